"""The parts of an activation that go from rank to rank between tiles, by intersecting intervals.

The activation between two tiles is a rectangle tokens x features: the positions of one row follow those of the row
before it. The part of a rank (`hpctrain.sharding.grid_parts`) says what it has: rows, features, and positions of each
row. Different grids, rows and numbers of ranks on the two sides need nothing special: a section is the intersection of
two parts.

Ranks of a tile that have the same rows, positions and features have a *common part*, whatever axes made the copies.
They share the sending of it. Where they have all positions, are near each other, and a sender is far, each receives
some of the tokens. Then they gather the whole among themselves (`gathers`): one copy crosses the slow link, also of a
single row. Where a tile cuts positions, each rank receives what it has, and gathers nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid_parts import parts_of
from hpctrain.sharding.intervals import Interval, intersections


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


Near = Callable[[int, int], bool]
"""Says whether messages from one rank to another one stay where links are fast."""


def everywhere(_one: int, _other: int) -> bool:
    """All ranks are near each other."""
    return True


class CommonPart(NamedTuple):
    """The rows, positions and features of an activation that some ranks of a tile have alike."""

    tokens: Interval
    """Tokens of the microbatch, as whole rows."""
    features: Interval
    positions: tuple[Interval, ...]
    """The positions of each of these rows, in their order in memory."""
    ranks: tuple[int, ...]

    def is_whole(self, row: RowShape) -> bool:
        """Say whether it has all positions."""
        return self.positions == (Interval(0, row.positions),)


@lru_cache(maxsize=4096)
def common_parts(tile: Tile, row: RowShape) -> tuple[CommonPart, ...]:
    """Return the common parts of an activation that the ranks of a tile have, in the order of their first ranks."""
    together: dict[tuple[Interval, Interval, tuple[Interval, ...]], list[int]] = {}
    for rank, part in zip(tile.ranks, parts_of(tile.tensor), strict=True):
        tokens, features = part.rows(tile.rows).scale(row.positions), part.features(row.hidden_size)
        together.setdefault((tokens, features, part.positions(row.positions)), []).append(rank)
    return tuple(CommonPart(*what, tuple(ranks)) for what, ranks in together.items())


def common_part_of(tile: Tile, rank: int, row: RowShape) -> CommonPart:
    """Return the common part of an activation to which a rank of a tile belongs."""
    return next(common for common in common_parts(tile, row) if rank in common.ranks)


def gathers(plan: Plan, tile: Tile, forward: bool, near: Near, row: RowShape) -> bool:
    """Say whether the ranks of a tile that need the same each receive a part of it, and gather the whole.

    It is about activations (`forward`) or gradients of a microbatch. They gather where they are near each other, and
    some sender is far from them. Where the tile or a sender cuts positions, they do not gather.
    """
    sources = plan.upstream(tile) if forward else plan.downstream(tile)
    own = common_parts(tile, row)
    if len(own[0].ranks) == 1:
        return False
    if not all(common.is_whole(row) for each in (tile, *sources) for common in common_parts(each, row)):
        return False
    first = tile.ranks[0]
    if all(near(first, rank) or source.ranks == tile.ranks for source in sources for rank in source.ranks):
        return False  # among them the tile's own ranks, which have it
    return all(near(common.ranks[0], rank) for common in own for rank in common.ranks)


def _between(source: Tile, target: Tile, receiver: int, row: RowShape, is_gathered: bool) -> Iterator[Transfer]:
    """Yield what `receiver` is sent by the ranks of `source`.

    Ranks of a common part share the sending: the i-th of n senders sends what the i-th n-th of receivers needs, or a
    share of it. Receivers are the ranks that need some of it for the same rows and features. Each receiver gets the
    whole of its part once, or the share that it brings to a gather.
    """
    needed = common_part_of(target, receiver, row)
    tokens = needed.tokens
    if is_gathered:
        place = needed.ranks.index(receiver)
        tokens = tokens.part(Interval(place, place + 1), len(needed.ranks))
    for theirs in common_parts(source, row):
        shared_tokens, features = tokens.intersect(theirs.tokens), needed.features.intersect(theirs.features)
        sections = intersections(needed.positions, theirs.positions)
        if not (shared_tokens.size and features.size and sections):
            continue
        receivers = [
            rank
            for other in common_parts(target, row)
            if other[:2] == needed[:2] and intersections(other.positions, theirs.positions)
            for rank in other.ranks
        ]
        number_of = len(theirs.ranks)
        for number, share in _senders(number_of, len(receivers), receivers.index(receiver)):
            sender = theirs.ranks[number]
            if needed.is_whole(row) and theirs.is_whole(row):
                if (section := shared_tokens.part(share, number_of)).size:
                    yield Transfer(sender, receiver, section, features)
                continue
            for section in sections:
                if (positions := section.part(share, number_of)).size:
                    yield _of_positions(sender, receiver, shared_tokens, features, positions, row)


def _of_positions(
    sender: int, receiver: int, tokens: Interval, features: Interval, positions: Interval, row: RowShape
) -> Transfer:
    """Return the message of some positions of rows; those of a single row are consecutive tokens."""
    if positions.size == row.positions:
        return Transfer(sender, receiver, tokens, features)
    if tokens.size == row.positions:
        return Transfer(sender, receiver, positions.shift(tokens.start), features)
    return Transfer(sender, receiver, tokens, features, PositionCut(positions, row.positions))


def _senders(num_senders: int, num_receivers: int, place: int) -> list[tuple[int, Interval]]:
    """Return which of some senders, who have the same, send to one of several receivers; and of what they have in
    common, cut into as many parts as there are senders, the parts of each."""
    ours = Interval(0, num_senders).shift(place * num_senders)
    shares = ((n, ours.intersect(Interval(n, n + 1).scale(num_receivers))) for n in range(num_senders))
    return [(number, share.shift(-ours.start)) for number, share in shares if share.size]


def receives(
    plan: Plan, tile: Tile, rank: int, row: RowShape, forward: bool, near: Near = everywhere
) -> list[Transfer]:
    """Return what a rank of a tile receives of a microbatch for it: activations (forward) or their gradients, in order
    of senders."""
    sources = plan.upstream(tile) if forward else plan.downstream(tile)
    is_gathered = gathers(plan, tile, forward, near, row)
    result = (t for source in sources for t in _between(source, tile, rank, row, is_gathered))
    return sorted(result, key=lambda t: t.sender)


def sends(plan: Plan, tile: Tile, rank: int, row: RowShape, forward: bool, near: Near = everywhere) -> list[Transfer]:
    """Return what a rank of a tile sends of a microbatch from it: activations (forward) or their gradients, in order of
    receivers."""
    result = []
    for target in plan.downstream(tile) if forward else plan.upstream(tile):
        is_gathered = gathers(plan, target, forward, near, row)
        for receiver in target.ranks:
            result += _between(tile, target, receiver, row, is_gathered)
    return sorted((t for t in result if t.sender == rank), key=lambda t: t.receiver)
