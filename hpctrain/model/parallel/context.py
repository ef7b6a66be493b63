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
        (exchanged,) = _Moved.apply(there.to_heads, there.to_positions, *heads)
        of_kinds = exchanged.split_with_sizes([part.size for part in by_rank[c.rank]], dim=1)
        restore = lambda mixed: _Moved.apply(back.to_positions, back.to_heads, mixed)[0]  # noqa: E731
        yield Seen(of_kinds, [Interval(0, num_positions)], restore)
        return
    groups = cut_evenly(keys.shape[1], min(parts, keys.shape[1]) if c.is_overlapped else 1)
    started = []
    for of_queries, *of_kinds in zip(*(_split_heads(each, groups) for each in heads), strict=True):
        own = torch.stack([each.transpose(1, 2) for each in of_kinds])
        gathering = _Gathering(c)
        started.append((of_queries, own, _Start.apply(own, gathering), gathering))
    for of_queries, own, moving, gathering in started:
        gathered = _Finish.apply(moving, gathering).transpose(2, 3)
        if dropping:
            dropping.drop(gathered, partial(_gathered, c=c), own)
        yield Seen((of_queries, *gathered), own_positions, held=gathered)


def _split_heads(heads: torch.Tensor, groups: Sequence[Interval]) -> Sequence[torch.Tensor]:
    """Return the heads of each group of key and value heads. Their gradients are joined once: those of slices would be
    put among zeros for all heads, and added up."""
    if len(groups) == 1:
        return [heads]
    of_each = heads.shape[1] // groups[-1].stop
    return heads.split_with_sizes([of_each * group.size for group in groups], dim=1)


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

    def __init__(self, c: Axis, num_positions: int, heads: Sequence[Sequence[Interval]]):
        """`heads` are those that each rank has all positions of: an interval of each kind, such as queries. Several
        ranks may have the same."""
        self._c, self._heads = c, heads
        self._counts = [sum(part.size for part in of_rank) for of_rank in heads]
        self._positions = cut_zigzag(num_positions, c.size)

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
        like = to_ranks[0][0]
        sizes = [sum(each.numel() for each in of_rank) for of_rank in to_ranks], list(map(math.prod, shapes))
        sent, received = (like.new_empty(sum(each)) for each in sizes)
        bounds = (itertools.accumulate(each, initial=0) for each in sizes)
        cuts, out_cuts = (list(itertools.starmap(Interval, itertools.pairwise(each))) for each in bounds)
        for cut, of_rank in zip(cuts, to_ranks, strict=True):
            joined = sent[slice(*cut)].view(*like.shape[:dim], -1, *like.shape[dim + 1 :])
            torch.cat(of_rank, dim=dim, out=joined)
        self._c.start_all_to_all(sent, received, cuts, out_cuts).wait()
        return [received[slice(*cut)].view(shape) for cut, shape in zip(out_cuts, shapes, strict=True)]


class _Moved(Function):
    """Moves tensors between ranks by one function, and their gradients back by another one."""

    @staticmethod
    def forward(ctx, there: Callable, back: Callable, *values: torch.Tensor):
        ctx.back = back
        return there(*values)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *ctx.back(*gradients)
