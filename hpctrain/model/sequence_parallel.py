"""Hidden states that are cut by positions over y (sequence parallelism, Korthikanti et al. 2022).

Between the products of a tile each y has the positions that are its own: norms, residuals and what is kept of them are
a y-th as large. A product whose input is cut gathers it over y, and one whose output is summed over y scatters the sum.
That moves the bytes of the all-reduces in their place. The input is gathered again for the gradient of its weight,
since only a rank's own part of it is kept.

Shape suffixes: N tokens (rows x positions, flattened), I input features, O output features, V vocabulary, all of them
this rank's part. A hidden state that is cut is [rows, positions / y, features].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.model.axes import Axis, PendingWork
from hpctrain.model.functions import add_rows, local_ids
from hpctrain.model.linear_layers import (
    add_bias_gradients,
    add_biases,
    add_weight_gradients,
    input_gradients,
    products,
    sum_outputs,
)
from hpctrain.model.units import Weight


def start_gather(part: torch.Tensor, y: Axis) -> tuple[torch.Tensor, PendingWork]:
    """Start to gather the positions of all y; return room for them, which `joined` reads when the work is done.

    All ranks of `y` must call.
    """
    parts = part.new_empty(y.size, *part.shape)
    parts[y.rank] = part
    return parts, y.start_all_gather(parts)


def joined(parts: torch.Tensor) -> torch.Tensor:
    """Return [rows, positions, features] of [y, rows, positions / y, features]; a single row is not copied."""
    y, rows, positions, features = parts.shape
    return parts.transpose(0, 1).reshape(rows, y * positions, features)


def gathered(part: torch.Tensor, y: Axis) -> torch.Tensor:
    """Return the hidden states of all positions. All ranks of `y` must call."""
    parts, work = start_gather(part, y)
    work.wait()
    return joined(parts)


def start_scatter(whole: torch.Tensor, y: Axis) -> tuple[torch.Tensor, PendingWork]:
    """Start to sum [rows, positions, features] over y; return this rank's positions of the sum, and the work.

    All ranks of `y` must call.
    """
    rows, positions, features = whole.shape
    parts = whole.view(rows, y.size, positions // y.size, features).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    return own, y.start_reduce_scatter(parts, own.data)  # autograd does not see that it is not yet there


class _GatheringLinear(Function):
    """y = x W^T + b of an input that is cut by positions over `out`, by which the output's features are cut."""

    @staticmethod
    def forward(
        ctx,
        x,
        parts: torch.Tensor,
        weights: list[Weight],
        biases: list[Weight],
        into: Axis,
        out: Axis,
        ends: list[Callable[[], None]] | None,
        keeps_whole: bool,
        in_8_bits: bool,
    ):
        whole = joined(parts)
        x_NI = whole.view(-1, whole.shape[-1])
        ctx.weights, ctx.biases, ctx.out, ctx.keeps_whole = weights, biases, out, keeps_whole
        ctx.shape, ctx.in_8_bits = whole.shape, in_8_bits
        ctx.save_for_backward(x_NI if keeps_whole else x)
        y_NO = products(x_NI, weights, in_8_bits)
        sum_outputs(y_NO, biases, into, ends)
        return y_NO.view(*whole.shape[:-1], y_NO.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (saved,) = ctx.saved_tensors
        gathering = None if ctx.keeps_whole else start_gather(saved, ctx.out)
        dy_NO = dy.reshape(-1, dy.shape[-1])
        dx_NI = input_gradients(dy_NO, ctx.weights, ctx.in_8_bits)
        dx, scattering = start_scatter(dx_NI.view(ctx.shape), ctx.out)
        x_NI = saved
        if gathering is not None:
            gathering[1].wait()
            x_NI = joined(gathering[0]).view(-1, ctx.shape[-1])
        add_weight_gradients(dy_NO, x_NI, ctx.weights, ctx.in_8_bits)
        add_bias_gradients(dy_NO, ctx.biases)
        scattering.wait()
        return dx, None, None, None, None, None, None, None, None


def gathering_linear(
    x: torch.Tensor,
    parts: torch.Tensor,
    weights: list[Weight],
    biases: list[Weight],
    into: Axis,
    out: Axis,
    ends: list[Callable[[], None]] | None = None,
    keeps_whole: bool = False,
    in_8_bits: bool = False,
) -> torch.Tensor:
    """As `linear` over axes x and y, of an input that is cut by positions over y.

    x: [rows, positions / y, I]; `parts` is what `start_gather` returned for it, gathered; result: [rows, positions, O].
    With `keeps_whole` all positions of the input are kept for the backward pass, and not gathered again.
    """
    return _GatheringLinear.apply(x, parts, weights, biases, into, out, ends, keeps_whole, in_8_bits)


class _ScatteringLinear(Function):
    """y = x W^T + b, summed over `into`, by whose ranks the output is cut by positions."""

    @staticmethod
    def forward(
        ctx,
        x,
        weights: list[Weight],
        biases: list[Weight],
        into: Axis,
        out: Axis,
        ends: list[Callable[[], None]] | None,
        in_8_bits: bool,
    ):
        ctx.weights, ctx.biases, ctx.into, ctx.out, ctx.in_8_bits = weights, biases, into, out, in_8_bits
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NI)
        y_NO = products(x_NI, weights, in_8_bits)
        own, scattering = start_scatter(y_NO.view(*x.shape[:-1], y_NO.shape[1]), into)
        later_NO = own.data.view(-1, own.shape[-1])

        def end() -> None:
            scattering.wait()
            add_biases(later_NO, biases)

        if ends is None:
            end()
        else:
            ends.append(end)
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x_NI,) = ctx.saved_tensors
        whole = gathered(dy, ctx.into)
        dy_NO = whole.view(x_NI.shape[0], -1)
        dx_NI = input_gradients(dy_NO, ctx.weights, ctx.in_8_bits)
        summed = ctx.out.start_all_reduce(dx_NI)
        add_weight_gradients(dy_NO, x_NI, ctx.weights, ctx.in_8_bits)
        add_bias_gradients(dy.reshape(-1, dy.shape[-1]), ctx.biases)  # own positions: the optimizer sums over y
        summed.wait()
        return dx_NI.view(*whole.shape[:-1], x_NI.shape[1]), None, None, None, None, None, None


def scattering_linear(
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[Weight],
    into: Axis,
    out: Axis,
    ends: list[Callable[[], None]] | None = None,
    in_8_bits: bool = False,
) -> torch.Tensor:
    """As `linear` over axes y and x, with an output that is cut by positions over y.

    x: [rows, positions, I]; result: [rows, positions / y, O].
    """
    return _ScatteringLinear.apply(x, weights, biases, into, out, ends, in_8_bits)


class _ScatteringEmbed(Function):
    @staticmethod
    def forward(ctx, anchor, ids, table: Weight, first_id: int, y: Axis):
        local, absent = local_ids(ids, first_id, table)
        ctx.save_for_backward(local, absent)
        ctx.table, ctx.y = table, y
        whole = F.embedding(local, table.data).masked_fill_(absent.unsqueeze(-1), 0)
        own, scattering = start_scatter(whole, y)
        scattering.wait()
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        ctx.table.accumulate(add_rows, gathered(dy, ctx.y), *ctx.saved_tensors)
        return None, None, None, None, None


def scattering_embed(anchor: torch.Tensor, ids: torch.Tensor, table: Weight, first_id: int, y: Axis) -> torch.Tensor:
    """As `embed`, of all ids [rows, positions], with a result that is cut by positions over y."""
    return _ScatteringEmbed.apply(anchor, ids, table, first_id, y)
