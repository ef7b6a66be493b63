"""Prices stages of pipelines: seconds and bytes as lines in the number of blocks, shared by all plans. Pure.

A stage of k blocks takes a fixed part (of the embedding or the head) and k times the mean of blocks. The mean has each
kind as often as the model has it, since the blocks of a stage are not known before all are cut. Leading blocks, such as
dense ones before those with experts, are known to be the first stage's. A simulation takes the blocks that a stage has.
Seconds are those of `prices/prices.py`, bytes those of `prediction/memory.py`, as in a prediction. They differ by
rounding, and for tiles that exchange with tiles of different grids, which a search only estimates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.plan.schedule import splits_freely
from hpctrain.plan.tiling import Tile
from hpctrain.planner.prediction.activations import RowBytes, row_bytes
from hpctrain.planner.prediction.memory import gathered_bytes, state_of
from hpctrain.planner.prediction.offload import host_share, offloaded_update_seconds
from hpctrain.planner.prediction.predictor import AGREED_BYTES
from hpctrain.planner.prices.buffers import (
    EXCHANGED_SHARE,
    SUMMED_BYTES,
    largest_unit,
    message_bytes,
    scattered_scratch,
)
from hpctrain.planner.prices.cost import layer_elements, update_seconds
from hpctrain.planner.prices.prices import Prices, Site, part_counts
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.holders import ALONE, HolderPlaces, Holders
from hpctrain.planner.search.pools import Pool
from hpctrain.planner.search.stage_variants import (
    LEADING,
    NOTHING,
    BlockLine,
    HeldBytes,
    Passes,
    StageMemoryNeeds,
    StageShape,
    StageVariant,
)
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK, EMBEDDING
from hpctrain.sharding.parameters import check_grid, item_parameters

EXACT_ROWS = 16
"""Maximum rows of a rank whose seconds are exact. Those of more rows are interpolated, where shapes are cut and
compared."""
COMPARED_ROWS = 1, 8
"""Numbers of rows by which grids are compared: with several rows, cutting positions takes a copy more."""


class StageCosts:
    """Prices of stages on one cluster."""

    def __init__(self, setup: Setup, cluster: Cluster, pools: Sequence[Pool]):
        self.setup, self.cluster, self.pools = setup, cluster, tuple(pools)
        self.prices = Prices(setup, cluster)
        self.network, self.head = self.prices.network, setup.head
        self.places = HolderPlaces(self.network, cluster, self.pools)
        # Each caches the method of the same name with an underscore before it.
        self.passes = lru_cache(None)(self._passes)
        self.both_seconds = lru_cache(None)(self._both_seconds)
        self.weight_seconds = lru_cache(None)(self._weight_seconds)
        self.part_count = lru_cache(None)(self._part_count)
        self.site = lru_cache(None)(self._site)
        self.splits_backward = lru_cache(None)(self._splits_backward)
        self.elements = lru_cache(None)(self._elements)
        self.state_bytes = lru_cache(None)(self._state_bytes)
        self.row_bytes = lru_cache(None)(self._row_bytes)
        self.most_blocks = lru_cache(None)(self._most_blocks)
        self.held = lru_cache(None)(self._held)
        self.elements_of = lru_cache(None)(partial(layer_elements, setup))
        """Number of weights of a layer that the ranks at one (x, y) have together, by grid and layer."""
        self.agree_seconds = self.network.group_seconds("all_reduce", AGREED_BYTES, range(cluster.num_devices))
        self.memory_bytes = [pool.memory_bytes for pool in self.pools]
        self.host_bytes = [host_share(cluster, pool.nodes) for pool in self.pools]
        """Bytes of its host's memory that a rank may fill, for each pool; 0 where that is not known."""
        of_all, num_leading = setup.block_kinds, setup.num_leading
        leading, later = (
            {k: n for k, n in of_all.items() if (k.start > 2 * num_leading) is late} for late in (False, True)
        )
        self.kinds = {BLOCK: _shares(later)} | ({LEADING: _shares(leading)} if leading else {})
        """For the mean of leading blocks and for that of all others, a block of each kind and its share."""
        self.grids = [self._grids(number) for number in range(len(self.pools))]

    def _grids(self, number: int) -> list[TensorGrid]:
        """Return the grids that have room on a node of a pool and cut the model, where y cuts positions too.

        Where a grid whose y cuts no positions is faster, it is there as well: the other needs less memory, and sends
        less. Keys and values are gathered where an exchange of heads is not possible, or not faster: it needs less
        memory.
        """

        def is_faster(one: TensorGrid, other: TensorGrid) -> bool:
            both = [[self.passes(number, each, BLOCK, rows) for each in (one, other)] for rows in COMPARED_ROWS]
            return all(own <= that for pair in both for own, that in zip(*pair, strict=True))

        result = []
        for grid in self.pools[number].grids(self.setup.context_sizes):
            try:
                check_grid(self.setup.model, grid)
            except PlanError:
                continue
            cut = grid._replace(sequence_parallel=True)
            is_finer = self.setup.sequence_parts(cut) > self.setup.sequence_parts(grid)
            if not is_finer or self.setup.positions % (cut.context_parts * cut.sequence_parts):
                result.append(grid)
                continue
            result += [cut] if is_faster(cut, grid) else [grid, cut]
        exchanging = {grid._replace(exchanges_heads=False): grid for grid in result if grid.exchanges_heads}
        return [grid for grid in result if grid not in exchanging or not is_faster(exchanging[grid], grid)]

    def end_layers(self, ends: tuple[bool, bool]) -> list[Interval]:
        """Return the ends of the model that a stage has."""
        return [*[EMBEDDING] * ends[0], *[self.head] * ends[1]]

    def line(self, is_first: bool, of: Callable[[Interval], float], fixed: float) -> BlockLine:
        """Return a quantity of a stage, given that `of` a layer or of a mean of blocks, and a fixed part."""
        num_leading = self.setup.num_leading if is_first else 0
        return BlockLine(fixed, of(BLOCK), of(LEADING) - of(BLOCK) if num_leading else 0.0, num_leading)

    # ---- seconds -----------------------------------------------------------------------------------------------------

    def _passes(
        self,
        number: int,
        grid: TensorGrid,
        layer: Interval,
        rows: int,
        recompute: str = "none",
        holders: Holders = ALONE,
        parts: int | None = None,
    ) -> Passes:
        """Return the seconds of passes over a layer on a grid of a pool, each of whose ranks has `rows`.

        Products are cut in so many parts, or in the best number. `BLOCK` and `LEADING` are means of blocks, by kind.
        """
        what = self.site(number, grid, holders), rows, recompute, parts or self.part_count(number, grid)
        return Passes(*(self._mean_seconds(name, layer, *what) for name in ("forward", "backward")))

    def _mean_seconds(self, name: str, layer: Interval, site: Site, *options) -> float:
        return self._mean(layer, lambda kind: self.prices.price(name, site, kind, *options).seconds)

    def _mean(self, layer: Interval, of: Callable[[Interval], float]) -> float:
        """Return the mean of the kinds of layers that one stands for."""
        return sum(share * of(kind) for kind, share in self.kinds.get(layer, {layer: 1.0}).items())

    def _blocks_of(self, is_first: bool) -> list[Interval]:
        """Return a block of each kind that a stage may have; the first one is of the later blocks."""
        return [*self.kinds[BLOCK], *(self.kinds.get(LEADING, ()) if is_first else ())]

    def _both_seconds(self, number: int, grid: TensorGrid, layer: Interval, rows: int, recompute: str) -> float:
        """Return what both passes over a layer take a rank; of many rows it is a line between powers of two."""
        low = rows if rows <= EXACT_ROWS else 1 << rows.bit_length() - 1
        seconds = self.passes(number, grid, layer, low, recompute).both
        if low < rows:
            seconds += (self.passes(number, grid, layer, 2 * low, recompute).both - seconds) * (rows / low - 1)
        return seconds

    def _weight_seconds(self, number: int, grid: TensorGrid, layer: Interval, rows: int, recompute: str) -> float:
        """Return the seconds of a backward pass that make gradients of weights."""
        options = rows, recompute, self.part_count(number, grid)
        return self._mean_seconds("backward_weight", layer, self.site(number, grid, ALONE), *options)

    def _part_count(self, number: int, grid: TensorGrid) -> int:
        """Return the number of parts into which products of blocks are cut on a grid.

        The fastest number for many rows stands for all, though a plan may have another one. More are tried while they
        pay.
        """
        best, *others = part_counts(self.setup, [grid])
        least = math.inf
        for count in (best, *others) if others else ():
            seconds = self.passes(number, grid, BLOCK, COMPARED_ROWS[-1], parts=count).both
            if seconds >= least:
                break
            best, least = count, seconds
        return best

    def _site(self, number: int, grid: TensorGrid, holders: Holders) -> Site:
        """Return the site of the first holders of a pool for a grid, which exchange weights with the others."""
        groups = holders.groups
        own = next((group.first_slot for group in groups if group.pool == number), 0)
        tile = Tile(Interval(0, 1), Interval(0, grid.row_parts), self.pools[number].slots(grid.size)[own], grid)
        if not groups:
            return self.prices.site(tile, holders.zero)
        return self.prices.site(tile, holders.zero, tuple(self.places.ranks(groups)), self.places.sharers(groups))

    def piecewise(self, stage: StageShape, layer: Interval, recompute: str, row_chunks: int) -> Passes:
        """Return what a layer takes a stage that goes through the rows of a rank in chunks."""
        few, more = divmod(stage.rows, row_chunks)
        chunks = [(times, rows) for times, rows in ((row_chunks - more, few), (more, few + 1)) if times]
        where = stage.pool, stage.choice.grid, layer
        each = [(n, self.passes(*where, rows, recompute, stage.exchanging)) for n, rows in chunks]
        return Passes(*(sum(n * seconds[i] for n, seconds in each) for i in (0, 1)))

    def variant(self, stage: StageShape, recompute: str, row_chunks: int, offload: str, most: int) -> StageVariant:
        """Return a variant of a stage for up to so many blocks."""
        is_first, ends = stage.ends[0], self.end_layers(stage.ends)
        passes = lru_cache(None)(lambda layer: self.piecewise(stage, layer, recompute, row_chunks))
        fixed = [sum(passes(end)[i] for end in ends) for i in (0, 1)]
        forward, backward = (self.line(is_first, lambda layer, i=i: passes(layer)[i], fixed[i]) for i in (0, 1))
        update = weight = NOTHING
        if offload == "optimizer":
            longer = self._offloaded_update(stage, 1 / stage.holders if stage.zero else 1.0)
            update = longer.times(1 / stage.microbatches)
        if row_chunks == 1 and not stage.ends[0] and self.splits_backward(stage.choice.grid, recompute, stage.zero):
            block, *of_ends = (
                self.weight_seconds(stage.pool, stage.choice.grid, layer, stage.rows, recompute)
                for layer in (BLOCK, *ends)
            )
            weight = BlockLine(sum(of_ends), block)
        return StageVariant(recompute, row_chunks, forward, backward, most, offload, update, weight)

    def _splits_backward(self, grid: TensorGrid, recompute: str, zero: int) -> bool:
        """Say whether such stages, all but the first, send gradients before they compute those of weights."""
        tile = Tile(Interval(0, 1), Interval(0, 1), (), grid, recompute=recompute, zero=zero)
        return self.setup.splits_backward and splits_freely(tile)

    def _offloaded_update(self, stage: StageShape, share: float) -> BlockLine:
        """Return what an update of a share of the stage's weights takes longer with its state in host memory."""
        stored, device = self.elements(stage.choice.grid, *stage.ends), self.pools[stage.pool].device
        many = max(1, int(share * stored.at(self.setup.model.num_layers)))
        longer = offloaded_update_seconds(self.setup, device, many) - update_seconds(self.setup, device, many)
        return stored.times(share * longer / many)

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def _elements(self, grid: TensorGrid, is_first: bool, is_last: bool) -> BlockLine:
        """Return how many weights a rank of a stage stores."""
        return self._stored(grid, is_first, is_last, partial(self.elements_of, grid))

    def _state_bytes(self, grid: TensorGrid, is_first: bool, is_last: bool) -> BlockLine:
        """Return the bytes of the optimizer's state of all weights that a rank of a stage stores."""
        model = self.setup.model

        def of(layer: Interval) -> float:
            parameters = (p for item in range(*layer) for p in item_parameters(model, item))
            parts = [(p.shape, math.prod(p.shape)) for p in parameters]
            return self.elements_of(grid, layer) * self.setup.state_bytes(parts)

        return self._stored(grid, is_first, is_last, of)

    def _stored(self, grid: TensorGrid, is_first: bool, is_last: bool, of: Callable[[Interval], float]) -> BlockLine:
        """Return what a rank of a stage stores, where the ranks at one (x, y) have so much `of` a layer together."""
        fixed = of(EMBEDDING) * is_first + of(self.head) * is_last
        if self.setup.model.description.tied_head and is_last and not is_first:
            fixed += of(EMBEDDING)
        return self.line(is_first, partial(self._mean, of=of), fixed).times(1 / grid.stored_parts)

    def needs(self, stage: StageShape, recompute: str, row_chunks: int, offload: str = "none") -> StageMemoryNeeds:
        """Return what a rank of a stage needs; see `memory_of`."""
        setup, grid, ends = self.setup, stage.choice.grid, stage.ends
        splits = not ends[0] and row_chunks == 1 and self.splits_backward(grid, recompute, stage.zero)
        held = self.held(
            stage.pool, grid, ends, stage.zero, stage.holders, stage.meets_mixed, stage.exchanging, splits, offload
        )
        at_once = -(-stage.rows // row_chunks)
        kept_of, computing_of = self.row_bytes(grid, recompute, ends, splits, at_once if ends[1] else min(at_once, 2))
        kept, computing = kept_of.times(at_once), computing_of.times(at_once)
        computing = computing.more(max(0.0, held.blocking - computing.at(1)))
        messages = 0 if all(ends) else 2 + setup.expected_messages
        always = held.always.more(messages * message_bytes(setup, grid, stage.rows))
        passing = always.plus(computing)
        on_device = passing.plus(kept, stage.kept), passing.plus(kept).more(held.first_sum), always.plus(held.last_sum)
        return StageMemoryNeeds(on_device, held.on_host)

    def _held(
        self,
        pool: int,
        grid: TensorGrid,
        ends: tuple[bool, bool],
        zero: int,
        holders: int,
        meets_mixed: bool,
        exchanging: Holders,
        splits: bool,
        offload: str,
    ) -> HeldBytes:
        """Return the bytes of a stage's rank that do not depend on rows."""
        setup = self.setup
        zero = 1 if zero > 1 and holders == 1 else zero
        share = 1 / holders if zero else 1.0
        state = state_of(setup, 1.0, share, float(meets_mixed), zero, holders, 0.0)
        of_optimizer, on_host = self.state_bytes(grid, *ends).times(share), NOTHING
        if offload == "optimizer":
            of_optimizer, on_host = on_host, of_optimizer
        blocks = [self.elements_of(grid, kind) for kind in self._blocks_of(ends[0])]
        sizes = [*blocks, *(self.elements_of(grid, layer) for layer in self.end_layers(ends))]
        pair, largest = max(blocks) + max(sizes), max(sizes)
        fixed = gathered_bytes(setup, grid.stored_parts, zero, holders, largest, pair, splits)
        overlapped, blocking, first, last = 0.0, 0.0, 0.0, NOTHING
        if setup.sums_itself:
            overlapped, blocking = self._scattered(pool, grid, ends, exchanging)
            if zero < 2 and holders > 1:
                first, last = self._sums(grid, ends, meets_mixed, largest)
        always = self.elements(grid, *ends).times(state.weights + state.gradients).plus(of_optimizer)
        return HeldBytes(always.more(fixed + overlapped), blocking, first, last, on_host)

    def _scattered(self, pool: int, grid: TensorGrid, ends: tuple[bool, bool], holders: Holders) -> tuple[float, float]:
        """Return the bytes that sums take in every pass of a stage, where these are overlapped and where not."""
        if grid.stored_parts == 1 and not holders.groups:
            return 0.0, 0.0
        setup, site = self.setup, self.site(pool, grid, holders)
        layers = (*self._blocks_of(ends[0]), *self.end_layers(ends))
        items, sums = [item for layer in layers for item in range(*layer)], []
        if holders.groups:
            unit = SUMMED_BYTES * largest_unit(setup, grid, items) // grid.stored_parts
            sums = [(unit, site.data_ranks, site.data_ranks[0])]
        return scattered_scratch(setup, self.network, site.tile, items, sums)

    def _sums(
        self, grid: TensorGrid, ends: tuple[bool, bool], meets_mixed: bool, largest: int
    ) -> tuple[float, BlockLine]:
        """Return about the bytes that sums take at the end of a step, in ZeRO 0 and 1; see `buffers.py`.

        The first figure is of the first sum, while one microbatch is kept, the second of the last sum, with all packed
        copies. `largest` are the weights of the largest layer, and a bucket has whole layers.
        """
        setup, bucket = self.setup, self.setup.bucket_bytes
        summed, packed = self.elements(grid, *ends).times(SUMMED_BYTES), float(meets_mixed)
        if bucket is not None:
            bucket = max(bucket, SUMMED_BYTES * largest / grid.stored_parts)
            if 2 * bucket < summed.at(setup.model.num_layers):  # else all is summed at the end
                in_flight = EXCHANGED_SHARE * bucket
                return in_flight + packed * bucket, summed.times(packed).more(in_flight)
        return 0.0, summed.times(EXCHANGED_SHARE + packed)

    def _most_blocks(self, stage: StageShape, recompute: str, row_chunks: int, offload: str) -> int:
        """Return the number of blocks of a stage that fit in the memory of its devices and of their host."""
        needs = self.needs(stage, recompute, row_chunks, offload)
        limit = self.memory_bytes[stage.pool]
        most = min(line.most(limit) for line in needs.on_device)
        return min(most, needs.on_host.most(self.host_bytes[stage.pool])) if any(needs.on_host) else most

    def _row_bytes(
        self, grid: TensorGrid, recompute: str, ends: tuple[bool, bool], splits: bool, rows: int
    ) -> tuple[BlockLine, BlockLine]:
        """Return the bytes that a stage keeps of a row, and the bytes that it computes with, with `rows` at once.

        Whether one row or several are at once makes a difference; beyond that the number matters to the head alone.
        Where weight passes need more than a block keeps, blocks that went backward add to what is computed with.
        """

        def bytes_of(*blocks: Interval) -> RowBytes:
            layers = [*[EMBEDDING] * ends[0], *blocks, *[self.head] * ends[1]]
            return row_bytes(self.setup, grid, layers, recompute, splits=splits, rows=rows)

        kinds = self._blocks_of(ends[0])
        one, pairs = bytes_of(kinds[0]), {kind: bytes_of(kinds[0], kind) for kind in kinds}
        kept = {kind: pair.kept - one.kept for kind, pair in pairs.items()}
        line = self.line(ends[0], partial(self._mean, of=kept.__getitem__), one.kept - kept[kinds[0]])
        more = bytes_of(*kinds[:1] * 3).computing - pairs[kinds[0]].computing if splits else 0.0
        return line, BlockLine(max(pair.computing for pair in pairs.values()) - 2 * more, more)


def _shares(counts: Mapping[Interval, float]) -> dict[Interval, float]:
    return {kind: count / sum(counts.values()) for kind, count in counts.items()}
