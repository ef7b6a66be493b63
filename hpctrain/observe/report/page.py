"""Makes the page: its top, a section for each kind of picture, and the tables."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader

from hpctrain import __version__
from hpctrain.observe.report import summary
from hpctrain.observe.report.bars import memory_panel, step_panel
from hpctrain.observe.report.differences import difference_rows
from hpctrain.observe.report.expert_loads import expert_panel
from hpctrain.observe.report.machine_bars import machine_panels
from hpctrain.observe.report.matrix import traffic_panel
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.step_curves import draw_curves, loss_panel, speed_panel
from hpctrain.observe.report.svg import Panel
from hpctrain.observe.report.tiles import plan_panel
from hpctrain.observe.report.timeline import timeline_panel
from hpctrain.observe.report.waterfall import waterfall_panel
from hpctrain.plan.tiling import Plan, counted
from hpctrain.planner.what_if import ComparedMachine

WIDE, HALF, NARROW = 840, 470, 342
"""Pixels of pictures: of one run (readable on paper too), of two side by side, on a phone."""


def family_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the fill class of each family, the same in all pictures of a page."""
    return {name: f"f{number % 8}" for number, name in enumerate(dict.fromkeys(names))}


def render_report(runs: Sequence[RunRecord]) -> str:
    """Return the page of some runs, complete in itself."""
    families = [name for run in runs for name in run.cluster.families]
    colours = family_colours([*families, *(tile.family for run in runs for tile in run.plan.tiles)])

    def show_plan(run: RunRecord) -> Panel:
        return plan_panel(run.plan, f"{counted(len(run.plan.tiles), 'tile')} on {run.cluster.describe()}", colours)

    norms = partial(draw_curves, runs, key="grad_norm", title="norm", single_name="measured")  # before it is clipped
    loads = partial(draw_curves, runs, key="expert_load", title="load", single_name="worst layer")
    rates = partial(draw_curves, runs, key="learning_rate", title="rate", single_name="set")
    sections = [
        {"anchor": anchor, "name": name, "panels": [panel]}
        for anchor, name, panel in (
            ("loss", "Loss", loss_panel(runs)),
            ("speed", "Speed", speed_panel(runs)),
            ("norm", "Gradient norm", Panel("Norm of the gradients, by step", norms)),
            ("rate", "Learning rate", Panel("Learning rate, by step", rates)),
            ("load", "Load of experts", Panel("Largest load of an expert over the mean of its layer, by step", loads)),
        )
        if anchor != "load" or any("expert_load" in line for run in runs for line in run.metrics)
    ]
    single = [("experts", "Busiest and idlest experts", expert_panel)] if any(run.experts for run in runs) else []
    sections += [
        {"anchor": anchor, "name": name, "panels": [panel(run) for run in runs]}
        for anchor, name, panel in (
            *single,
            ("plan", "Plan", show_plan),
            ("timeline", "Timeline of a step", timeline_panel),
            ("step", "Where a step goes", step_panel),
            ("waterfall", "From all devices busy to the step", waterfall_panel),
            ("memory", "Memory", memory_panel),
            ("traffic", "Communication", traffic_panel),
        )
    ]
    return _render(" and ".join(run.name for run in runs), sections, runs)


def render_plan(plan: Plan, name: str) -> str:
    """Return a page with the picture of a plan alone."""
    colours = family_colours([tile.family for tile in plan.tiles])
    section = {"anchor": "plan", "name": "Plan", "panels": [plan_panel(plan, plan.describe(), colours)]}
    return _render(name, [section], [])


def render_machines(rows: Sequence[ComparedMachine], name: str, currency: str) -> str:
    """Return a page that compares machines for a job."""
    panels = machine_panels(rows, currency)
    sections = [
        {"anchor": f"by-{unit.rpartition('/')[2]}", "name": unit, "panels": [own]} for unit, own in panels.items()
    ]
    return _render(name, sections, [])


def _render(title: str, sections: list[dict[str, Any]], runs: Sequence[RunRecord]) -> str:
    """Render the page; a section has a panel for each run, or one for all."""
    environment = Environment(loader=PackageLoader("hpctrain.observe.report", "."), autoescape=True)
    environment.trim_blocks = environment.lstrip_blocks = True
    return environment.get_template("report.html").render(
        title=title,
        runs=runs,
        sections=sections,
        several=len(runs) > 1,
        differences=difference_rows(runs) if len(runs) > 1 else [],
        whole=WIDE,
        summary=summary,
        wide=HALF if len(runs) > 1 else WIDE,
        narrow=NARROW,
        version=__version__,
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
