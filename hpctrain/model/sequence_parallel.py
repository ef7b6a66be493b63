"""Hidden states that are cut by positions over y (sequence parallelism, Korthikanti et al. 2022).

Between the products of a tile each y has the positions that are its own: norms, residuals and what is kept of them are
a y-th as large. A product whose input is cut gathers it over y, and one whose output is summed over y scatters the sum.
That moves the bytes of the all-reduces in their place. The input is gathered again for the gradient of its weight,
since only a rank's own part of it is kept.

Shape suffixes: N tokens (rows x positions, flattened), I input features, O output features, V vocabulary, all of them
this rank's part. A hidden state that is cut is [rows, positions / y, features].
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.model.axes import Axis
from hpctrain.model.operators.linear import (
    add_bias_gradients,
    add_biases,
    add_weight_gradients,
    input_gradients,
    num_outputs,
    products,
    sum_outputs,
)
from hpctrain.model.positions import Gathering, cut_parts, joined, start_gather, start_scatter
from hpctrain.model.units import Weight


class _GatheringLinear(Function):
    """y = x W^T + b of an input that is cut by positions over `out`, by which the output's features are cut."""

    @staticmethod
    def forward(
        ctx,
        x,
        gathering: Gathering,
        weights: list[Weight],
        biases: list[Weight],
        into: Axis,
        out: Axis,
        ends: list[Callable[[], None]] | None,
        in_8_bits: bool,
    ):
        ctx.weights, ctx.biases, ctx.out, ctx.keeps_whole = weights, biases, out, gathering.whole is not None
        ctx.shape, ctx.in_8_bits = gathering.shape, in_8_bits
        if len(gathering.parts) == 1:
            ((_, x_NI),) = gathering.take()
            y_NO = products(x_NI, weights, in_8_bits)
            sum_outputs(y_NO, biases, into, ends)
            y = y_NO.view(*ctx.shape[:-1], y_NO.shape[1])
        else:
            y = x.new_empty(*ctx.shape[:-1], num_outputs(weights))
            compute = partial(products, weights=weights, in_8_bits=in_8_bits)
            later = []
            for result, place in gathering.map(compute, y, out.size):
                summed = into.start_all_reduce(result)
                if into.size == 1:
                    place()
                else:
                    later.append((summed, place))
            for summed, place in later:
                summed.wait()
                place()
            add_biases(y.view(-1, y.shape[-1]), biases)
        ctx.save_for_backward(x if gathering.whole is None else gathering.whole.view(-1, ctx.shape[-1]))
        return y

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
        return dx, None, None, None, None, None, None, None


def gathering_linear(
    x: torch.Tensor,
    gathering: Gathering,
    weights: list[Weight],
    biases: list[Weight],
    into: Axis,
    out: Axis,
    ends: list[Callable[[], None]] | None = None,
    in_8_bits: bool = False,
) -> torch.Tensor:
    """Apply `linear` over axes x and y to an input that is cut by positions over y.

    x: [rows, positions / y, I], of which `gathering` was made; result: [rows, positions, O]. Of several parts
    each is computed, and its sum started, when it is there; then `ends` is left alone. Where it keeps the whole, all
    positions of the input are kept for the backward pass, and not gathered again.
    """
    return _GatheringLinear.apply(x, gathering, weights, biases, into, out, ends, in_8_bits)


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
        parts: int,
    ):
        ctx.weights, ctx.biases, ctx.into, ctx.out = weights, biases, into, out
        ctx.in_8_bits, ctx.parts = in_8_bits, parts
        rows, positions, _ = x.shape
        x = x.contiguous()
        ctx.save_for_backward(x.view(-1, x.shape[-1]))
        own = x.new_empty(rows, positions // into.size, num_outputs(weights))
        scatterings = []
        for part in cut_parts(rows, positions // into.size, parts):
            y_NO = products(part.of(x, into.size).reshape(-1, x.shape[-1]), weights, in_8_bits)
            place = own[part.rows, part.positions]
            whole = y_NO.view(place.shape[0], -1, y_NO.shape[1])
            scatterings.append(start_scatter(whole, into, place)[1])
        later_NO = own.data.view(-1, own.shape[-1])  # of which autograd does not see that it is not yet there

        def end() -> None:
            for scattering in scatterings:
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
        gathering = Gathering(dy, ctx.into, ctx.parts, keeps_whole=True)
        dx = x_NI.new_empty(*gathering.shape[:-1], x_NI.shape[1])
        compute = partial(input_gradients, weights=ctx.weights, in_8_bits=ctx.in_8_bits)
        for _, place in gathering.map(compute, dx, ctx.into.size):
            place()
        assert gathering.whole is not None, "it is kept"
        dy_NO, dx_NI = gathering.whole.view(x_NI.shape[0], -1), dx.view(x_NI.shape)
        summed = ctx.out.start_all_reduce(dx_NI)
        add_weight_gradients(dy_NO, x_NI, ctx.weights, ctx.in_8_bits)
        add_bias_gradients(dy.reshape(-1, dy.shape[-1]), ctx.biases)  # own positions: the optimizer sums over y
        summed.wait()
        return dx, None, None, None, None, None, None, None


def scattering_linear(
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[Weight],
    into: Axis,
    out: Axis,
    ends: list[Callable[[], None]] | None = None,
    in_8_bits: bool = False,
    parts: int = 1,
) -> torch.Tensor:
    """Apply `linear` over axes y and x, with an output that is cut by positions over y.

    x: [rows, positions, I]; result: [rows, positions / y, O]. Rows are cut in `parts`, or positions of a single row:
    each is scattered while the next one is computed, and backward gathered while the last one is.
    """
    return _ScatteringLinear.apply(x, weights, biases, into, out, ends, in_8_bits, parts)
