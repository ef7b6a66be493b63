"""What a stage costs, by pool, tensor grid and rows: computed once and shared by all plans that a search scores. Pure.

Blocks are equal, so a stage of k blocks takes a base (of the embedding or the head) and k times the same, in seconds
and in bytes. Seconds are those of `planner/predictor.py`, bytes those of `planner/memory.py` for our engine, but for
rounding, and for who meets different grids.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from hpctrain.comm.network import Crowd
from hpctrain.config.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.plan.schedule import splits_freely
from hpctrain.plan.tiling import Tile
from hpctrain.planner.cost import Setup, layer_cost, layer_elements, update_seconds
from hpctrain.planner.memory import (
    GRADIENT_BYTES,
    gathered_bytes,
    inner_bytes,
    layer_computing,
    layer_deferred,
    layer_kept,
    layer_moved,
    message_bytes,
    state_bytes,
)
from hpctrain.planner.offload import host_share, offloaded_update_seconds
from hpctrain.planner.parts import part_counts
from hpctrain.planner.pass_cost import pass_cost
from hpctrain.planner.pools import Pool
from hpctrain.planner.work import LayerCost, PassWork
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK, EMBEDDING
from hpctrain.sharding.parameters import check_grid

COMPARED_ROWS = 1, 8
"""Positions of several rows are put in order, those of one are."""
AGREED_BYTES = 24  # loss, norm and stopping: see Predictor


class Seconds(NamedTuple):
    """Of a forward and of a backward pass over one layer."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class BlockLine(NamedTuple):
    """Of a stage with k blocks: base + k * each."""

    base: float
    each: float

    def at(self, k: float) -> float:
        return self.base + k * self.each

    def plus(self, other: "BlockLine", times: float) -> "BlockLine":
        return BlockLine(self.base + times * other.base, self.each + times * other.each)

    def most(self, limit: float) -> int:
        """Return for how many blocks it stays within a limit; 0 if for none."""
        return max(0, math.floor((limit - self.base) / self.each))


class Holders(NamedTuple):
    """Who has the same weights, where these are exchanged in every pass."""

    zero: int = 1
    groups: tuple[tuple[int, int], ...] = ()
    """(pool, replicas) of each."""


ALONE = Holders()


class Needs(NamedTuple):
    """Bytes of a stage's rank."""

    state: BlockLine
    """Whatever is kept of microbatches."""
    activations: BlockLine
    """Of each microbatch that is kept."""
    on_host: BlockLine
    """In memory of the host, of the optimizer's state."""
    moved: BlockLine = BlockLine(0.0, 0.0)
    """In memory of the host, of the activations of each microbatch that is kept."""

    def keeping(self, microbatches: float) -> BlockLine:
        return self.state.plus(self.activations, microbatches)


def row_chunk_counts(most: int, fewest: int) -> list[int]:
    """Return in how many pieces ranks may go through so many rows: few, by twos and threes, and a row each."""
    wanted = {n << power for n in (2, 3) for power in range(fewest.bit_length())}
    result = [1, *sorted(count for count in wanted if count < fewest), *([fewest] if fewest > 1 else [])]
    at_once = {-(-most // count): count for count in reversed(result)}  # the fewest pieces of those with as many rows
    return sorted(at_once.values())


class StageCosts:
    """Prices of stages on one cluster."""

    def __init__(self, setup: Setup, cluster: Cluster, pools: Sequence[Pool]):
        self.setup, self.cluster, self.pools = setup, cluster, tuple(pools)
        self.network = setup.stack.network(cluster, setup.stack.link_share)
        self.head = setup.head
        self.seconds = lru_cache(None)(self._seconds)
        self.parts = lru_cache(None)(self._parts)
        self._cost = lru_cache(None)(self._layer_cost)
        self.part_count = lru_cache(None)(self._best_count)
        self._in_parts = lru_cache(None)(lambda count: replace(setup, tensor_parts=count))
        self._tile = lru_cache(None)(self._first_tile)
        self.needs = lru_cache(None)(self._needs)
        self.elements = lru_cache(None)(self._elements)
        self.splits = lru_cache(None)(self._splits)
        self.elements_of = lru_cache(None)(partial(layer_elements, setup.model))
        """Of a grid and a layer: how many weights the ranks at one (x, y) have together."""
        self._row = lru_cache(None)(self._row_bytes)
        self._sharing = lru_cache(None)(self._sharing_seconds)
        self._sharers = lru_cache(None)(self._sharing_ranks)
        self._crowd = lru_cache(None)(self._all_ranks)
        self.agree_seconds = self.network.group_seconds("all_reduce", AGREED_BYTES, range(cluster.num_devices))
        self.host_bytes = [host_share(cluster, pool.nodes) for pool in self.pools]
        """Of each pool, what a rank may fill of its host's memory."""
        self.grids = [self._grids(number) for number in range(len(self.pools))]

    def _grids(self, number: int) -> list[TensorGrid]:
        """Return the grids that have room on a node of a pool and cut the model, where y cuts positions too.

        One that does not is also there where it is faster: the other one needs less memory, and sends less.
        """
        result = []
        for grid in self.pools[number].grids():
            try:
                check_grid(self.setup.model, grid)
            except PlanError:
                continue
            if grid.y == 1 or self.setup.positions % grid.y or self.setup.stack.sequence_parallel:
                result.append(grid)
                continue
            cut = grid._replace(sequence_parallel=True)
            passes = [
                tuple(seconds for rows in COMPARED_ROWS for seconds in self.seconds(number, each, BLOCK, rows, "none"))
                for each in (cut, grid)
            ]
            is_faster = all(own <= other for own, other in zip(*passes, strict=True))
            result += [cut] if is_faster else [grid, cut]
        return result

    def layers(self, ends: tuple[bool, bool]) -> list[Interval]:
        """Return the layers that a stage's figures are made of: a block, which stands for all, and its ends."""
        return [BLOCK, *([EMBEDDING] if ends[0] else []), *([self.head] if ends[1] else [])]

    def _seconds(
        self, number: int, grid: TensorGrid, layer: Interval, rows: int, recompute: str, holders: Holders = ALONE
    ) -> Seconds:
        """Return what a layer takes on a grid of a pool, each of whose ranks has `rows`."""
        count = self.part_count(number, grid) if self.setup.is_block(layer) else 1
        return self._seconds_in(count, number, grid, layer, rows, recompute, holders)

    def _seconds_in(
        self,
        count: int,
        number: int,
        grid: TensorGrid,
        layer: Interval,
        rows: int,
        recompute: str = "none",
        holders: Holders = ALONE,
    ) -> Seconds:
        """Return the same where products are cut in so many parts."""
        cost = self._cost(count, grid, layer, rows, recompute, holders.zero)
        return Seconds(*self._passes(number, grid, (cost.forward, cost.backward), holders))

    def _best_count(self, number: int, grid: TensorGrid) -> int:
        """Return into how many parts products of blocks are cut on a grid: the number that is the fastest for many rows
        stands for all, though a plan may have another one. More are tried while they pay."""
        best, *others = part_counts(self.setup, [grid])
        least = self._seconds_in(best, number, grid, BLOCK, COMPARED_ROWS[-1]).both if others else 0.0
        for count in others:
            seconds = self._seconds_in(count, number, grid, BLOCK, COMPARED_ROWS[-1]).both
            if seconds >= least:
                break
            best, least = count, seconds
        return best

    def piecewise(
        self,
        number: int,
        grid: TensorGrid,
        layer: Interval,
        rows: int,
        recompute: str,
        row_chunks: int,
        holders: Holders = ALONE,
    ) -> Seconds:
        """Return what a layer takes that goes through the rows of a rank in pieces."""
        if row_chunks == 1:
            return self.seconds(number, grid, layer, rows, recompute, holders)
        least, more = divmod(rows, row_chunks)
        some = self.seconds(number, grid, layer, least, recompute, holders)
        if not more:
            return Seconds(row_chunks * some.forward, row_chunks * some.backward)
        others = self.seconds(number, grid, layer, least + 1, recompute, holders)
        return Seconds(*((row_chunks - more) * few + more * many for few, many in zip(some, others, strict=True)))

    def _parts(self, number: int, grid: TensorGrid, layer: Interval, rows: int, recompute: str) -> list[float]:
        """Return the seconds of the parts of a backward pass: until the gradient is sent, and after that."""
        count = self.part_count(number, grid) if self.setup.is_block(layer) else 1
        cost = self._cost(count, grid, layer, rows, recompute)
        return self._passes(number, grid, (cost.backward_input, cost.backward_weight))

    def _layer_cost(self, parts: int, *what) -> LayerCost:
        return layer_cost(self._in_parts(parts), *what)

    def _passes(
        self, number: int, grid: TensorGrid, works: Iterable[PassWork], holders: Holders = ALONE
    ) -> list[float]:
        pool, tile = self.pools[number], self._tile(number, grid)
        ranks, crowd = self._sharers(grid, holders)
        passes = (pass_cost(self.setup, self.network, [pool.device], work, tile, ranks, crowd) for work in works)
        return [each.seconds for each in passes]

    def _sharing_ranks(self, grid: TensorGrid, holders: Holders) -> tuple[tuple[int, ...], Crowd | None]:
        """Return the ranks of one group of holders, and those of all."""
        if not holders.groups:
            return (), None
        slots = (slot for of, count in holders.groups for slot in self.pools[of].slots(grid.size)[:count])
        return tuple(slot[0] for slot in slots), self._crowd(tuple((of, grid.size) for of, _ in holders.groups))

    def _first_tile(self, number: int, grid: TensorGrid) -> Tile:
        """Return a tile on the first place for a grid, of whatever items and rows."""
        return Tile(Interval(0, 1), Interval(0, grid.z), self.pools[number].slots(grid.size)[0], grid)

    def _splits(self, grid: TensorGrid, recompute: str, zero: int) -> bool:
        """Say whether such stages, all but the first, send gradients before they compute those of weights."""
        tile = Tile(Interval(0, 1), Interval(0, 1), (), grid, recompute=recompute, zero=zero)
        return self.setup.stack.splits_backward and splits_freely(tile)

    def _elements(self, grid: TensorGrid, is_first: bool, is_last: bool) -> BlockLine:
        """Return how many weights a rank of a stage stores."""
        base = self.elements_of(grid, EMBEDDING) * is_first + self.elements_of(grid, self.head) * is_last
        if self.setup.model.description.tied_head and is_last and not is_first:
            base += self.elements_of(grid, EMBEDDING)
        return BlockLine(base / grid.z, self.elements_of(grid, BLOCK) / grid.z)

    def _needs(
        self,
        grid: TensorGrid,
        rows: int,
        recompute: str,
        zero: int,
        holders: int,
        ends: tuple[bool, bool],
        at_once: int | None = None,
        meets_mixed: bool = False,
        virtual_stages: int = 1,
        offload: str = "none",
    ) -> Needs:
        """Return what a rank of a stage needs; see `memory_of`.

        At the loss it may go through its rows in pieces, and keep so many `at_once`. Who `meets_mixed` grids has
        weights packed for these, too.
        """
        setup, b = self.setup, self.setup.item_bytes
        zero = min(zero, 1) if zero > 1 and holders == 1 else zero
        share = 1 / holders if zero else 1.0
        state = b * (share if zero == 3 else 1) + GRADIENT_BYTES * (share if zero >= 2 else 1)
        of_optimizer, on_host = state_bytes(setup) * share, 0.0
        if offload in ("optimizer", "all"):
            of_optimizer, on_host = 0.0, of_optimizer
        state += of_optimizer
        if meets_mixed and zero < 3:
            state = state + b
        if zero == 1:
            state = state + GRADIENT_BYTES * share * (holders > 1)
        stored = self.elements(grid, *ends)
        messages = 0 if all(ends) else 1 + virtual_stages + setup.stack.expected_messages
        buffers = messages * message_bytes(setup, grid, rows)
        moves = offload in ("activations", "all")
        splits = not ends[0] and at_once is None and not moves and self.splits(grid, recompute, zero)
        rows = rows if at_once is None else at_once
        kept, computing = self._row(grid, recompute, ends, splits, rows > 1)
        moved = layer_moved(setup, grid, BLOCK, recompute) if moves else 0.0
        buffers = buffers + rows * (computing + 2 * moved)
        kept = BlockLine(kept.base, kept.each - moved)
        sizes = [self.elements_of(grid, layer) for layer in self.layers(ends)]
        gathered = gathered_bytes(setup, grid.z, zero, holders, max(sizes), sizes[0] + max(sizes), splits)
        return Needs(
            BlockLine(stored.base * state + buffers + gathered, stored.each * state),
            BlockLine(rows * kept.base, rows * kept.each),
            BlockLine(stored.base * on_host, stored.each * on_host),
            BlockLine(0.0, rows * moved),
        )

    def copy_seconds(self, number: int, grid: TensorGrid, recompute: str, rows: int) -> float:
        """Return what it takes to move what a block of a pool keeps of so many rows of a rank, in one direction."""
        moved = layer_moved(self.setup, grid, BLOCK, recompute)
        return rows * moved / self.pools[number].device.host_copy_bytes_per_second

    def offloaded_update(self, number: int, grid: TensorGrid, ends: tuple[bool, bool], share: float) -> BlockLine:
        """Return what an update of a share of the stage's weights takes longer with its state in host memory."""
        stored, device = self.elements(grid, *ends), self.pools[number].device
        many = max(1, int(share * stored.at(self.setup.model.num_layers)))
        longer = offloaded_update_seconds(self.setup, device, many) - update_seconds(self.setup, device, many)
        return BlockLine(stored.base * share * longer / many, stored.each * share * longer / many)

    def _row_bytes(
        self, grid: TensorGrid, recompute: str, ends: tuple[bool, bool], splits: bool, in_halves: bool
    ) -> tuple[BlockLine, float]:
        """Return the bytes of a row that a rank of a stage keeps, and those that it computes with; see
        `layer_computing`."""
        block, *others = (layer_kept(self.setup, grid, layer, recompute) for layer in self.layers(ends))
        computing = layer_computing(self.setup, grid, BLOCK, recompute, in_halves)
        computing += inner_bytes(self.setup, grid, BLOCK) if splits else 0.0
        if ends[1]:  # what the head has kept is gone when a block goes back
            head = layer_computing(self.setup, grid, self.head, recompute, in_halves)
            left = layer_deferred(self.setup, grid, self.head) if splits else 0.0
            computing = max(head, computing - others[-1] + left)
        return BlockLine(sum(others), block), computing

    def sharing_seconds(self, groups: tuple[tuple[int, int, int], ...], num_bytes: int, operation: str) -> float:
        """Return about what an exchange among holders takes, such as a reduce-scatter of `num_bytes`.

        `groups` are (pool, ranks of a tensor grid, replicas). As if each began at the first node of its pool: an
        estimate, which ranks plans. Between powers of two it is a line.
        """
        if num_bytes < 1:
            return 0.0
        power = num_bytes.bit_length() - 1
        low, high = (self._sharing(groups, 1 << n, operation) for n in (power, power + 1))
        return low + (high - low) * (num_bytes / (1 << power) - 1)

    def _sharing_seconds(self, groups: tuple[tuple[int, int, int], ...], num_bytes: int, operation: str) -> float:
        ranks = [slot[0] for number, size, replicas in groups for slot in self.pools[number].slots(size)[:replicas]]
        overlapped = self._crowd(tuple((number, size) for number, size, _ in groups))
        return self.network.group_seconds(operation, num_bytes, ranks, overlapped)

    def _all_ranks(self, grids: tuple[tuple[int, int], ...]) -> Crowd:
        """Return the ranks of all places for tensor grids; these are (pool, ranks of one)."""
        places = (slot for number, size in grids for slot in self.pools[number].slots(size))
        return self.network.crowd(tuple(itertools.chain(*places)))
