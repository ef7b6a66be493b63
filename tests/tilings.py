"""Random tilings: any cut of items x rows among different tensor grids, for tests on one rank and on many."""

import itertools
from dataclasses import replace

from hypothesis import strategies as st

from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import check_grid


def grids_of(model: Model, size: int) -> list[TensorGrid]:
    """All grids of `size` ranks that can cut the model."""
    result = []
    for x, y in itertools.product(range(1, size + 1), repeat=2):
        if size % (x * y) == 0:
            grid = TensorGrid(x, y, size // (x * y))
            try:
                check_grid(model, grid)
            except PlanError:
                continue
            result.append(grid)
    return result


def share_items_by_different_grids(plan: Plan) -> bool:
    last = max(tile.items.stop for tile in plan.tiles)
    return any(len({tile.tensor for tile in plan.tiles if tile.contains(item)}) > 1 for item in range(last))


def _shares(draw, total: int, parts: int) -> list[int]:
    """Cut `total` into `parts` sizes of at least one."""
    cuts = sorted(draw(st.permutations(range(1, total)))[: parts - 1])
    return [stop - start for start, stop in itertools.pairwise([0, *cuts, total])]


@st.composite
def tilings(
    draw, model: Model, num_ranks: int, rows: int, microbatches: int, unused: bool = True, exchanging: bool = False
) -> Plan:
    """A plan for exactly `num_ranks` ranks: side by side pipelines of any depth, or stages of any data degree.

    With `exchanging` the tiles of a stage may exchange while they compute (ZeRO 2 and 3), by different grids too.
    """
    left_out = draw(st.integers(0, 1)) if unused and num_ranks > 2 else 0
    order = draw(st.permutations(range(num_ranks)))
    used = num_ranks - left_out
    parts = draw(st.integers(1, min(used, rows if used < 4 else 3)))
    side_by_side = draw(st.booleans())
    tiles: list[tuple[Interval, Interval, int]] = []
    if side_by_side:  # columns of rows, each a pipeline of its own depth
        parts = min(parts, rows)
        widths = _intervals(_shares(draw, rows, parts))
        for width, ranks in zip(widths, _shares(draw, used, parts), strict=True):
            depth = draw(st.integers(1, min(ranks, model.num_layers)))
            items = _intervals(_shares(draw, model.num_items, depth))
            tiles += [(i, width, n) for i, n in zip(items, _shares(draw, ranks, depth), strict=True)]
    else:  # stages, each with a data degree of its own
        parts = min(parts, model.num_items)
        stages = _intervals(_shares(draw, model.num_items, parts))
        for items, ranks in zip(stages, _shares(draw, used, parts), strict=True):
            degree = draw(st.integers(1, min(ranks, rows)))
            widths = _intervals(_shares(draw, rows, degree))
            tiles += [(items, w, n) for w, n in zip(widths, _shares(draw, ranks, degree), strict=True)]
    made, ranks = [], iter(order)
    for items, width, size in tiles:
        fitting = [g for g in grids_of(model, size) if g.z <= width.size]
        if not fitting:  # take one rank, and leave the others out
            fitting = [TensorGrid()]
        grid = draw(st.sampled_from(fitting))
        # Rows of 16 positions, of which the ranks of z may have the same rows, and cut these instead.
        if grid.z in (2, 4, 8) and draw(st.booleans()):
            grid = grid._replace(z=1, c=grid.z)
        cuts_evenly = grid.y > 1 and 16 // grid.c % grid.y == 0
        grid = grid._replace(sequence_parallel=cuts_evenly and draw(st.booleans()))
        members = tuple(itertools.islice(ranks, grid.size))
        options = {
            "zero": draw(st.integers(0, 1)),
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            "offload": draw(st.sampled_from(["none", "optimizer"])),
            "state_share": draw(st.integers(1, 3)),
            "row_chunks": draw(st.integers(1, max(1, width.size // grid.z // 2))),
        }
        made.append(Tile(items, width, members, grid, **options))
    if exchanging and not side_by_side:
        made = _some_exchange(draw, made)
    return Plan(tuple(made), microbatches, rows, unused=tuple(sorted(ranks)))


@st.composite
def with_extra_warmups(draw, drawn: Plan) -> Plan:
    """Let tiles have more microbatches in flight than by 1F1B, each at least as many as the next."""
    warm_up: dict[Tile, int] = {}
    for tile in sorted(drawn.tiles, key=lambda tile: -tile.items.start):
        following = [warm_up[other] for other in drawn.downstream(tile)]
        least = max(drawn.depth_to_loss(tile), *following, 0)
        warm_up[tile] = least + (draw(st.integers(0, 3)) if following else 0)
    extra_warmup = {tile: number - drawn.depth_to_loss(tile) for tile, number in warm_up.items()}
    return replace(drawn, tiles=tuple(replace(tile, extra_warmup=extra_warmup[tile]) for tile in drawn.tiles))


def _some_exchange(draw, tiles: list[Tile]) -> list[Tile]:
    """Let the stages of one tensor grid exchange while they compute, or not."""
    resolved = {}
    for items in dict.fromkeys(tile.items for tile in tiles):
        row_chunks = min(tile.row_chunks for tile in tiles if tile.items == items)
        zero = draw(st.sampled_from([None, 2, 3]))
        are_alike = len({tile.tensor for tile in tiles if tile.items == items}) == 1
        resolved[items] = {"zero": zero, "row_chunks": row_chunks} if zero and are_alike else {}
    return [replace(tile, **resolved[tile.items]) for tile in tiles]


def _intervals(sizes: list[int]) -> list[Interval]:
    return [Interval(start, stop) for start, stop in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def stages_of_different_degree() -> Plan:
    """An interleaved pipeline of two stages on four ranks, the first of which has two replicas, the other y = 2."""
    tiles = []
    for start, middle, stop in ((0, 3, 7), (7, 12, 18)):
        tiles += [Tile(Interval(start, middle), Interval(row, row + 1), (row,)) for row in (0, 1)]
        tiles.append(Tile(Interval(middle, stop), Interval(0, 2), (2, 3), TensorGrid(y=2)))
    return Plan(tuple(tiles), 3, 2)
