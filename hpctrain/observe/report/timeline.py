"""The timeline of one step: for each tensor grid what was predicted above what was measured, on one axis."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpctrain.observe.report.curves import label_width
from hpctrain.observe.report.groups import groups_of, name_ranks
from hpctrain.observe.report.record import RunRecord
from hpctrain.observe.report.svg import PixelScale, Svg, axis_x, clip, legend, legend_height, show_seconds
from hpctrain.plan.schedule import Op
from hpctrain.plan.tiling import Tile

KINDS = {
    Op.FORWARD.value: "forward",
    Op.BACKWARD.value: "backward",
    Op.BACKWARD_INPUT.value: "backward",
    Op.BACKWARD_WEIGHT.value: "weights",
    Op.REDUCE_GRADIENTS.value: "reduce",
    Op.UPDATE.value: "update",
}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "weights": "backward of weights",
    "reduce": "sum gradients",
    "update": "agree and update",
    "idle": "waiting",
}
LANE, GAP, BOTTOM = 15, 16, 40
MOST_LINES = 24
MOST_EDGED = 40
"""Boxes of one kind in a lane; more would be all edges."""
THIN = 2.0
"""Pixels; thinner boxes of one kind next to each other become one."""


class Bar(NamedTuple):
    kind: str
    begin: float
    end: float
    microbatch: int = -1


def predicted_bars(run: RunRecord, tile: Tile) -> list[Bar]:
    spans = run.forecast.spans[tile] if run.forecast else []
    return [Bar(KINDS[s.instruction.op.value], s.begin, s.end, s.instruction.microbatch) for s in spans]


def measured_bars(run: RunRecord, tile: Tile) -> list[Bar]:
    grids = run.timeline["grids"] if run.timeline else []
    spans = next((grid["spans"] for grid in grids if grid["rank"] == tile.ranks[0]), [])
    return [Bar(KINDS[op], begin, end, m) for op, _, m, begin, end in spans if op in KINDS]


def shown_grids(run: RunRecord) -> list[tuple[Tile, str, str]]:
    """Return the grids that have a line each, with their names: of equal ones the first, where there are many."""
    groups = groups_of(run)
    if len(run.plan.first_tiles) > MOST_LINES:
        return [(group.tile, group.label, group.who) for group in groups[:MOST_LINES]]
    named = []
    for group in groups:
        for tile in group.tiles:
            named.append((tile, group.label, f"{tile.family}, {name_ranks(tuple(sorted(tile.ranks)))}"))
    return named


def timeline(run: RunRecord, width: int) -> Svg | None:
    """Draw a step; None where it is neither predicted nor measured."""
    grids = shown_grids(run)
    bars = [(predicted_bars(run, tile), measured_bars(run, tile)) for tile, _, _ in grids]
    every = [bar for pair in bars for lane in pair for bar in lane]
    if not every:
        return None
    has_measured = any(measured for _, measured in bars)
    kinds = [kind for kind in NAMES if kind == "idle" or any(bar.kind == kind for bar in every)]
    entries = [(f"box k-{kind}", NAMES[kind]) for kind in kinds]
    head = legend_height(width - 8, entries) + 10
    lanes = 1 + has_measured
    block = lanes * LANE + GAP + 14
    left = label_width(["predicted "], width) + 6
    x = PixelScale(0, max(bar.end for bar in every), left, width - 14)
    svg = Svg(width, head + len(grids) * block + BOTTOM, "timeline of a step, predicted above measured", data_x=x)
    legend(svg, 8, 2, width - 8, entries)
    axis_x(svg, x, head + len(grids) * block, head, show_seconds, "seconds from the beginning of the step")
    for number, ((_, label, who), pair) in enumerate(zip(grids, bars, strict=True)):
        top = head + number * block
        svg.text(left, top + 11, clip(f"{label} · {who}", width - left - 10), "strong")
        for lane, (name, of_lane) in enumerate(zip(("predicted", "measured"), pair, strict=True)):
            if lane >= lanes:
                continue
            at = top + 16 + lane * LANE
            svg.text(left - 6, at + 11, name, "tick", "end")
            if of_lane:
                _lane(svg, x, at, of_lane, f"{run.name}/{'timeline.json' if lane else 'forecast'}:{number}")
    return svg


def _lane(svg: Svg, x: PixelScale, at: float, bars: Sequence[Bar], source: str) -> None:
    svg.rect(x.start, at, x(max(bar.end for bar in bars)) - x.start, LANE - 2, "box k-idle")
    drawn = [(kind, list(_merged(x, [bar for bar in bars if bar.kind == kind]))) for kind in NAMES]
    for kind, boxes in drawn:
        svg.boxes(boxes, at, LANE - 2, f"{'box' if len(boxes) <= MOST_EDGED else 'fine'} k-{kind}", data_from=source)
    for bar in bars:
        middle, wide = (x(bar.begin) + x(bar.end)) / 2, x(bar.end) - x(bar.begin)
        if bar.microbatch >= 0 and wide > 8 * len(str(bar.microbatch + 1)) + 4:
            svg.text(middle, at + 10.5, bar.microbatch + 1, f"on k-{bar.kind}-text", "middle")


def _merged(x: PixelScale, bars: Iterable[Bar]) -> Iterable[tuple[float, float]]:
    """Return boxes in pixels, thin neighbours as one."""
    last: tuple[float, float] | None = None
    for bar in bars:
        begin, end = x(bar.begin), x(bar.end)
        if last and begin - last[1] < THIN / 2 and end - begin < THIN:
            last = last[0], end
            continue
        if last:
            yield last
        last = begin, end
    if last:
        yield last
