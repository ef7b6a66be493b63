"""Summarises a run for the top of its page and for the tables at the end."""

from datetime import UTC, datetime

from markupsafe import Markup

from hpctrain.observe.console import describe_model, describe_overrun, describe_slowest
from hpctrain.observe.folder.run_folder import CORRUPTION, FAILURE, JUMP, LOST, RESOLVED, SAVE, STRAGGLER, VALIDATE
from hpctrain.observe.folder.schema import DRIFT, EVENTS, METRICS
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import show_bytes, show_count, show_percent, show_seconds

MAX_EVENTS = 60
"""Events of one run; of more the first and the last are shown."""
MAX_STAGES = 8
"""Stages whose memory is in the table; of more the fullest."""
YARDSTICK = {
    "fraction_of_sum": "fraction of the families' sum",
    "speedup_over_best_family": "speed-up over the best family alone",
    "speedup_over_even": "speed-up over the even plan",
}


def verdict(run: RunRecord) -> Markup:
    """Return the state of the run in a sentence."""
    steps = run.job.train.steps
    done = run.end["step"] if run.end else run.metrics[-1]["step"] if run.metrics else 0
    if run.end:
        by = run.end.get("stopped_by")
        state = "is done" if done >= steps else f"was stopped by {by}" if by else "paused"
    elif run.is_live:
        state = "is in progress"
    else:
        state = "failed" if run.events or run.ending else "has not begun"
    text = Markup("{}: {:,} of {} steps").format(state, done, run.figure("{:,}".format, RESOLVED, "train", "steps"))
    if not run.drift:
        return text
    longer = "longer" if run.drift["drift"] >= 0 else "shorter"
    seconds = run.figure(show_seconds, DRIFT.name, "measured_seconds")
    drift = run.figure(lambda value: show_percent(abs(value)), DRIFT.name, "drift")
    return text + Markup("; a step takes {}, {} {} than predicted").format(seconds, drift, longer)


def training_rows(run: RunRecord) -> list[tuple[str, Markup | str]]:
    """Return what was trained, on what, and when: a name and a value for each."""
    job = run.job
    batch = run.figure("{:,}".format, RESOLVED, "train", "global_batch")
    length = run.figure("{:,}".format, RESOLVED, "data", "sequence_length")
    rate = run.figure("{:.4g}".format, RESOLVED, "train", "learning_rate")
    rows: list[tuple[str, Markup | str]] = [
        ("model", f"{describe_model(job.model)}, {job.train.dtype}"),
        ("data", str(job.data.tokens)),
        ("step", Markup("{} sequences of {} tokens, learning rate {}").format(batch, length, rate)),
        ("plan", f"{run.plan.describe()}, on {run.cluster.describe()}"),
    ]
    if run.events:
        first, last = (datetime.fromtimestamp(run.events[at]["time"], UTC) for at in (0, -1))
        rows.append(("time", f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"))
    if run.start.get("rehearsed"):
        scale = run.start.get("reasons", {}).get("rehearsal", "")
        text = "times and memory are those of the devices that the ranks impersonate"
        rows.append(("rehearsal", f"{text}; {scale}" if scale else text))
    return rows


def headline_rows(run: RunRecord) -> list[tuple[str, Markup | str, Markup | str]]:
    """Return the figures at the top, those that the run has: a name, a value and a note for each."""
    shown = (
        ("loss", "loss", "{:.4f}".format, "nats, last step"),
        ("validation loss", "validation_loss", "{:.4f}".format, "nats"),
        ("speed", "tokens_per_second", show_count, "tokens/s, last step"),
        ("of the families' sum", "fraction_of_sum", "{:.2f}".format, "1: as much as all families alone, together"),
        ("MFU", "mfu", show_percent, "of the devices' peak"),
    )
    rows: list[tuple[str, Markup | str, Markup | str]]
    rows = [(name, run.figure(show, METRICS.name, key), note) for name, key, show, note in shown]
    assumed = run.figure("{:g}".format, RESOLVED, "search", "expert_spread")
    spread = run.figure("{:.3f}".format, METRICS.name, "expert_spread")
    rows.append(("spread of experts", spread, Markup("of their tokens, over the mean; assumed: {}").format(assumed)))
    last = run.metrics[-1] if run.metrics else {}
    if fullest := last.get("memory_share"):
        share = run.figure(show_percent, METRICS.name, "memory_share", "max")
        rows.append(("fullest memory", share, f"rank {fullest['max_rank']}"))
    if slowest := last.get("slowest"):
        rank = run.figure("rank {}".format, METRICS.name, "slowest", "rank")
        rows.append(("slowest", rank, describe_slowest(slowest)))
    if "overrun" in run.end:
        overrun = run.figure(show_percent, EVENTS.name, "overrun")
        rows.append(("rehearsal's overrun", overrun, describe_overrun(run.end["overrun"])))
    return [row for row in rows if row[1]]


def prediction_rows(run: RunRecord) -> list[tuple[Markup | str, ...]]:
    """Return what was predicted, what was measured and the difference of each figure."""
    if not run.drift:
        return []
    step = run.drift["predicted_seconds"]
    rows: list[tuple[Markup | str, ...]] = []

    def compare(name: str, unit: str, *keys: object) -> None:
        show = show_seconds if unit == "seconds" else show_bytes
        ends = [(*keys, f"{when}_{unit}") for when in ("predicted", "measured")]
        before, after = (run.value(DRIFT.name, *end) for end in ends)
        off = f"{(after - before) / step:+.1%} of the step" if unit == "seconds" else f"{after / before - 1:+.1%}"
        rows.append((name, *(run.figure(show, DRIFT.name, *end) for end in ends), off))

    compare("step", "seconds")
    for part in run.drift.get("parts", ()):
        compare(part, "seconds", "parts", part)
    stages = list(enumerate(run.drift.get("memory", ())))
    for place, each in sorted(sorted(stages, key=lambda stage: -stage[1]["predicted_bytes"])[:MAX_STAGES]):
        rows_of_stage = f", {each['rows']} rows" if "rows" in each else ""
        name = f"memory, items {each['items'][0]}-{each['items'][1] - 1}, {each['family']}{rows_of_stage}"
        compare(name, "bytes", "memory", place)
    for family in run.value(EVENTS.name, "yardstick", "predicted_alone") or ():
        keys = "yardstick", "predicted_alone", family
        shown = run.figure("{:,.0f} tokens/s".format, EVENTS.name, *keys) or "does not fit"
        rows.append((f"{family} alone", shown, "", ""))
    for key, text in YARDSTICK.items():
        if shown := run.figure("{:.2f}".format, EVENTS.name, "yardstick", key):
            rows.append((text, "", shown, ""))
    return rows


def event_rows(run: RunRecord) -> list[dict]:
    """Return rows of events: the time since the first, the step, the kind and the text.

    Validations are in the curve of losses; of several checkpoints without anything else between them the last is shown.
    """
    if not run.events:
        return []
    rows, num_saves = [], 0
    for event in run.events:
        if (kind := event["event"]) == VALIDATE:
            continue
        num_saves = num_saves + 1 if kind == SAVE else 0
        if num_saves > 1:
            rows.pop()
        row = {
            "after": show_seconds(event["time"] - run.events[0]["time"]),
            "step": event["step"],
            "kind": "planned again" if event.get("planned_again") else kind,
            "text": f"{num_saves} checkpoints; the last: {event['text']}" if num_saves > 1 else event["text"],
            "is_bad": kind in (FAILURE, STRAGGLER, JUMP, CORRUPTION, LOST),
        }
        rows.append(row)
    if run.diagnosis:
        kind = "in progress" if run.is_live else FAILURE
        rows.append({"kind": kind, "text": "; ".join(run.diagnosis.sentences), "is_bad": not run.is_live})
    if len(rows) > MAX_EVENTS:
        half = MAX_EVENTS // 2
        rows = [*rows[:half], {"text": f"{len(rows) - MAX_EVENTS:,} more events"}, *rows[-half:]]
    return rows
