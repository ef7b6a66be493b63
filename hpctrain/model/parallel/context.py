"""Attention over rows whose positions c cuts: keys and values of all positions are gathered, or heads are exchanged
for positions.

| way                 | a rank attends with                       | c moves                        |
|---------------------|-------------------------------------------|--------------------------------|
| gathered            | its queries, keys and values of all ranks | keys and values, to every rank |
| exchanged (Ulysses) | all positions of a c-th of the heads      | each head once, and the result |

Ulysses is of Jacobs et al. 2023.

Shapes: a rank's own [rows, heads, its positions, head size]; with all positions [rows, heads, positions, head size].
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

import torch
from torch.autograd import Function

from hpctrain.model.parallel.axes import ONE_RANK, Axes, Axis, PendingWork
from hpctrain.model.recompute import Dropping
from hpctrain.sharding.intervals import Interval, cut_evenly, place_in


class Seen(NamedTuple):
    """The tensors that a rank computes attention with. They are held until then, if they are computed again later."""

    heads: Sequence[torch.Tensor]
    """Queries, keys and values."""
    positions: Sequence[Interval]
    """The positions of the queries. Keys and values are of all positions."""
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
        return cls(like, [(kinds, rows, sum(each.size for each in of_rank), *heads) for of_rank in contexts])

    def intervals(self, contexts: Contexts) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield each interval of positions that a rank has: what the rank has of it, and the interval."""
        for of_rank, intervals in zip(self.tensors, contexts, strict=True):
            for interval in intervals:
                yield of_rank[:, :, slice(*place_in(intervals, interval))], slice(*interval)


class _Gathering:
    """Keys and values of some heads, while they or their gradients are moved over c."""

    def __init__(self, c: Axis, contexts: Contexts):
        self.c, self.contexts = c, contexts
        self.by_rank: _ByRank | None = None
        self.work: PendingWork = ONE_RANK


def see_context(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    axes: Axes,
    first: int = 0,
    dropping: Dropping | None = None,
    parts: int = 1,
) -> Iterator[Seen]:
    """Yield what a rank attends with, from its own queries, which begin at `first`, keys and values.

    Where c is overlapped, heads are gathered in so many `parts`, of which all begin at once: attention of one overlaps
    the gather of the next, and in the backward pass the scatter of the one before. What is gathered is gathered again
    in the backward pass, where `dropping` says so. All ranks of c must call.
    """
    c, heads = axes.c, (queries, keys, values)
    own_positions, contexts = axes.context(queries.shape[2], first), axes.contexts(queries.shape[2])
    if c.size == 1:
        yield Seen(heads, own_positions)
        return
    if axes.exchanges_heads:
        num_positions = sum(interval.size for of_rank in contexts for interval in of_rank)
        by_rank = heads_by_rank(queries.shape[1], keys.shape[1], c.size)
        there = HeadExchange(c, contexts, by_rank)
        back = HeadExchange(c, contexts, [of_rank[:1] for of_rank in by_rank])
        (exchanged,) = _Moved.apply(there.to_heads, there.to_positions, *heads)
        of_kinds = exchanged.split_with_sizes([part.size for part in by_rank[c.rank]], dim=1)
        restore = lambda mixed: _Moved.apply(back.to_positions, back.to_heads, mixed)[0]  # noqa: E731
        yield Seen(of_kinds, [Interval(0, num_positions)], restore)
        return
    groups = cut_evenly(keys.shape[1], min(parts, keys.shape[1]) if c.is_overlapped else 1)
    started = []
    for of_queries, *of_kinds in zip(*(_split_heads(each, groups) for each in heads), strict=True):
        own = torch.stack([each.transpose(1, 2) for each in of_kinds])
        gathering = _Gathering(c, contexts)
        started.append((of_queries, own, _Start.apply(own, gathering), gathering))
    for of_queries, own, moving, gathering in started:
        gathered = _Finish.apply(moving, gathering).transpose(2, 3)
        if dropping:
            dropping.drop(gathered, partial(_gathered, c=c, contexts=contexts), own)
        yield Seen((of_queries, *gathered), own_positions, held=gathered)


def _split_heads(heads: torch.Tensor, groups: Sequence[Interval]) -> Sequence[torch.Tensor]:
    """Return the heads of each group of key and value heads. Their gradients are joined once: those of slices would be
    put among zeros for all heads, and added up."""
    if len(groups) == 1:
        return [heads]
    of_each = heads.shape[1] // groups[-1].stop
    return heads.split_with_sizes([of_each * group.size for group in groups], dim=1)


def _gathered(own: torch.Tensor, c: Axis, contexts: Contexts) -> torch.Tensor:
    by_rank = _by_rank(own, c, contexts)
    c.all_gather(by_rank.flat, by_rank.cuts)
    return _in_order(by_rank, contexts)


def _by_rank(own: torch.Tensor, c: Axis, contexts: Contexts) -> _ByRank:
    by_rank = _ByRank.by_positions(own, contexts)
    by_rank.tensors[c.rank].copy_(own)
    return by_rank


def _in_order(by_rank: _ByRank, contexts: Contexts) -> torch.Tensor:
    kinds, rows, _, *heads = by_rank.tensors[0].shape
    whole = by_rank.flat.new_empty(kinds, rows, sum(each.shape[2] for each in by_rank.tensors), *heads)
    for of_rank, interval in by_rank.intervals(contexts):
        whole[:, :, interval] = of_rank
    return whole


class _Start(Function):
    """Starts the gather of a rank's own keys and values; in the backward pass it ends the scatter of their gradient."""

    @staticmethod
    def forward(ctx, own, gathering: _Gathering):
        ctx.gathering = gathering
        gathering.by_rank = by_rank = _by_rank(own, gathering.c, gathering.contexts)
        gathering.work = gathering.c.start_all_gather(by_rank.flat, by_rank.cuts)
        return own.view_as(own)

    @staticmethod
    def backward(ctx, gradient):
        ctx.gathering.work.wait()
        return gradient, None


class _Finish(Function):
    """Ends the gather of what `_Start` returned; in the backward pass it starts the scatter of its gradient."""

    @staticmethod
    def forward(ctx, moving, gathering: _Gathering):
        ctx.gathering = gathering
        by_rank, gathering.by_rank = gathering.by_rank, None
        gathering.work.wait()
        assert by_rank is not None
        return _in_order(by_rank, gathering.contexts)

    @staticmethod
    def backward(ctx, gradient):
        gathering: _Gathering = ctx.gathering
        by_rank = _ByRank.by_positions(gradient, gathering.contexts)
        for of_rank, interval in by_rank.intervals(gathering.contexts):
            of_rank.copy_(gradient[:, :, interval])
        own = torch.empty_like(by_rank.tensors[gathering.c.rank])
        gathering.work = gathering.c.start_reduce_scatter(by_rank.flat, own, by_rank.cuts)
        return own, None


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
