"""What no plan of the search's space can take less than. Pure.

Each pool is granted, for a number of microbatches, the choice of tensor grid, stages, replicas and ZeRO stage by which
it would do the most, whatever the others do; no message between stages takes any time, and no pool waits for another.
Counted in full are, of each block: its products, on as many rows as a rank has; what its tensor grid exchanges; what
its replicas exchange of its weights; the room that its weights need; and how long the stages of the pool itself wait
for each other. In the end all devices update an equal part of the weights.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from hpctrain.parameters import count_parameters
from hpctrain.plan import TensorGrid
from hpctrain.planner.cost import update_seconds
from hpctrain.planner.space import Space
from hpctrain.planner.stages import StageCosts

CERTAIN_SHARE = 0.9
"""Of exchanges and updates: cuts are rounded, and replicas may lie on nodes in other ways than the first ones do."""
HALVINGS = 40


def least_seconds(costs: StageCosts, global_batch: int, space: Space) -> float:
    """Return the bound: of the numbers of microbatches, that by which least is needed."""
    setup = costs.setup
    work = min(_Bound(costs, global_batch, m, space).seconds() for m in space.microbatch_counts(global_batch))
    parameters = count_parameters(setup.model)
    updated = sum(pool.num_devices / update_seconds(setup, pool.device, parameters) for pool in costs.pools)
    return work + CERTAIN_SHARE / updated + costs.agree_seconds + setup.stack.step_seconds


class _Way(NamedTuple):
    """What a pool can do of an item that is there many times."""

    per_second: float
    """How many, for all rows of the batch, in a second of the step."""
    most: float
    """How many it has room for."""


class _Bound:
    """The bound for one number of microbatches."""

    def __init__(self, costs: StageCosts, global_batch: int, microbatches: int, space: Space):
        self._costs, self._space = costs, space
        self._microbatches, self._rows = microbatches, global_batch // microbatches
        self._per_row: dict[tuple, float] = {}
        self._late: dict[tuple, float] = {}

    def seconds(self) -> float:
        """Return the least seconds of a step, but for its end."""
        costs = self._costs
        num_blocks, pools = costs.setup.model.num_layers, range(len(costs.pools))
        blocks = [_best(self._ways(number)) for number in pools]
        speeds = [ways[0].per_second for ways in blocks]
        # An embedding or head is worth as many blocks as the pool that is worst at blocks, beside it, could do instead.
        pairs = list(zip(pools, speeds, strict=True))
        ends = sum(min(speed * self._alone(number, item) for number, speed in pairs) for item in (0, costs.last))
        low = (num_blocks + ends) / sum(speeds)
        if sum(max(way.most for way in ways) for ways in blocks) < num_blocks:
            return math.inf
        high = low
        while _done(blocks, high) < num_blocks:
            high *= 2
        for _ in range(HALVINGS if high > low else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if _done(blocks, middle) >= num_blocks else (middle, high)
        return low

    def _alone(self, number: int, item: int) -> float:
        """Return in how many seconds all devices of a pool do an item at the least, for all rows of the batch."""
        costs, how = self._costs, self._space.recompute[0]
        best = math.inf
        for grid in costs.grids[number]:
            costs.seconds(number, grid, item, -(-self._rows // grid.z), how)
            known = costs.known_rows[number, grid, item, how]
            best = min(best, min(seconds.both / rows for rows, seconds in known.items()) * grid.size / grid.z)
        return best * self._microbatches * self._rows / costs.pools[number].num_devices

    def _ways(self, number: int) -> Iterator[_Way]:
        """Yield what a pool can do of blocks."""
        costs, m, pool = self._costs, self._microbatches, self._costs.pools[number]
        recompute = self._space.recompute[-1]
        for grid, replicas, fewest, counts in self._choices(number):
            computed = self._seconds(number, 1, grid, replicas)
            weights = costs.elements_of(grid, 1) / grid.z
            holders = replicas if len(costs.pools) == 1 else max(replicas, self._rows)
            for zero in self._space.zero if fewest > 1 else (1,):
                needed = costs.bytes(grid, 1, recompute, zero, holders, 1, (False, False), 1)
                room = needed.most(pool.memory_bytes)
                if zero < 2:
                    exchanged = _exchange_seconds(costs, number, grid.size, fewest, weights)
                else:
                    exchanged = CERTAIN_SHARE * m * costs.exchange(number, grid, fewest, 1, zero).both
                each = m * computed + exchanged
                # stages of the same pool wait for each other, too
                late = self._weight_share(number, grid, replicas, zero)
                yield from (_Way(min(n / each, _overlap(n, m, late) / computed), n * room) for n in counts)

    def _weight_share(self, number: int, grid: TensorGrid, replicas: int, zero: int) -> float:
        """Return the largest share of a stage's time that comes after the gradient is sent; embeddings are never on a
        stage that sends it early."""
        costs, how = self._costs, self._space.recompute[0]
        if not costs.splits(grid, how, zero):
            return 0.0
        key = number, grid, replicas
        if key not in self._late:
            most = self._most_rows(grid, replicas)
            known = []
            for item in (1, costs.last):
                costs.seconds(number, grid, item, most, how)
                known += [s for rows, s in costs.known_rows[number, grid, item, how].items() if rows <= most]
            self._late[key] = max(s.backward_weight / (s.forward + s.backward_input + s.backward_weight) for s in known)
        return self._late[key]

    def _most_rows(self, grid: TensorGrid, replicas: int) -> int:
        return math.ceil(math.ceil(self._rows / replicas) / grid.z)

    def _seconds(self, number: int, item: int, grid: TensorGrid, replicas: int) -> float:
        """Return the least seconds of a stage for an item of all rows of a microbatch.

        The rows of a single pool are known; those of one of several may be fewer, and are counted by the best rate.
        """
        key = number, item, grid, replicas
        if key not in self._per_row:
            costs, how = self._costs, self._space.recompute[0]
            most = self._most_rows(grid, replicas)
            found = costs.seconds(number, grid, item, most, how).both
            if len(costs.pools) > 1:
                known = costs.known_rows[number, grid, item, how]
                rate = min(seconds.both / rows for rows, seconds in known.items() if rows <= most)
                found = rate * self._rows / (replicas * grid.z)
            self._per_row[key] = found
        return self._per_row[key]

    def _choices(self, number: int) -> Iterator[tuple[TensorGrid, int, int, list[int]]]:
        """Yield grids, replicas, how many of them exchange the least in that way, and how many stages there may be.

        They exchange not at all, on a node, or over nodes; the more there are of a kind, the more they compute.
        """
        pool, costs = self._costs.pools[number], self._costs
        for grid in costs.grids[number]:
            if self._space.largest_grid is not None and grid.size > self._space.largest_grid:
                continue
            slots, near = len(pool.slots(grid.size)), max(1, len(pool.nodes[0]) // grid.size)
            found: dict[tuple[int, int], list[int]] = {}
            for stages in range(1, min(slots, costs.setup.model.num_layers) + 1):
                most = min(slots // stages, self._rows // grid.z)
                for replicas, fewest in ((1, 1), (min(near, most), 2), (most, near + 1)):
                    if fewest <= replicas <= most:
                        found.setdefault((replicas, fewest), []).append(stages)
            for (replicas, fewest), counts in found.items():
                yield grid, replicas, fewest, counts


@lru_cache(None)
def _overlap(stages: int, microbatches: int, late: float) -> float:
    """Return how many seconds of one microbatch all stages can do together in a second of the step, at the most.

    A stage neither starts before the first microbatch has passed those before it, nor ends before the last one has
    come back to them. If P stages together take S for one of M microbatches, none more than T = 1 / M, they wait the
    least if the last ones are full: S (S / T - 1) / 2 altogether, beside M S of work in P. Solved for S. Of what takes
    a share `late` of a stage's time, after it has sent the gradient, none waits, and while it does the last of it, it
    does not wait: (1 - late) S (S / T - 1) / 2 - late S.
    """
    m, waiting = microbatches, (1 - late) / 2
    linear = m - waiting - late
    return (math.sqrt(linear**2 + 4 * m * waiting * stages) - linear) / (2 * m * waiting)


def _best(ways: Iterator[_Way]) -> list[_Way]:
    """Return the ways than which no other is both faster and roomier, the fastest first."""
    found: list[_Way] = []
    for way in sorted(ways, reverse=True):
        if not found or way.most > found[-1].most:
            found.append(way)
    return found


def _done(pools: list[list[_Way]], seconds: float) -> float:
    """Return how many items all pools do in a step of so many seconds."""
    return sum(max(min(way.most, way.per_second * seconds) for way in ways) for ways in pools)


def _exchange_seconds(costs: StageCosts, number: int, size: int, replicas: int, weights: float) -> float:
    """Return what replicas exchange of a block once a step: by bandwidth, for a stage's blocks go in one message."""
    if replicas == 1:
        return 0.0
    groups, num_blocks = ((number, size, replicas),), costs.setup.model.num_layers
    found = 0.0
    for each in (costs.setup.stack.gradient_bytes, costs.setup.item_bytes):
        whole = int(weights * each * num_blocks)
        found += costs.sharing_seconds(groups, 2 * whole) - costs.sharing_seconds(groups, whole)
    return CERTAIN_SHARE * found / num_blocks
