"""Keys and values of all positions of rows that c cuts: gathered, and their gradients summed and scattered.

Shapes: keys and values of a rank [2, rows, positions / c, heads, head size], of all ranks the same with all positions.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.autograd import Function

from hpctrain.model.parallel.axes import Axis
from hpctrain.model.recompute import Dropping
from hpctrain.sharding.intervals import cut_zigzag, place_in


def gather_context(
    keys: torch.Tensor, values: torch.Tensor, c: Axis, dropping: Dropping | None = None
) -> Sequence[torch.Tensor]:
    """Return keys and values of all positions in their order, [rows, heads, positions, head size]. They are gathered
    again in the backward pass, where `dropping` says so; the caller holds what is returned while it is read.

    All ranks of `c` must call, each with as many positions.
    """
    if c.size == 1:
        return keys, values
    own = torch.stack([keys.transpose(1, 2), values.transpose(1, 2)])
    result = _Gather.apply(own, c).transpose(2, 3)
    if dropping:
        dropping.drop(result, partial(_gathered, c=c), own)
    return result


def _gathered(own: torch.Tensor, c: Axis) -> torch.Tensor:
    by_rank = own.new_empty(c.size, *own.shape)
    by_rank[c.rank] = own
    c.all_gather(by_rank)
    whole = own.new_empty(*own.shape[:2], c.size * own.shape[2], *own.shape[3:])
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


class _Gather(Function):
    @staticmethod
    def forward(ctx, own, c: Axis):
        ctx.c = c
        return _gathered(own, c)

    @staticmethod
    def backward(ctx, gradient):
        c: Axis = ctx.c
        kinds, rows, positions, *heads = gradient.shape
        by_rank = gradient.new_empty(c.size, kinds, rows, positions // c.size, *heads)
        for of_rank, place, interval in _intervals(by_rank, c):
            of_rank[:, :, place] = gradient[:, :, interval]
        own = torch.empty_like(by_rank[0])
        c.start_reduce_scatter(by_rank, own).wait()
        return own, None
