"""What a stage costs, by pool, tensor grid and rows: found once and shared by all plans that a search weighs. Pure.

Blocks are alike, so a stage of k blocks takes a base (of the embedding or the head) and k times the same, in seconds
and in bytes. Seconds are those of `planner/predict.py`, bytes those of `planner/memory.py` for our engine, but for
rounding, and for who meets unlike grids.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from hpctrain.cluster import Cluster
from hpctrain.comm.network import ClusterNetwork, Crowd, least_slope
from hpctrain.errors import PlanError
from hpctrain.intervals import Interval
from hpctrain.parameters import box_size, check_grid, item_units
from hpctrain.plan import TensorGrid, Tile
from hpctrain.planner.cost import Setup, Work, item_cost, unit_elements
from hpctrain.planner.memory import (
    GRADIENT_BYTES,
    MASTER_BYTES,
    MOMENT_BYTES,
    inner_bytes,
    item_computing,
    item_deferred,
    item_kept,
    message_bytes,
)
from hpctrain.planner.pools import Pool
from hpctrain.planner.predict import pass_cost
from hpctrain.schedule import splits_freely

Numbers = int | np.ndarray
AGREED_BYTES = 24  # loss, norm and stopping: see Predictor


class Seconds(NamedTuple):
    """Of a forward and of a backward pass over one item."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Line(NamedTuple):
    """Of a stage with k blocks: base + k * each."""

    base: float
    each: float

    def at(self, k: int) -> float:
        return self.base + k * self.each

    def most(self, limit: float) -> int:
        """Return for how many blocks it stays within a limit; 0 if for none."""
        return max(0, math.floor((limit - self.base) / self.each))


class Needs(NamedTuple):
    """Bytes of a stage's rank."""

    state: Line
    """Whatever is kept of microbatches."""
    activations: Line
    """Of each microbatch that is kept."""

    def keeping(self, microbatches: int) -> Line:
        state, kept = self
        return Line(state.base + kept.base * microbatches, state.each + kept.each * microbatches)


def piece_counts(most: int, fewest: int) -> list[int]:
    """Return in how many pieces ranks may go through so many rows: few, by twos and threes, and a row each."""
    wanted = {n << power for n in (2, 3) for power in range(fewest.bit_length())}
    found = [1, *sorted(count for count in wanted if count < fewest), *([fewest] if fewest > 1 else [])]
    at_once = {-(-most // count): count for count in reversed(found)}  # the fewest pieces of those with as many rows
    return sorted(at_once.values())


class StageCosts:
    """Prices of stages on one cluster."""

    def __init__(self, setup: Setup, cluster: Cluster, pools: Sequence[Pool]):
        self.setup, self.cluster, self.pools = setup, cluster, tuple(pools)
        self.network = ClusterNetwork(cluster, setup.stack.link_share)
        self.last = setup.model.num_items - 1
        self.seconds = lru_cache(None)(self._seconds)
        self.in_pieces = lru_cache(None)(self._in_pieces)
        self.parts = lru_cache(None)(self._parts)
        self._cost = lru_cache(None)(partial(item_cost, setup))
        self._tile = lru_cache(None)(self._first_tile)
        self.exchange = lru_cache(None)(self._exchange)
        self.needs = lru_cache(None)(self.needs_of)  # of numbers, not arrays
        self.elements = lru_cache(None)(self._elements)
        self.splits = lru_cache(None)(self._splits)
        self._unit = lru_cache(None)(lambda grid, item: unit_elements(setup.model, grid, item))
        self._row = lru_cache(None)(self._row_bytes)
        self._sharing = lru_cache(None)(self._sharing_seconds)
        self.ending = lru_cache(None)(self._ending)
        self._crowd = lru_cache(None)(self._all_ranks)
        self.own_elements = lru_cache(None)(self._own_elements)
        self._sizes = lru_cache(None)(self._exchanged_sizes)
        self._of_node = lru_cache(None)(self._places_of_node)
        self.agree_seconds = self.network.group_seconds("all_reduce", AGREED_BYTES, range(cluster.num_devices))
        self.grids = [self._grids(pool) for pool in pools]

    def _grids(self, pool: Pool) -> list[TensorGrid]:
        """Return the grids that have room on a node of the pool and cut the model."""
        found = []
        for grid in pool.grids():
            try:
                check_grid(self.setup.model, grid)
            except PlanError:
                continue
            found.append(grid)
        return found

    def items(self, ends: tuple[bool, bool]) -> list[int]:
        """Return the items that a stage's figures are made of: a block, which stands for all, and those at its ends."""
        return [1, *([0] if ends[0] else []), *([self.last] if ends[1] else [])]

    def _seconds(self, number: int, grid: TensorGrid, item: int, rows: int, recompute: str) -> Seconds:
        """Return what an item takes on a grid of a pool, each of whose ranks has `rows`; without ZeRO's exchange."""
        cost = self._cost(grid, item, rows, recompute)
        return Seconds(*self._passes(number, grid, (cost.forward, cost.backward)))

    def piecewise(self, number: int, grid: TensorGrid, item: int, rows: int, recompute: str, pieces: int) -> Seconds:
        """Return what an item takes that goes through the rows of a rank in pieces."""
        if pieces == 1:
            return self.seconds(number, grid, item, rows, recompute)
        least, more = divmod(rows, pieces)
        some = self.seconds(number, grid, item, least, recompute)
        if not more:
            return Seconds(pieces * some.forward, pieces * some.backward)
        others = self.seconds(number, grid, item, least + 1, recompute)
        return Seconds(*((pieces - more) * few + more * many for few, many in zip(some, others, strict=True)))

    def _in_pieces(self, number: int, grid: TensorGrid, rows: int, recompute: str, at_once: int) -> float:
        """Return what a block takes at the least in pieces of up to `at_once` rows."""
        counts = (count for count in piece_counts(rows, rows) if -(-rows // count) <= at_once)
        return min(self.piecewise(number, grid, 1, rows, recompute, count).both for count in counts)

    def _parts(self, number: int, grid: TensorGrid, item: int, rows: int, recompute: str) -> list[float]:
        """Return the seconds of the parts of a backward pass: until the gradient is sent, and after that."""
        cost = self._cost(grid, item, rows, recompute)
        return self._passes(number, grid, (cost.backward_input, cost.backward_weight))

    def _passes(self, number: int, grid: TensorGrid, works: Iterable[Work]) -> list[float]:
        pool, tile = self.pools[number], self._tile(number, grid)
        passes = (pass_cost(self.setup, self.network, [pool.device], work, tile, ()) for work in works)
        return [each.compute + each.tensor for each in passes]

    def _first_tile(self, number: int, grid: TensorGrid) -> Tile:
        """Return a tile on the first place for a grid, of whatever items and rows."""
        return Tile(Interval(0, 1), Interval(0, grid.z), self.pools[number].slots(grid.size)[0], grid)

    def _splits(self, grid: TensorGrid, recompute: str, zero: int) -> bool:
        """Say whether such stages, all but the first, send gradients before they compute those of weights."""
        tile = Tile(Interval(0, 1), Interval(0, 1), (), grid, recompute=recompute, zero=zero)
        return self.setup.stack.splits_backward and splits_freely(tile)

    def _exchange(
        self,
        number: int,
        grid: TensorGrid,
        replicas: int,
        item: int,
        zero: int,
        sharing: tuple[tuple[int, int], ...] = (),
    ) -> Seconds:
        """Return what ZeRO 2 and 3 add to the passes over an item that so many replicas of a pool share; or those of
        several pools are `sharing`: (pool, replicas)."""
        if zero < 2 or (replicas == 1 and not sharing):
            return Seconds(0.0, 0.0)
        pool = self.pools[number]
        cost = item_cost(self.setup, grid, item, 1, "none", zero)
        groups, tile = sharing or ((number, replicas),), self._tile(number, grid)
        ranks = tuple(slot[0] for of, count in groups for slot in self.pools[of].slots(grid.size)[:count])
        crowd = self._crowd(tuple((of, grid.size) for of, _ in groups))
        return Seconds(
            *(
                pass_cost(self.setup, self.network, [pool.device], work, tile, ranks, crowd).data
                for work in (cost.forward, cost.backward)
            )
        )

    def elements_of(self, grid: TensorGrid, item: int) -> int:
        """Return how many weights of an item the ranks at one (x, y) have together."""
        return self._unit(grid, item)

    def _elements(self, grid: TensorGrid, is_first: bool, is_last: bool) -> Line:
        """Return how many weights a rank of a stage stores."""
        base = self._unit(grid, 0) * is_first + self._unit(grid, self.last) * is_last
        if self.setup.model.tie_head and is_last and not is_first:
            base += self._unit(grid, 0)
        return Line(base / grid.z, self._unit(grid, 1) / grid.z)

    def needs_of(
        self,
        grid: TensorGrid,
        rows: Numbers,
        recompute: str,
        zero: int,
        holders: Numbers,
        ends: tuple[bool, bool],
        least_blocks: int = 2,
        at_once: Numbers | None = None,
        meets_unlike: bool = False,
    ) -> Needs:
        """Return what a rank of a stage needs; see `memory_of`. Rows and holders may be arrays, the latter of 1 where
        `zero` is 1 at the most.

        There are whole weights of two items at once, if it has two: `least_blocks` of 1 is for who may have one, and
        be alone. At the loss it may go through its rows in pieces, and keep so many `at_once`. Who `meets_unlike` grids
        has weights packed for these, too.
        """
        setup, b = self.setup, self.setup.item_bytes
        zero = min(zero, 1) if zero > 1 and np.max(holders) == 1 else zero
        share = 1 / holders if zero else 1.0
        state = b * (share if zero == 3 else 1) + GRADIENT_BYTES * (share if zero >= 2 else 1)
        state += (MOMENT_BYTES + (MASTER_BYTES if b < MASTER_BYTES else 0)) * share
        if meets_unlike and zero < 3:
            state = state + b
        if zero == 1:
            state = state + GRADIENT_BYTES * share * (holders > 1)
        stored = self.elements(grid, *ends)
        messages = 1 if all(ends) or least_blocks < 2 else 1 + setup.stack.expected_messages
        buffers = messages * message_bytes(setup, grid, rows)
        splits = not ends[0] and at_once is None and self.splits(grid, recompute, zero)
        rows = rows if at_once is None else at_once
        kept, computing = self._row(grid, recompute, ends, splits, bool(np.max(rows) > 1))
        buffers = buffers + rows * computing
        gathered = 0.0
        if grid.z > 1 or zero >= 2:
            sizes = [self._unit(grid, item) for item in self.items(ends)]
            largest = sizes[0] + max(sizes if least_blocks > 1 else sizes[1:], default=0)
            gathered = largest * (GRADIENT_BYTES + (b if grid.z > 1 or zero == 3 else 0))
            shares = (1 / grid.z if grid.z > 1 else 0) + (1 / (grid.z * holders) if zero >= 2 else 0)
            gathered += (largest if splits else max(sizes)) * shares * GRADIENT_BYTES
        return Needs(
            Line(stored.base * state + buffers + gathered, stored.each * state),
            Line(rows * kept.base, rows * kept.each),
        )

    def _row_bytes(
        self, grid: TensorGrid, recompute: str, ends: tuple[bool, bool], splits: bool, in_halves: bool
    ) -> tuple[Line, float]:
        """Return the bytes of a row that a rank of a stage keeps, and those that it computes with; see
        `item_computing`."""
        block, *others = (item_kept(self.setup, grid, item, recompute) for item in self.items(ends))
        computing = item_computing(self.setup, grid, 1, recompute != "none", in_halves)
        computing += inner_bytes(self.setup, grid) if splits else 0.0
        if ends[1]:  # what the head has kept is gone when a block goes back
            head = item_computing(self.setup, grid, self.last, recompute != "none")
            left = item_deferred(self.setup, grid, self.last) if splits else 0.0
            computing = max(head, computing - others[-1] + left)
        return Line(sum(others), block), computing

    def row_bytes(self, grid: TensorGrid, recompute: str) -> float:
        """Return the bytes of one more row of a block, where rows go in pieces."""
        kept, computing = self._row(grid, recompute, (False, False), False, True)
        return kept.each + computing

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
        beside = self._crowd(tuple((number, size) for number, size, _ in groups))
        return self.network.group_seconds(operation, num_bytes, ranks, beside)

    def _all_ranks(self, grids: tuple[tuple[int, int], ...]) -> Crowd:
        """Return the ranks of all places for tensor grids; these are (pool, ranks of one)."""
        places = (slot for number, size in grids for slot in self.pools[number].slots(size))
        return self.network.crowd(tuple(itertools.chain(*places)))

    def _own_elements(self, grid: TensorGrid, item: int, is_alone: bool) -> float:
        """Return how many weights of an item a rank exchanges by itself: without those that ranks of its grid have in
        common, where these may exchange them together. Its pipeline `is_alone`, or meets other grids."""
        cut = set() if is_alone else {axis for axis, size in (("x", grid.x), ("y", grid.y)) if size > 1}
        parameters = (p for unit in item_units(self.setup.model, grid, item) for p in unit.parameters)
        own = (p for p in parameters if not p.is_shared_over_y(grid) and cut <= set(p.split))
        return sum(box_size(p.box(grid, 0, 0)) for p in own) / grid.z

    def _exchanged_sizes(self, size: int) -> list[int]:
        """Return sizes of what ranks of a grid exchange at once, in bytes: from their part of a block to all blocks.

        By twos where it was measured how fast links are at what size; else times bend at the ends, if at all.
        """
        block = self._unit(TensorGrid(), 1)
        least, most = block * self.setup.item_bytes // size + 1, block * GRADIENT_BYTES * self.setup.model.num_layers
        count = (most // least).bit_length() + 2
        powers = range(count) if any(link.times for link in self.cluster.links) else (0, 1, count, count + 1)
        return [least << power for power in powers]

    def _ending(self, number: int, size: int, replicas: int, num_pipelines: int) -> float:
        """Return what replicas exchange at the end of a step for each weight, of gradients and weights, at the least.

        Nothing where stages of a pool may lie unlike each other. By bandwidth, for a stage's items go in one message.
        """
        if not self.lies_alike(number, size, replicas):
            return 0.0
        ranks = [slot[0] for slot in self.pools[number].slots(size)[:replicas]]
        # Beside other pipelines, whose grids may be unlike, it is not certain who else shares a NIC.
        beside = self._crowd(((number, size),)) if num_pipelines == 1 else None
        across = self._across_seconds(number, size, replicas, num_pipelines) / replicas
        sizes, found = self._sizes(size), 0.0
        operations = ("reduce_scatter", self.setup.stack.gradient_bytes), ("all_gather", self.setup.item_bytes)
        for operation, element_bytes in operations:
            inside = self.network.least_byte_seconds(operation, sizes, ranks, beside) if replicas > 1 else 0.0
            # What each of the pipelines owns goes across while what the next one owns goes on inside.
            found += max(inside, inside / num_pipelines + across) * element_bytes
        return found

    def _across_seconds(self, number: int, size: int, replicas: int, num_pipelines: int) -> float:
        """Return what it takes at the least, for each byte, that each rank of a stage exchanges with other pipelines.

        By the fastest way; 0 where pools have families or nodes in common.
        """
        families = [family for pool in self.pools for family in pool.families]
        nodes = [self.cluster.devices[ranks[0]].node for pool in self.pools for ranks in pool.nodes]
        if num_pipelines == 1 or len(set(families)) < len(families) or len(set(nodes)) < len(nodes):
            return 0.0
        own, sizes, each = self.pools[number], self._sizes(size), math.inf
        senders = [slot[0] for slot in own.slots(size)[:replicas] if slot[0] in own.nodes[0]]
        for target in (pool.nodes[0][0] for pool in self.pools if pool is not own):
            way = senders[0], target
            flows = self.network.flows(senders[0], senders, target)
            each = min(each, least_slope(sizes, [self.network.seconds(*way, n, flows) for n in sizes]))
        return each * (num_pipelines - 1) / num_pipelines

    def lies_alike(self, number: int, size: int, replicas: int) -> bool:
        """Say whether all stages of so many replicas, of `size` ranks each, lie alike on the nodes of a pool."""
        of_node = self._of_node(number, size)
        return of_node > 0 and (replicas % of_node == 0 or of_node % replicas == 0)

    def _places_of_node(self, number: int, size: int) -> int:
        """Return how many tensor grids have room on each node of a pool; 0 where nodes, or devices, are not alike."""
        counts = {len(ranks) // size for ranks in self.pools[number].nodes}
        return counts.pop() if len(counts) == 1 and len(self.pools[number].families) == 1 else 0
