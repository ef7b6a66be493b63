"""Which piece of an activation goes from which rank to which, by intersecting intervals.

The activation between two tiles is a rectangle rows x features (for all positions of a sequence). A rank at
(x, y, z) of a tile holds the z-th part of the tile's rows and the x-th part of the features, and so do the other y.
Unlike grids, rows and numbers of ranks on the two sides need nothing special: a piece is where two parts meet. Where
tiles have other rows by turns, each microbatch of the plan's period has pieces of its own.
"""

from dataclasses import dataclass

from hpctrain.intervals import Interval, cut_evenly
from hpctrain.plan import Plan, Tile


@dataclass(frozen=True)
class Transfer:
    """One message: rows (of the microbatch) x features (of the hidden size) from a rank to another one."""

    sender: int
    receiver: int
    rows: Interval
    features: Interval


def held(tile: Tile, rank: int, hidden_size: int, microbatch: int) -> tuple[Interval, Interval]:
    """Return the rows and the features of a microbatch's activation that a rank of the tile holds."""
    x, _, z = tile.coordinate(rank)
    return tile.rows_at(z, microbatch), cut_evenly(hidden_size, tile.tensor.x)[x]


def _between(source: Tile, target: Tile, receiver: int, hidden_size: int, microbatch: int) -> list[Transfer]:
    """Return what `receiver` needs from the ranks of `source`.

    The y of a tile hold the same. Each receives the whole of its part once, and they share the sending: of what two
    parts have in common, the i-th of n senders brings what the i-th n-th of the receivers needs, or a piece of it.
    """
    rows, features = held(target, receiver, hidden_size, microbatch)
    ours = Interval(0, source.tensor.y).shift(target.coordinate(receiver)[1] * source.tensor.y)
    senders = [(y, ours.intersect(Interval(y, y + 1).scale(target.tensor.y))) for y in range(source.tensor.y)]
    senders = [(y, part.shift(-ours.start)) for y, part in senders if part.size]
    found = []
    for z in range(source.tensor.z):
        for x in range(source.tensor.x):
            their_rows, their_features = held(source, source.rank_at(x, 0, z), hidden_size, microbatch)
            shared_rows, shared_features = rows.intersect(their_rows), features.intersect(their_features)
            if not (shared_rows.size and shared_features.size):
                continue
            by_rows = shared_rows.size >= len(senders)
            for y, part in senders:
                piece_rows = shared_rows.part(part, ours.size) if by_rows else shared_rows
                piece_features = shared_features if by_rows else shared_features.part(part, ours.size)
                if piece_rows.size and piece_features.size:
                    found.append(Transfer(source.rank_at(x, y, z), receiver, piece_rows, piece_features))
    return found


def receives(plan: Plan, tile: Tile, rank: int, hidden_size: int, forward: bool, microbatch: int) -> list[Transfer]:
    """Return what a rank of a tile receives of a microbatch for it: activations (forward) or their gradients, in order
    of senders."""
    sources = plan.upstream(tile, microbatch) if forward else plan.downstream(tile, microbatch)
    found = (t for source in sources for t in _between(source, tile, rank, hidden_size, microbatch))
    return sorted(found, key=lambda t: t.sender)


def sends(plan: Plan, tile: Tile, rank: int, hidden_size: int, forward: bool, microbatch: int) -> list[Transfer]:
    """Return what a rank of a tile sends of a microbatch from it: activations (forward) or their gradients, in order of
    receivers."""
    targets = plan.downstream(tile, microbatch) if forward else plan.upstream(tile, microbatch)
    found = (t for target in targets for r in target.ranks for t in _between(tile, target, r, hidden_size, microbatch))
    return sorted((t for t in found if t.sender == rank), key=lambda t: t.receiver)
