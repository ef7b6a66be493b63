"""Norms, rotary positions, gated activations and the loss as fused kernels: the pure functions of `pure.py`, compiled.

What calls other ranks lies between two kernels, and is in neither.
"""

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.architectures.description import Norm
from hpctrain.comm.accelerators.compiling import Compiled
from hpctrain.config.kernels import KernelChoice
from hpctrain.model import pure
from hpctrain.model.axes import Axis
from hpctrain.model.functions import OfInput
from hpctrain.model.kernels import Kernels
from hpctrain.model.linear_layers import add_part
from hpctrain.model.units import Weight


def make_kernels(choice: KernelChoice, family: str) -> Kernels:
    """Return the kernels of a rank of a family. What of the choice is still open is as without it."""
    return (FusedKernels if choice.fused_of(family) else Kernels)(choice)


class FusedKernels(Kernels):
    """Each of them but attention is one kernel forward, and one or two backward: a sum over tokens is one of its own.
    The loss is two kernels forward, with what ranks exchange between them, and one backward.

    The last bits are others than those of `Kernels`: values are rounded to the dtype once, at the end.
    """

    def __init__(self, choice: KernelChoice | None = None):
        super().__init__(choice)
        self._run = Compiled()

    def norm(
        self,
        x: torch.Tensor,
        weights: list[Weight],
        x_axis: Axis,
        features: int,
        of: Norm,
        again: list[OfInput] | None = None,
    ) -> torch.Tensor:
        cutting = x_axis if x_axis.size > 1 else None
        if of.has_bias:
            return _FusedLayerNorm.apply(x, *weights, cutting, features, of, self._run, again)
        return _FusedRmsNorm.apply(x, *weights, cutting, features, of, self._run, again)

    def head_norm(self, x: torch.Tensor, weight: Weight, of: Norm) -> torch.Tensor:
        return _FusedRmsNorm.apply(x, weight, None, x.shape[-1], of, self._run, None)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return _FusedRotate.apply(x, cos, sin, self._run)

    def gated(self, both: torch.Tensor, activation: str) -> torch.Tensor:
        return _FusedGated.apply(both, activation, self._run)

    def token_losses(
        self,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        first_id: int,
        num_ids: int,
        cap: float | None,
        y: Axis,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local_N = targets_N - first_id
        tops_N = y.all_reduce(self._run(pure.token_tops, logits_NV, num_ids=num_ids, cap=cap), "max")
        sums_2N = y.all_reduce(self._run(pure.token_sums, logits_NV, tops_N, local_N, num_ids=num_ids, cap=cap))
        logs_N = sums_2N[0].log()
        return (logs_N - sums_2N[1]).masked_fill_(targets_N < 0, 0), logs_N + tops_N

    def logits_gradient(
        self,
        logits_NV: torch.Tensor,
        targets_N: torch.Tensor,
        logs_N: torch.Tensor,
        d_loss: torch.Tensor,
        first_id: int,
        num_ids: int,
        cap: float | None,
    ) -> torch.Tensor:
        scales_N = torch.where(targets_N < 0, 0.0, d_loss).float()
        local_N = targets_N - first_id
        return self._run(pure.logits_gradient, logits_NV, logs_N, local_N, scales_N, num_ids=num_ids, cap=cap)


class _FusedRmsNorm(Function):
    @staticmethod
    def forward(
        ctx,
        x,
        weight: Weight,
        cutting: Axis | None,
        features: int,
        of: Norm,
        run: Compiled,
        again: list[OfInput] | None,
    ):
        shape, x_NF = x.shape, x.detach().reshape(-1, x.shape[-1])
        sums = [cutting.all_reduce(run(pure.row_squares, x_NF))] if cutting else []

        def computed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            constants = {"features": features, "epsilon": of.epsilon, "offset": of.offset}
            return run(pure.rms_norm, x.reshape(-1, x.shape[-1]), weight.data, *sums, **constants)

        y_NF, rstd = computed(x_NF)
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.cutting, ctx.features, ctx.offset, ctx.run = weight, cutting, features, of.offset, run
        if again is not None:
            again.append(lambda x: computed(x)[0].view(shape))
        return y_NF.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, rstd = ctx.saved_tensors
        weight, run = ctx.weight, ctx.run
        operands = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), rstd, weight.data
        sums = []
        if ctx.cutting:
            sums = [ctx.cutting.all_reduce(run(pure.rms_norm_sums, *operands, offset=ctx.offset))]
        dx, d_weight = run(pure.rms_norm_backward, *operands, *sums, features=ctx.features, offset=ctx.offset)
        weight.accumulate(add_part, d_weight)
        return dx.view(x.shape), None, None, None, None, None, None


class _FusedLayerNorm(Function):
    @staticmethod
    def forward(
        ctx,
        x,
        weight: Weight,
        bias: Weight,
        cutting: Axis | None,
        features: int,
        of: Norm,
        run: Compiled,
        again: list[OfInput] | None,
    ):
        shape, x_NF = x.shape, x.detach().reshape(-1, x.shape[-1])
        sums = []
        if cutting:
            mean = cutting.all_reduce(run(pure.row_sums, x_NF)).div_(features)
            sums = [mean, cutting.all_reduce(run(pure.centred_squares, x_NF, mean))]

        def computed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            operands = x.reshape(-1, x.shape[-1]), weight.data, bias.data, *sums
            return run(pure.layer_norm, *operands, features=features, epsilon=of.epsilon)

        y_NF, mean, rstd = computed(x_NF)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.cutting, ctx.features, ctx.run = weight, bias, cutting, features, run
        if again is not None:
            again.append(lambda x: computed(x)[0].view(shape))
        return y_NF.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        run = ctx.run
        operands = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), mean, rstd, ctx.weight.data
        sums = [ctx.cutting.all_reduce(run(pure.layer_norm_sums, *operands))] if ctx.cutting else []
        dx, d_weight, d_bias = run(pure.layer_norm_backward, *operands, *sums, features=ctx.features)
        ctx.bias.accumulate(add_part, d_bias)
        ctx.weight.accumulate(add_part, d_weight)
        return dx.view(x.shape), None, None, None, None, None, None, None


class _FusedRotate(Function):
    @staticmethod
    def forward(ctx, x, cos, sin, run: Compiled):
        ctx.save_for_backward(cos, sin)
        ctx.run = run
        return run(pure.rotate, x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return ctx.run(pure.rotate_backward, dy, *ctx.saved_tensors), None, None, None


class _FusedGated(Function):
    @staticmethod
    def forward(ctx, both, activation: str, run: Compiled):
        ctx.save_for_backward(both)
        ctx.activation, ctx.run = activation, run
        both_NF = both.detach().reshape(-1, both.shape[-1])
        return run(pure.gated, both_NF, activation=activation).view(*both.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (both,) = ctx.saved_tensors
        operands = dy.reshape(-1, dy.shape[-1]), both.reshape(-1, both.shape[-1])
        return ctx.run(pure.gated_backward, *operands, activation=ctx.activation).view(both.shape), None, None
