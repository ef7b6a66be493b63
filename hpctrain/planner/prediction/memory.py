"""Bytes that a rank needs, part by part: what the engine keeps (`model/storage/store.py`, `model/stage.py`,
`model/storage/shard.py`).
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import NamedTuple

from hpctrain.plan.holdings import Holding, ShardGroup
from hpctrain.plan.schedule import Action, passes, weight_delay
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.activations import row_bytes
from hpctrain.planner.prices.buffers import (
    SUMMED_BYTES,
    exchanged_bytes,
    largest_message_bytes,
    num_messages,
    scattered_scratch,
)
from hpctrain.planner.prices.cost import layer_elements
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import GRADIENT_BYTES, Setup
from hpctrain.sharding.host_buckets import SLOTS, bucket_elements
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers
from hpctrain.sharding.parameters import box_size


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one rank at their peak, by part."""

    weights: int
    gradients: int
    moments: int
    """Moments of the optimizer, and master weights where the weights in use are half precision."""
    activations: int
    """Activations kept between forward and backward passes, of all microbatches in flight, weight passes included."""
    gathered: int
    """Whole weights and gradients of the layers that compute, where they are stored in shards. Includes the receive
    buffers of gradients in flight to the shards."""
    buffers: int
    """Temporary memory of a layer, beyond the activations that later layers have released. Includes messages that wait
    to be sent, and receive buffers."""
    on_host: int = 0
    """Bytes in host memory instead of the device's: what the tiles offload."""

    @property
    def total(self) -> int:
        """The bytes of the device."""
        return sum(vars(self).values()) - self.on_host


@dataclass(frozen=True)
class StageMemory:
    """The memory that a rank of a tile needs, and has."""

    tile: Tile
    """First tile of the rank."""
    memory: MemoryParts
    available_bytes: int
    items: tuple[Interval, ...]
    """Items of each tile of the rank."""
    ranks: tuple[int, ...] = ()
    """Ranks that need as much memory: those of tiles with as many rows of the same items, on the same family."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.available_bytes


class State(NamedTuple):
    """Bytes of a rank's weights, of their gradients, and of the optimizer's state for the weights that it updates."""

    weights: float
    gradients: float
    optimizer: float


@singledispatch
def state_of(
    setup: Setup, stored: float, updated: float, packed: float, zero: int, num_holders: int, state_bytes: float
) -> State:
    """Return the bytes of the weights that a rank stores, of which it updates some, with as many holders.

    `state_bytes` are those of the optimizer for each weight that is updated. `packed` are those that it has once more,
    to exchange them with other grids, and where they are used.
    """
    weights = setup.item_bytes * (updated if zero == 3 else stored)
    weights += setup.item_bytes * packed
    gradients = (updated if zero >= 2 else stored) * GRADIENT_BYTES
    if zero == 1 and num_holders > 1:
        gradients += updated * GRADIENT_BYTES
    return State(weights, gradients, updated * state_bytes)


@singledispatch
def memory_of(
    setup: Setup,
    network: ClusterNetwork,
    plan: Plan,
    tile: Tile,
    shards: Holding,
    rank: int,
    waiting: int,
    available: int,
) -> MemoryParts:
    """Return what one rank of a tile needs, for all of its tiles, while so many messages wait to be sent.

    `shards` is what `rank` holds, which is of this tile or of one with like items, grid and state.
    Its device has so many bytes `available`.
    """
    states, num_updated = [State(0, 0, 0)], 0
    held: list[tuple[ShardGroup, int]] = []
    part = plan.tile_of(rank).part(rank)
    for group in shards.shard_groups:
        packed = sum(region.size for region in group.regions)
        stored = sum(part.stored(layout).size for layout in group.layouts) + packed
        updated = group.cuts(stored)[group.ranks.index(rank)].size if group.zero else stored
        placed = ((p.shape, box_size(box)) for layout in group.layouts for p, box, _ in layout.placed())
        parts = [*placed, *((region.parameter.shape, region.size) for region in group.regions)]
        state_bytes = setup.state_bytes(parts)
        states.append(state_of(setup, stored, updated, packed, group.zero, len(group.ranks), state_bytes))
        held.append((group, stored))
        num_updated += updated
    weights, gradients, moments = (int(sum(parts)) for parts in zip(*states, strict=True))
    buffers = (waiting + num_messages(setup, plan, tile)) * largest_message_bytes(setup, tile)
    kept = gathered = on_host = 0
    if not tile.is_idle:
        kept, computing = _activations(setup, plan, tile)
        gathered = _gathered(setup, plan, tile, shards)
        if setup.sums_itself:
            items = itertools.chain.from_iterable(range(*each.items) for each in plan.virtual_stages(tile))
            sums = [(stored * SUMMED_BYTES, group.ranks, rank) for group, stored in held if group.zero >= 2]
            overlapped, blocking = scattered_scratch(setup, network, tile, items, sums)
            alive_before = partial(_alive_before, setup, plan, tile)
            exchanged = exchanged_bytes(setup, network, plan, tile, held, rank, alive_before)
            gathered += int(overlapped)
            computing = int(max(computing, blocking, exchanged - kept))
        buffers += computing
    if tile.offload == "optimizer":  # whose buckets move through the device when nothing of a microbatch is there
        moments, on_host = 0, moments
        bucket = SLOTS * min(num_updated, bucket_elements(num_updated))
        buffers = max(buffers, int(bucket * setup.state_bytes()) - kept)
    return MemoryParts(weights, gradients, moments, kept, gathered, buffers, on_host)


def _gathered(setup: Setup, plan: Plan, tile: Tile, shards: Holding) -> int:
    zero = max((group.zero for group in shards.shard_groups), default=0)
    virtual_stages = plan.virtual_stages(tile)
    sizes = [layer_elements(setup, tile.tensor, layer) for each in virtual_stages for layer in layers(each.items)]
    pair = max(map(sum, itertools.pairwise(sizes)), default=sizes[0])
    holders = min((len(group.ranks) for group in shards.shard_groups if group.zero >= 2), default=0)
    splits = any(splits_backward(setup, plan, each) for each in virtual_stages)
    return int(gathered_bytes(setup, tile.tensor.stored_parts, zero, holders, max(sizes), pair, splits))


def gathered_bytes(setup: Setup, parts: int, zero: int, holders: int, largest: int, pair: int, splits: bool) -> float:
    """Return the bytes of whole weights and gradients where a rank stores one of several `parts`.

    They are of its `largest` layer. Where exchanges are overlapped they are of a `pair` of neighbours, since weights
    are gathered early and gradients scattered late. The shard of what is scattered is added; it is of both layers where
    a weight pass came before (`splits`).
    """
    if parts == 1 and zero < 2:
        return 0.0
    over_parts, over_holders = parts > 1 and setup.overlaps_weights, bool(setup.bucket_bytes)
    whole = pair if over_parts or (zero >= 2 and over_holders) else largest
    of_weights = pair if over_parts or (zero == 3 and over_holders) else largest
    weights = setup.gathered_bytes if parts > 1 or zero == 3 else 0
    shares = (1 / parts if parts > 1 else 0) + (1 / (parts * holders) if zero >= 2 and holders else 0)
    coming = whole if splits else largest
    return of_weights * weights + whole * setup.gradient_bytes + coming * shares * setup.gradient_bytes


def splits_backward(setup: Setup, plan: Plan, tile: Tile) -> bool:
    """Say whether a tile sends the gradient of its input before it computes those of its weights."""
    return setup.splits_backward and weight_delay(plan, tile) is not None


def _activations(setup: Setup, plan: Plan, tile: Tile) -> tuple[int, int]:
    """Return the bytes that a rank keeps of activations, for all of its tiles, and those that it computes with."""
    rows = tile.rank_rows
    at_once = -(-rows // tile.row_chunks)
    virtual_stages = plan.virtual_stages(tile)
    kept, left, computing = [], [], 0.0
    for each in virtual_stages:
        splits, at_loss = splits_backward(setup, plan, each), not plan.downstream(each)
        row = row_bytes(
            setup,
            each.tensor,
            layers(each.items),
            each.recompute,
            splits=splits,
            rows=at_once,
            more_rows=1.0 if at_loss else rows / at_once,
        )
        many = at_once if at_loss else rows  # at the loss one row chunk is kept at a time, and what weight passes need
        kept.append(many * row.kept + (rows - many) * row.deferred)
        left.append(rows * row.deferred)
        computing = max(computing, at_once * row.computing)
    return int(_most_alive(setup, plan, virtual_stages, kept, left)), int(computing)


def _alive_before(setup: Setup, plan: Plan, tile: Tile, item: int) -> float:
    """Return the bytes of activations that a rank has, and computes with, when the last backward pass has gone through
    an item: of the layers before it, for one microbatch. A rank with several virtual stages may have others too."""
    rows = tile.rank_rows
    left = [layer for layer in layers(tile.items) if layer.stop <= item]
    if len(plan.virtual_stages(tile)) > 1:
        kept, computing = _activations(setup, plan, tile)
        return kept + computing if item > tile.items.start else 0.0
    if not left:
        return 0.0
    at_once = -(-rows // tile.row_chunks)
    splits = splits_backward(setup, plan, tile)
    row = row_bytes(setup, tile.tensor, left, tile.recompute, splits=splits, rows=at_once)
    return (rows if plan.downstream(tile) else at_once) * row.kept + at_once * row.computing


def _most_alive(
    setup: Setup, plan: Plan, virtual_stages: Sequence[Tile], kept: Sequence[float], left: Sequence[float]
) -> float:
    """Return the most bytes of activations that ranks keep after a forward pass of a step.

    Each forward pass of a virtual stage keeps `kept` bytes. Its backward pass releases them. Where the weight pass
    comes later, `left` bytes stay until then.
    """
    if not any(kept):
        return 0.0
    delays = [weight_delay(plan, each) or 0 if splits_backward(setup, plan, each) else 0 for each in virtual_stages]
    alive = most = 0.0
    waiting: deque[float] = deque()
    for action, number, _ in passes(plan, virtual_stages[0]):
        if action is Action.FORWARD:
            alive += kept[number]
            most = max(most, alive)
            continue
        alive -= kept[number]
        if delays[number]:
            waiting.append(left[number])
            alive += left[number]
            while len(waiting) > delays[number]:
                alive -= waiting.popleft()
    return most
