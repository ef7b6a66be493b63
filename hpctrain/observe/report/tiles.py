"""The plan as a picture: items across, rows down, a box for each tile or for many equal ones."""

from collections.abc import Mapping, Sequence

from hpctrain.observe.console import wrap
from hpctrain.observe.report.svg import RIGHT, Panel, PixelScale, Svg, clip, show_whole, text_width
from hpctrain.plan.draw import options_of, ranges
from hpctrain.plan.tiling import Plan, Tile, counted

LEFT = 46
MAX_BOXES = 60
"""Equal tiles of a plan with more tiles share a box where they lie one below the other."""
LINE = 15
SLIM = 60
"""A box with fewer pixels across has its text from top to bottom."""


def boxes_of(plan: Plan) -> list[list[Tile]]:
    """Return the tiles of each box: one, or equal ones with consecutive rows."""
    if len(plan.tiles) <= MAX_BOXES:
        return [[tile] for tile in plan.tiles]
    boxes: list[list[Tile]] = []
    for tile in sorted(plan.tiles, key=lambda t: (t.items, t.rows)):
        last = boxes[-1][-1] if boxes else None
        if last and last.work == tile.work and last.rows.stop == tile.rows.start:
            boxes[-1].append(tile)
        else:
            boxes.append([tile])
    return boxes


NOTE = (
    "A micro-batch is a rectangle: the model's items across (embedding, then attention and feed-forward part of each"
    " block, then the head), its rows (sequences) down. Each box is a tile, computed by the ranks named in it."
)


def plan_panel(plan: Plan, title: str, colours: Mapping[str, str]) -> Panel:
    """Return a plan; `colours` are the fill classes of families."""
    return Panel(title, lambda width: _draw(plan, colours, width), NOTE)


def _draw(plan: Plan, colours: Mapping[str, str], width: int) -> Svg:
    boxes = boxes_of(plan)
    num_items = max(tile.items.stop for tile in plan.tiles)
    bounds = sorted({bound for box in boxes for bound in (box[0].rows.start, box[-1].rows.stop)})
    cuts = len(bounds) - 1
    slimmest = min(box[0].items.size for box in boxes) / num_items * (width - LEFT - RIGHT)
    height = min(520, max(270 if slimmest < SLIM else 150, 62 * cuts))
    families = dict.fromkeys(tile.family for tile in plan.tiles)
    svg = Svg(width, f"tiles of the plan {plan.describe()}", [(colours[name], name) for name in families], gap=26)
    svg.text(4, svg.top - 10, f"rows of a micro-batch ({plan.rows:,})", "label")
    x = svg.axis_x((0, num_items), LEFT, height, show_whole, "items of the model")
    y = PixelScale(0, plan.rows, svg.top, svg.top + height)
    for bound in bounds if cuts <= 16 else (0, plan.rows):
        svg.text(LEFT - 6, y(bound) + 4, bound, "tick", "end")
    for box in boxes:
        tile = box[0]
        left, right, top, bottom = x(tile.items.start), x(tile.items.stop), y(tile.rows.start), y(box[-1].rows.stop)
        lines = _lines(box)
        svg.rect(left, top, right - left, bottom - top, f"tile {colours[tile.family]}", "\n".join(lines))
        if len(box) > 1 and (bottom - top) / len(box) >= 3:
            for other in box[1:]:
                svg.line(left, y(other.rows.start), right, y(other.rows.start), "seam")
        if right - left < SLIM < bottom - top:
            middle, start = (left + right) / 2 + 4, top + 6
            turned = f"rotate(90 {middle - 8:.1f} {start:.1f})"
            if right - left > LINE:
                svg.text(middle - 8, start, clip(" · ".join(lines), bottom - top - 12), "ontile", transform=turned)
            continue
        count = int((bottom - top - 4) / LINE)
        fitted = lines if count >= len(lines) else wrap(lines, right - left - 12, " · ", text_width)[:count]
        for number, line in enumerate(fitted):
            if shown := clip(line, right - left - 12):
                svg.text(left + 6, top + 15 + number * LINE, shown, "ontile" if number else "ontile strong")
    return svg


def _lines(tiles: Sequence[Tile]) -> list[str]:
    """Return what is written into a box of equal tiles, the most important first."""
    tile, count = tiles[0], len(tiles)
    ranks = ranges(tuple(sorted(rank for equal in tiles for rank in equal.ranks)))
    rows = f"{count} tiles of {counted(tile.rows.size, 'row')}" if count > 1 else counted(tile.rows.size, "row")
    lines = [tile.family, f"{'ranks' if count * len(tile.ranks) > 1 else 'rank'} {ranks}", rows, str(tile.tensor)]
    return [*lines, *(["ZeRO 1"] if tile.zero == 1 else []), *options_of(tile)]
