"""The groups and the messages that one rank of a plan takes part in. Pure: needs neither MPI nor torch.

Everything is listed in one plan-wide order (axes, holders by unit, channels by pair). So ranks that create their
groups one after the other never wait in a circle.
"""

from collections import Counter
from dataclasses import dataclass

from hpctrain.config.job import Model
from hpctrain.plan.holdings import Holding, holding_of
from hpctrain.plan.schedule import RECEIVING, SENDING, Action, channel_depth
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.transfers import Near, RowShape, Transfer, everywhere, gathers, receives, sends
from hpctrain.sharding.grid import GROUPS


@dataclass(frozen=True)
class Transfers:
    """A rank's messages of a microbatch, to and from one of its tiles, by what sends or receives them."""

    messages: dict[Action, list[Transfer]]
    gathers: dict[Action, bool]
    """Whether ranks of the tile that need the same each receive a part of it and gather the whole, by the receiving
    instruction."""


@dataclass(frozen=True)
class ChannelNeed:
    """The buffers that a channel to one peer needs.

    Two ranks have a channel for each two neighbouring tiles of theirs, as messages of different pairs need not come in
    one order.
    """

    peer: int
    item: int
    """First item of the tile that follows: activations go to it, gradients come from it."""
    elements: int
    """Number of elements of the largest message."""
    depth: int
    """Maximum number of messages in flight at once."""


@dataclass(frozen=True)
class Role:
    """One rank's part in a plan."""

    rank: int
    tiles: tuple[Tile, ...]
    """Tiles of the rank, in the order of items."""
    axes: dict[str, tuple[int, ...]]
    """The ranks along each axis of the tensor grid."""
    holding: Holding
    """The weights that this rank has, by the ranks that store the same."""
    transfers: tuple[Transfers, ...]
    """Messages of each tile."""
    channels: list[ChannelNeed]


def role_of(
    model: Model, positions: int, plan: Plan, rank: int, bucket_bytes: int | None = None, near: Near = everywhere
) -> Role:
    """Return what a rank takes part in, with rows of so many positions.

    `bucket_bytes` is that of `holding_of`, `near` that of `hpctrain.plan.transfers`.

    Takes time and memory by the rank's own groups, not by all pairs of ranks."""
    tiles = plan.tiles_of(rank)
    row = RowShape(positions, model.hidden_size)
    transfers = tuple(_transfers(row, plan, tile, rank, near) for tile in tiles)
    axes = {name: tiles[0].axis_ranks(along, rank) for name, along in GROUPS.items()}
    held = holding_of(model, plan, rank, bucket_bytes)
    return Role(rank, tiles, axes, held, transfers, _channels(plan, rank, transfers))


def _transfers(row: RowShape, plan: Plan, tile: Tile, rank: int, near: Near) -> Transfers:
    messages, gathered = {}, {}
    for forward, receive, send in zip((True, False), RECEIVING, SENDING, strict=True):
        messages[receive] = receives(plan, tile, rank, row, forward, near)
        messages[send] = sends(plan, tile, rank, row, forward, near)
        gathered[receive] = gathers(plan, tile, forward, near, row)
    return Transfers(messages, gathered)


def _channels(plan: Plan, rank: int, transfers: tuple[Transfers, ...]) -> list[ChannelNeed]:
    largest: dict[tuple[int, int], int] = {}
    depth: dict[tuple[int, int], int] = {}
    for tile, of_tile in zip(plan.tiles_of(rank), transfers, strict=True):
        for action, messages in of_tile.messages.items():
            is_before = action in (Action.RECEIVE_ACTIVATION, Action.SEND_GRADIENT)
            item = tile.items.start if is_before else tile.items.stop
            near = (plan.upstream if is_before else plan.downstream)(tile)
            peers = Counter(transfer.sender if action in RECEIVING else transfer.receiver for transfer in messages)
            del peers[rank]  # tiles of one rank hand over to each other
            for peer, count in peers.items():  # several messages, where both cut positions into unlike intervals
                other = next(each for each in near if peer in each.ranks)
                depth[peer, item] = max(depth.get((peer, item), 0), count * channel_depth(plan, tile, other))
            for transfer in messages:
                peer = transfer.sender if action in RECEIVING else transfer.receiver
                if peer != rank:
                    largest[peer, item] = max(largest.get((peer, item), 0), transfer.num_elements)
    pairs = sorted(largest, key=lambda key: (min(rank, key[0]), max(rank, key[0]), key[1]))
    return [ChannelNeed(*key, largest[key], depth[key]) for key in pairs]
