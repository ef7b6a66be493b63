"""Bytes that communication takes on a device: messages between stages, and sums while they are in flight. Pure.

hpctrain moves messages and adds them up itself (`comm/collectives`): parts that arrive need memory until they are
added. `ClusterNetwork.scratch_bytes` says how much one sum takes; here is how many are in flight at once, and when.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from hpctrain.plan.holdings import ShardGroup
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prices.cost import unit_elements
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import STORING, TensorGrid

SUMMED_BYTES = 4
"""Bytes of a gradient, and of a weight that ranks of different dtypes exchange: fp32."""
EXCHANGED_SHARE = 1.25
"""Scratch of a sum as a share of its tensor, over two equal domains of two ranks; over one domain it is less than 1."""
Held = Sequence[tuple[ShardGroup, int]]
"""Shard groups that a rank holds, each with the number of weights that it stores. The rank is one of the tile, or of an
equivalent tile."""


def largest_unit(setup: Setup, grid: TensorGrid, items: Iterable[int]) -> int:
    """Return how many weights the largest of some items has, of those that the ranks at one (x, y) have together."""
    return max(unit_elements(setup, grid, item) for item in items)


def scattered_scratch(
    setup: Setup,
    network: ClusterNetwork,
    tile: Tile,
    items: Iterable[int],
    sums: Iterable[tuple[int, Sequence[int], int]],
) -> tuple[float, float]:
    """Return the scratch bytes of sums whose results are scattered after each layer's backward pass.

    These sums are over z, of the largest of a tile's `items`, and over the holders of ZeRO 2 and 3: `sums` are of so
    many bytes, among some ranks, on one of these. The first figure is of sums that overlap the next layer, the second
    of sums that nothing overlaps.
    """
    overlapped = blocking = 0.0
    if tile.tensor.stored_parts > 1:
        ranks = tile.axis_ranks(STORING, tile.ranks[0])
        num_bytes = SUMMED_BYTES * largest_unit(setup, tile.tensor, items)
        scratch = network.scratch_bytes("reduce_scatter", num_bytes, ranks, tile.ranks[0])
        overlapped, blocking = (scratch, 0.0) if setup.overlaps_weights else (0.0, scratch)
    scratch = max((network.scratch_bytes("reduce_scatter", *each) for each in sums), default=0.0)
    is_overlapped = setup.bucket_bytes is not None
    return (overlapped + scratch, blocking) if is_overlapped else (overlapped, max(blocking, scratch))


def exchanged_bytes(
    setup: Setup,
    network: ClusterNetwork,
    plan: Plan,
    tile: Tile,
    held: Held,
    rank: int,
    alive_before: Callable[[int], float],
) -> float:
    """Return the most bytes of what holders exchange at the end of a step, and of activations that are left then.

    With ZeRO 0 and 1 gradients are summed when the last backward pass has made them. Where that is overlapped, each
    bucket starts when the pass has gone through an item; before it are `alive_before` bytes of activations and of what
    is computed with. Ranks of other tensor grids exchange packed copies. Weights are gathered in fp32 where ranks
    compute in different dtypes.
    """
    sums: list[tuple[int, tuple[int, ...], int, int]] = []
    gathered = 0
    for group, stored in held:
        num_bytes = stored * SUMMED_BYTES
        if group.zero < 2 and len(group.ranks) > 1:
            operation = "reduce_scatter" if group.zero else "all_reduce"
            scratch = network.scratch_bytes(operation, num_bytes, group.ranks, rank)
            first = 0 if group.is_tied else group.final_after
            sums.append((first, group.ranks, num_bytes if group.regions else 0, scratch))
        if group.zero in (1, 2) and _has_different_dtypes(setup, plan, group):
            gathered += num_bytes
    if setup.bucket_bytes is None:  # one after the other
        return max(gathered, *(packed + scratch for _, _, packed, scratch in sums), 0)
    sums.sort(key=lambda each: -each[0])
    most, alive, packed, by_lane = float(gathered), math.inf, 0, {}
    for first, started in itertools.groupby(sums, key=lambda each: each[0]):
        for _, ranks, num_bytes, scratch in started:  # a lane does one sum after the other
            packed += num_bytes
            by_lane[ranks] = max(by_lane.get(ranks, 0), scratch)
        exchanged = packed + sum(by_lane.values())
        if alive + exchanged > most:  # activations become fewer with each bucket
            alive = alive_before(first)
            most = max(most, alive + exchanged)
    return most


def _has_different_dtypes(setup: Setup, plan: Plan, group: ShardGroup) -> bool:
    by_family = dict(setup.by_family)
    return bool(by_family) and len({by_family.get(plan.tile_of(rank).family) for rank in group.ranks}) > 1


def message_bytes(setup: Setup, grid: TensorGrid, rows: int) -> int:
    """Return the bytes of what a rank of a grid sends, or receives, of `rows` rows of its own."""
    positions = setup.on(grid).positions
    return rows * positions * setup.model.hidden_size // grid.x // grid.sequence_parts * setup.item_bytes


def largest_message_bytes(setup: Setup, tile: Tile) -> int:
    """Return the bytes of what a rank of a tile sends, or receives, of a microbatch."""
    return 0 if tile.is_idle else message_bytes(setup, tile.tensor, tile.rank_rows)


def waiting_share(forward_seconds: float, message_seconds: float) -> float:
    """Return the share of activations that wait to be sent after the warm-up, by the seconds to make and to send
    one."""
    return max(0.0, 1 - forward_seconds / message_seconds) if message_seconds else 0.0


def num_messages(setup: Setup, plan: Plan, tile: Tile) -> int:
    """Return the number of messages for which a rank of a tile has buffers.

    Incoming: those that arrive before the rank comes to receive them. Outgoing: one in flight for each tile that sends
    any, and the one that it makes.
    """

    def has_messages(near: Iterable[Tile]) -> bool:
        return any(other.ranks != tile.ranks for other in near)

    kinds = has_messages(plan.upstream(tile)) + has_messages(plan.downstream(tile))
    sending = sum(has_messages((*plan.upstream(each), *plan.downstream(each))) for each in plan.virtual_stages(tile))
    return min(setup.expected_messages, kinds * plan.microbatches) + (sending + 1 if sending else 0)
