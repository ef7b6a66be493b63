"""Holdings: what each rank of a plan has of the model, and with whom. Pure: needs neither MPI nor torch.

A rank *uses* the boxes of its part (`hpctrain.sharding.grid_parts`), *stores* a share of each unit's flat array, and
*owns* what it updates of that (ZeRO). The *holders* of an element are the ranks that store it: they sum gradients
together, and share the updates. Where all tiles that use an item have the same tensor grid, whole units have the same
holders, at the same place of every tile. What these exchange is one flat array.
Where grids are different, their ranks store rectangles of the parameters, which intersect in smaller ones: *regions*.
Each region is held by one exact set of ranks, which exchanges its regions packed side by side.

What one set of ranks holds may be cut into several shard groups, of whole blocks each: buckets, so that the gradients
of the last items can be summed while those of the first are computed.

Every rank computes its own shard groups by itself, in one plan-wide order: by the first element of each.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import ONE_RANK, TensorGrid
from hpctrain.sharding.grid_parts import GridPart, parts_of, same_elements
from hpctrain.sharding.intervals import Interval, cut_by_shares, tiles_exactly
from hpctrain.sharding.items import block_of
from hpctrain.sharding.parameters import (
    Box,
    Parameter,
    Unit,
    UnitLayout,
    all_parameters,
    item_units,
    join_units,
    units,
    whole_rows,
)

Rectangle = tuple[Interval, Interval]
GRADIENT_BYTES = 4  # fp32


@dataclass(frozen=True)
class Region:
    """A rectangle of a parameter of one or two dims (which then has one column)."""

    parameter: Parameter
    rows: Interval
    columns: Interval

    @property
    def box(self) -> Box:
        return (self.rows, self.columns)[: len(self.parameter.shape)]

    @property
    def size(self) -> int:
        return self.rows.size * self.columns.size


@dataclass(frozen=True)
class ShardGroup:
    """The weights that one exact set of ranks holds: whole units, or regions of them."""

    ranks: tuple[int, ...]
    """Ranks of the group, in the order of the plan's tiles. It is the same order for every y, so that the copies of a
    norm have like owners."""
    shares: tuple[int, ...]
    """Share of the optimizer's state, for each of the ranks."""
    zero: int
    """The ZeRO stage in which they exchange."""
    layouts: tuple[UnitLayout, ...] = ()
    regions: tuple[Region, ...] = ()
    items: tuple[int, ...] = ()
    """The items that use these weights, in their order. A tied embedding has two."""
    final_after: int = 0
    """The item of this rank's tiles after whose backward pass all gradients of this group are complete."""
    is_tied: bool = False
    """Whether it has weights of two items. Holders of one item may finish all other sums before the others begin."""

    def cuts(self, size: int) -> tuple[Interval, ...]:
        """Return for each rank which of `size` elements it owns."""
        return cut_by_shares(size, self.shares)


@dataclass(frozen=True)
class Holding:
    """The weights of a plan that one rank has."""

    part: GridPart
    """The part of the model that the rank uses."""
    shard_groups: tuple[ShardGroup, ...]
    """Weights that the rank stores, by the ranks that store the same. These ranks cut them among themselves into what
    each owns."""
    cut_units: tuple[UnitLayout, ...] = ()
    """The units whose elements are in regions, of each item what is not tied as one."""


def holding_of(model: Model, plan: Plan, rank: int, bucket_bytes: int | None = None) -> Holding:
    """Return what a rank holds, and with whom.

    What the same ranks hold is cut into shard groups of at least `bucket_bytes` of gradients each, which must be the
    same for all ranks; without it there is one. Ranks at the same place of tiles of one kind (`Plan.first_like`) hold
    the same.
    """
    tile = plan.tile_of(rank)
    part, place = tile.part(rank), tile.ranks.index(rank)
    number_of = _numbers(model)  # pyright: ignore[reportArgumentType] - frozen, so it has a hash
    cutter = _Cutter(model, plan, rank)
    tiles = plan.tiles_of(rank)
    # Computed once for all units of the same users, and all of the same ranks: plans may have thousands of tiles.
    zero_of = lru_cache(None)(partial(_zero, plan))
    counterparts: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def items_here(unit: Unit) -> list[int]:
        return [item for item in unit.items if any(each.contains(item) for each in tiles)]

    held_by: dict[tuple, list[HeldShard]] = {}  # by ranks, ZeRO stage, unit that exchanges by itself, and kind of part
    mixed: list[Unit] = []
    for unit in units(model, tile.tensor):  # pyright: ignore[reportArgumentType] - frozen, so it has a hash
        if not items_here(unit):
            continue
        users = plan.users(unit.items)
        key = id(users), unit.shared_heads
        if key not in counterparts:
            has_others = any(grid.of_weights != tile.tensor.of_weights for grid in {each.tensor for each in users})
            places = same_elements(tile.tensor, unit.shared_heads)[place]
            counterparts[key] = None if has_others else tuple(user.ranks[i] for user in users for i in places)
        ranks = counterparts[key]
        if ranks is None:
            mixed.append(unit)
            continue
        zero, layout = zero_of(ranks, len(unit.items) > 1), part.layout(unit)
        if not layout.size:  # this coordinate has none of its parameters
            continue
        first = number_of[unit.parameters[0].name], 0, 0
        by_itself = unit if zero >= 2 else None  # exchanged while it computes
        held_by.setdefault((ranks, zero, by_itself, UnitLayout), []).append(
            HeldShard(first, unit, layout, layout.size / len(part.stored_cuts(layout)))
        )
    cut_units = join_units(mixed)
    for unit in cut_units:
        for region, ranks in cutter.regions(unit, plan.users(unit.items)):
            first = number_of[region.parameter.name], region.rows.start, region.columns.start
            held_by.setdefault((ranks, 1, None, Region), []).append(HeldShard(first, unit, region, region.size))

    shard_groups = []
    shares = {ranks: tuple(plan.tile_of(rank).state_share for rank in ranks) for ranks in {key[0] for key in held_by}}
    for (ranks, zero, *_), shards in held_by.items():
        for bucket in _buckets(sorted(shards, key=lambda shard: shard.first), bucket_bytes):
            shard_group = ShardGroup(
                ranks,
                shares[ranks],
                zero,
                layouts=tuple(held.shard for held in bucket if isinstance(held.shard, UnitLayout)),
                regions=tuple(held.shard for held in bucket if isinstance(held.shard, Region)),
                items=tuple(sorted({item for held in bucket for item in held.unit.items})),
                final_after=min(item for held in bucket for item in items_here(held.unit)),
                is_tied=any(len(held.unit.items) > 1 for held in bucket),
            )
            shard_groups.append((bucket[0].first, shard_group))
    shard_groups.sort(key=lambda pair: pair[0])
    groups = tuple(shard_group for _, shard_group in shard_groups)
    return Holding(part, groups, tuple(layout for layout in map(part.layout, cut_units) if layout.size))


class HeldShard(NamedTuple):
    """A part of what one rank holds."""

    first: tuple[int, int, int]
    """Its first element in the plan-wide order: the parameter's number, the row, the column."""
    unit: Unit
    shard: UnitLayout | Region
    size: float
    """Elements that the rank stores, as a mean over the ranks that use the same."""


@lru_cache(maxsize=16)
def _numbers(model: Model) -> dict[str, int]:
    """Return the place of each parameter in the order of the items."""
    return {name: number for number, name in enumerate(all_parameters(model))}


def whole_model(model: Model) -> Holding:
    """Return what a rank holds that has the whole model to itself."""
    (whole,) = parts_of(ONE_RANK)
    layouts = map(whole.layout, units(model, ONE_RANK))  # pyright: ignore[reportArgumentType] - frozen, so it has a hash
    return Holding(whole, (ShardGroup((0,), (1,), 1, tuple(layouts)),))


def _buckets(parts: Sequence[HeldShard], bucket_bytes: int | None) -> Iterator[list[HeldShard]]:
    """Cut parts, which are in the order of items, into runs of at least so many bytes of gradients, of whole blocks.

    From the last to the first, so that what is left over is final last: nothing hides it. All holders of the same
    compute the same cut, for it depends on nothing else.
    """
    bucket: list[HeldShard] = []
    num_bytes = 0.0
    for i, part in reversed(list(enumerate(parts))):
        bucket.append(part)
        num_bytes += part.size * GRADIENT_BYTES
        starts_layer = i > 0 and block_of(parts[i - 1].unit.items[0]) != block_of(part.unit.items[0])
        if bucket_bytes is not None and num_bytes >= bucket_bytes and starts_layer:
            yield bucket[::-1]
            bucket, num_bytes = [], 0.0
    if bucket:
        yield bucket[::-1]


def _zero(plan: Plan, ranks: tuple[int, ...], is_tied: bool) -> int:
    """Return the ZeRO stage in which ranks exchange a unit: the highest of their tiles.

    In stage 0 every rank updates everything. It is for one family, whose ranks compute the same bits. Stages 2 and 3
    need other holders, and the same items, since they exchange while they compute; so a tied embedding stays at 1.
    Regions, which ranks of different tensor grids share, are at 1.
    """
    tiles = [plan.tile_of(rank) for rank in ranks]
    highest = max(tile.zero for tile in tiles)
    if len(ranks) == 1 or is_tied:
        highest = min(highest, 1)
    families = {family for tile in tiles for family in tile.family.split("+")}  # a tile may have several
    return highest if len(families) == 1 else max(1, highest)


def check_zero(plan: Plan, where: str) -> None:
    """Refuse ZeRO 2 and 3 where the tiles that share items do not go through them together. Raises PlanError."""
    delayed, grids = plan.schedule == "zb-h1", [tile.tensor.of_weights for tile in plan.tiles]
    exchanging = [(number, tile) for number, tile in enumerate(plan.tiles) if tile.zero >= 2]
    for number, tile in exchanging:
        for other_number, other in enumerate(plan.tiles):
            if not tile.items.intersect(other.items).size:
                continue
            for what, a, b in (
                ("tensor grids", grids[number], grids[other_number]),
                ("items", list(tile.items), list(other.items)),
                ("zero", tile.zero, other.zero),
                ("row_chunks", tile.row_chunks, other.row_chunks),
                ("virtual_stages", *([list(each.items) for each in plan.virtual_stages(t)] for t in (tile, other))),
                (
                    "forward passes before the first backward one (see extra_warmup)",
                    plan.warm_up(tile),
                    plan.warm_up(other),
                ),
                *((("tiles before", plan.depth_from_start(tile), plan.depth_from_start(other)),) if delayed else ()),
            ):
                if a != b:
                    raise PlanError(
                        f"{where}: zero = {tile.zero} exchanges while tiles compute, and tiles"
                        f" {number} and {other_number} share items but have different {what}: {a} and {b};"
                        " make them equal, or set zero to 1 or 0 in both"
                    )


class _Cutter:
    """Cuts a rank's units where grids differ. What is computed for one item serves all with equal parameters."""

    def __init__(self, model: Model, plan: Plan, rank: int):
        self._model, self._rank, self._tile = model, rank, plan.tile_of(rank)
        self._index = self._tile.ranks.index(rank)
        self._first_equal: dict[tuple, int] = {}
        self._stored: dict[tuple[int, TensorGrid], list[dict[Rectangle, list[int]]]] = {}
        self._result: dict[tuple, list[tuple[int, Rectangle, tuple[int, ...]]]] = {}

    def regions(self, unit: Unit, users: tuple[Tile, ...]) -> list[tuple[Region, tuple[int, ...]]]:
        """Return the regions of this rank's part of a unit, each with its holders in the order of tiles.

        Raises PlanError where they do not cover this part exactly.
        """
        item = unit.items[0]
        parameters = _parameters(self._model, item)
        wanted = tuple(p.name in {p.name for p in unit.parameters} for p in parameters)
        cutting = tuple(replace(parameter, name="") for parameter in parameters)  # all that decides how they are cut
        like = self._first_equal.setdefault((cutting, wanted), item)
        key = like, users, wanted
        if key not in self._result:
            numbers = [number for number, is_wanted in enumerate(wanted) if is_wanted]
            self._result[key] = [result for number in numbers for result in self._cut(like, number, users)]
        result = [(Region(parameters[number], *where), ranks) for number, where, ranks in self._result[key]]
        self._check_coverage(unit, [region for region, _ in result])
        return result

    def _check_coverage(self, unit: Unit, regions: Sequence[Region]) -> None:
        """Refuse regions that are not exactly what this rank stores of a unit. Raises PlanError."""
        covered = dict.fromkeys((p.name for p in unit.parameters), 0)
        for region in regions:
            covered[region.parameter.name] += region.size
        for parameter, rectangles in _stored_rectangles(unit, self._tile.tensor, self._index):
            stored = sum(rows.size * columns.size for rows, columns in rectangles)
            if stored != covered[parameter.name]:
                raise PlanError(
                    f"rank {self._rank} stores {stored:,} elements of {parameter.name}, and the regions that it shares"
                    f" with other tensor grids have {covered[parameter.name]:,}: each element must be in one region."
                    " This is a fault of hpctrain; give all tiles that share items one tensor grid, and report it"
                )

    def _cut(self, item: int, number: int, users: tuple[Tile, ...]):
        grids = dict.fromkeys(tile.tensor for tile in users)
        for own, members in self._cells(item, self._tile.tensor)[number].items():
            if self._index not in members:
                continue
            parts: list[tuple[Rectangle, dict[TensorGrid, list[int]]]] = [(own, {})]
            for grid in grids:
                parts = [
                    (both, shards | {grid: cells})
                    for part, shards in parts
                    for other, cells in self._cells(item, grid)[number].items()
                    if (both := _meet(part, other))
                ]
            for part, shards in parts:
                yield number, part, tuple(tile.ranks[i] for tile in users for i in shards[tile.tensor])

    def _cells(self, item: int, grid: TensorGrid) -> list[dict[Rectangle, list[int]]]:
        """Return for each parameter of an item the rectangles that a grid cuts it into, and who of a tile has each.

        Rectangles do not overlap: what several ranks store is the same for them. Padding is in none.
        """
        if (item, grid) not in self._stored:
            numbers = {p.name: number for number, p in enumerate(_parameters(self._model, item))}
            result: list[dict[Rectangle, list[int]]] = [{} for _ in numbers]
            for unit in join_units(item_units(self._model, grid, item)):
                for index in range(grid.size):
                    for parameter, rectangles in _stored_rectangles(unit, grid, index):
                        for where in rectangles:
                            result[numbers[parameter.name]].setdefault(where, []).append(index)
                for parameter in unit.parameters:
                    _check_tiling(parameter, result[numbers[parameter.name]], grid)
            self._stored[item, grid] = result
        return self._stored[item, grid]


def _stored_rectangles(unit: Unit, grid: TensorGrid, index: int) -> Iterator[tuple[Parameter, list[Rectangle]]]:
    """Yield of each parameter of a unit the rectangles that a place of a grid stores. Padding is in none."""
    part = parts_of(grid)[index]
    layout = part.layout(unit)
    shard = part.stored(layout)
    for parameter, box, placed in layout.placed():
        inside = placed.intersect(shard).shift(-placed.start)
        runs = whole_rows(parameter, box, inside) if inside.size else ()
        yield parameter, [(rows, Interval(columns.start, columns.stop)) for rows, columns, _ in runs]


def _check_tiling(parameter: Parameter, rectangles: Collection[Rectangle], grid: TensorGrid) -> None:
    """Refuse rectangles that do not cover a parameter exactly once. Raises PlanError."""
    num_rows, *num_columns = parameter.shape
    bounds = sorted({0, num_rows, *(bound for rows, _ in rectangles for bound in rows)})
    for band in itertools.starmap(Interval, itertools.pairwise(bounds)):
        inside = [columns for rows, columns in rectangles if rows.intersect(band).size]
        if not tiles_exactly(inside, Interval(0, math.prod(num_columns))):
            raise PlanError(
                f"a tensor grid of {grid} stores columns {[list(each) for each in sorted(inside)]} of rows"
                f" {list(band)} of {parameter.name}, which is not each of {math.prod(num_columns):,} once. This is a"
                " fault of hpctrain; use another tensor grid, and report it"
            )


def _parameters(model: Model, item: int) -> list[Parameter]:
    """Return the parameters of an item; a tied embedding is one of the first item alone."""
    return [p for unit in item_units(model, ONE_RANK, item) for p in unit.parameters]


def _meet(a: Rectangle, b: Rectangle) -> Rectangle | None:
    rows, columns = a[0].intersect(b[0]), a[1].intersect(b[1])
    return (rows, columns) if rows.size and columns.size else None
