"""A lower bound of the step time of every plan in the search's space. Pure.

1. A rank's seconds for a row of a block depend on its tensor grid and on how many rows it has at once. Let b be the
   least over all numbers of rows. A pool with devices for g such grids x * y * z then does at most g * z / b rows of a
   block in a second. Its speed is the highest of all tensor grids.
2. The head of a row takes a rank at least as long as `head` blocks of a row: the least ratio of all pools and grids.
3. A step has `global_batch` rows, each of which goes through all blocks and the head. So all pools together need at
   least global_batch * (blocks + head) / (sum of the pools' speeds). No plan is better than all devices always busy.
4. Then all ranks agree on the step, and all devices together update each weight at least once.

Sums over a tensor grid are counted. Not counted: memory, messages between stages, exchanges of replicas, waiting, whole
blocks, and the embedding. Where memory is short, plans recompute or use slower tensor grids: then the gap is large.
"""

from collections.abc import Iterator

from hpctrain.planner.prices.cost import update_seconds
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.search.space import Space
from hpctrain.planner.search.stages import ALONE, Holders, StageCosts
from hpctrain.sharding.items import BLOCK
from hpctrain.sharding.parameters import count_parameters

EVERY_COUNT_UP_TO, NEXT_COUNT = 16, 1.25
"""Row counts whose seconds are looked up: each up to the first figure and up to a profile's largest. Beyond, each count
is the one before times the second figure."""
CERTAIN_SHARE = 0.99
"""Share of the busy seconds that is certain: row counts that are not looked up may fill a device a little better. They
are up to 0.2 % faster on the ready clusters, and up to 1 % where measured products differ wildly."""
VERY_MANY_ROWS = 1 << 16
"""Row count that the formula gives the most rows per second, apart from 1 row, whose positions need no sorting."""


def lower_bound(costs: StageCosts, global_batch: int, space: Space) -> float:
    """Return a lower bound of the step time of all plans, in seconds."""
    setup, speed, head = costs.setup, 0.0, float("inf")
    for number in range(len(costs.pools)):
        rates = list(_rates(costs, global_batch, space, number))
        speed += max(block for block, _ in rates)
        head = min(head, *(ratio for _, ratio in rates))
    weights = count_parameters(setup.model)
    updates = sum(pool.num_devices / update_seconds(setup, pool.device, weights) for pool in costs.pools)
    busy = global_batch * (setup.model.num_layers + head) / speed
    return CERTAIN_SHARE * busy + costs.agree_seconds + 1 / updates


def _rates(costs: StageCosts, global_batch: int, space: Space, number: int) -> Iterator[tuple[float, float]]:
    """Yield two figures for each tensor grid of a pool: the most rows of a block that its devices compute in a second,
    and the ratio of the head's least seconds for a row to a block's."""
    pool, zero = costs.pools[number], max(1, *space.zero)
    counts = _row_counts(global_batch, pool.device)
    for grid in costs.grids[number]:
        if grid.size <= (space.largest_grid or grid.size):
            of_zero = Holders(zero) if grid.stored_parts > 1 else ALONE  # of others it changes nothing
            block, head = (
                min(costs.passes(number, grid, layer, rows, "none", of_zero).both / rows for rows in counts)
                for layer in (BLOCK, costs.head)
            )
            yield len(pool.slots(grid.size)) * grid.row_parts / block, head / block


def _row_counts(most: int, device: DeviceModel) -> list[int]:
    """Return the numbers of rows whose seconds are looked up: all that a measurement may favour, where there is one."""
    if not device.profile and not device.family.products:
        return [1, VERY_MANY_ROWS]
    profiled = device.profile.times[-1].rows if device.profile else 0
    result = list(range(1, max(EVERY_COUNT_UP_TO, profiled) + 1))
    while result[-1] < most:
        result.append(min(most, int(result[-1] * NEXT_COUNT)))
    return [*result, VERY_MANY_ROWS]
