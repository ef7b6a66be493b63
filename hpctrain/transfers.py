"""Which piece of an activation goes from which rank to which, by intersecting intervals.

The activation between two tiles is a rectangle rows x features (for all positions of a sequence). A rank at
(x, y, z) of a tile holds the z-th part of the tile's rows and the x-th part of the features, and so do the other y.
Unlike grids, rows and numbers of ranks on the two sides need nothing special: a piece is where two parts meet.

The y of a tile need the same. Where they are near each other and somebody who sends is far, each receives a piece,
over a NIC of its own, and they gather the whole among themselves (`gathers`): over the slow link goes one copy.
"""

from collections.abc import Callable
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


def held(tile: Tile, rank: int, hidden_size: int) -> tuple[Interval, Interval]:
    """Return the rows and the features of a microbatch's activation that a rank of the tile holds."""
    x, _, z = tile.coordinate(rank)
    return tile.rows_at(z), cut_evenly(hidden_size, tile.tensor.x)[x]


Near = Callable[[int, int], bool]
"""Whether what goes from one rank to another one stays where links are fast."""


def everywhere(_one: int, _other: int) -> bool:
    """All ranks are near each other."""
    return True


def gathers(plan: Plan, tile: Tile, forward: bool, near: Near) -> bool:
    """Say whether the y of a tile receive pieces of what they need and gather the whole: of activations (forward) or
    gradients of a microbatch.

    That is where all y of each x and z are near each other, some rank that sends is far from them, and there are rows
    for all.
    """
    y, z = tile.tensor.y, tile.tensor.z
    sources = plan.upstream(tile) if forward else plan.downstream(tile)
    if y == 1 or min(tile.rows_at(each).size for each in range(z)) < y:
        return False
    first = tile.ranks[0]
    if all(near(first, rank) or source.ranks == tile.ranks for source in sources for rank in source.ranks):
        return False  # among them the tile's own ranks, which have it
    return all(near(tile.ranks[i - i % y], rank) for i, rank in enumerate(tile.ranks))


def gathered_rows(tile: Tile, rank: int) -> Interval:
    """Return which of the rows that a rank of the tile holds it receives itself, where its y gather."""
    _, y, z = tile.coordinate(rank)
    rows = tile.rows_at(z)
    return cut_evenly(rows.size, tile.tensor.y)[y].shift(rows.start)


def _between(source: Tile, target: Tile, receiver: int, hidden_size: int, is_gathered: bool) -> list[Transfer]:
    """Return what `receiver` is sent by the ranks of `source`.

    The y of a tile hold the same. Each receives the whole of its part once, or the piece that it brings to a gather,
    and they share the sending: of what two parts have in common, the i-th of n senders brings what the i-th n-th of the
    receivers needs, or a piece of it.
    """
    rows, features = held(target, receiver, hidden_size)
    if is_gathered:
        rows = gathered_rows(target, receiver)
    ours = Interval(0, source.tensor.y).shift(target.coordinate(receiver)[1] * source.tensor.y)
    senders = [(y, ours.intersect(Interval(y, y + 1).scale(target.tensor.y))) for y in range(source.tensor.y)]
    senders = [(y, part.shift(-ours.start)) for y, part in senders if part.size]
    found = []
    for z in range(source.tensor.z):
        for x in range(source.tensor.x):
            their_rows, their_features = held(source, source.rank_at(x, 0, z), hidden_size)
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


def receives(
    plan: Plan, tile: Tile, rank: int, hidden_size: int, forward: bool, near: Near = everywhere
) -> list[Transfer]:
    """Return what a rank of a tile receives of a microbatch for it: activations (forward) or their gradients, in order
    of senders."""
    sources = plan.upstream(tile) if forward else plan.downstream(tile)
    is_gathered = gathers(plan, tile, forward, near)
    found = (t for source in sources for t in _between(source, tile, rank, hidden_size, is_gathered))
    return sorted(found, key=lambda t: t.sender)


def sends(
    plan: Plan, tile: Tile, rank: int, hidden_size: int, forward: bool, near: Near = everywhere
) -> list[Transfer]:
    """Return what a rank of a tile sends of a microbatch from it: activations (forward) or their gradients, in order of
    receivers."""
    found = []
    for target in plan.downstream(tile) if forward else plan.upstream(tile):
        is_gathered = gathers(plan, target, forward, near)
        for receiver in target.ranks:
            found += _between(tile, target, receiver, hidden_size, is_gathered)
    return sorted((t for t in found if t.sender == rank), key=lambda t: t.receiver)
