"""What no plan of the search's space can take less than. Pure.

All devices compute all the time, each by the choice of tensor grid, stages and replicas by which it would do the most;
nobody waits, and no message between stages takes any time. But what a choice costs for each block is counted whole: the
products of as many rows as it has, what its tensor grid exchanges, and what its replicas exchange of the block's
weights after the last microbatch. Then all update an equal part of the weights.
"""

import math
from collections.abc import Iterator

from hpctrain.parameters import count_parameters
from hpctrain.plan import TensorGrid
from hpctrain.planner.cost import update_seconds
from hpctrain.planner.space import Space
from hpctrain.planner.stages import StageCosts

CERTAIN_SHARE = 0.9
"""Of exchanges and updates: cuts are rounded, and replicas may lie on nodes in other ways than the first ones do."""


def least_seconds(costs: StageCosts, global_batch: int, space: Space) -> float:
    """Return the bound: of the numbers of microbatches, that by which least is needed.

    There are three kinds of work (embedding, block, head), at which devices may be unlike good. Any prices for a row of
    each give a bound: all that has to be done, over all that the devices can earn in a second, each with what pays it
    best. Those of each pool's own seconds are tried.
    """
    setup = costs.setup
    work = min(_least_work(costs, global_batch, count, space) for count in space.microbatch_counts(global_batch))
    parameters = count_parameters(setup.model)
    updated = sum(pool.num_devices / update_seconds(setup, pool.device, parameters) for pool in costs.pools)
    return work + CERTAIN_SHARE / updated + costs.agree_seconds + setup.stack.step_seconds


def _least_work(costs: StageCosts, global_batch: int, microbatches: int, space: Space) -> float:
    if len(costs.pools) == 1:
        return _least_of_one(costs, global_batch // microbatches, microbatches, space)
    num_blocks, rows = costs.setup.model.num_layers, global_batch // microbatches
    kinds = {0: 1, 1: num_blocks, costs.last: 1}
    # seconds in which all of a pool's devices do an item for all rows of the batch
    alone = [
        {item: _seconds_alone(costs, number, item, rows, microbatches, space) for item in kinds}
        for number in range(len(costs.pools))
    ]
    found = 0.0
    for prices in alone:
        owed = sum(prices[item] * times for item, times in kinds.items())
        earned = sum(max(prices[item] / own[item] for item in kinds) for own in alone)
        found = max(found, owed / earned)
    return found


def _seconds_alone(costs: StageCosts, number: int, item: int, rows: int, microbatches: int, space: Space) -> float:
    """Return in how many seconds of a step all devices of a pool do one item at the least, by their best choice."""
    best, per_row = math.inf, {}
    for grid, stages, replicas, fewest in _choices(costs, number, rows, space):
        key = grid, replicas
        if key not in per_row:
            most = -(-(-(-rows // replicas)) // grid.z)
            costs.seconds(number, grid, item, most, space.recompute[0])
            known = costs.known_rows[number, grid, item, space.recompute[0]]
            per_row[key] = min(seconds / count for count, seconds in known.items() if count <= most)
        computed = microbatches * rows * per_row[key] / (replicas * grid.z)
        exchanged = _exchange_seconds(costs, number, grid.size, fewest, costs.elements_of(grid, item) / grid.z)
        best = min(best, (computed + exchanged) / stages)
    return best


def _least_of_one(costs: StageCosts, rows: int, microbatches: int, space: Space) -> float:
    """Return the bound for a single pool, all of whose stages have all rows: whole rows, and bubbles count too.

    A stage neither starts before the first microbatch has passed those before it, nor ends before the last one has
    come back to them. If all P stages together take S for a microbatch, none more than T / M, it costs the least if the
    last ones are full: the idle time of all is S (S M / T - 1) / 2 at the least, and M S of P T is work.
    """
    model, best = costs.setup.model, math.inf
    items = {0: 1, 1: model.num_layers, costs.last: 1}
    for grid, stages, replicas, fewest in _choices(costs, 0, rows, space):
        each = -(-(-(-rows // replicas)) // grid.z)
        total = sum(costs.seconds(0, grid, i, each, space.recompute[0]).both * n for i, n in items.items())
        weights = sum(costs.elements_of(grid, i) * n for i, n in items.items()) / grid.z
        half = (microbatches - 0.5) * total
        idling = (half + math.sqrt(half**2 + 2 * stages * microbatches * total**2)) / (2 * stages)
        exchanging = microbatches * total + _exchange_seconds(costs, 0, grid.size, fewest, weights)
        best = min(best, max(idling, exchanging / stages))
    return best


def _choices(costs: StageCosts, number: int, rows: int, space: Space) -> Iterator[tuple[TensorGrid, int, int, int]]:
    """Yield grids, stages and replicas, and how many replicas exchange the least in the same way.

    They exchange not at all, on a node, or over nodes, and the more there are of a kind the more they compute.
    """
    pool = costs.pools[number]
    for grid in costs.grids[number]:
        if space.largest_grid is not None and grid.size > space.largest_grid:
            continue
        slots, near = len(pool.slots(grid.size)), max(1, len(pool.nodes[0]) // grid.size)
        for stages in range(1, min(slots, costs.setup.model.num_layers) + 1):
            most = min(slots // stages, rows // grid.z)
            for replicas, fewest in ((1, 1), (min(near, most), 2), (most, near + 1)):
                if fewest <= replicas <= most:
                    yield grid, stages, replicas, fewest


def _exchange_seconds(costs: StageCosts, number: int, size: int, replicas: int, weights: float) -> float:
    if replicas == 1:
        return 0.0
    groups = ((number, size, replicas),)
    num_bytes = costs.setup.stack.gradient_bytes, costs.setup.item_bytes
    return CERTAIN_SHARE * sum(costs.sharing_seconds(groups, int(weights * each)) for each in num_bytes)
