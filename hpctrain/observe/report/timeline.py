"""The timeline of one step: for each tensor grid what was predicted above what was measured, on one axis."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from hpctrain.observe.folder.schema import TIMELINE
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import LANE, LANES_LEFT, MAX_GROUPS, Panel, PixelScale, Svg, show_seconds, sourced
from hpctrain.plan.schedule import Action
from hpctrain.plan.tiling import Tile

KINDS = {
    Action.FORWARD.value: "forward",
    Action.BACKWARD.value: "backward",
    Action.BACKWARD_INPUT.value: "backward",
    Action.BACKWARD_WEIGHT.value: "weights",
    Action.REDUCE_GRADIENTS.value: "reduce",
    Action.UPDATE.value: "update",
}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "weights": "backward of weights",
    "reduce": "sum gradients",
    "update": "agree and update",
    "idle": "waiting",
}
MAX_EDGED = 40
"""Boxes of one kind in a lane that have edges; of more nothing but edges would be seen."""


class Bar(NamedTuple):
    kind: str
    begin: float
    end: float
    microbatch: int = -1


def timeline_panel(run: RunRecord) -> Panel:
    """Return a step as it was predicted and measured."""
    note = "Numbers are micro-batches. Grey is waiting: for messages of a neighbour, or for the slowest rank."
    predicted = run.figure(show_seconds, "forecast", "step_seconds")
    if run.timeline:
        end = max(span[4] for grid in run.timeline["grids"] for span in grid["spans"])
        shown = sourced(end, show_seconds(end), f"{run.name}/{TIMELINE.name}:end")
        step = run.figure("{:,}".format, TIMELINE.name, "step")
        title = Markup("Predicted {}, measured {} in step {}").format(predicted or "nothing", shown, step)
    else:
        title = Markup("A step is predicted to take {}").format(predicted or "an unknown time")
        note += " It was not measured: the run ended before its third step, or its devices have clocks of their own."
    return Panel(title, lambda width: _draw(run, width), note)


def _measured(run: RunRecord, tile: Tile) -> list[Bar]:
    grids = run.timeline["grids"] if run.timeline else []
    spans = next((grid["spans"] for grid in grids if grid["rank"] == tile.ranks[0]), [])
    return [Bar(KINDS[action], begin, end, m) for action, _, m, begin, end in spans if action in KINDS]


def _draw(run: RunRecord, width: int) -> Svg | None:
    """Draw a line for each tensor grid, of many for each group of equal ones; None where nothing is known."""
    if len(run.plan.first_tiles) > MAX_GROUPS:
        grids = [(group.tile, group.describe()) for group in run.groups[:MAX_GROUPS]]
    else:
        grids = [(tile, group.describe(tile.ranks)) for group in run.groups for tile in group.tiles]
    forecast = run.forecast.spans if run.forecast else {}
    predicted = [
        [
            Bar(KINDS[s.instruction.action.value], s.begin, s.end, s.instruction.microbatch)
            for s in forecast.get(tile, ())
        ]
        for tile, _ in grids
    ]
    lanes = {"predicted": predicted}
    if any(measured := [_measured(run, tile) for tile, _ in grids]):
        lanes["measured"] = measured
    bars = [bar for lines in lanes.values() for line in lines for bar in line]
    if not bars:
        return None
    kinds = [kind for kind in NAMES if kind == "idle" or any(bar.kind == kind for bar in bars)]
    legend = [(f"box k-{kind}", NAMES[kind]) for kind in kinds]
    svg = Svg(width, "timeline of a step, predicted above measured", legend)
    height = len(lanes) * LANE + 30
    end = max(bar.end for bar in bars)
    title = "seconds from the beginning of the step"
    x = svg.axis_x((0, end), LANES_LEFT, len(grids) * height, show_seconds, title)
    for place, (_, heading) in enumerate(grids):
        tops = svg.lanes(svg.top + place * height, heading, lanes)
        for (name, lines), top in zip(lanes.items(), tops, strict=True):
            file = TIMELINE.name if name == "measured" else "forecast"
            if lines[place]:
                _lane(svg, x, top, lines[place], f"{run.name}/{file}:{place}")
    return svg


def _lane(svg: Svg, x: PixelScale, at: float, bars: Sequence[Bar], source: str) -> None:
    svg.rect(x.start, at, x(max(bar.end for bar in bars)) - x.start, LANE - 2, "box k-idle")
    for kind in NAMES:
        boxes = [(x(bar.begin), x(bar.end)) for bar in bars if bar.kind == kind]
        svg.boxes(boxes, at, LANE - 2, f"{'box' if len(boxes) <= MAX_EDGED else 'fine'} k-{kind}", data_from=source)
    for bar in bars:
        middle, wide = (x(bar.begin) + x(bar.end)) / 2, x(bar.end) - x(bar.begin)
        if bar.microbatch >= 0 and wide > 8 * len(str(bar.microbatch + 1)) + 4:
            svg.text(middle, at + 10.5, bar.microbatch + 1, f"on k-{bar.kind}-text", "middle")
