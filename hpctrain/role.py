"""What one rank of a plan takes part in: its groups and its messages. Pure: needs neither MPI nor torch.

Everything is listed in one plan-wide order (axes, holders by unit, channels by pair), so that ranks that make their
groups one after the other never wait in a circle.
"""

from dataclasses import dataclass

from hpctrain.holders import Holdings, holdings_of
from hpctrain.job import Model
from hpctrain.plan import Plan, Tile
from hpctrain.schedule import channel_depth
from hpctrain.transfers import Transfer, receives, sends


@dataclass(frozen=True)
class Transfers:
    """A rank's messages of a microbatch."""

    receive_activation: list[Transfer]
    send_activation: list[Transfer]
    receive_gradient: list[Transfer]
    send_gradient: list[Transfer]


@dataclass(frozen=True)
class ChannelNeed:
    """What a channel to one peer must hold."""

    peer: int
    elements: int
    """Of the largest message: rows x hidden features; each is `positions` numbers."""
    depth: int
    """Messages under way at once."""


@dataclass(frozen=True)
class Role:
    """One rank's part in a plan."""

    rank: int
    tile: Tile
    axes: dict[str, tuple[int, ...]]
    """The ranks along each axis of the tensor grid: x, y, z."""
    held: Holdings
    """The weights that this rank holds, by the ranks that hold the same."""
    transfers: tuple[Transfers, ...]
    """Those of microbatch m are at m % period: where rows go by turns, pieces do."""
    channels: list[ChannelNeed]


def role_of(model: Model, plan: Plan, rank: int, bucket_bytes: int | None = None) -> Role:
    """Return what a rank takes part in; `bucket_bytes` as in `holdings_of`.

    Takes time and memory by the rank's own groups, not by all pairs of ranks."""
    tile = plan.tile_of(rank)
    made = {
        m: Transfers(
            receive_activation=receives(plan, rank, model.hidden_size, forward=True, microbatch=m),
            send_activation=sends(plan, rank, model.hidden_size, forward=True, microbatch=m),
            receive_gradient=receives(plan, rank, model.hidden_size, forward=False, microbatch=m),
            send_gradient=sends(plan, rank, model.hidden_size, forward=False, microbatch=m),
        )
        for m in set(plan.cut_like)
    }
    transfers = tuple(made[m] for m in plan.cut_like)
    axes = {axis: tuple(tile.axis_ranks(axis, rank)) for axis in "xyz"}
    held = holdings_of(model, plan, rank, bucket_bytes)
    return Role(rank, tile, axes, held, transfers, _channels(plan, rank, transfers))


def _channels(plan: Plan, rank: int, transfers: tuple[Transfers, ...]) -> list[ChannelNeed]:
    largest: dict[int, int] = {}
    for of_microbatch in transfers:
        for name, pieces in vars(of_microbatch).items():
            for piece in pieces:
                peer = piece.sender if name.startswith("receive") else piece.receiver
                largest[peer] = max(largest.get(peer, 0), piece.rows.size * piece.features.size)
    tile = plan.tile_of(rank)
    pairs = sorted(largest, key=lambda peer: (min(rank, peer), max(rank, peer)))
    return [ChannelNeed(peer, largest[peer], channel_depth(plan, tile, plan.tile_of(peer))) for peer in pairs]
