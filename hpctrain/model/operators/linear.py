"""Linear layers on a tensor grid: their products, and the gradients that these add.

Shape suffixes: N tokens (rows x positions, flattened), I input features, O output features, all of them this rank's
part. Gradients of weights are added straight into `Weight.grad` (fp32), never returned; see `Weight.accumulate`.

In half precision the gradient of a weight is summed in fp32 and rounded once, when it is used. A product that is
rounded to bf16 before it is added loses what is below 1/256 of its own size, in every microbatch. The operation has a
name of its own in torch, so that whoever watches operations sees one product of half precision.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.model.axes import Axis
from hpctrain.model.operators.running import add_part
from hpctrain.model.operators.scaled_products import add_scaled_product, forward_product, input_gradient
from hpctrain.model.units import Weight
from hpctrain.sharding.intervals import cut_evenly

_LIBRARY = torch.library.Library("hpctrain", "DEF")
_LIBRARY.define("add_wide_product(Tensor(a!) grad, Tensor dy, Tensor x, bool fresh) -> ()")


def add_wide_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, fresh: bool) -> None:
    """Add dy^T x to an fp32 gradient, summed in fp32 and not rounded in between.

    grad: [O, I] fp32; dy: [N, O], x: [N, I] of half precision. Where it is `fresh` the gradient is overwritten.
    """
    torch.ops.hpctrain.add_wide_product(grad_OI, dy_NO, x_NI, fresh)


def _add_wide_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, fresh: bool) -> None:
    beta = 0 if fresh else 1
    if has_wide_products(grad_OI.device, x_NI.dtype):
        wide = torch.ops.aten.addmm.dtype_out
        wide(grad_OI, dy_NO.t(), x_NI, torch.float32, beta=beta, alpha=1, out=grad_OI)
    else:
        grad_OI.addmm_(dy_NO.t().float(), x_NI.float(), beta=beta)


_LIBRARY.impl("add_wide_product", _add_wide_product, "CompositeExplicitAutograd")


@lru_cache
def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether a device multiplies in half precision with a result in fp32, added to what is there: by trying it.

    CPUs do not, nor do old versions of libraries: there both operands are converted first, which costs their speed.
    """
    if device.type == "cpu":
        return False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    tiny = torch.full((16, 16), 2.0**-12, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(tiny, ones, ones, torch.float32, beta=1, alpha=1, out=tiny)
    except (NotImplementedError, RuntimeError):
        return False
    return bool((tiny == 16 + 2.0**-12).all())


def add_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, fresh: bool) -> None:
    """Add dy^T x to a weight's gradient, which may be of a wider dtype."""
    if grad_OI.dtype == dy_NO.dtype:
        grad_OI.addmm_(dy_NO.t(), x_NI, beta=0 if fresh else 1)
    else:
        add_wide_product(grad_OI, dy_NO, x_NI, fresh)


def add_sum(grad_O: torch.Tensor, dy_NO: torch.Tensor, fresh: bool) -> None:
    """Add the sum of dy over tokens to a bias's gradient."""
    add_part(grad_O, dy_NO.sum(0, dtype=torch.float32), fresh)


def num_outputs(weights: list[Weight]) -> int:
    """Return how many features the outputs of all weights have."""
    return sum(weight.data.shape[0] for weight in weights)


def products(
    x_NI: torch.Tensor, weights: list[Weight], in_8_bits: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T, [N, O], O the sum over `weights`; in the place of `out`, where that is given."""
    if in_8_bits:
        parts = [forward_product(x_NI, weight.data) for weight in weights]
        y_NO = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return y_NO if out is None else out.copy_(y_NO)
    y_NO = x_NI.new_empty(x_NI.shape[0], num_outputs(weights)) if out is None else out
    for weight, part in zip(weights, split_outputs(y_NO, weights), strict=True):
        torch.mm(x_NI, weight.data.to(x_NI.dtype).t(), out=part)
    return y_NO


def split_outputs(dy_NO: torch.Tensor, weights: list[Weight]) -> tuple[torch.Tensor, ...]:
    """Return the columns of each weight's outputs."""
    return dy_NO.split([weight.data.shape[0] for weight in weights], dim=1)


def input_gradients(
    dy_NO: torch.Tensor, weights: list[Weight], in_8_bits: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return dy W, [N, I], summed over `weights`; in the place of `out`, where that is given."""
    parts = split_outputs(dy_NO, weights)
    if in_8_bits:
        dx_NI = input_gradient(parts[0], weights[0].data)
        for weight, part in zip(weights[1:], parts[1:], strict=True):
            dx_NI += input_gradient(part, weight.data)
        return dx_NI if out is None else out.copy_(dx_NI)
    dx_NI = torch.mm(parts[0], weights[0].data.to(dy_NO.dtype), out=out)
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        dx_NI.addmm_(part, weight.data.to(dy_NO.dtype))
    return dx_NI


def add_weight_gradients(dy_NO: torch.Tensor, x_NI: torch.Tensor, weights: list[Weight], in_8_bits: bool) -> None:
    """Add dy^T x to the gradient of each weight."""
    for weight, part in zip(weights, split_outputs(dy_NO, weights), strict=True):
        weight.accumulate(add_scaled_product if in_8_bits else add_product, part, x_NI)


class _Linear(Function):
    """y = x W^T + b where W is cut by `into` over its input and by `out` over its output (Agarwal's 3D product).

    Forward all-reduces over `into`, each of `parts` while the next one is computed; the gradient of x is all-reduced
    over `out`, while those of the weights are computed where the axis lets it (AxoNN, arXiv 2305.13525).
    """

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
        ctx.weights, ctx.biases, ctx.out, ctx.in_8_bits = weights, biases, out, in_8_bits
        x_NI = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NI)
        cuts = cut_evenly(x_NI.shape[0], min(parts, x_NI.shape[0])) if into.size > 1 else ()
        if len(cuts) > 1:
            y_NO = x_NI.new_empty(x_NI.shape[0], num_outputs(weights))
            rows = [slice(*cut) for cut in cuts]
            sums = [into.start_all_reduce(products(x_NI[at], weights, in_8_bits, y_NO[at])) for at in rows]
            for each in sums:
                each.wait()
            add_biases(y_NO, biases)
        else:
            y_NO = products(x_NI, weights, in_8_bits)
            sum_outputs(y_NO, biases, into, ends)
        return y_NO.view(*x.shape[:-1], y_NO.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x_NI,) = ctx.saved_tensors
        dy_NO = dy.reshape(x_NI.shape[0], dy.shape[-1])
        dx_NI = input_gradients(dy_NO, ctx.weights, ctx.in_8_bits)
        summed = ctx.out.start_all_reduce(dx_NI)
        add_weight_gradients(dy_NO, x_NI, ctx.weights, ctx.in_8_bits)
        add_bias_gradients(dy_NO, ctx.biases)
        summed.wait()
        return dx_NI.view(*dy.shape[:-1], x_NI.shape[1]), None, None, None, None, None, None, None


def add_biases(y_NO: torch.Tensor, biases: list[Weight]) -> None:
    """Add biases that lie side by side to each token's output, in place."""
    at = 0
    for bias in biases:
        y_NO[:, at : at + bias.data.numel()] += bias.data
        at += bias.data.numel()


def sum_outputs(y_NO: torch.Tensor, biases: list[Weight], into: Axis, ends: list[Callable[[], None]] | None) -> None:
    """Sum a product over `into` and add its biases, in place; with `ends` the sum is only started, see `linear`."""
    if ends is None:
        into.all_reduce(y_NO)
        add_biases(y_NO, biases)
        return
    later_NO = y_NO.data  # of which autograd does not see that it is not yet there
    summed = into.start_all_reduce(later_NO)

    def end() -> None:
        summed.wait()
        add_biases(later_NO, biases)

    ends.append(end)


def add_bias_gradients(dy_NO: torch.Tensor, biases: list[Weight]) -> None:
    """Add the sum of dy over tokens to the gradient of each bias."""
    if biases:
        for bias, part in zip(biases, dy_NO.split([bias.data.numel() for bias in biases], dim=1), strict=True):
            bias.accumulate(add_sum, part)


def linear(
    x: torch.Tensor,
    weights: list[Weight],
    biases: list[Weight],
    into: Axis,
    out: Axis,
    ends: list[Callable[[], None]] | None = None,
    in_8_bits: bool = False,
    parts: int = 1,
) -> torch.Tensor:
    """Apply one or several weights to the same input; outputs lie side by side in the last dim.

    x: [..., I]; result: [..., O], O the sum over `weights`. Ranks of `into` (forward) and `out` (backward) must call.
    With `ends` the sum over `into` is only started: the result is there, and may be used, when what is appended to it
    has been called. With `in_8_bits` the operands of all three products are rounded to fp8. Without `ends` the tokens
    may be cut in `parts`, each of which is summed while the next one is computed, where the axis lets it.
    """
    return _Linear.apply(x, weights, biases, into, out, ends, in_8_bits, parts)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return torch's own linear layer: differentiable."""
    return F.linear(x, weight, bias)
