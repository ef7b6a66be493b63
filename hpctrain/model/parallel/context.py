"""Attention over rows whose positions c cuts: keys and values are gathered, or sent to those that see them, or heads
are exchanged for positions.

| way                 | a rank attends with                       | c moves                          |
|---------------------|-------------------------------------------|----------------------------------|
| gathered            | its queries, keys and values of all ranks | keys and values, to every rank   |
| sent                | its queries, keys and values that it sees | those to the ranks that see them |
| exchanged (Ulysses) | all positions of a c-th of the heads      | each head once, and the result   |

Ulysses is of Jacobs et al. 2023.

Shapes: a rank's own [rows, heads, its positions, head size]; with all positions [rows, heads, positions, head size].
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch.autograd import Function

from hpctrain.model.parallel.axes import ONE_RANK, Axes, Axis, PendingWork
from hpctrain.model.recompute import Dropping
from hpctrain.sharding.intervals import Interval, cut_evenly, intersections, place_in, seen_by_each


class Seen(NamedTuple):
    """The tensors that a rank computes attention with. They are held until then, if they are computed again later."""

    heads: Sequence[torch.Tensor]
    """Queries, keys and values."""
    positions: Sequence[Interval]
    """The positions of the queries."""
    key_positions: Sequence[Interval]
    """The positions of keys and values: all that the queries see are among them."""
    restore: Callable[[torch.Tensor], torch.Tensor] = lambda mixed: mixed
    """Returns attention's result for this rank's own positions, all heads."""
    held: object = None


Contexts = Sequence[Sequence[Interval]]
"""The positions of a row that each rank of c has."""


class _ByRank:
    """An empty flat tensor, and in it a tensor for each rank, one after the other."""

    def __init__(self, like: torch.Tensor, shapes: Iterable[Sequence[int]]):
        shapes = list(shapes)
        bounds = itertools.accumulate(map(math.prod, shapes), initial=0)
        self.cuts = list(itertools.starmap(Interval, itertools.pairwise(bounds)))
        self.flat = like.new_empty(self.cuts[-1].stop)
        self.tensors = [self.flat[slice(*cut)].view(shape) for cut, shape in zip(self.cuts, shapes, strict=True)]

    @classmethod
    def by_positions(cls, like: torch.Tensor, contexts: Contexts) -> Self:
        """Make it for keys and values like these, [kinds, rows, positions, heads, head size]."""
        kinds, rows, _, *heads = like.shape
        return cls(like, [(kinds, rows, _size(of_rank), *heads) for of_rank in contexts])

    def intervals(self, contexts: Contexts, among: Sequence[Interval]) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield each interval of positions that a rank has: what the rank has of it, and its place among others."""
        for of_rank, intervals in zip(self.tensors, contexts, strict=True):
            for interval in intervals:
                yield of_rank[:, :, slice(*place_in(intervals, interval))], slice(*place_in(among, interval))

    def filled(self, contexts: Contexts, source: torch.Tensor, among: Sequence[Interval]) -> Self:
        """Copy to each rank's tensor its positions of a tensor, which has those of some intervals; return this."""
        for of_rank, place in self.intervals(contexts, among):
            of_rank.copy_(source[:, :, place])
        return self


class _Moves(NamedTuple):
    """The positions of keys and values that a rank of c sends and receives."""

    own: Sequence[Interval]
    seen: Sequence[Interval]
    """Those that it receives from all ranks, itself among them: they are what its own positions see."""
    received: Contexts
    """Those that it receives from each rank."""
    sent: Contexts | None
    """Those that each rank receives from it; None: all ranks receive all, which is a gather."""

    @classmethod
    def of(cls, rank: int, contexts: Contexts, seen: Contexts) -> Self:
        own, here = contexts[rank], seen[rank]
        is_gather = all(_size(each) == sum(map(_size, contexts)) for each in seen)
        received = [intersections(of_rank, here) for of_rank in contexts]
        return cls(own, here, received, None if is_gather else [intersections(own, of_rank) for of_rank in seen])


class _Gathering:
    """Keys and values of some heads, while they or their gradients are moved over c."""

    def __init__(self, c: Axis, moves: _Moves):
        self._c, self._moves = c, moves
        self._work: PendingWork = ONE_RANK
        self._arriving: _ByRank | None = None

    def start(self, own: torch.Tensor) -> None:
        """Start to receive from all ranks what this one sees."""
        own_positions, _, received, sent = self._moves
        self._arriving = arriving = _ByRank.by_positions(own, received)
        if sent is None:
            arriving.tensors[self._c.rank].copy_(own)
            self._work = self._c.start_all_gather(arriving.flat, arriving.cuts)
        else:
            self._exchange(_ByRank.by_positions(own, sent).filled(sent, own, own_positions), arriving)

    def finish(self) -> torch.Tensor:
        """Return the keys and values of all positions that this rank sees, in order."""
        arriving, like = self._arrived()
        kinds, rows, _, *heads = like.shape
        whole = like.new_empty(kinds, rows, _size(self._moves.seen), *heads)
        for of_rank, place in arriving.intervals(self._moves.received, self._moves.seen):
            whole[:, :, place] = of_rank
        return whole

    def again(self, own: torch.Tensor) -> torch.Tensor:
        """Return what `finish` does, without overlap."""
        self.start(own)
        return self.finish()

    def start_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Start to sum the gradients of this rank's keys and values; return a tensor with the shape of the sum."""
        own_positions, seen, received, sent = self._moves
        leaving = _ByRank.by_positions(gradient, received).filled(received, gradient, seen)
        kinds, rows, _, *heads = gradient.shape
        shape = (kinds, rows, _size(own_positions), *heads)
        if sent is None:
            own = gradient.new_empty(shape)
            self._work = self._c.start_reduce_scatter(leaving.flat, own, leaving.cuts)
            return own
        self._arriving = _ByRank.by_positions(gradient, sent)
        self._exchange(leaving, self._arriving)
        return gradient.new_empty(()).expand(shape)  # it is made when all has arrived

    def finish_back(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        if self._moves.sent is None:
            self._work.wait()
            return own
        arriving, _ = self._arrived()
        total = own.new_zeros(own.shape, dtype=torch.promote_types(own.dtype, torch.float32))
        for of_rank, place in arriving.intervals(self._moves.sent, self._moves.own):
            total[:, :, place] += of_rank
        return total.to(own.dtype)

    def _exchange(self, leaving: _ByRank, arriving: _ByRank) -> None:
        self._work = self._c.start_all_to_all(leaving.flat, arriving.flat, leaving.cuts, arriving.cuts)

    def _arrived(self) -> tuple[_ByRank, torch.Tensor]:
        arriving, self._arriving = self._arriving, None
        assert arriving is not None, "it was started"
        self._work.wait()
        return arriving, arriving.tensors[0]


def _size(intervals: Sequence[Interval]) -> int:
    return sum(each.size for each in intervals)


def see_context(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    axes: Axes,
    first: int = 0,
    dropping: Dropping | None = None,
    parts: int = 1,
    window: int | None = None,
    begin: Callable[[int], int] | None = None,
) -> Iterator[Seen]:
    """Yield what a rank attends with, from its own queries, which begin at `first`, keys and values.

    Where c is overlapped, heads are gathered in so many `parts`, of which all begin at once: attention of one overlaps
    the gather of the next, and in the backward pass the scatter of the one before. What is gathered is gathered again
    in the backward pass, where `dropping` says so. Positions see those in their `window`, and from the `begin` of their
    document. All ranks of c must call, and say the same of these.
    """
    c, heads = axes.c, (queries, keys, values)
    own_positions, contexts = axes.context(queries.shape[2], first), axes.contexts(queries.shape[2])
    if c.size == 1:
        yield Seen(heads, own_positions, [Interval(0, keys.shape[2])])
        return
    if axes.exchanges_heads:
        everything = [Interval(0, sum(map(_size, contexts)))]
        by_rank = heads_by_rank(queries.shape[1], keys.shape[1], c.size)
        there = HeadExchange(c, contexts, by_rank)
        back = HeadExchange(c, contexts, [of_rank[:1] for of_rank in by_rank])
        (exchanged,) = _Moved.apply(there.to_heads, there.to_positions, *heads)
        of_kinds = exchanged.split_with_sizes([part.size for part in by_rank[c.rank]], dim=1)
        restore = lambda mixed: _Moved.apply(back.to_positions, back.to_heads, mixed)[0]  # noqa: E731
        yield Seen(of_kinds, everything, everything, restore)
        return
    groups = cut_evenly(keys.shape[1], min(parts, keys.shape[1]) if c.is_overlapped else 1)
    moves, started = _Moves.of(c.rank, contexts, seen_by_each(contexts, window, begin)), []
    for of_queries, *of_kinds in zip(*(_split_heads(each, groups) for each in heads), strict=True):
        own = torch.stack([each.transpose(1, 2) for each in of_kinds])
        gathering = _Gathering(c, moves)
        started.append((of_queries, own, _Start.apply(own, gathering), gathering))
    for of_queries, own, moving, gathering in started:
        gathered = _Finish.apply(moving, gathering).transpose(2, 3)
        if dropping:
            dropping.drop(gathered, gathering.again, own)
        yield Seen((of_queries, *gathered), own_positions, moves.seen, held=gathered)


def _split_heads(heads: torch.Tensor, groups: Sequence[Interval]) -> Sequence[torch.Tensor]:
    """Return the heads of each group of key and value heads. Their gradients are joined once: those of slices would be
    put among zeros for all heads, and added up."""
    if len(groups) == 1:
        return [heads]
    of_each = heads.shape[1] // groups[-1].stop
    return heads.split_with_sizes([of_each * group.size for group in groups], dim=1)


class _Start(Function):
    """Starts to move a rank's own keys and values; in the backward pass it ends the sum of their gradients."""

    @staticmethod
    def forward(ctx, own, gathering: _Gathering):
        ctx.gathering = gathering
        gathering.start(own)
        return own.view_as(own)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gathering.finish_back(gradient), None


class _Finish(Function):
    """Ends the move of what `_Start` returned; in the backward pass it starts the sum of its gradients."""

    @staticmethod
    def forward(ctx, moving, gathering: _Gathering):
        ctx.gathering = gathering
        return gathering.finish()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gathering.start_back(gradient), None


def heads_by_rank(num_heads: int, num_kv_heads: int, parts: int) -> list[tuple[Interval, Interval, Interval]]:
    """Return which heads each rank of c attends with, of queries, of keys and of values.

    Key and value heads fewer than ranks are there for several of them.
    """
    result = []
    for queries in cut_evenly(num_heads, parts):
        keys = Interval(queries.start * num_kv_heads // num_heads, -(-queries.stop * num_kv_heads // num_heads))
        result.append((queries, keys, keys))
    return result


class HeadExchange:
    """Moves heads between ranks that have some positions of all heads, and ranks that have all positions of some."""

    def __init__(self, c: Axis, positions: Contexts, heads: Sequence[Sequence[Interval]]):
        """`heads` are those that each rank has all positions of: an interval of each kind, such as queries. Several
        ranks may have the same."""
        self._c, self._positions, self._heads = c, positions, heads
        self._counts = [sum(part.size for part in of_rank) for of_rank in heads]

    def to_heads(self, *own: torch.Tensor) -> tuple[torch.Tensor]:
        """Return all positions of this rank's heads of all kinds, from its positions of all heads of each kind."""
        rows, _, _, size = own[0].shape
        count = self._counts[self._c.rank]
        shapes = [(rows, count, sum(part.size for part in of_rank), size) for of_rank in self._positions]
        to_ranks = [[of[:, slice(*part)] for of, part in zip(own, heads, strict=True)] for heads in self._heads]
        from_ranks = self._exchanged(to_ranks, 1, shapes)
        whole = own[0].new_empty(rows, count, sum(each.shape[2] for each in from_ranks), size)
        for of_rank, intervals in zip(from_ranks, self._positions, strict=True):
            for part in intervals:
                whole[:, :, slice(*part)] = of_rank[:, :, slice(*place_in(intervals, part))]
        return (whole,)

    def to_positions(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's positions of all heads of each kind, from all positions of its heads of all kinds. Of
        heads that several ranks have it is the sum."""
        rows, _, _, size = whole.shape
        own_positions = sum(part.size for part in self._positions[self._c.rank])
        to_ranks = [[whole[:, :, slice(*part)] for part in of_rank] for of_rank in self._positions]
        from_ranks = self._exchanged(to_ranks, 2, [(rows, each, own_positions, size) for each in self._counts])
        of_kinds = [
            of_rank.split_with_sizes([part.size for part in heads], dim=1)
            for of_rank, heads in zip(from_ranks, self._heads, strict=True)
        ]
        result = []
        for heads, values in zip(zip(*self._heads, strict=True), zip(*of_kinds, strict=True), strict=True):
            count = heads[-1].stop
            is_sum = count < sum(part.size for part in heads)
            wide = torch.promote_types(whole.dtype, torch.float32) if is_sum else whole.dtype
            own = whole.new_zeros(rows, count, own_positions, size, dtype=wide)
            for part, each in zip(heads, values, strict=True):
                own[:, slice(*part)] += each
            result.append(own.to(whole.dtype))
        return tuple(result)

    def _exchanged(
        self, to_ranks: Sequence[list[torch.Tensor]], dim: int, shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """Send each rank its tensors, joined along `dim`. Return tensors of these shapes, one from each rank.

        What was sent is gone on return, before the caller puts in order what has arrived.
        """
        like, sizes = to_ranks[0][0], (sum(each.shape[dim] for each in of_rank) for of_rank in to_ranks)
        sent = _ByRank(like, [(*like.shape[:dim], size, *like.shape[dim + 1 :]) for size in sizes])
        received = _ByRank(like, shapes)
        for joined, of_rank in zip(sent.tensors, to_ranks, strict=True):
            torch.cat(of_rank, dim=dim, out=joined)
        self._c.start_all_to_all(sent.flat, received.flat, sent.cuts, received.cuts).wait()
        return received.tensors


class _Moved(Function):
    """Moves tensors between ranks by one function, and their gradients back by another one."""

    @staticmethod
    def forward(ctx, there: Callable, back: Callable, *values: torch.Tensor):
        ctx.back = back
        return there(*values)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *ctx.back(*gradients)
