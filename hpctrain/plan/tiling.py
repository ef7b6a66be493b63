"""The plan: a tiling of the work of each microbatch, items x rows, among tensor grids of ranks.

Plain frozen data with a TOML form (see `file.py`), written by a person, by `even_plan`, or by the planner, and
read by everything else. Items are those of `sharding/items.py`; rows are the sequences of a microbatch.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter, itemgetter

from hpctrain.config.errors import PlanError
from hpctrain.sharding.grid import ONE_RANK, TensorGrid
from hpctrain.sharding.grid_parts import GridPart, parts_of
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import block_of


@dataclass(frozen=True)
class Tile:
    """Consecutive items x consecutive rows, computed by one tensor grid of ranks.

    `ranks` are in the `RANK_ORDER` of the axes of `tensor`.
    """

    items: Interval
    rows: Interval
    ranks: tuple[int, ...]
    tensor: TensorGrid = ONE_RANK
    family: str = "cpu"
    recompute: str = "none"
    zero: int = 1
    state_share: int = 1
    """The share of each of its ranks when holders cut the state of the optimizer among them."""
    row_chunks: int = 1
    """Number of row chunks in which the tile computes its rows of a microbatch."""
    extra_warmup: int = 0
    """Microbatches that it has in flight beyond those of 1F1B, so that slow messages delay nobody."""
    offload: str = "none"
    """What is kept in host memory: "none", or the "optimizer"'s moments and fp32 masters."""

    def __post_init__(self) -> None:
        # Tiles are keys of many dictionaries: these distinguish nearly all, and take a tenth of the time of all.
        object.__setattr__(self, "_hash", hash((self.items, self.ranks)))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue] - set above

    @property
    def is_idle(self) -> bool:
        """Say whether this is a placeholder for a rank that the plan does not use."""
        return not self.items.size

    def part(self, rank: int) -> GridPart:
        """Return what a rank of this tile has of rows, features and parameters."""
        return parts_of(self.tensor)[self.ranks.index(rank)]

    def axis_ranks(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` in their coordinates on some axes only, the first being slowest."""
        grid, coordinate = self.part(rank)
        return tuple(self.ranks[grid.index_of(each)] for each in grid.along(coordinate, axes))

    @property
    def by_place(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks at each place along c, where these have unequal shares of the positions; else nothing."""
        places = [part.context_place for part in parts_of(self.tensor)] if self.tensor.position_shares else []
        pairs = list(zip(self.ranks, places, strict=False))
        return tuple(tuple(rank for rank, number in pairs if number == place) for place in sorted(set(places)))

    @property
    def rank_rows(self) -> int:
        """Return the rows of a microbatch that a rank computes: of the ranks with the most."""
        return -(-self.rows.size // self.tensor.row_parts)

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Return the rows of a rank in each of its row chunks."""
        return tuple(chunk.size for chunk in cut_evenly(self.rank_rows, self.row_chunks))

    def contains(self, item: int) -> bool:
        return self.items.start <= item < self.items.stop

    @property
    def work(self) -> tuple:
        """The work of the tile: all but its ranks and the place of its rows. Tiles with equal work are equal in it."""
        return self.rows.size, *_all_but_place(self)


_all_but_place = attrgetter(*(field.name for field in fields(Tile) if field.name not in ("ranks", "rows")))


@dataclass(frozen=True)
class Plan:
    """The tiles of a microbatch, each with its ranks, and the schedule by which they compute."""

    tiles: tuple[Tile, ...]
    microbatches: int
    rows: int
    """Sequences in a microbatch, over all tiles of a stage."""
    schedule: str = "1f1b"
    """Name of the schedule: "1f1b" or "zb-h1"; see `hpctrain.plan.schedule`."""
    unused: tuple[int, ...] = ()

    def with_schedule(self, **changes) -> "Plan":
        """Return the plan by another schedule, or with another number of microbatches.

        It shares what follows from the tiles, which takes long where they are many."""
        result = replace(self, **changes)
        result.__dict__.update({name: value for name, value in vars(self).items() if name not in vars(result)})
        return result

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that the plan is for, the unused ones too."""
        return tuple(sorted({*self.unused, *(rank for tile in self.tiles for rank in tile.ranks)}))

    @cached_property
    def _tiles_of(self) -> dict[int, tuple[Tile, ...]]:
        result: dict[int, list[Tile]] = {}
        for tile in self.tiles:
            result.setdefault(tile.ranks[0], []).append(tile)
        every = [tuple(sorted(tiles, key=lambda tile: tile.items.start)) for tiles in result.values()]
        every += [(Tile(Interval(0, 0), Interval(0, 0), (rank,)),) for rank in self.unused]
        return {rank: tiles for tiles in every for rank in tiles[0].ranks}

    def tiles_of(self, rank: int) -> tuple[Tile, ...]:
        """Return the tiles of a rank, its virtual stages, in the order of items; an unused one has an idle tile,
        without items and neighbours."""
        return self._tiles_of[rank]

    def tile_of(self, rank: int) -> Tile:
        """Return the first tile of a rank, for what all of them have in common: ranks, grid, rows, options (see
        `check_tiling`)."""
        return self._tiles_of[rank][0]

    def virtual_stages(self, tile: Tile) -> tuple[Tile, ...]:
        """Return all tiles of a tile's ranks, in the order of items."""
        return self._tiles_of[tile.ranks[0]]

    @cached_property
    def first_like(self) -> dict[Tile, Tile]:
        """Return for each of `first_tiles` the first one of its kind: with the same grid and the same items.

        Ranks at the same place of tiles of one kind store the same (`hpctrain.plan.holdings`). So a question about all
        ranks need only be asked for one tile of each kind.
        """
        first: dict[tuple, Tile] = {}
        kinds = ((tuple(each.items for each in self.virtual_stages(t)), t.tensor, t) for t in self.first_tiles)
        return {tile: first.setdefault((items, grid), tile) for items, grid, tile in kinds}

    @cached_property
    def equal_work(self) -> dict[Tile, Tile]:
        """Return for each tile the first one with equal work."""
        first: dict[tuple, Tile] = {}
        return {tile: first.setdefault(tile.work, tile) for tile in self.tiles}

    @cached_property
    def first_tiles(self) -> tuple[Tile, ...]:
        """Return the first tile of each tensor grid of ranks, which represents the ranks."""
        return tuple(tile for tile in self.tiles if self.virtual_stages(tile)[0] is tile)

    @cached_property
    def _users(self) -> dict[tuple[Interval, ...], tuple[Tile, ...]]:
        return {}

    @cached_property
    def _cuts(self) -> tuple[Interval, ...]:
        return tuple(dict.fromkeys(tile.items for tile in self.tiles))

    def users(self, items: Sequence[int]) -> tuple[Tile, ...]:
        """Return for all ranks that have some items a tile of theirs, in the order of tiles.

        Where these are the same tiles it is the same object.
        """
        cuts = tuple(cut for cut in self._cuts if any(cut.start <= item < cut.stop for item in items))
        if cuts not in self._users:
            tiles = (tile for tile in self.tiles if tile.items in cuts)
            self._users[cuts] = tuple({tile.ranks: tile for tile in tiles}.values())
        return self._users[cuts]

    @cached_property
    def _downstream(self) -> dict[Tile, tuple[Tile, ...]]:
        """Return for each tile those of the next items that share rows with it. Not all pairs are looked at."""
        starting: dict[int, list[tuple[int, int, Tile]]] = {}
        for number, tile in enumerate(self.tiles):
            starting.setdefault(tile.items.start, []).append((tile.rows.start, number, tile))
        most_rows = {item: max(tile.rows.size for *_, tile in tiles) for item, tiles in starting.items()}
        for tiles in starting.values():
            tiles.sort(key=lambda each: each[:2])
        result: dict[Tile, tuple[Tile, ...]] = {}
        for tile in self.tiles:
            tiles, before = starting.get(tile.items.stop, []), most_rows.get(tile.items.stop, 0)
            first = bisect_left(tiles, tile.rows.start - before, key=itemgetter(0))
            after = bisect_left(tiles, tile.rows.stop, key=itemgetter(0))
            sharing = [(number, t) for _, number, t in tiles[first:after] if tile.rows.intersect(t.rows).size]
            result[tile] = tuple(t for _, t in sorted(sharing, key=itemgetter(0)))
        return result

    @cached_property
    def _upstream(self) -> dict[Tile, tuple[Tile, ...]]:
        result: dict[Tile, list[Tile]] = {tile: [] for tile in self.tiles}
        for tile, following in self._downstream.items():
            for other in following:
                result[other].append(tile)
        return {tile: tuple(tiles) for tile, tiles in result.items()}

    @cached_property
    def _depth_to_loss(self) -> dict[Tile, int]:
        return _depths(sorted(self.tiles, key=lambda tile: -tile.items.start), self._downstream)

    @cached_property
    def _depth_from_start(self) -> dict[Tile, int]:
        return _depths(sorted(self.tiles, key=lambda tile: tile.items.start), self._upstream)

    def downstream(self, tile: Tile) -> tuple[Tile, ...]:
        """Return the tiles that take this tile's output: those of the next items that share rows with it."""
        return self._downstream.get(tile, ())

    def upstream(self, tile: Tile) -> tuple[Tile, ...]:
        """Return the tiles whose output this tile takes."""
        return self._upstream.get(tile, ())

    def depth_to_loss(self, tile: Tile) -> int:
        """Return the number of tiles on the longest path from this one to the loss, not counting itself."""
        return self._depth_to_loss[tile]

    def depth_from_start(self, tile: Tile) -> int:
        """Return the number of tiles on the longest path from the first items to this one, not counting itself."""
        return self._depth_from_start[tile]

    def warm_up(self, tile: Tile) -> int:
        """Return how many forward passes a tile does before it alternates, if it has one tile a rank."""
        return self.depth_to_loss(tile) + tile.extra_warmup

    def path_length(self, tile: Tile) -> int:
        """Return the number of tiles on the longest path through this one."""
        return self._depth_from_start[tile] + 1 + self._depth_to_loss[tile]

    @cached_property
    def path_ranks(self) -> int:
        """Return into how many parts a path from the first items to the loss cuts the model: the most of any."""
        before, after = self._depth_from_start, self._depth_to_loss
        return max((before[tile] + 1 + after[tile]) * tile.tensor.size for tile in self.tiles)

    @cached_property
    def pipelines(self) -> tuple[tuple[Tile, ...], ...]:
        """Return the groups of tiles that share messages, directly or through others, in the order of the tiles."""
        place = {tile: i for i, tile in enumerate(self.tiles)}
        result: list[tuple[Tile, ...]] = []
        seen: set[Tile] = set()
        for start in self.tiles:
            if start in seen:
                continue
            seen.add(start)
            together = [start]
            for tile in together:  # grows while it is gone through
                near = [t for t in (*self.upstream(tile), *self.downstream(tile)) if t not in seen]
                seen.update(near)
                together += near
            result.append(tuple(sorted(together, key=place.__getitem__)))
        return tuple(result)

    @cached_property
    def forms(self) -> tuple[int, ...]:
        """Return for each of `pipelines` a number that those share whose tiles wait for each other in the same way."""
        numbers: dict[tuple, int] = {}
        result = []
        for tiles in self.pipelines:
            place = {tile: i for i, tile in enumerate(tiles)}
            each = tuple((t.items, t.zero, self.warm_up(t), place[self.virtual_stages(t)[0]]) for t in tiles)
            pairs = tuple((place[a], place[b]) for a in tiles for b in self.downstream(a))
            result.append(numbers.setdefault((each, pairs), len(numbers)))
        return tuple(result)

    def describe(self) -> str:
        """Return the layout in a few words, such as `TP2 x PP2 x DP4, ZeRO 1, 4 microbatches of 8 rows`.

        A plan that is not even is a number of tiles: `3 tiles of TP1/TP2, ZeRO 1, ...`.
        """
        grids = "/".join(sorted({str(tile.tensor) for tile in self.tiles}))
        microbatches = f"{counted(self.microbatches, 'microbatch')} of {counted(self.rows, 'row')}"
        items = {tile.items for tile in self.tiles}
        replicas = {tile.rows for tile in self.tiles}
        virtual_stages = {len(self.virtual_stages(tile)) for tile in self.tiles}
        if len(self.tiles) == len(items) * len(replicas) and "/" not in grids and len(virtual_stages) == 1:
            each = max(virtual_stages)
            interleaved = f" ({each} virtual stages)" if each > 1 else ""
            tiles = f"{grids} x PP{len(items) // each}{interleaved} x DP{len(replicas)}"
        else:
            tiles = f"{counted(len(self.tiles), 'tile')} of {grids}"
            tiles += f", up to {max(virtual_stages)} a rank" if max(virtual_stages) > 1 else ""
        unused = f", {counted(len(self.unused), 'rank')} unused" if self.unused else ""
        schedule = "" if self.schedule == "1f1b" else f", {self.schedule}"
        most = max((tile.extra_warmup for tile in self.tiles), default=0)
        extra_warmup = f", up to {most} extra warm-up" if most else ""
        zero = "/".join(map(str, sorted({tile.zero for tile in self.tiles})))
        return f"{tiles}, ZeRO {zero}, {microbatches}{schedule}{extra_warmup}{unused}"


def _depths(tiles: Sequence[Tile], neighbours: Mapping[Tile, Sequence[Tile]]) -> dict[Tile, int]:
    """Return the longest path from each tile over its neighbours, which come before it."""
    depth: dict[Tile, int] = {}
    for tile in tiles:
        depth[tile] = max((1 + depth[other] for other in neighbours[tile]), default=0)
    return depth


def counted(number: float, what: str) -> str:
    """Return a number of things in words, such as `2 microbatches` or `1.5 blocks`."""
    if number == int(number):
        number = int(number)
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def even_plan(
    num_items: int,
    grid: TensorGrid,
    pipeline: int,
    data: int,
    microbatches: int,
    rows: int,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    **tile,
) -> Plan:
    """Return the even plan: `pipeline` stages x `data` replicas of `grid`; `tile` gives the rest of each tile.

    Blocks are cut evenly by count, with embedding and head at the ends; ranks run fastest in the tensor grid, then
    over replicas, then over stages, so that what exchanges most sits closest. Several `virtual_stages` make an
    interleaved pipeline: each stage has so many tiles, every `pipeline`-th.

    Raises PlanError if there are fewer blocks than tiles in a pipeline, rows that do not divide, or one stage with
    several virtual stages.
    """
    if virtual_stages > 1 and pipeline == 1:
        raise PlanError(
            f"virtual_stages = {virtual_stages} shorten the bubble of a pipeline, and pipeline = 1 has none; set"
            " virtual_stages to 1, or pipeline to 2 or more"
        )
    if virtual_stages > 1 and schedule != "1f1b":
        raise PlanError(
            f'virtual_stages = {virtual_stages}: schedule = "{schedule}" has one tile a rank; set it to 1, or "1f1b"'
        )
    num_blocks = block_of(num_items - 1)
    if pipeline * virtual_stages > num_blocks:
        of_each = f" x virtual_stages = {virtual_stages}" if virtual_stages > 1 else ""
        raise PlanError(f"pipeline = {pipeline} stages{of_each} need as many blocks, the model has {num_blocks}")
    if rows % data:
        raise PlanError(f"{rows} rows of a microbatch do not divide among data = {data} replicas")
    inner = [2 * cut.stop + 1 for cut in cut_evenly(num_blocks, pipeline * virtual_stages)[:-1]]
    cuts = [Interval(*pair) for pair in itertools.pairwise([0, *inner, num_items])]
    tiles = []
    for number, items in enumerate(cuts):
        for place, replica in enumerate(cut_evenly(rows, data)):
            first = (number % pipeline * data + place) * grid.size
            tiles.append(Tile(items, replica, tuple(range(first, first + grid.size)), grid, **tile))
    return Plan(tuple(tiles), microbatches, rows, schedule)
