"""Makes the page: what each section says in its title, its numbers with their sources, and its pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from hpctrain import __version__
from hpctrain.observe.report import words
from hpctrain.observe.report.bars import memory_bars, step_bars
from hpctrain.observe.report.curves import loss_curve, speed_curve
from hpctrain.observe.report.groups import families_of
from hpctrain.observe.report.matrix import matrix_picture
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import Svg, show_seconds
from hpctrain.observe.report.tiles import tiles_picture
from hpctrain.observe.report.timeline import timeline
from hpctrain.observe.run import CORRUPTION, FAILURE, JUMP, LOST, SAVE, STRAGGLER, VALIDATE
from hpctrain.plan.tiling import Plan

WIDE, HALF, NARROW = 840, 470, 342
"""Pixels of pictures: of one run (readable on paper too), of two side by side, on a phone."""
MOST_EVENTS = 60
"""Of one run; the first and the last are shown."""


@dataclass(frozen=True)
class Panel:
    """A picture of one run, or of all, with what it says."""

    title: Markup | str
    wide: Svg | None = None
    narrow: Svg | None = None
    note: Markup | str = ""
    """Below the picture; or, where there is none, why."""
    rows: Sequence[Sequence[Markup | str]] = ()
    """Of the table of axes."""


@dataclass(frozen=True)
class Section:
    """A part of the page: a panel for each run, or one for all."""

    anchor: str
    name: str
    panels: list[Panel] = field(default_factory=list)


def render_report(runs: Sequence[RunRecord]) -> str:
    """Return the page of some runs, complete in itself."""
    sections = [
        _curves(runs, loss_curve, "loss", "Loss", words.loss),
        _curves(runs, speed_curve, "speed", "Speed", words.speed),
    ]
    sections += [
        _section(runs, "plan", "Plan", words.plan, lambda run, width: tiles_picture(run.plan, families_of(run), width)),
        _section(runs, "timeline", "Timeline of a step", words.timeline, timeline),
        _section(runs, "step", "Where a step goes", words.parts, step_bars),
        _section(runs, "memory", "Memory", words.memory, memory_bars),
        _section(runs, "traffic", "Communication", words.traffic, matrix_picture),
    ]
    tables = [
        {
            "run": run,
            "prediction": words.prediction_rows(run),
            "decisions": run.start.get("reasons", {}),
            "events": _events(run),
        }
        for run in runs
    ]
    return _template().render(
        title=" and ".join(run.name for run in runs),
        runs=[
            {"record": run, "verdict": words.verdict(run), "facts": words.facts(run), "failure": _failure(run)}
            for run in runs
        ],
        sections=sections,
        tables=tables,
        several=len(runs) > 1,
        version=__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def render_plan(plan: Plan, name: str) -> str:
    """Return a page with the picture of a plan alone."""
    names = dict.fromkeys(tile.family for tile in plan.tiles)
    classes = {family: f"f{number % 8}" for number, family in enumerate(names)}
    panel = Panel(
        plan.describe(), tiles_picture(plan, classes, WIDE), tiles_picture(plan, classes, NARROW), words.TILES_NOTE
    )
    return _template().render(
        title=name, runs=[], sections=[Section("plan", "Plan", [panel])], tables=[], several=False, version=__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )  # fmt: skip


def _template():
    environment = Environment(loader=PackageLoader("hpctrain.observe.report", "."), autoescape=True)
    environment.trim_blocks = environment.lstrip_blocks = True
    return environment.get_template("report.html")


def _section(
    runs: Sequence[RunRecord],
    anchor: str,
    name: str,
    describe: Callable[[RunRecord], tuple[Markup | str, Markup | str]],
    draw: Callable[[RunRecord, int], Svg | None],
) -> Section:
    width = WIDE if len(runs) == 1 else HALF
    panels = []
    for run in runs:
        title, note = describe(run)
        rows = words.axis_rows(run) if anchor == "step" else ()
        panels.append(Panel(title, draw(run, width), draw(run, NARROW), note, rows))
    return Section(anchor, name, panels)


def _curves(runs: Sequence[RunRecord], draw, anchor: str, name: str, describe) -> Section:
    title, note = describe(runs)
    return Section(anchor, name, [Panel(title, draw(runs, WIDE), draw(runs, NARROW), note)])


def _events(run: RunRecord) -> list[dict]:
    """Return rows of events: the time since the first, the step, the kind and the text.

    Validations are in the curve of losses; of several checkpoints without anything else between them the last is shown.
    """
    if not run.events:
        return []
    begin, rows, num_saves = run.events[0]["time"], [], 0
    for event in run.events:
        if (kind := event["event"]) == VALIDATE:
            continue
        num_saves = num_saves + 1 if kind == SAVE else 0
        if num_saves > 1:
            rows.pop()
        row = {
            "after": show_seconds(event["time"] - begin),
            "step": event["step"],
            "kind": "planned again" if event.get("planned_again") else kind,
            "text": f"{num_saves} checkpoints; the last: {event['text']}" if num_saves > 1 else event["text"],
            "is_bad": kind in (FAILURE, STRAGGLER, JUMP, CORRUPTION, LOST),
        }
        rows.append(row)
    if failure := _failure(run):
        text = "; ".join(failure["causes"])
        kind = "in progress" if run.is_live else FAILURE
        rows.append({"after": "", "step": "", "kind": kind, "text": text, "is_bad": not run.is_live})
    if len(rows) > MOST_EVENTS:
        half = MOST_EVENTS // 2
        skipped = {"after": "", "step": "", "kind": "", "is_bad": False}
        rows = [*rows[:half], {**skipped, "text": f"{len(rows) - MOST_EVENTS:,} more events"}, *rows[-half:]]
    return rows


def _failure(run: RunRecord) -> dict | None:
    """Return what a run that did not end in order says at the top."""
    if run.end or run.ending is None:
        return None
    state, diagnosis = run.ending
    return {
        "state": state,
        "causes": diagnosis.sentences,
        "table": "\n".join(diagnosis.table),
        "is_live": run.is_live,
        "saved_step": next((event["step"] for event in reversed(run.events) if event["event"] == SAVE), None),
    }
