"""Draws a plan for a terminal: items across, rows down, a box for each tile."""

import itertools

from hpctrain.plan.tiling import Plan, Tile

MIN_WIDTH = 72
BOX = {"lr": "─", "ud": "│", "rd": "┌", "ld": "┐", "ru": "└", "lu": "┘", "rud": "├", "lud": "┤", "lrd": "┬", "lru": "┴"}
CROSS = "┼"


ACROSS = "items across (0: embedding; 1, 2: attention, MLP of block 0; ...); rows down"


def draw_plan(plan: Plan, max_width: int = 80, max_lines: int = 48) -> str:
    """Return the tiles as boxes with family, tensor grid, ranks, and options that are not the defaults.

    A drawing that is wider than `max_width` or longer than `max_lines` becomes a table, with equal tiles on one line.
    """
    drawing = _draw_boxes(plan) if len(plan.tiles) <= max_width else ""
    lines = drawing.splitlines()
    if drawing and len(lines) <= max_lines and max(map(len, lines)) <= max_width:
        return drawing
    return "\n".join([plan.describe(), "", *_table(plan), *_unused(plan)])


def _table(plan: Plan) -> list[str]:
    """Return a line for all tiles that differ only in their ranks and in which rows they have."""
    groups: dict[tuple, list[tuple[int, Tile]]] = {}
    for number, tile in enumerate(plan.tiles):
        key = tile.work, tuple(_options(plan, tile))
        groups.setdefault(key, []).append((number, tile))
    cells = [("items", "tiles", "rows each", "family", "grid", "ranks", "options")]
    for (_, options), members in groups.items():
        tile = members[0][1]
        ranks = _brief(tuple(rank for _, tile in members for rank in tile.ranks))
        numbers = _brief(tuple(number for number, _ in members))
        items, rows = f"[{tile.items.start}, {tile.items.stop}]", str(tile.rows.size)
        cells.append((items, numbers, rows, tile.family, str(tile.tensor), ranks, ", ".join(options)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _unused(plan: Plan) -> list[str]:
    return [f"unused: {ranges(plan.unused)}"] if plan.unused else []


def _draw_boxes(plan: Plan) -> str:
    item_bounds = sorted({bound for tile in plan.tiles for bound in tile.items})
    row_bounds = sorted({bound for tile in plan.tiles for bound in tile.rows})
    texts = [_text(plan, number, tile) for number, tile in enumerate(plan.tiles)]
    width = max(MIN_WIDTH, item_bounds[-1])
    columns = _positions(item_bounds, width, [(t.items, 3 + max(map(len, text))) for t, text in _pairs(plan, texts)])
    lines = _positions(row_bounds, 0, [(t.rows, 1 + len(text)) for t, text in _pairs(plan, texts)])
    canvas = _Canvas(columns[item_bounds[-1]] + 1, lines[row_bounds[-1]] + 1)
    for tile, text in _pairs(plan, texts):
        left, right = (columns[bound] for bound in tile.items)
        top, bottom = (lines[bound] for bound in tile.rows)
        canvas.box(left, right, top, bottom)
        for offset, line in enumerate(text):
            canvas.write(left + 2, top + 1 + offset, line)
    margin = 1 + len(str(row_bounds[-1]))
    at = {lines[bound]: str(bound) for bound in row_bounds}
    ruler = _Canvas(columns[item_bounds[-1]] + len(str(item_bounds[-1])), 1)
    for bound in item_bounds:
        ruler.write(columns[bound], 0, str(bound))
    drawn = [f"{at.get(number, ''):>{margin - 1}} {line}" for number, line in enumerate(canvas.lines())]
    summary = [
        plan.describe(),
        ACROSS,
        "",
    ]
    summary += [" " * margin + ruler.lines()[0], *drawn]
    return "\n".join([*summary, *_unused(plan)])


def ranges(numbers: tuple[int, ...]) -> str:
    """Write numbers in their order, runs of consecutive ones as `4-7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _pairs(plan: Plan, texts: list[list[str]]):
    return zip(plan.tiles, texts, strict=True)


def _brief(numbers: tuple[int, ...], size: int = 24) -> str:
    """Return numbers as ranges; where that is longer than `size`, their count and their ends."""
    text = ranges(numbers)
    return text if len(text) <= size else f"{len(numbers)}: {min(numbers)}...{max(numbers)}"


def _options(plan: Plan, tile: Tile) -> list[str]:
    """Return what of a tile is not the default, and its virtual stage of several."""
    virtual_stages = plan.virtual_stages(tile)
    number = [f"virtual stage {virtual_stages.index(tile)} of {len(virtual_stages)}"]
    return [*(number if len(virtual_stages) > 1 else []), *options_of(tile)]


def options_of(tile: Tile) -> list[str]:
    """Return what of a tile is not the default."""
    options = [] if tile.recompute == "none" else [f"recompute {tile.recompute}"]
    options += [] if tile.offload == "none" else [f"offload {tile.offload}"]
    options += [f"ZeRO {tile.zero}"] if tile.zero != 1 else []
    options += [f"share {tile.state_share}"] if tile.state_share != 1 else []
    options += [f"{tile.row_chunks} row chunks"] if tile.row_chunks != 1 else []
    options += [f"extra warm-up {tile.extra_warmup}"] if tile.extra_warmup else []
    return options


def _text(plan: Plan, number: int, tile: Tile) -> list[str]:
    ranks = f"{'ranks' if len(tile.ranks) > 1 else 'rank'} {_brief(tile.ranks)}"
    return [f"{number}: {tile.family} {tile.tensor}", ranks, *_options(plan, tile)]


def _positions(bounds: list[int], size: int, needed: list[tuple]) -> dict[int, int]:
    """Place bounds in proportion within `size` characters, and further apart where a tile needs more space."""
    sizes = {a: max(2, (b - a) * size // bounds[-1]) for a, b in itertools.pairwise(bounds)}
    for interval, width in sorted(needed, key=lambda need: need[0].size):
        inside = [bound for bound in sizes if interval.start <= bound < interval.stop]
        missing = width - sum(sizes[bound] for bound in inside)
        sizes[inside[-1]] += max(0, missing)
    return dict(zip(bounds, itertools.accumulate(sizes.values(), initial=0), strict=True))


class _Canvas:
    """Characters, of which borders know where they continue: left, right, up, down."""

    def __init__(self, width: int, height: int):
        self._cells = [[" "] * width for _ in range(height)]
        self._borders: dict[tuple[int, int], set[str]] = {}

    def box(self, left: int, right: int, top: int, bottom: int) -> None:
        for x in range(left, right + 1):
            for y in (top, bottom):
                self._borders.setdefault((x, y), set()).update("l" * (x > left) + "r" * (x < right))
        for y in range(top, bottom + 1):
            for x in (left, right):
                self._borders.setdefault((x, y), set()).update("u" * (y > top) + "d" * (y < bottom))

    def write(self, x: int, y: int, text: str) -> None:
        self._cells[y][x : x + len(text)] = text

    def lines(self) -> list[str]:
        for (x, y), directions in self._borders.items():
            self._cells[y][x] = BOX.get("".join(direction for direction in "lrud" if direction in directions), CROSS)
        return ["".join(line).rstrip() for line in self._cells]
