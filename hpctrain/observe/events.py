"""The events of a run, apart from its steps: starts, checkpoints, stragglers, ends.

events.jsonl     one line an event: `time` (seconds since 1970), `event` (its kind), `step` (done by then), `text` (a
                 sentence), and what belongs to the kind, such as the `reasons` of a start
"""

import json
import time
from pathlib import Path

from hpctrain.observe.run import writing

EVENTS = "events.jsonl"
START, SAVE, VALIDATE, STRAGGLER, RECOVERY, FAILURE, END = (
    "start",
    "checkpoint",
    "validation",
    "straggler",
    "straggler caught up",
    "failure",
    "end",
)


def note_event(folder: Path, event: str, step: int, text: str, **more: object) -> None:
    """Append an event to a run folder; for one rank to call. Raises TrainingError where the disk refuses."""
    line = {"time": time.time(), "event": event, "step": step, "text": text, **more}
    with writing(folder), (folder / EVENTS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_events(folder: Path) -> list[dict]:
    """Return the events of a run folder, the oldest first; a line that is damaged, or cut short, is left out."""
    path, events = folder / EVENTS, []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_event(event):
            events.append(event)
    return events


def _is_event(event: object) -> bool:
    if not isinstance(event, dict):
        return False
    is_typed = isinstance(event.get("event"), str) and isinstance(event.get("text"), str)
    return is_typed and type(event.get("step")) is int and type(event.get("time")) in (int, float)


def note_failure(folder: Path, flight: Path) -> None:
    """Note how the last start of a run failed, if it neither ended in order nor has been noted; before the next one.

    What is known of it is in the flight records, which the next start writes anew.
    """
    from hpctrain.comm.watchdog.diagnosis import post_mortem

    events = read_events(folder)
    if not events or events[-1]["event"] in (END, FAILURE):
        return
    result = post_mortem(flight, time.time())
    state, causes = (result[0], list(result[1].sentences)) if result else ("not ended in order", [])
    text = "; ".join(causes) or "it left no flight records"
    note_event(folder, FAILURE, events[-1]["step"], text, state=state, causes=causes)
