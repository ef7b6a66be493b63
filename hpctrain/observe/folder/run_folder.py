"""The run folder: everything that a run leaves behind, written by rank 0.

resolved.toml    the job with every `auto` replaced by its value; the reasons are its comments
plan.toml        the plan
cluster.toml     the description of the machine that the plan is for; the reason of the plan has the speeds that were
                 measured while training
*.json, *.jsonl  metrics, events and what was measured: hpctrain.observe.folder.schema says what is in each
yardstick.json   what families are predicted to do alone (hpctrain.planner.yardstick)
checkpoints/     see hpctrain.checkpoint
copies           the name of the run's copies in the memory of hosts (hpctrain.checkpoint.copies)
legs/NNN/        the first three of each leg: a start, or a part of a run by another plan
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.errors import JobError, TrainingError, describe_os_error
from hpctrain.config.job import Job, dump_job
from hpctrain.config.paths import exists, is_file, look_at, read_bytes, refused_as, replace_text, write_text
from hpctrain.config.saved import RESOLVED
from hpctrain.observe.folder.schema import (
    EVENTS,
    METRICS,
    OF_ONE_PLAN,
    SavedFile,
    SavedLosses,
    SavedNote,
    T,
    read_lines,
)
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan

PLAN = "plan.toml"
CLUSTER = "cluster.toml"
LEGS = "legs"


def default_run_folder(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


class RunFolder:
    """The folder of one run, which exists; one rank writes it.

    A file that a start needs raises an error where it cannot be written. Training continues without the files that only
    people and reports read: each is reported once, and noted as an event.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda text: None):
        self.path = path
        self.step = 0
        """The step of the last event, or the last that is done."""
        self.leg = 0
        """The number of the leg that was described last, from 1; it counts those of earlier starts."""
        self._say = say
        self._refused: set[Path] = set()

    @property
    def leg_path(self) -> Path:
        """The folder of the leg that was described last."""
        return self.path / LEGS / f"{self.leg:03}"

    def describe(self, job: Job, plan: Plan, reasons: dict[str, str], cluster: Cluster) -> None:
        """Save the resolved job, the plan and what they are for. Raises TrainingError where the disk refuses."""
        dumped, before = dump_plan(plan), self.path / PLAN
        with writing(self.path):
            if is_file(before) and read_bytes(before) != dumped.encode():
                for file in OF_ONE_PLAN:
                    (self.path / file.name).unlink(missing_ok=True)
        legs = self.path / LEGS
        with writing(legs):
            legs.mkdir(exist_ok=True)
            self.leg = 1 + max((int(leg.name) for leg in legs.iterdir() if leg.name.isdecimal()), default=0)
            self.leg_path.mkdir()
        for name, text in ((CLUSTER, dump_cluster(cluster)), (PLAN, dumped), (RESOLVED, dump_job(job, reasons, PLAN))):
            for folder in (self.path, self.leg_path):
                write_text(folder / name, text, TrainingError, "free space")

    def rewind_metrics(self, step: int) -> str | None:
        """Drop the lines of steps after `step`, which a resumed run computes again.

        Lines that are damaged are dropped too; the file as it was is then kept, and a message about it is returned.
        """
        file = self.path / METRICS.name
        damaged, partial = file.with_name(f"{file.name}.damaged"), file.with_name(f"{file.name}.partial")
        with writing(self.path):
            lines, mistakes = read_lines(file, SavedLosses)
            if mistakes:
                file.replace(damaged)
            partial.unlink(missing_ok=True)
            partial.write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))
            partial.replace(file)
        repeated = [line["step"] for line in lines if line["step"] > step]
        said = [f"{mistakes[0]}; left out ({len(mistakes)} in all), the file is kept as {damaged}"] if mistakes else []
        if repeated:
            said.append(
                f"{file}: steps {repeated[0]} to {repeated[-1]}, of which there is no checkpoint, are computed again"
            )
        return "; ".join(said) or None

    def append(self, file: SavedFile[T], line: T) -> None:
        """Append a line to a file."""
        path = self.path / file.name
        self.attempt(path, lambda: append_line(path, line))

    def write(self, file: SavedFile[T], value: T, indent: int | None = None) -> None:
        """Write a file, whole or not at all."""
        path = self.path / file.name
        self.attempt(path, lambda: replace_text(path, json.dumps(value, indent=indent) + "\n"))

    def note(self, event: str, step: int, text: str, **more: object) -> None:
        """Append an event."""
        self.step = step
        self.attempt(self.path / EVENTS.name, lambda: note_event(self.path, event, step, text, **more))

    def attempt(self, path: Path, write: Callable[[], object]) -> bool:
        """Write a file by `write`, and return whether that succeeded; report the first failure of each file."""
        try:
            write()
        except OSError as error:
            if path not in self._refused:
                self._refused.add(path)
                text = f"{path}: cannot be written: {describe_os_error(error)}; training continues without it"
                self._say(text)
                if path.name != EVENTS.name:
                    self.note(LOST, self.step, text)
            return False
        return True


def append_line(path: Path, line: object) -> None:
    """Append a line to a file of a run folder. Raises OSError."""
    if exists(path):
        look_at(path)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def note_event(folder: Path, event: str, step: int, text: str, **more: object) -> None:
    """Append an event to those of a run folder. Raises OSError."""
    append_line(folder / EVENTS.name, {"time": time.time(), "event": event, "step": step, "text": text, **more})


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes files of a run folder, into a TrainingError."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{error.filename or path}: cannot be written: {describe_os_error(error)};"
            " free space and start the same command again, it continues from the latest checkpoint"
        ) from None


def read_metrics(path: Path) -> list[dict]:
    """Read a run folder's metrics, each with a whole number `step` and numbers for what was measured.

    A last line that a crash cut short is left out. Raises JobError for any other line that is damaged.
    """
    with refused_as(JobError, f"{path / METRICS.name}: cannot be read"):
        lines, mistakes = read_lines(path / METRICS.name, SavedLosses)
    if mistakes:
        raise JobError(f"{mistakes[0]}; remove that line")
    return lines


START, LEG, SAVE, COPIES, VALIDATE, STRAGGLER, RECOVERY, SLOWER, JUMP, CORRUPTION, LOST, FAILURE, END = (
    "start",
    "leg",
    "checkpoint",
    "copies",
    "validation",
    "straggler",
    "straggler caught up",
    "time scale raised",
    "jump",
    "corruption",
    "output lost",
    "failure",
    "end",
)


def read_events(folder: Path) -> list[dict]:
    """Return the events of a run folder, the oldest first; a line that is damaged, or cut short, is left out."""
    with suppress(OSError):  # something that no run wrote
        return read_lines(folder / EVENTS.name, SavedNote)[0]
    return []


def refuse_missing_checkpoints(folder: Path) -> None:
    """Refuse a run folder without a checkpoint whose events say that there was one; for one rank to call.

    A new run would write over what is left of the old one. Raises JobError.
    """
    saved = [event["step"] for event in read_events(folder) if event["event"] == SAVE]
    if saved:
        raise JobError(
            f"{folder}: has no checkpoint, though {EVENTS.name} says that one of step {saved[-1]} was written; bring"
            f" checkpoints/ back, choose another --run, or delete the folder to begin anew"
        )


def note_failure(folder: Path, flight: Path) -> None:
    """Note how the last start of a run failed, if it neither ended in order nor has been noted; before the next one.

    What is known of it is in the flight records, which the next start writes anew. Raises TrainingError where the disk
    refuses.
    """
    from hpctrain.comm.watchdog.diagnosis import post_mortem

    events = read_events(folder)
    if not events or events[-1]["event"] in (END, FAILURE):
        return
    result = post_mortem(flight, time.time())
    state, causes = (result[0], list(result[1].sentences)) if result else ("not ended in order", [])
    text = "; ".join(causes) or "it left no flight records"
    with writing(folder):
        note_event(folder, FAILURE, events[-1]["step"], text, state=state, causes=causes)
