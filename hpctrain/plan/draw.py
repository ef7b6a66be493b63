"""Draws a plan for a terminal: items across, rows down, a box for each tile."""

import itertools

from hpctrain.plan.tiling import Plan, Tile

MIN_WIDTH = 72
BOX = {"lr": "─", "ud": "│", "rd": "┌", "ld": "┐", "ru": "└", "lu": "┘", "rud": "├", "lud": "┤", "lrd": "┬", "lru": "┴"}
CROSS = "┼"


def draw_plan(plan: Plan) -> str:
    """Return the drawing: the tiles' family, tensor grid, ranks, and what is unlike the defaults."""
    item_bounds = sorted({bound for tile in plan.tiles for bound in tile.items})
    row_bounds = sorted({bound for tile in plan.tiles for bound in tile.rows})
    texts = [_text(plan, number, tile) for number, tile in enumerate(plan.tiles)]
    width = max(MIN_WIDTH, 3 * item_bounds[-1])
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
    summary = [plan.describe(), "items across (0: embedding, then blocks, last: head), rows of a microbatch down", ""]
    summary += [" " * margin + ruler.lines()[0], *drawn]
    if plan.unused:
        summary.append(f"unused: {ranges(plan.unused)}")
    return "\n".join(summary)


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


def _text(plan: Plan, number: int, tile: Tile) -> list[str]:
    virtual_stages = plan.virtual_stages(tile)
    options = [f"chunk {virtual_stages.index(tile)} of {len(virtual_stages)}"] if len(virtual_stages) > 1 else []
    options += [] if tile.recompute == "none" else [f"recompute {tile.recompute}"]
    options += [f"zero {tile.zero}"] if tile.zero != 1 else []
    options += [f"share {tile.state_share}"] if tile.state_share != 1 else []
    options += [f"{tile.row_chunks} row_chunks"] if tile.row_chunks != 1 else []
    options += [f"{tile.extra_warmup} ahead"] if tile.extra_warmup else []
    ranks = ranges(tile.ranks)
    if len(ranks) > 24:
        ranks = f"{min(tile.ranks)}...{max(tile.ranks)}"
    return [f"{number}: {tile.family} {tile.tensor}", f"{'ranks' if len(tile.ranks) > 1 else 'rank'} {ranks}", *options]


def _positions(bounds: list[int], size: int, needed: list[tuple]) -> dict[int, int]:
    """Place bounds in proportion within `size` characters, and further apart where a tile needs room."""
    sizes = {a: max(2, (b - a) * size // bounds[-1]) for a, b in itertools.pairwise(bounds)}
    for interval, width in sorted(needed, key=lambda need: need[0].size):
        inside = [bound for bound in sizes if interval.start <= bound < interval.stop]
        missing = width - sum(sizes[bound] for bound in inside)
        sizes[inside[-1]] += max(0, missing)
    return dict(zip(bounds, itertools.accumulate(sizes.values(), initial=0), strict=True))


class _Canvas:
    """Characters, of which borders know where they go on: left, right, up, down."""

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
        for (x, y), ways in self._borders.items():
            self._cells[y][x] = BOX.get("".join(way for way in "lrud" if way in ways), CROSS)
        return ["".join(line).rstrip() for line in self._cells]
