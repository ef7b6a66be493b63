"""The parts of an activation that go from rank to rank between tiles, by intersecting intervals.

The activation between two tiles is a rectangle tokens x features: the positions of one row follow those of the row
before it. A rank at (x, y, z) of a tile holds the tokens of the z-th part of the tile's rows and the x-th part of the
features. So do the other y. Different grids, rows and numbers of ranks on the two sides need nothing special: a
section is the intersection of two parts.

The y of a tile need the same. Where they are near each other and somebody who sends is far, each receives a part of the
tokens, and they gather the whole among themselves (`gathers`): one copy crosses the slow link, also of a single row.

A tile that is sequence parallel has its hidden states cut by positions over y: each y holds, sends and receives its own
positions of each row, a y-th of the bytes, and gathers nothing. What it has in common with a tile whose y hold all is
the same intersection, of positions too.
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


class PositionCut(NamedTuple):
    """The same positions of each of several rows."""

    positions: Interval
    row_length: int


@dataclass(frozen=True)
class Transfer:
    """One message: tokens (of the microbatch) x features (of the hidden size) from a rank to another one."""

    sender: int
    receiver: int
    tokens: Interval
    features: Interval
    cut: PositionCut | None = None
    """What of these tokens, which are of whole rows, it has; None: all."""

    @property
    def num_tokens(self) -> int:
        if self.cut is None:
            return self.tokens.size
        return self.tokens.size // self.cut.row_length * self.cut.positions.size

    @property
    def num_elements(self) -> int:
        return self.num_tokens * self.features.size


def owned_slice(tile: Tile, rank: int, row: RowShape) -> tuple[Interval, Interval]:
    """Return the tokens and the features of a microbatch's activation that a rank of the tile holds; of the tokens
    only some, where y cuts positions (`owned_positions`)."""
    x, _, z = tile.coordinate(rank)
    return tile.rows_at(z).scale(row.positions), cut_evenly(row.hidden_size, tile.tensor.x)[x]


def owned_positions(tile: Tile, rank: int, row: RowShape) -> Interval:
    """Return the positions of each of its rows that a rank of the tile holds."""
    _, y, _ = tile.coordinate(rank)
    return cut_evenly(row.positions, tile.tensor.position_parts)[y if tile.tensor.sequence_parallel else 0]


Near = Callable[[int, int], bool]
"""Whether what goes from one rank to another one stays where links are fast."""


def everywhere(_one: int, _other: int) -> bool:
    """All ranks are near each other."""
    return True


def gathers(plan: Plan, tile: Tile, forward: bool, near: Near) -> bool:
    """Say whether the ranks along y of a tile receive parts of what they need and gather the whole: of activations
    (forward) or gradients of a microbatch.

    That is where all y of each x and z are near each other, and some rank that sends is far from them. Where positions
    are cut over y, here or at who sends, what each receives is not what the others do.
    """
    y, sources = tile.tensor.y, plan.upstream(tile) if forward else plan.downstream(tile)
    if y == 1 or any(each.tensor.sequence_parallel for each in (tile, *sources)):
        return False
    first = tile.ranks[0]
    if all(near(first, rank) or source.ranks == tile.ranks for source in sources for rank in source.ranks):
        return False  # among them the tile's own ranks, which have it
    return all(near(tile.ranks[i - i % y], rank) for i, rank in enumerate(tile.ranks))


def _between(source: Tile, target: Tile, receiver: int, row: RowShape, is_gathered: bool) -> list[Transfer]:
    """Return what `receiver` is sent by the ranks of `source`.

    The ranks along y of a tile hold the same. Each receives the whole of its part once, or the share that it brings to
    a gather. They share the sending: of what two parts have in common, the i-th of n senders sends what the i-th n-th
    of the receivers needs, or a share of it.
    """
    if source.tensor.sequence_parallel or target.tensor.sequence_parallel:
        return _between_cut(source, target, receiver, row)
    tokens, features = owned_slice(target, receiver, row)
    _, target_y, _ = target.coordinate(receiver)
    if is_gathered:
        tokens = tokens.part(Interval(target_y, target_y + 1), target.tensor.y)
    senders = _senders(source, target, target_y)
    result = []
    for z in range(source.tensor.z):
        for x in range(source.tensor.x):
            their_tokens, their_features = owned_slice(source, source.rank_at(x, 0, z), row)
            shared_tokens, shared_features = tokens.intersect(their_tokens), features.intersect(their_features)
            if not (shared_tokens.size and shared_features.size):
                continue
            sections = ((y, shared_tokens.part(part, source.tensor.y)) for y, part in senders)
            result += [
                Transfer(source.rank_at(x, y, z), receiver, section, shared_features)
                for y, section in sections
                if section.size
            ]
    return result


def _senders(source: Tile, target: Tile, target_y: int) -> list[tuple[int, Interval]]:
    """Return which y of a source send to one of a target, all of which hold the same; and of what they have in common,
    cut into as many parts as the source has y, the parts of each."""
    ours = Interval(0, source.tensor.y).shift(target_y * source.tensor.y)
    senders = [(y, ours.intersect(Interval(y, y + 1).scale(target.tensor.y))) for y in range(source.tensor.y)]
    return [(y, part.shift(-ours.start)) for y, part in senders if part.size]


def _between_cut(source: Tile, target: Tile, receiver: int, row: RowShape) -> list[Transfer]:
    """Return what `_between` does where positions are cut over y at one end or at both."""
    tokens, features = owned_slice(target, receiver, row)
    positions, (_, target_y, _) = owned_positions(target, receiver, row), target.coordinate(receiver)
    if source.tensor.sequence_parallel:
        sections = [(y, owned_positions(source, source.rank_at(0, y, 0), row)) for y in range(source.tensor.y)]
    else:
        senders = _senders(source, target, target_y)
        sections = [(y, positions.part(part, source.tensor.y)) for y, part in senders]
    result = []
    for z in range(source.tensor.z):
        for x in range(source.tensor.x):
            their_tokens, their_features = owned_slice(source, source.rank_at(x, 0, z), row)
            rows, shared_features = tokens.intersect(their_tokens), features.intersect(their_features)
            for y, section in sections:
                shared = positions.intersect(section)
                if not (rows.size and shared_features.size and shared.size):
                    continue
                cut = None if shared.size == row.positions else PositionCut(shared, row.positions)
                what = rows
                if cut and rows.size == row.positions:  # of a single row they are consecutive
                    what, cut = shared.shift(rows.start), None
                result.append(Transfer(source.rank_at(x, y, z), receiver, what, shared_features, cut))
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
