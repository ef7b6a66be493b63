"""Token embeddings and learned positions, whose tables are cut by x over features; that of tokens also by y over ids.

Shapes: ids int64 [rows, positions]; hidden states [rows, positions, hidden / x], or their positions cut by y where
hidden states are (see `linear.py`).
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd import Function

from hpctrain.model.parallel.axes import Axis
from hpctrain.model.parallel.gathering import gathered, start_scatter
from hpctrain.model.storage.units import Weight
from hpctrain.sharding.intervals import Interval


class _Embed(Function):
    @staticmethod
    def forward(ctx, anchor, ids, table: Weight, first_id: int, y: Axis, cuts_sequence: bool):
        local = ids - first_id
        absent = (local < 0) | (local >= table.data.shape[0])  # ids of other ranks: the first row stands in for them
        local = local.masked_fill(absent, 0)
        ctx.save_for_backward(local, absent)
        ctx.table, ctx.y, ctx.cuts_sequence = table, y, cuts_sequence
        out = F.embedding(local, table.data)
        if y.size == 1:
            return out
        out.masked_fill_(absent.unsqueeze(-1), 0)
        if not cuts_sequence:
            return y.all_reduce(out)
        own, scattering = start_scatter(out, y)
        scattering.wait()
        return own

    @staticmethod
    def backward(ctx, dy):
        whole = gathered(dy, ctx.y) if ctx.cuts_sequence else dy
        ctx.table.accumulate(add_rows, whole, *ctx.saved_tensors)
        return None, None, None, None, None, None


def add_rows(grad: torch.Tensor, dy: torch.Tensor, local: torch.Tensor, absent: torch.Tensor, overwrite: bool) -> None:
    """Add dy, [..., features], to the rows `local` of a table's gradient, but for those that are `absent`."""
    if overwrite:
        grad.zero_()
    dy = dy.float().masked_fill(absent.unsqueeze(-1), 0)
    grad.index_add_(0, local.reshape(-1), dy.reshape(-1, dy.shape[-1]))


def embed(
    anchor: torch.Tensor, ids: torch.Tensor, table: Weight, first_id: int, y: Axis, cuts_sequence: bool = False
) -> torch.Tensor:
    """Look up ids in a table cut by y over ids and by x over features.

    The result is the same on all y, or this y's positions of it where it `cuts_sequence`. `anchor` is any tensor that
    requires a gradient: it makes autograd call the backward pass. All ranks of `y` must call.
    """
    return _Embed.apply(anchor, ids, table, first_id, y, cuts_sequence)


class _AddPositions(Function):
    @staticmethod
    def forward(ctx, x, table: Weight, positions: Sequence[Interval], places: torch.Tensor | None):
        ctx.table, ctx.places, ctx.positions = table, places, positions
        if places is not None:
            return x + table.data[places]
        rows = [table.data[slice(*interval)] for interval in positions]
        return x + (rows[0] if len(rows) == 1 else torch.cat(rows))

    @staticmethod
    def backward(ctx, dy):
        if ctx.places is None:
            ctx.table.accumulate(partial(add_consecutive, positions=ctx.positions), dy)
        else:
            ctx.table.accumulate(add_rows, dy, ctx.places, torch.zeros_like(ctx.places, dtype=torch.bool))
        return dy, None, None, None


def add_consecutive(grad: torch.Tensor, dy: torch.Tensor, overwrite: bool, positions: Sequence[Interval]) -> None:
    """Add dy, [rows, positions, features], summed over rows, to the gradients of these positions."""
    if overwrite:
        grad.zero_()
    sums = dy.sum(0, dtype=torch.float32).split([interval.size for interval in positions])
    for interval, own in zip(positions, sums, strict=True):
        grad[slice(*interval)] += own


def add_positions(
    x: torch.Tensor, table: Weight, positions: Sequence[Interval], places: torch.Tensor | None = None
) -> torch.Tensor:
    """Add learned positions, [positions, hidden / x], to x: [rows, positions, hidden / x].

    They are those of some intervals, or `places`, int64 [rows, positions].
    """
    return _AddPositions.apply(x, table, positions, places)
