"""Linear layers on a tensor grid: their products, the gradients that these add, and what is summed over ranks.

Shape suffixes: N tokens (rows x positions, flattened), I input features, O output features, all of them this rank's
part. Gradients of weights are added straight into `Weight.grad` (fp32), never returned; see `Weight.accumulate`.

Where hidden states are cut by positions over y (sequence parallelism, Korthikanti et al. 2022), norms, residuals and
what is kept of them are a y-th as large. A layer whose input is cut gathers it over y, and one whose output is summed
over y scatters the sum. Together they move as many bytes as the all-reduces that they replace. One gather comes on top:
that of the input for the gradient of its weight, since only a rank's own part of it is kept.

In half precision the gradient of a weight is summed in fp32 and rounded once, when it is used. A product that is
rounded to bf16 before it is added loses what is below 1/256 of its own size, in every microbatch. The operation has a
name of its own in torch, so that whoever watches operations sees one product of half precision.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch.autograd import Function

from hpctrain.model.operators.running import add_part
from hpctrain.model.parallel.axes import Axis, Following, PendingWork
from hpctrain.model.parallel.gathering import Gathering, cut_parts, start_scatter
from hpctrain.model.storage.units import Weight
from hpctrain.sharding.intervals import cut_evenly

_LIBRARY = torch.library.Library("hpctrain", "DEF")
_LIBRARY.define("add_wide_product(Tensor(a!) grad, Tensor dy, Tensor x, bool overwrite) -> ()")


def add_wide_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, overwrite: bool) -> None:
    """Add dy^T x to an fp32 gradient, summed in fp32 and not rounded in between.

    grad: [O, I] fp32; dy: [N, O], x: [N, I] of half precision. With `overwrite` its old contents are ignored.
    """
    torch.ops.hpctrain.add_wide_product(grad_OI, dy_NO, x_NI, overwrite)


def _add_wide_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, overwrite: bool) -> None:
    beta = 0 if overwrite else 1
    if has_wide_products(grad_OI.device, x_NI.dtype):
        wide = torch.ops.aten.addmm.dtype_out
        wide(grad_OI, dy_NO.t(), x_NI, torch.float32, beta=beta, alpha=1, out=grad_OI)
    else:
        grad_OI.addmm_(dy_NO.t().float(), x_NI.float(), beta=beta)


_LIBRARY.impl("add_wide_product", _add_wide_product, "CompositeExplicitAutograd")


@lru_cache
def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Say, by a trial, whether a device adds a product of half precision to an fp32 result.

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


def add_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, overwrite: bool) -> None:
    """Add dy^T x to a weight's gradient, which may be of a wider dtype."""
    if grad_OI.dtype == dy_NO.dtype:
        grad_OI.addmm_(dy_NO.t(), x_NI, beta=0 if overwrite else 1)
    else:
        add_wide_product(grad_OI, dy_NO, x_NI, overwrite)


def add_sum(grad_O: torch.Tensor, dy_NO: torch.Tensor, overwrite: bool) -> None:
    """Add the sum of dy over tokens to a bias's gradient."""
    add_part(grad_O, dy_NO.sum(0, dtype=torch.float32), overwrite)


class Linear:
    """A linear layer: one or several weights for the same input, whose outputs lie side by side in the last dim.

    The weights are cut by `input_axis` over their input and by `output_axis` over their output (Agarwal's 3D product).
    A layer `gathers` an input that is cut by positions over `output_axis`, or `scatters` its output by positions over
    `input_axis`.
    """

    def __init__(
        self,
        weights: list[Weight],
        biases: list[Weight],
        input_axis: Axis,
        output_axis: Axis,
        *,
        gathers: bool = False,
        scatters: bool = False,
        parts: int = 1,
        keeps_whole: bool = False,
    ):
        """Next to a collective a product is cut in `parts`: of tokens, or, where positions are cut, of rows or of the
        positions of a single row. Each part is summed or scattered while the next one is computed. All begin to be
        gathered at once, and each is multiplied when it is there.

        For the gradient of its weight a layer that gathers needs the input of all positions. With `keeps_whole` it
        keeps what the forward pass has gathered; else it keeps this rank's own positions and gathers them again.
        """
        self.weights, self.biases, self.input_axis, self.output_axis = weights, biases, input_axis, output_axis
        self.gathers, self.scatters, self.keeps_whole = gathers, scatters, keeps_whole
        self.parts = parts

    @cached_property
    def outputs(self) -> list[int]:
        """Return how many features the output of each weight has; known once they are there."""
        return [weight.data.shape[0] for weight in self.weights]

    @cached_property
    def num_outputs(self) -> int:
        return sum(self.outputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b, [..., O] of [..., I]; x is [rows, positions, I] where positions are cut.

        All ranks of `input_axis` must call, and all of `output_axis` the backward pass. A layer that gathers needs
        those of `output_axis` in its forward pass too, one that scatters those of `input_axis` in its backward pass.
        """
        return _Linear.apply(x, self)

    def split(self, y_NO: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the columns of each weight's outputs."""
        return (y_NO,) if len(self.weights) == 1 else y_NO.split(self.outputs, dim=1)

    def whole_product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T, [..., O] of [..., I], not yet summed over `input_axis`."""
        if len(self.weights) == 1:
            return F.linear(x, _in_dtype(self.weights[0], x.dtype))
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def product(self, x_NI: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T, [N, O], written into `out` where that is given."""
        if len(self.weights) == 1:
            return torch.mm(x_NI, _in_dtype(self.weights[0], x_NI.dtype).t(), out=out)
        y_NO = x_NI.new_empty(x_NI.shape[0], self.num_outputs) if out is None else out
        for weight, part in zip(self.weights, self.split(y_NO), strict=True):
            torch.mm(x_NI, _in_dtype(weight, x_NI.dtype).t(), out=part)
        return y_NO

    def input_gradient(self, dy_NO: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return dy W, [N, I], summed over weights, written into `out` where that is given."""
        (first, *weights), (part, *parts) = self.weights, self.split(dy_NO)
        dx_NI = torch.mm(part, _in_dtype(first, dy_NO.dtype), out=out)
        for weight, part in zip(weights, parts, strict=True):
            dx_NI.addmm_(part, _in_dtype(weight, dy_NO.dtype))
        return dx_NI

    def add_weight_gradients(self, dy_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """Add dy^T x to the gradient of each weight."""
        for weight, part in zip(self.weights, self.split(dy_NO), strict=True):
            weight.accumulate(add_product, part, x_NI)

    def add_bias_gradients(self, dy_NO: torch.Tensor) -> None:
        """Add the sum of dy over tokens to the gradient of each bias."""
        parts = dy_NO.split([bias.data.numel() for bias in self.biases], dim=1)
        for bias, part in zip(self.biases, parts, strict=True):
            bias.accumulate(add_sum, part)


def _in_dtype(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a weight in a dtype, which is another one where a job pins linear layers."""
    data = weight.data
    return data if data.dtype == dtype else data.to(dtype)


class _Linear(Function):
    """Applies a layer. Forward it sums over `input_axis`. The gradient of the input is summed over `output_axis`, while
    those of the weights are computed where the axis lets it (AxoNN, arXiv 2305.13525)."""

    @staticmethod
    def forward(ctx, x, layer: Linear):
        ctx.layer, ctx.shape, kept = layer, x.shape, x
        if layer.gathers:
            gathering = Gathering(x, layer.output_axis, layer.parts, layer.keeps_whole)
            ctx.shape = gathering.shape
            y = _forward_gathering(layer, x, gathering)
            kept = x if gathering.whole is None else gathering.whole
        elif layer.scatters:
            y = _forward_scattering(layer, x)
        elif layer.parts > 1 and layer.input_axis.size > 1:
            y = _forward_in_parts(layer, x)
        else:
            y = layer.input_axis.all_reduce(layer.whole_product(x))
        at = 0
        for bias in layer.biases:  # they lie side by side
            y[..., at : at + bias.data.numel()] += bias.data
            at += bias.data.numel()
        ctx.save_for_backward(kept)
        return y

    @staticmethod
    def backward(ctx, dy):
        layer: Linear = ctx.layer
        (kept,) = ctx.saved_tensors
        dy_NO = given_NO = dy.reshape(-1, dy.shape[-1])
        regathered = Gathering(kept, layer.output_axis) if layer.gathers and not layer.keeps_whole else None
        if layer.scatters:
            gathering = Gathering(dy, layer.input_axis, layer.parts, keeps_whole=True)
            dx = kept.new_empty(ctx.shape)
            for _, copy_into_place in gathering.map(layer.input_gradient, dx):
                copy_into_place()
            assert gathering.whole is not None, "it is kept"
            dy_NO = gathering.whole.view(-1, dy.shape[-1])
        else:
            dx = layer.input_gradient(dy_NO).view(ctx.shape)
        if layer.gathers:
            dx, work = start_scatter(dx, layer.output_axis)
        else:
            work = layer.output_axis.start_all_reduce(dx)
        x_NI = kept.reshape(-1, kept.shape[-1]) if regathered is None else regathered.tokens()
        layer.add_weight_gradients(dy_NO, x_NI)
        if layer.biases:
            # Where the layer scatters these are of this rank's positions: the optimizer sums such biases over y.
            layer.add_bias_gradients(given_NO)
        work.wait()
        return dx, None


def _forward_gathering(layer: Linear, x: torch.Tensor, gathering: Gathering) -> torch.Tensor:
    """Return the product of an input that is gathered: each gathered part is multiplied while the next one arrives."""
    input_axis = layer.input_axis
    if len(gathering.parts) == 1:
        y_NO = input_axis.all_reduce(layer.product(gathering.tokens()))
        return y_NO.view(*gathering.shape[:-1], -1)
    y, works = x.new_empty(*gathering.shape[:-1], layer.num_outputs), list[PendingWork]()
    for result, copy_into_place in gathering.map(layer.product, y):
        work = input_axis.start_all_reduce(result)
        if input_axis.size == 1:
            copy_into_place()
        else:
            works.append(Following([work], copy_into_place))
    Following(works).wait()
    return y


def _forward_scattering(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's positions of the sum over `input_axis`: each part is scattered while the next is computed."""
    axis, works = layer.input_axis, list[PendingWork]()
    rows, positions = x.shape[0], x.shape[1] // axis.size
    y, whole = x.new_empty(rows, positions, layer.num_outputs), x.contiguous()
    for part in cut_parts(rows, positions, layer.parts):
        y_NO = layer.product(part.of(whole, axis.size).reshape(-1, x.shape[-1]))
        own = y[part.rows, part.positions]
        works.append(start_scatter(y_NO.view(own.shape[0], -1, y_NO.shape[1]), axis, own)[1])
    Following(works).wait()
    return y


def _forward_in_parts(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over `input_axis`: that of some tokens is overlapped with the product of the next ones."""
    x_NI, y = x.reshape(-1, x.shape[-1]), x.new_empty(*x.shape[:-1], layer.num_outputs)
    y_NO = y.view(x_NI.shape[0], -1)
    parts = [slice(*cut) for cut in cut_evenly(x_NI.shape[0], min(layer.parts, x_NI.shape[0]))]
    works = [layer.input_axis.start_all_reduce(layer.product(x_NI[part], y_NO[part])) for part in parts]
    Following(works).wait()
    return y
