"""Bytes that a rank needs, part by part: what the engine keeps (`model/storage/store.py`, `model/stage.py`,
`model/storage/shard.py`).

For other software the same parts, with gradients as it keeps them, and what its libraries take and its allocator loses.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from hpctrain.architectures.description import Attention, Mlp, Norm
from hpctrain.comm.network import ClusterNetwork
from hpctrain.config.kernels import tokens_at_once
from hpctrain.plan.holders import RankShards, ShardGroup
from hpctrain.plan.schedule import Op, in_flight, passes, weight_delay
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prices.buffers import exchanged_bytes, largest_message_bytes, num_messages, scattered_scratch
from hpctrain.planner.prices.cost import heads_on, layer_elements
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.host_buckets import SLOTS, bucket_elements, moves
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import EMBEDDING, is_attention, layers
from hpctrain.sharding.parameters import padded_vocabulary

MASTER_BYTES, MOMENT_BYTES = 4, 8
INDEX_BYTES, STATISTIC_BYTES = 8, 4
LOSS_BYTES = 28
"""For each token while its loss is computed: maxima, sums, and its own logit."""


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one rank at their peak, by part."""

    weights: int
    gradients: int
    moments: int
    """And master weights, where those in use are half precision."""
    activations: int
    """Kept between forward and backward passes, of all microbatches in flight, weight passes included."""
    gathered: int
    """Whole weights and gradients of the layers in the making, where they are stored in shards, and what comes in of
    gradients that are in flight to them."""
    buffers: int
    """What a layer computes with and does not keep, beyond what those after it have kept and let go; what waits to be
    sent, where the next messages go, what libraries have taken, and what an allocator cannot use."""
    on_host: int = 0
    """In memory of the host, in place of the device's: what the tiles offload."""

    @property
    def total(self) -> int:
        """The bytes of the device."""
        return sum(vars(self).values()) - self.on_host


@dataclass(frozen=True)
class StageMemory:
    """The memory that a rank of a tile needs, and has."""

    tile: Tile
    """The first one of the rank."""
    memory: MemoryParts
    available_bytes: int
    items: tuple[Interval, ...]
    """Of all tiles of the rank."""
    ranks: tuple[int, ...] = ()
    """All that need as much: those of tiles with as many rows of the same items, on the same family."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.available_bytes


class State(NamedTuple):
    """Bytes of a rank's weights, of their gradients, and of the optimizer's state of those that it updates."""

    weights: float
    gradients: float
    optimizer: float


def state_of(setup: Setup, stored: float, updated: float, packed: float, zero: int, num_holders: int) -> State:
    """Return the bytes of the weights that a rank stores, of which it updates some, with as many holders.

    `packed` are those that it has once more, to exchange them with other grids, and where they are used.
    """
    stack, b = setup.stack, setup.item_bytes
    weights = stack.stored_bytes(b) * (updated if zero == 3 else stored)
    weights += b * packed if zero < 3 else 0
    kept, summed = stack.gradient_bytes(setup.dtype)
    gradients = (updated if zero >= 2 else stored) * kept
    if zero == 1 and num_holders > 1:
        gradients += updated * summed
    return State(weights, gradients, updated * state_bytes(setup))


def state_bytes(setup: Setup) -> int:
    """Return the bytes of the optimizer's state for each weight that a rank updates: moments, and a master where
    weights in use are half precision."""
    return MOMENT_BYTES + (MASTER_BYTES if setup.item_bytes < MASTER_BYTES else 0)


def memory_of(
    setup: Setup,
    network: ClusterNetwork,
    plan: Plan,
    tile: Tile,
    shards: RankShards,
    rank: int,
    waiting: int,
    available: int,
) -> MemoryParts:
    """Return what one rank of a tile needs, for all of its tiles, while so many messages wait to be sent.

    `shards` is what `rank` holds, which is of this tile or of one with like items, grid and state.
    Its device has so many bytes `available`, of which software may lose a share.
    """
    stack, states, num_updated = setup.stack, [State(0, 0, 0)], 0
    held: list[tuple[ShardGroup, int]] = []
    z = plan.tile_of(rank).coordinate(rank)[2]
    for group in shards.shard_groups:
        packed = sum(region.size for region in group.regions)
        stored = sum(cut_evenly(layout.size, tile.tensor.z)[z].size for layout in group.layouts) + packed
        updated = group.cuts(stored)[group.ranks.index(rank)].size if group.zero else stored
        states.append(state_of(setup, stored, updated, packed, group.zero, len(group.ranks)))
        held.append((group, stored))
        num_updated += updated
    weights, gradients, moments = (int(sum(parts)) for parts in zip(*states, strict=True))
    others = (max((len(group.ranks) for group in shards.shard_groups), default=1), tile.tensor.x, tile.tensor.y)
    num_groups = sum(size > 1 for size in (*others, tile.tensor.z, plan.path_length(tile)))
    buffers = (waiting + num_messages(setup, plan, tile)) * largest_message_bytes(setup, tile)
    buffers += stack.taken_bytes(available, num_groups)
    kept = gathered = on_host = 0
    if not tile.is_idle:
        kept, computing, on_host = _activations(setup, plan, tile)
        gathered = _gathered(setup, plan, tile, shards)
        if stack.is_hpctrain:
            overlapped, blocking = scattered_scratch(setup, network, plan, tile, held, rank)
            alive_before = partial(_alive_before, setup, plan, tile)
            exchanged = exchanged_bytes(setup, network, plan, tile, held, rank, alive_before)
            gathered += int(overlapped)
            computing = int(max(computing, blocking, exchanged - kept))
        buffers += computing
    if tile.offloads_optimizer:  # whose buckets move through the device when nothing of a microbatch is there
        moments, on_host = 0, on_host + moments
        buffers = max(buffers, SLOTS * min(num_updated, bucket_elements(num_updated)) * state_bytes(setup) - kept)
    return MemoryParts(weights, gradients, moments, kept, gathered, buffers, on_host)


def _gathered(setup: Setup, plan: Plan, tile: Tile, shards: RankShards) -> int:
    zero = max((group.zero for group in shards.shard_groups), default=0)
    virtual_stages = plan.virtual_stages(tile)
    sizes = [layer_elements(setup.model, tile.tensor, layer) for each in virtual_stages for layer in layers(each.items)]
    pair = max(map(sum, itertools.pairwise(sizes)), default=sizes[0])
    holders = min((len(group.ranks) for group in shards.shard_groups if group.zero >= 2), default=0)
    splits = any(splits_backward(setup, plan, each) for each in virtual_stages)
    return int(gathered_bytes(setup, tile.tensor.z, zero, holders, max(sizes), pair, splits))


def gathered_bytes(setup: Setup, z: int, zero: int, holders: int, largest: int, pair: int, splits: bool) -> float:
    """Return the bytes of whole weights and gradients where a rank stores shards: those of its `largest` layer, or of a
    `pair` of neighbours where they are overlapped, since one is gathered early and scattered late.

    The shard of what is scattered comes on top; it is of both where a weight pass has gone before (`splits`).
    """
    if z == 1 and zero < 2:
        return 0.0
    over_z, over_holders = z > 1 and "z" in setup.overlaps, bool(setup.bucket_bytes)
    whole = pair if over_z or (zero >= 2 and over_holders) else largest
    of_weights = pair if over_z or (zero == 3 and over_holders) else largest
    weights = setup.gathered_bytes if z > 1 or zero == 3 else 0
    shares = (1 / z if z > 1 else 0) + (1 / (z * holders) if zero >= 2 and holders else 0)
    coming = whole if splits else largest
    return of_weights * weights + whole * setup.gradient_bytes + coming * shares * setup.gradient_bytes


def splits_backward(setup: Setup, plan: Plan, tile: Tile) -> bool:
    """Say whether a tile sends the gradient of its input before it computes those of its weights."""
    return setup.stack.splits_backward and weight_delay(plan, tile) is not None


def _activations(setup: Setup, plan: Plan, tile: Tile) -> tuple[int, int, int]:
    """Return the bytes that a rank keeps on its device, for all of its tiles, those that it computes with, and those
    that it keeps in host memory."""
    rows = tile.rank_rows
    at_once = -(-rows // tile.row_chunks)
    virtual_stages = plan.virtual_stages(tile)
    wraps = len(virtual_stages) > 1 or in_flight(plan, tile) > 1
    kept, left, moved, computing = [], [], [], 0.0
    for each in virtual_stages:
        splits, at_loss = splits_backward(setup, plan, each), not plan.downstream(each)
        row = row_bytes(
            setup,
            each.tensor,
            layers(each.items),
            each.recompute,
            offloads=each.offloads_activations,
            splits=splits,
            rows=at_once,
            wraps=wraps,
            more_rows=1.0 if at_loss else rows / at_once,
        )
        many = at_once if at_loss else rows  # at the loss one row chunk is kept at a time, and what weight passes need
        kept.append(many * row.kept + (rows - many) * row.deferred)
        left.append(rows * row.deferred)
        moved.append(many * row.moved)
        computing = max(computing, at_once * row.computing)
    return (
        int(_most_alive(setup, plan, virtual_stages, kept, left)),
        int(computing),
        int(_most_alive(setup, plan, virtual_stages, moved, [0.0] * len(moved))),
    )


def _alive_before(setup: Setup, plan: Plan, tile: Tile, item: int) -> float:
    """Return the bytes of activations that a rank has, and computes with, when the last backward pass has gone through
    an item: of the layers before it, for one microbatch. A rank with several virtual stages may have others too."""
    rows = tile.rank_rows
    left = [layer for layer in layers(tile.items) if layer.stop <= item]
    if len(plan.virtual_stages(tile)) > 1:
        kept, computing, _ = _activations(setup, plan, tile)
        return kept + computing if item > tile.items.start else 0.0
    if not left:
        return 0.0
    at_once = -(-rows // tile.row_chunks)
    offloads, splits = tile.offloads_activations, splits_backward(setup, plan, tile)
    row = row_bytes(setup, tile.tensor, left, tile.recompute, offloads=offloads, splits=splits, rows=at_once)
    return (rows if plan.downstream(tile) else at_once) * row.kept + at_once * row.computing


def _most_alive(
    setup: Setup, plan: Plan, virtual_stages: Sequence[Tile], kept: Sequence[float], left: Sequence[float]
) -> float:
    """Return the most bytes that ranks have kept after a forward pass of a step.

    Each forward pass of a virtual stage has `kept` bytes, of which its backward pass has `left` what the weight pass
    needs, where that comes later.
    """
    if not any(kept):
        return 0.0
    delays = [weight_delay(plan, each) or 0 if splits_backward(setup, plan, each) else 0 for each in virtual_stages]
    alive = most = 0.0
    waiting: deque[float] = deque()
    for op, number, _ in passes(plan, virtual_stages[0]):
        if op is Op.FORWARD:
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


class RowBytes(NamedTuple):
    """Bytes that layers have of one row of a rank."""

    kept: float
    """From the forward pass to the backward one, on the device."""
    moved: float
    """The same in host memory."""
    deferred: float
    """From the input pass to the weight pass, where the backward pass is split."""
    computing: float
    """At the peak of a pass, in addition to what is kept."""

    def minus(self, other: "RowBytes") -> "RowBytes":
        return RowBytes(*(own - its for own, its in zip(self, other, strict=True)))


def row_bytes(
    setup: Setup,
    grid: TensorGrid,
    every: Sequence[Interval],
    recompute: str,
    *,
    offloads: bool,
    splits: bool,
    rows: int,
    wraps: bool = True,
    more_rows: float = 1.0,
) -> RowBytes:
    """Return the bytes of a row that a rank with some layers keeps, and computes with.

    In a backward pass, what the layers after one have kept is gone, or has become what weight passes need: of
    `more_rows` times as many rows, where only a chunk is computed at once. It computes `rows` at once.
    In a forward pass that offloads, there are what a block has kept and the block before it, which may be the last one
    of another microbatch (`wraps`).
    """

    def bytes_of(layer: Interval) -> tuple[float, float, float, float, float]:
        """Return what a layer moves, keeps, defers, has inside and computes with."""
        moved = layer_moved(setup, grid, layer, recompute) if offloads else 0.0
        stays = layer_kept(setup, grid, layer, recompute, rows) - moved
        inner = inner_bytes(setup, grid, layer) if setup.is_block(layer) else 0.0
        deferred = layer_deferred(setup, grid, layer) if splits else 0.0
        return moved, stays, deferred, inner, layer_computing(setup, grid, layer, recompute, rows)

    kinds = [setup.first_equal[slice(*layer)] for layer in every]
    of_kind = {kind: bytes_of(layer) for kind, layer in dict(zip(kinds, every, strict=True)).items()}
    moved, stays, deferred, *_ = zip(*(of_kind[kind] for kind in kinds), strict=True)
    hidden = setup.positions * setup.model.hidden_size / grid.x / grid.position_parts * setup.item_bytes
    blocks = [number for number, each in enumerate(moved) if each]
    most = more = behind = 0.0
    for number, kind in reversed(list(enumerate(kinds))):
        *_, inner, computing = of_kind[kind]
        taken = computing + sum(moved[max(0, number - 1) : number + 1])
        most = max(most, taken + more + (inner if splits else 0.0))
        if moved[number]:  # in the forward pass
            before = moved[number - 1] if number > blocks[0] else moved[blocks[-1]] if wraps else 0.0
            again = inner if recompute == "selective" else 0.0
            most = max(most, 2 * hidden + again - behind + moved[number] + before)
        behind += stays[number]
        change = deferred[number] - stays[number]
        more += change * (more_rows if change > 0 else 1.0)
    return RowBytes(sum(stays), sum(moved), sum(deferred), most)


def layer_computing(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str, rows: int = 1) -> float:
    """Return the bytes that a layer computes with and does not keep, for one of `rows` of a rank.

    While it goes backward, gradients of about half of what it keeps are there too; what was computed again is whole.
    While the loss is computed, logits are there more than once.
    """
    kept = layer_kept(setup, grid, layer, "none", rows)
    if layer == setup.head:
        whole, chunk = _logits(setup, grid, rows)
        loss_bytes = setup.stack.loss_bytes.get(setup.item_bytes, 0)
        overlapped = whole * loss_bytes + chunk * (setup.item_bytes + loss_bytes) + setup.positions * LOSS_BYTES
        overlapped = max(kept / 2, overlapped)
    else:
        overlapped = kept / 2
    has_mask = setup.masks_documents and setup.is_block(layer) and is_attention(layer.start)
    mask = setup.positions**2 if has_mask else 0
    if grid.sequence_parallel and layer != EMBEDDING:
        is_whole = recompute == "full"
        overlapped = _whole_hidden_states(setup, grid, layer, is_whole, rows, overlapped)
    return _again_bytes(setup, grid, layer, recompute) + overlapped + mask


def _whole_hidden_states(
    setup: Setup, grid: TensorGrid, layer: Interval, again: bool, rows: int, gradients: float
) -> float:
    """Return the bytes that a block or the head computes with where y cuts positions, for one of `rows` of a rank.

    They are `gradients`, and hidden states of all positions: a product's input, or of what was computed `again` all
    inputs, and the gradient of one. With several rows some are there twice, while their positions are put
    in order or taken apart, when half of the gradients are gone; how often is fitted to tests/ranks/test_memory.py.
    """
    whole = setup.positions * setup.model.hidden_size / grid.x * setup.item_bytes
    if layer == setup.head:  # at the loss, or after it, when a cast of the logits' gradient may be there
        cast = sum(_logits(setup, grid, rows)) * setup.item_bytes if setup.item_bytes < MASTER_BYTES else 0.0
        return max(gradients, cast + (6 if rows > 1 else 3) * whole * (1 - 1 / grid.y))
    if again:
        inputs = sum(branch is not None for branch in setup.branches(layer))
        return gradients + (inputs + 1) * whole * (1 - 1 / grid.y)
    if rows > 1:
        return gradients / 2 + 2.75 * whole
    return gradients + 2 * whole * (1 - 1 / grid.y)


def _again_bytes(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str) -> float:
    """Return the bytes of what a layer computes again that are there at once, for one row of a rank.

    Of operators that follow each other it is the largest result: the input of the last product, or capped scores.
    """
    is_block, stack = setup.is_block(layer), setup.stack
    if recompute == "none" or (recompute == "full" and not is_block and not stack.is_hpctrain):
        return 0.0
    if recompute == "full" or not stack.again_operations:
        return layer_kept(setup, grid, layer, "none")
    if not is_block:
        return 0.0
    attention, _ = setup.branches(layer)
    scores = _core_bytes(setup, grid, attention) if attention and attention.score_cap is not None else 0.0
    return max(scores, inner_bytes(setup, grid, layer))


def _core_bytes(setup: Setup, grid: TensorGrid, attention: Attention) -> float:
    """Return the bytes that attention in one kernel keeps of a row in addition to its operands and its result: sums of
    exponentials; or with a cap scores, their tanh, and exponentials."""
    numbers = setup.positions * attention.heads / grid.y
    return numbers * (STATISTIC_BYTES if attention.score_cap is None else setup.positions * 3 * setup.item_bytes)


def inner_bytes(setup: Setup, grid: TensorGrid, layer: Interval) -> float:
    """Return the bytes of the inner features of a layer, for one row of a rank."""
    _, mlp = setup.branches(layer)
    return setup.positions * mlp.inner / grid.y * setup.item_bytes if mlp else 0.0


def layer_deferred(setup: Setup, grid: TensorGrid, layer: Interval) -> float:
    """Return the bytes that a layer keeps between its input and its weight pass, for one row of a rank: both operands
    of each product that is a weight's gradient."""
    model = setup.model
    hidden = model.hidden_size / grid.x
    if layer == EMBEDDING:
        numbers = hidden
    elif layer == setup.head:
        numbers = hidden + padded_vocabulary(model, grid) / grid.y
    else:
        attention, mlp = setup.branches(layer)
        numbers = 2 * hidden + 2 * sum(heads_on(attention, grid)) if attention else 0.0
        numbers += 2 * hidden + (mlp.inner + mlp.up_size) / grid.y if mlp else 0.0
    return setup.positions * numbers * setup.item_bytes


def _norm_statistics(setup: Setup, norm: Norm) -> float:
    """Return the bytes that a norm keeps of a row apart from its input: the scale of each token, or mean and scale."""
    return setup.positions * STATISTIC_BYTES * (2 if norm.has_bias else 1)


def layer_moved(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str) -> float:
    """Return the bytes of what a layer keeps that an offload moves to host memory, for one row of a rank: all that a
    block keeps but statistics. Other layers keep theirs on the device."""
    if not setup.is_block(layer):
        return 0.0
    kept = layer_kept(setup, grid, layer, recompute)
    if recompute == "full":
        return kept
    given = setup.positions * setup.model.hidden_size / grid.x / grid.position_parts * setup.item_bytes
    for branch in filter(None, setup.branches(layer)):
        norms = [norm for norm in (branch.norm, branch.out_norm) if norm]
        kept -= sum(_norm_statistics(setup, norm) for norm in norms) / grid.position_parts
        if isinstance(branch, Attention) and branch.score_cap is None:
            sums = _core_bytes(setup, grid, branch)
            kept -= 0.0 if moves(sums, given, grid.y) else sums
    return kept


def layer_kept(setup: Setup, grid: TensorGrid, layer: Interval, recompute: str, rows: int = 1) -> float:
    """Return the bytes that a layer keeps for its backward pass, for one of `rows` of a rank.

    For a Megatron block with nothing recomputed: s b h (10 + 24 / t + 5 a s / h t) (Korthikanti et al. 2022).
    """
    model, b = setup.model, setup.item_bytes
    cut = setup.position_parts(grid)
    hidden = setup.positions * model.hidden_size / grid.x
    if layer == EMBEDDING:
        return setup.positions * (2 * INDEX_BYTES + 1)  # ids, and where they are; it makes the first block's input
    if recompute == "full":
        return hidden * setup.gathered_bytes / cut
    if layer == setup.head:
        logits, _ = _logits(setup, grid, rows)
        return (
            hidden * 2 * b / grid.position_parts
            + logits * (b if setup.stack.is_hpctrain else STATISTIC_BYTES)
            + setup.positions * (INDEX_BYTES + STATISTIC_BYTES)  # targets, and logarithms of sums
            + _norm_statistics(setup, model.description.norm) / grid.position_parts
        )
    own = ((branch, branch_kept(setup, grid, branch, recompute)) for branch in setup.branches(layer) if branch)
    return sum(setup.stack.branch_kept(setup, grid, branch, recompute, kept) for branch, kept in own)


def _logits(setup: Setup, grid: TensorGrid, rows: int) -> tuple[float, float]:
    """Return how many logits of each of `rows` a rank keeps, and how many there are besides while it computes.

    All and none, or none and those of as many tokens as it goes through at once.
    """
    columns = padded_vocabulary(setup.model, grid) // grid.y
    at_once = setup.positions
    if setup.stack.is_hpctrain:
        at_once = tokens_at_once(setup.positions, columns, setup.logits_bytes // rows)
    return (0.0, at_once * columns) if at_once < setup.positions else (at_once * columns, 0.0)


def branch_kept(setup: Setup, grid: TensorGrid, branch: Attention | Mlp, recompute: str) -> float:
    """Return the bytes that our engine keeps of a branch, for one row: its input, normed, too; queries, keys, values,
    mixed; gate and up. Selective recomputing drops what is between products."""
    drops, b = recompute == "selective", setup.item_bytes
    hidden = setup.positions * setup.model.hidden_size / grid.x
    norms = [norm for norm in (branch.norm, branch.out_norm) if norm]
    kept = b * (1 + len(norms) - drops) * hidden / setup.position_parts(grid)
    kept += sum(_norm_statistics(setup, norm) for norm in norms) / grid.position_parts
    if isinstance(branch, Mlp):
        return kept + b * setup.positions * branch.inner / grid.y * ((3 if branch.gated else 2) - drops)
    query, key = (setup.positions * features for features in heads_on(branch, grid))
    kept += b * (2 * query + 2 * key)
    if drops:
        return kept + (0.0 if branch.score_cap is not None else _core_bytes(setup, grid, branch))
    kept += b * (query + key) * ((branch.rotary is not None) + (branch.head_norm is not None))
    return kept + _core_bytes(setup, grid, branch)
