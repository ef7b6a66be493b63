"""What a report says in words: verdicts, titles that carry the message, and notes on how to read a picture."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from hpctrain.observe.console import describe_slowest, trust
from hpctrain.observe.report.bars import memory_stacks, step_stacks
from hpctrain.observe.report.groups import groups_of
from hpctrain.observe.report.matrix import fabric_totals
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import number, show_bytes, show_count, show_percent, show_seconds, show_traffic

TILES_NOTE = (
    "A micro-batch is a rectangle: the model's items across (embedding, then attention and feed-forward part of each"
    " block, then the head), its rows (sequences) down. Each box is a tile, computed by the ranks named in it."
)


class Fact(NamedTuple):
    """A figure at the top of the page."""

    name: str
    value: Markup | str
    note: Markup | str = ""


def join(*parts: Markup | str) -> Markup:
    """Put texts and numbers together, with what is no markup escaped."""
    return Markup("").join(parts)


def verdict(run: RunRecord) -> Markup | str:
    """Return the state of the run in a sentence."""
    steps = run.job.train.steps
    done = run.metrics[-1]["step"] if run.metrics else 0
    if run.end:
        done = run.end["step"]
        by = run.end.get("stopped_by")
        state = "is done" if done >= steps else f"was stopped by {by}" if by else "paused"
    elif run.is_live:
        state = "is in progress"
    else:
        state = "failed" if run.events or run.ending else "has not begun"
    begin = join(
        f"{state}: ", number(done, f"{done:,}", f"{run.name}/metrics.jsonl:step"), " of ",
        number(steps, f"{steps:,}", f"{run.name}/resolved.toml:train.steps"), " steps",
    )  # fmt: skip
    if not run.drift:
        return begin
    off = run.drift["drift"]
    seconds = run.drift["measured_seconds"]
    source = f"{run.name}/drift.json"
    return join(
        begin, "; a step takes ", number(seconds, show_seconds(seconds), f"{source}:measured_seconds"), ", ",
        number(off, show_percent(abs(off)), f"{source}:drift"), " longer" if off >= 0 else " shorter",
        " than predicted",
    )  # fmt: skip


def facts(run: RunRecord) -> list[Fact]:
    """Return the figures at the top: those that the run has."""
    summary: list[Fact] = []
    source = f"{run.name}/metrics.jsonl"
    if run.metrics:
        last = run.metrics[-1]
        summary.append(Fact("loss", number(last["loss"], f"{last['loss']:.4f}", f"{source}:loss"), "nats, last step"))
        validated = [line for line in run.metrics if "validation_loss" in line]
        if validated:
            value = validated[-1]["validation_loss"]
            summary.append(Fact("validation loss", number(value, f"{value:.4f}", f"{source}:validation_loss"), "nats"))
        tokens = last["tokens_per_second"]
        summary.append(
            Fact("speed", number(tokens, show_count(tokens), f"{source}:tokens_per_second"), "tokens/s, last step")
        )
        if "fraction_of_sum" in last:
            value = last["fraction_of_sum"]
            shown = number(value, f"{value:.2f}", f"{source}:fraction_of_sum")
            summary.append(Fact("of the families' sum", shown, "1: as much as all families alone, together"))
        if "mfu" in last:
            summary.append(
                Fact("MFU", number(last["mfu"], show_percent(last["mfu"]), f"{source}:mfu"), "of the devices' peak")
            )
        if fullest := last.get("memory_share"):
            shown = number(fullest["max"], show_percent(fullest["max"]), f"{source}:memory_share.max")
            summary.append(Fact("fullest memory", shown, f"rank {fullest['max_rank']}"))
        if slowest := last.get("slowest"):
            rank = number(slowest["rank"], f"rank {slowest['rank']}", f"{source}:slowest.rank")
            summary.append(Fact("slowest", rank, describe_slowest(slowest)))
    if "overrun" in run.end:
        overrun = run.end["overrun"]
        shown = number(overrun, show_percent(overrun), f"{run.name}/events.jsonl:overrun")
        summary.append(Fact("rehearsal's overrun", shown, trust(overrun)))
    return summary


def loss(runs: Sequence[RunRecord]) -> tuple[Markup | str, str]:
    note = "Validation losses are circles." if any("validation_loss" in m for run in runs for m in run.metrics) else ""
    if len(runs) > 1:
        return _compare_losses(runs), note
    run = runs[0]
    if not run.metrics:
        return "No step was logged", "The first step is not complete."
    first, last = run.metrics[0], run.metrics[-1]
    source = f"{run.name}/metrics.jsonl:loss"
    fell = "fell" if last["loss"] < first["loss"] else "did not fall: it went"
    title = join(
        f"The loss {fell} from ", number(first["loss"], f"{first['loss']:.3f}", source), " to ",
        number(last["loss"], f"{last['loss']:.3f}", source), " nats",
    )  # fmt: skip
    return title, note


def _compare_losses(runs: Sequence[RunRecord]) -> str:
    """Say how far apart the losses of runs are, in the steps that all of them logged."""
    by_step = [{line["step"]: line["loss"] for line in run.metrics} for run in runs]
    common = set.intersection(*(set(losses) for losses in by_step))
    if not common:
        return "Losses of the runs, which have no step in common"
    apart = max(max(losses[step] for losses in by_step) - min(losses[step] for losses in by_step) for step in common)
    how = f"differ by at most {apart:.2g} nats" if apart else "are equal"
    return f"The losses {how} in the {len(common):,} steps that all runs logged"


def speed(runs: Sequence[RunRecord]) -> tuple[Markup | str, str]:
    note = "The first step of a start also allocates memory, and takes longer."
    if len(runs) > 1:
        return "Tokens per second of the runs, by step", note
    run = runs[0]
    if not run.metrics:
        return "No step was logged", ""
    if not run.drift:
        last = run.metrics[-1]["step_seconds"]
        return join(
            "The last step took ", number(last, show_seconds(last), f"{run.name}/metrics.jsonl:step_seconds")
        ), note
    measured = run.drift["measured_seconds"]
    source = f"{run.name}/drift.json"
    low, high = run.drift["interval_seconds"]
    inside = "within" if low <= measured <= high else "outside"
    title = join(
        "A step takes ", number(measured, show_seconds(measured), f"{source}:measured_seconds"), ", ", inside,
        " the predicted ", number(low, show_seconds(low), f"{source}:interval_seconds.0"), " to ",
        number(high, show_seconds(high), f"{source}:interval_seconds.1"),
    )  # fmt: skip
    return title, note


def plan(run: RunRecord) -> tuple[str, str]:
    return f"{run.plan.describe()}, on {run.cluster.describe()}", TILES_NOTE


def timeline(run: RunRecord) -> tuple[Markup | str, Markup | str]:
    """Say how much of a step ranks wait, and how to read the picture."""
    note = "Numbers are micro-batches. Grey is waiting: for messages of a neighbour, or for the slowest rank."
    missing = (
        ""
        if run.timeline
        else " It was not measured: the run ended before its third step, or its devices have clocks of their own."
    )
    if not run.forecast:
        return "The step as it was measured", f"{note} The cluster file does not suffice for a prediction."
    seconds = run.forecast.prediction.step_seconds
    shown = number(seconds, show_seconds(seconds), f"{run.name}/forecast:step_seconds")
    if not run.timeline:
        return join("A step is predicted to take ", shown), note + missing
    step = run.timeline["step"]
    end = max(span[4] for grid in run.timeline["grids"] for span in grid["spans"])
    return join(
        "Predicted ", shown, ", measured ", number(end, show_seconds(end), f"{run.name}/timeline.json:end"),
        " in step ",
        number(step, f"{step:,}", f"{run.name}/timeline.json:step"),
    ), note  # fmt: skip


def parts(run: RunRecord) -> tuple[Markup | str, str]:
    """Say which part of a step takes the most after computing."""
    stacks = [(group, stack) for group in groups_of(run) for stack in step_stacks(run, group)]
    stacks = [each for each in stacks if each[1].name == "measured"] or stacks
    note = (
        "Predicted above measured (one logged step, mean over the ranks of a line)."
        " Waiting belongs to what is waited for."
        + (
            " The table has the communication of a rank by axis: what computing hides, and what it waits for."
            * bool(axis_rows(run))
        )
    )
    if not stacks:
        return "Where a step goes is not known", "The devices compute by themselves, and the step cannot be predicted."
    ranks = sum(len(group.ranks) for group, _ in stacks)
    mean = {
        part: sum(stack.parts[part] * len(group.ranks) for group, stack in stacks) / ranks
        for part in stacks[0][1].parts
    }
    total = sum(mean.values())
    other = max((part for part in mean if part != "compute"), key=lambda part: mean[part])
    how = "Ranks compute" if stacks[0][1].name == "measured" else "Ranks are predicted to compute"
    return f"{how} {mean['compute'] / total:.0%} of a step; next is '{other}' with {mean[other] / total:.1%}", note


def axis_rows(run: RunRecord) -> list[tuple[Markup | str, ...]]:
    """Return a row for each axis: the seconds of a rank that it communicated in a step, hidden and exposed."""
    axes = run.traffic.get("axes", {}) if run.traffic else {}
    keys = ("communication_seconds", "hidden_seconds", "exposed_seconds")
    source = f"{run.name}/traffic.json:axes"
    return [
        (
            "all ranks" if axis == "everyone" else axis,
            *(number(each[key], show_seconds(each[key]), f"{source}.{axis}.{key}") for key in keys),
        )
        for axis, each in axes.items()
    ]


def memory(run: RunRecord) -> tuple[Markup | str, str]:
    """Say which ranks are the fullest."""
    note = "Predicted parts above the measured peak."
    filled = []
    for group in groups_of(run):
        family = run.cluster.families.get(group.tile.family)
        capacity = family.memory_bytes if family else 0
        for stack in memory_stacks(run, group) if capacity else ():
            filled.append((stack.name == "measured", sum(stack.parts.values()) / capacity, group))
    if not filled:
        return "Memory is not known", ""
    measured, share, group = max(filled, key=lambda each: each[:2])
    how = "use" if measured else "are predicted to use"
    family_name = group.tile.family
    family = run.cluster.families[family_name]
    if family.kind == "cpu":
        note += (
            " A CPU rank's peak is its whole process: Python, torch and buffers of MPI are in it, and no part above."
        )
    source = f"{run.name}/cluster.toml:families.{family_name}.memory_bytes"
    return join(
        f"The fullest ranks ({group.label}, {family_name}) {how} {show_percent(share)} of ",
        number(family.memory_bytes, show_bytes(family.memory_bytes), source),
    ), note  # fmt: skip


def traffic(run: RunRecord) -> tuple[Markup | str, Markup | str]:
    """Say how much moves in a step, and over what."""
    totals = fabric_totals(run)
    if not totals:
        return "Nothing is known of what ranks sent", "The run ended before its third step, or has one rank."
    total = sum(totals.values())
    shares = ", ".join(
        f"{size / total:.0%} {'' if name.startswith('inside') else 'over '}{name}" for name, size in totals.items()
    )
    note = (
        "Senders down, receivers across; the darker, the more. Collectives are spread evenly over the pairs of their"
        " group: the algorithm may take other routes for the same bytes."
    )
    step = run.traffic["step"] if run.traffic else 0
    return join(f"Ranks send {show_traffic(total)} in a step: {shares}"), join(
        note, " Step ", number(step, f"{step}", f"{run.name}/traffic.json:step"), "."
    )


MOST_STAGES = 8
"""Whose memory is in the table; of more stages these are the fullest."""


def prediction_rows(run: RunRecord) -> list[dict]:
    """Return a row for each figure that was predicted and measured."""
    if not run.drift:
        return []
    rows: list[dict] = []

    def add(name: str, predicted: Markup | str = "", measured: Markup | str = "", off: str = "") -> None:
        rows.append({"name": name, "predicted": predicted, "measured": measured, "off": off})

    def compare(name: str, each: Mapping, unit: str, show: Callable[[float], str], where: str) -> None:
        source, before, after = f"{run.name}/drift.json:{where}", each[f"predicted_{unit}"], each[f"measured_{unit}"]
        off = f"{(after - before) / step:+.1%} of the step" if unit == "seconds" else f"{after / before - 1:+.1%}"
        predicted = number(before, show(before), f"{source}predicted_{unit}")
        add(name, predicted, number(after, show(after), f"{source}measured_{unit}"), off)

    step = run.drift["predicted_seconds"]
    compare("step", run.drift, "seconds", show_seconds, "")
    for part, each in run.drift.get("parts", {}).items():
        compare(part, each, "seconds", show_seconds, f"parts.{part}.")
    stages = list(enumerate(run.drift.get("memory", ())))
    fullest = sorted(stages, key=lambda stage: -stage[1]["predicted_bytes"])[:MOST_STAGES]
    for index, each in sorted(fullest, key=lambda stage: stage[0]):
        name = f"memory, items {each['items'][0]}-{each['items'][1] - 1}, {each.get('family', '')}"
        name += f", {each['rows']} rows" if each.get("rows") else ""
        compare(name, each, "bytes", show_bytes, f"memory.{index}.")
    source = f"{run.name}/events.jsonl:yardstick"
    for name, alone in run.yardstick.get("predicted_alone", {}).items():
        shown = number(alone, f"{alone:,.0f} tokens/s", f"{source}.predicted_alone.{name}") if alone else "does not fit"
        add(f"{name} alone", shown)
    for key, text in YARDSTICK.items():
        if key in run.yardstick:
            value = run.yardstick[key]
            add(text, measured=number(value, f"{value:.2f}", f"{source}.{key}"))
    return rows


YARDSTICK = {
    "fraction_of_sum": "fraction of the families' sum",
    "speedup_over_best_family": "speed-up over the best family alone",
    "speedup_over_even": "speed-up over the even plan",
}
