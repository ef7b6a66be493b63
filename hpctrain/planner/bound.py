"""A lower bound of the step time of every plan in the search's space. Pure.

A step time T is impossible if the pools cannot do all blocks of all rows in it, for any number of microbatches M. The
bound is the longest time that is impossible. Every rule allows at least what a plan can do:

1. Time. A pool with s stages has at most (places for the tensor grid) // s replicas of each. Of n rows of a microbatch,
   the slowest rank of a stage has at least r = ceil(n / (replicas * z)). The stage has at most
   floor(T / (M * seconds of a block for r rows)) blocks. The last stage also computes the head.
2. Memory. A stage with i stages of its pool behind it keeps the activations of min(i + 1, M) microbatches. Its blocks
   must fit. It may recompute them, which takes longer. The last stage may cut its rows into chunks and keep one.
3. ZeRO 2 and 3 keep less. In return, the gradients of each microbatch leave their node through its NICs.
4. Pipelines. A pipeline has the blocks of its pools together, each with its best tensor grid and number of stages.
   Pipelines side by side share the rows: each gets as many as it can do in T.
5. The end. All ranks agree, then all devices together update each weight once.

Not counted: messages, exchanges at the end of a step, the ramp of a pipeline, and the embedding.
"""

import itertools
import math
from functools import lru_cache

import numpy as np

from hpctrain.parameters import count_parameters
from hpctrain.plan import TensorGrid
from hpctrain.planner.cost import update_seconds
from hpctrain.planner.space import Space, arrangements, stage_counts
from hpctrain.planner.stages import StageCosts

HALVINGS = 10
"""How often the range of times is halved: the bound is exact to 0.1 % of the best plan's step time."""
ROW_COUNTS = 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 1 << 16
"""Numbers of rows whose seconds are looked up. By the formula, no number has more rows per second than very many."""
ROUNDING = 1 + 1e-9


class _Pool:
    """What a pool can do. Arrays are over modes (recompute, ZeRO) and options (tensor grid, stages, replicas)."""

    def __init__(self, costs: StageCosts, space: Space, number: int):
        pool, setup = costs.pools[number], costs.setup
        grids = [grid for grid in costs.grids[number] if grid.size <= (space.largest_grid or math.inf)]
        zeros = sorted({1, max(1, *space.zero)})
        modes = list(itertools.product((space.recompute[0], space.recompute[-1]), zeros))
        profiled = pool.device.profiled.profile.times[-1].rows if pool.device.profiled else 0
        self._counts = np.array(sorted({*ROW_COUNTS, *range(1, profiled + 1)}))

        def table(item: int, how: str, zero: int) -> np.ndarray:
            known = [(grid, zero if grid.z > 1 else 1) for grid in grids]  # of others it changes nothing
            counts = self._counts.tolist()
            return np.array([[costs.seconds(number, g, item, n, how, z).both for n in counts] for g, z in known])

        self._chunk_rows = np.array([1, *self._counts[:-1] + 1])  # at least, of chunks of up to `_counts` rows
        self._seconds = np.array([table(1, *mode) for mode in modes])
        self._row_seconds = np.minimum.accumulate(self._seconds / self._counts, axis=2)
        self._head_seconds = (table(costs.last, space.recompute[0], zeros[-1]) / self._counts).min(axis=1)
        self._memory_bytes, options, needed = pool.memory_bytes, [], []
        for index, grid in enumerate(grids):
            places, in_node = len(pool.slots(grid.size)), pool.largest_grid // grid.size
            classes = [(0, in_node), *((in_node << n, in_node << n + 1) for n in range(places.bit_length()))]
            for stages, (few, many) in itertools.product(stage_counts(places, setup.model.num_layers), classes):
                if few < places // stages:  # more replicas than `few`, of which a node has `in_node` at most
                    outside = 1 - min(1.0, in_node / (few + 1))
                    options.append((index, stages, min(places // stages, many), grid.z, outside))
            holders = np.array([replicas for i, _, replicas, *_ in options if i == index])
            holders += costs.cluster.num_devices - pool.num_devices
            needed.append([costs.least_bytes(grid, *mode, holders) for mode in modes])
        self._grid, self._stages, replicas, z, outside = map(np.array, zip(*options, strict=True))
        self._parts, self._bytes = replicas * z, np.concatenate(needed, axis=2).transpose(1, 0, 2)
        gradients = costs.elements_of(TensorGrid(), 1) * setup.stack.gradient_bytes / costs.node_bandwidth(pool)
        self._exchange = np.array([[gradients * (zero > 1)] for _, zero in modes]) * outside
        self._least = self._row_seconds[:, self._grid, -1]
        self.speed = (self._stages * self._parts / self._least[0]).max()
        """How many rows go through a block in a second, at most."""

    def most_blocks(self, rows: int, m: int, seconds: float, wanted: float) -> tuple[float, float]:
        """Return how many blocks the pool can do, without and with the head, in a pipeline with so many rows of a
        microbatch. Options with fewer than are wanted do not count, nor those whose first stage does not fit."""
        own = -(-rows // self._parts)
        which = np.flatnonzero(self._stages * seconds * ROUNDING >= wanted * m * own * self._least[0])
        fits = self._fit(self._bytes[:, :, which], own[which], np.minimum(self._stages[which], m)).max(axis=0) >= 1
        which = which[fits | (self._stages[which] == 1)]
        if not which.size:
            return 0.0, 0.0
        own, stages, grid = own[which], self._stages[which], self._grid[which]
        needed, exchange = self._bytes[:, :, which, None], self._exchange[:, which, None]
        at = np.searchsorted(self._counts, own, side="right") - 1
        block = np.maximum(self._seconds[:, grid, at], own * self._least[:, which])[:, :, None]
        in_flight = np.arange(1, min(m, stages.max()) + 1)
        times = np.where(in_flight < m, stages[:, None] >= in_flight, np.maximum(stages[:, None] - m + 1, 0))
        fit = self._fit(needed, own[:, None], in_flight)
        blocks = _whole(seconds / (m * (block + exchange)), fit)
        left = (seconds / m - own * self._head_seconds[grid])[:, None]
        chunks = own[:, None] * self._row_seconds[:, grid] + exchange * np.ceil(own[:, None] / self._counts)
        fits = np.where(own[:, None] > self._chunk_rows, self._fit(needed, self._chunk_rows, 1), 0)
        last = np.maximum(_whole(left / (block + exchange), fit[:, :, :1]), _whole(left / chunks, fits)).max(axis=1)
        every = (blocks * times).sum(axis=1)
        return every.max(), (every - blocks[:, 0] + last).max()

    def _fit(self, needed: np.ndarray, rows: int | np.ndarray, in_flight: int | np.ndarray) -> np.ndarray:
        """Return how many blocks fit in memory."""
        base, of_row, of_block, kept = needed
        return np.floor((self._memory_bytes - base - of_row * rows) / (of_block + kept * rows * in_flight))


def _whole(blocks: np.ndarray, fit: np.ndarray) -> np.ndarray:
    """Return the most whole blocks of a stage in any mode."""
    return np.maximum(np.minimum(np.floor(blocks * ROUNDING), fit).max(axis=0), 0)


def least_seconds(costs: StageCosts, global_batch: int, space: Space, best_seconds: float) -> float:
    """Return the bound, at most `best_seconds`: the step time of a plan that is known."""
    pools = [_Pool(costs, space, number) for number in range(len(costs.pools))]
    every, num_blocks, setup = range(len(pools)), costs.setup.model.num_layers, costs.setup
    weights = count_parameters(setup.model)
    updates = sum(pool.num_devices / update_seconds(setup, pool.device, weights) for pool in costs.pools)
    end = 1 / updates + costs.agree_seconds + setup.stack.step_seconds
    partitions = {frozenset(map(frozenset, p)) for p in arrangements(len(pools)) if sum(map(len, p)) == len(pools)}

    def is_possible(m: int, seconds: float) -> bool:
        speeds, all_rows = [max(seconds - end, 0.0) * pool.speed / m for pool in pools], global_batch // m

        def most(some: frozenset[int]) -> int:
            """Return how many rows some pools do at their highest speed."""
            return math.floor(sum(speeds[number] for number in some) / num_blocks * ROUNDING)

        def does_all(pipeline: frozenset[int], rows: int) -> bool:
            wanted = [num_blocks - (sum(speeds) - speeds[i]) / rows for i in pipeline]
            known = [pools[i].most_blocks(rows, m, seconds - end, w) for i, w in zip(pipeline, wanted, strict=True)]
            return sum(inner for inner, _ in known) + max(last - inner for inner, last in known) >= num_blocks

        @lru_cache(None)
        def most_rows(pipeline: frozenset[int]) -> float:
            """Return how many rows a pipeline of these pools can do, or -inf if the others cannot do the rest."""
            low, high = max(0, all_rows - most(frozenset(every) - pipeline)), min(all_rows, most(pipeline))
            if low > high or (low and not does_all(pipeline, low)):
                return -math.inf
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if does_all(pipeline, middle) else (low, middle - 1)
            return low

        return any(sum(map(most_rows, pipelines)) >= all_rows for pipelines in partitions)

    low, high, left = 0.0, best_seconds, space.microbatch_counts(global_batch)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        possible = [m for m in left if is_possible(m, middle)]
        low, high, left = (low, middle, possible) if possible else (middle, high, left)
    return low
