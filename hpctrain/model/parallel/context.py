"""Attention over rows whose positions c cuts: keys and values of all positions are gathered, or heads are exchanged
for positions.

| way                 | a rank attends with                       | c moves                        |
|---------------------|-------------------------------------------|--------------------------------|
| gathered            | its queries, keys and values of all ranks | keys and values, to every rank |
| exchanged (Ulysses) | all positions of a c-th of the heads      | each head once, and the result |

Ulysses is of Jacobs et al. 2023.

Shapes: a rank's own [rows, heads, positions / c, head size]; with all positions [rows, heads, positions, head size].
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd import Function

from hpctrain.model.parallel.axes import ONE_RANK, Axes, Axis, PendingWork
from hpctrain.model.recompute import Dropping
from hpctrain.sharding.intervals import Interval, cut_evenly, cut_zigzag, place_in


class Seen(NamedTuple):
    """The tensors that a rank computes attention with. They are held until then, if they are computed again later."""

    heads: Sequence[torch.Tensor]
    """Queries, keys and values."""
    positions: Sequence[Interval]
    """The positions of the queries. Keys and values are of all positions."""
    restore: Callable[[torch.Tensor], torch.Tensor] = lambda mixed: mixed
    """Returns attention's result for this rank's own positions, all heads."""
    held: object = None


class _Gathering:
    """Keys and values of some heads, while they or their gradients are moved over c."""

    def __init__(self, c: Axis):
        self.c = c
        self.by_rank: torch.Tensor | None = None
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
    in the backward pass, where `dropping` says so. All ranks of c must call, each with as many positions.
    """
    c, heads = axes.c, (queries, keys, values)
    own_positions = axes.context(queries.shape[2], first)
    if c.size == 1:
        yield Seen(heads, own_positions)
        return
    if axes.exchanges_heads:
        num_positions = c.size * queries.shape[2]
        by_rank = heads_by_rank(queries.shape[1], keys.shape[1], c.size)
        there = HeadExchange(c, num_positions, by_rank)
        back = HeadExchange(c, num_positions, [of_rank[:1] for of_rank in by_rank])
        exchanged = _Moved.apply(torch.cat(heads, dim=1), there.to_heads, there.to_positions)
        of_kinds = exchanged.split_with_sizes([part.size for part in by_rank[c.rank]], dim=1)
        restore = lambda mixed: _Moved.apply(mixed, back.to_positions, back.to_heads)  # noqa: E731
        yield Seen(of_kinds, [Interval(0, num_positions)], restore)
        return
    groups = cut_evenly(keys.shape[1], min(parts, keys.shape[1]) if c.is_overlapped else 1)
    of_queries = queries.shape[1] // keys.shape[1]
    started = []
    for group in groups:
        own = torch.stack([each[:, slice(*group)].transpose(1, 2) for each in (keys, values)])
        gathering = _Gathering(c)
        started.append((group.scale(of_queries), own, _Start.apply(own, gathering), gathering))
    for part, own, moving, gathering in started:
        gathered = _Finish.apply(moving, gathering).transpose(2, 3)
        if dropping:
            dropping.drop(gathered, partial(_gathered, c=c), own)
        yield Seen((queries[:, slice(*part)], *gathered), own_positions, held=gathered)


def _gathered(own: torch.Tensor, c: Axis) -> torch.Tensor:
    by_rank = _by_rank(own, c)
    c.all_gather(by_rank)
    return _in_order(by_rank, c)


def _by_rank(own: torch.Tensor, c: Axis) -> torch.Tensor:
    by_rank = own.new_empty(c.size, *own.shape)
    by_rank[c.rank] = own
    return by_rank


def _in_order(by_rank: torch.Tensor, c: Axis) -> torch.Tensor:
    _, kinds, rows, positions, *heads = by_rank.shape
    whole = by_rank.new_empty(kinds, rows, c.size * positions, *heads)
    for of_rank, place, interval in _intervals(by_rank, c):
        whole[:, :, interval] = of_rank[:, :, place]
    return whole


def _intervals(by_rank: torch.Tensor, c: Axis) -> Iterator[tuple[torch.Tensor, slice, slice]]:
    """Yield each interval of positions that a rank has: what the rank has, the place of the interval in it, and the
    interval."""
    cuts = cut_zigzag(c.size * by_rank.shape[3], c.size)
    for of_rank, intervals in zip(by_rank, cuts, strict=True):
        for interval in intervals:
            yield of_rank, slice(*place_in(intervals, interval)), slice(*interval)


class _Start(Function):
    """Starts the gather of a rank's own keys and values; in the backward pass it ends the scatter of their gradient."""

    @staticmethod
    def forward(ctx, own, gathering: _Gathering):
        ctx.gathering = gathering
        gathering.by_rank = _by_rank(own, gathering.c)
        gathering.work = gathering.c.start_all_gather(gathering.by_rank)
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
        return _in_order(by_rank, gathering.c)

    @staticmethod
    def backward(ctx, gradient):
        c: Axis = ctx.gathering.c
        kinds, rows, positions, *heads = gradient.shape
        by_rank = gradient.new_empty(c.size, kinds, rows, positions // c.size, *heads)
        for of_rank, place, interval in _intervals(by_rank, c):
            of_rank[:, :, place] = gradient[:, :, interval]
        own = torch.empty_like(by_rank[0])
        ctx.gathering.work = c.start_reduce_scatter(by_rank, own)
        return own, None


def heads_by_rank(num_heads: int, num_kv_heads: int, parts: int) -> list[tuple[Interval, Interval, Interval]]:
    """Return which heads each rank of c attends with, of queries, keys and values, where these follow each other.

    Key and value heads fewer than ranks are there for several of them.
    """
    result = []
    for queries in cut_evenly(num_heads, parts):
        keys = Interval(queries.start * num_kv_heads // num_heads, -(-queries.stop * num_kv_heads // num_heads))
        result.append((queries, keys.shift(num_heads), keys.shift(num_heads + num_kv_heads)))
    return result


class HeadExchange:
    """Moves heads between ranks that have some positions of all heads, and ranks that have all positions of some."""

    def __init__(self, c: Axis, num_positions: int, heads: Sequence[Sequence[Interval]]):
        """`heads` are those that each rank has all positions of. Several ranks may have the same."""
        self._c, self._heads = c, heads
        self._counts = [sum(part.size for part in of_rank) for of_rank in heads]
        self._positions = cut_zigzag(num_positions, c.size)

    def to_heads(self, own: torch.Tensor) -> torch.Tensor:
        """Return all positions of this rank's heads, from its positions of all heads."""
        rows, _, positions, size = own.shape
        count = self._counts[self._c.rank]
        sent = [(rows, each, positions, size) for each in self._counts]
        received = [(rows, count, sum(part.size for part in of_rank), size) for of_rank in self._positions]
        to_ranks, exchange, from_ranks = self._buffers(own, sent, received)
        for of_rank, heads in zip(to_ranks, self._heads, strict=True):
            torch.cat([own[:, slice(*part)] for part in heads], dim=1, out=of_rank)
        exchange()
        whole = own.new_empty(rows, count, sum(each.shape[2] for each in from_ranks), size)
        for of_rank, intervals in zip(from_ranks, self._positions, strict=True):
            for part in intervals:
                whole[:, :, slice(*part)] = of_rank[:, :, slice(*place_in(intervals, part))]
        return whole

    def to_positions(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's positions of all heads, from all positions of its heads: the sum of what ranks have."""
        rows, count, _, size = whole.shape
        own_positions = sum(part.size for part in self._positions[self._c.rank])
        sent = [(rows, count, sum(part.size for part in of_rank), size) for of_rank in self._positions]
        received = [(rows, each, own_positions, size) for each in self._counts]
        to_ranks, exchange, from_ranks = self._buffers(whole, sent, received)
        for of_rank, intervals in zip(to_ranks, self._positions, strict=True):
            torch.cat([whole[:, :, slice(*part)] for part in intervals], dim=2, out=of_rank)
        exchange()
        num_heads = max(part.stop for of_rank in self._heads for part in of_rank)
        wide = torch.promote_types(whole.dtype, torch.float32) if num_heads < sum(self._counts) else whole.dtype
        own = whole.new_zeros(rows, num_heads, own_positions, size, dtype=wide)
        for of_rank, heads in zip(from_ranks, self._heads, strict=True):
            for part, values in zip(heads, of_rank.split_with_sizes([part.size for part in heads], dim=1), strict=True):
                own[:, slice(*part)] += values
        return own.to(whole.dtype)

    def _buffers(
        self, like: torch.Tensor, sent: Sequence[tuple[int, ...]], received: Sequence[tuple[int, ...]]
    ) -> tuple[list[torch.Tensor], Callable[[], None], list[torch.Tensor]]:
        """Return tensors for each rank, the function that exchanges them, and tensors from each rank."""
        flat, cuts, views = [], [], []
        for shapes in (sent, received):
            bounds = list(itertools.accumulate((math.prod(shape) for shape in shapes), initial=0))
            flat.append(like.new_empty(bounds[-1]))
            cuts.append(list(itertools.starmap(Interval, itertools.pairwise(bounds))))
            views.append([flat[-1][slice(*cut)].view(shape) for cut, shape in zip(cuts[-1], shapes, strict=True)])
        return views[0], lambda: self._c.start_all_to_all(*flat, *cuts).wait(), views[1]


class _Moved(Function):
    """Moves a tensor between ranks by one function, and its gradient back by another one."""

    @staticmethod
    def forward(ctx, value: torch.Tensor, there: Callable, back: Callable):
        ctx.back = back
        return there(value)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None
