"""Which piece of an activation goes from which rank to which, by intersecting intervals.

The activation between two tiles is a rectangle tokens x features: the positions of one row follow those of the row
before it. A rank at (x, y, z) of a tile holds the tokens of the z-th part of the tile's rows and the x-th part of the
features, and so do the other y. Different grids, rows and numbers of ranks on the two sides need nothing special: a
section is where two parts meet.

The y of a tile need the same. Where they are near each other and somebody who sends is far, each receives a part of the
tokens, and they gather the whole among themselves (`gathers`): one copy crosses the slow link, also of a single row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.intervals import Interval, cut_evenly


class RowShape(NamedTuple):
    """The size of an activation for each row."""

    positions: int
    hidden_size: int


@dataclass(frozen=True)
class Transfer:
    """One message: tokens (of the microbatch) x features (of the hidden size) from a rank to another one."""

    sender: int
    receiver: int
    tokens: Interval
    features: Interval

    @property
    def num_elements(self) -> int:
        return self.tokens.size * self.features.size


def owned_slice(tile: Tile, rank: int, row: RowShape) -> tuple[Interval, Interval]:
    """Return the tokens and the features of a microbatch's activation that a rank of the tile holds."""
    x, _, z = tile.coordinate(rank)
    return tile.rows_at(z).scale(row.positions), cut_evenly(row.hidden_size, tile.tensor.x)[x]


Near = Callable[[int, int], bool]
"""Whether what goes from one rank to another one stays where links are fast."""


def everywhere(_one: int, _other: int) -> bool:
    """All ranks are near each other."""
    return True


def gathers(plan: Plan, tile: Tile, forward: bool, near: Near) -> bool:
    """Say whether the y of a tile receive pieces of what they need and gather the whole: of activations (forward) or
    gradients of a microbatch.

    That is where all y of each x and z are near each other, and some rank that sends is far from them.
    """
    y, sources = tile.tensor.y, plan.upstream(tile) if forward else plan.downstream(tile)
    if y == 1:
        return False
    first = tile.ranks[0]
    if all(near(first, rank) or source.ranks == tile.ranks for source in sources for rank in source.ranks):
        return False  # among them the tile's own ranks, which have it
    return all(near(tile.ranks[i - i % y], rank) for i, rank in enumerate(tile.ranks))


def _between(source: Tile, target: Tile, receiver: int, row: RowShape, is_gathered: bool) -> list[Transfer]:
    """Return what `receiver` is sent by the ranks of `source`.

    The y of a tile hold the same. Each receives the whole of its part once, or the piece that it brings to a gather,
    and they share the sending: of what two parts have in common, the i-th of n senders brings what the i-th n-th of the
    receivers needs, or a piece of it.
    """
    tokens, features = owned_slice(target, receiver, row)
    _, target_y, _ = target.coordinate(receiver)
    if is_gathered:
        tokens = tokens.part(Interval(target_y, target_y + 1), target.tensor.y)
    ours = Interval(0, source.tensor.y).shift(target_y * source.tensor.y)
    senders = [(y, ours.intersect(Interval(y, y + 1).scale(target.tensor.y))) for y in range(source.tensor.y)]
    senders = [(y, part.shift(-ours.start)) for y, part in senders if part.size]
    result = []
    for z in range(source.tensor.z):
        for x in range(source.tensor.x):
            their_tokens, their_features = owned_slice(source, source.rank_at(x, 0, z), row)
            shared_tokens, shared_features = tokens.intersect(their_tokens), features.intersect(their_features)
            if not (shared_tokens.size and shared_features.size):
                continue
            sections = ((y, shared_tokens.part(part, ours.size)) for y, part in senders)
            result += [
                Transfer(source.rank_at(x, y, z), receiver, section, shared_features)
                for y, section in sections
                if section.size
            ]
    return result


def receives(
    plan: Plan, tile: Tile, rank: int, row: RowShape, forward: bool, near: Near = everywhere
) -> list[Transfer]:
    """Return what a rank of a tile receives of a microbatch for it: activations (forward) or their gradients, in order
    of senders."""
    sources = plan.upstream(tile) if forward else plan.downstream(tile)
    is_gathered = gathers(plan, tile, forward, near)
    result = (t for source in sources for t in _between(source, tile, rank, row, is_gathered))
    return sorted(result, key=lambda t: t.sender)


def sends(plan: Plan, tile: Tile, rank: int, row: RowShape, forward: bool, near: Near = everywhere) -> list[Transfer]:
    """Return what a rank of a tile sends of a microbatch from it: activations (forward) or their gradients, in order of
    receivers."""
    result = []
    for target in plan.downstream(tile) if forward else plan.upstream(tile):
        is_gathered = gathers(plan, target, forward, near)
        for receiver in target.ranks:
            result += _between(tile, target, receiver, row, is_gathered)
    return sorted((t for t in result if t.sender == rank), key=lambda t: t.receiver)
