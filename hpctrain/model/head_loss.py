"""The loss of logits, and the last product with its loss, some tokens at a time: logits are never there all at once.

A vocabulary of 128 thousand ids makes logits of half a megabyte a token in fp32, several times what a block keeps. The
forward pass keeps two numbers a token; the backward pass computes the logits again, a third more work for this product.

Shape suffixes: N tokens, I input features, V vocabulary, all of them this rank's part.
"""

from collections.abc import Iterator

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.config.kernels import tokens_at_once
from hpctrain.model.axes import Axes, Axis
from hpctrain.model.kernels import Kernels
from hpctrain.model.linear_layers import add_product
from hpctrain.model.positions import gathered, start_scatter
from hpctrain.model.units import Weight


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight: Weight,
        targets,
        first_id: int,
        num_ids: int,
        cap: float | None,
        axes: Axes,
        kernels: Kernels,
    ):
        x_NI = _all_tokens(hidden, axes)
        targets_N = targets.reshape(-1)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        logs_N = torch.empty(x_NI.shape[0], device=hidden.device)
        ctx.of = first_id, num_ids, cap
        for at in _chunks(x_NI, weight, kernels):
            losses_N, logs_N[at] = kernels.token_losses(_logits(x_NI[at], weight, axes), targets_N[at], *ctx.of, axes.y)
            loss += losses_N.sum(dtype=torch.float64)
        ctx.save_for_backward(hidden, targets_N, logs_N)
        ctx.weight, ctx.axes, ctx.kernels = weight, axes, kernels
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        hidden, targets_N, logs_N = ctx.saved_tensors
        weight: Weight = ctx.weight
        axes: Axes = ctx.axes
        x_NI = _all_tokens(hidden, axes)
        dx_NI = torch.empty_like(x_NI)
        for at in _chunks(x_NI, weight, ctx.kernels):
            logits_NV = _logits(x_NI[at], weight, axes)
            d_logits_NV = ctx.kernels.logits_gradient(logits_NV, targets_N[at], logs_N[at], d_loss, *ctx.of)
            summed = d_logits_NV @ weight.data.to(x_NI.dtype)
            if not axes.sequence_parallel:
                axes.y.all_reduce(summed)
            dx_NI[at] = summed
            weight.accumulate(add_product, d_logits_NV, x_NI[at])
        dx = dx_NI.view(*hidden.shape[:1], -1, hidden.shape[-1])
        if axes.sequence_parallel:
            dx, scattering = start_scatter(dx, axes.y)
            scattering.wait()
        return dx, None, None, None, None, None, None, None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets, first_id: int, num_ids: int, cap: float | None, y: Axis, kernels: Kernels):
        logits_NV, targets_N = logits.detach().reshape(-1, logits.shape[-1]), targets.reshape(-1)
        ctx.of = first_id, num_ids, cap
        losses_N, logs_N = kernels.token_losses(logits_NV, targets_N, *ctx.of, y)
        ctx.save_for_backward(logits_NV, targets_N, logs_N)
        ctx.kernels, ctx.shape = kernels, logits.shape
        return losses_N.sum(dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        logits_NV, targets_N, logs_N = ctx.saved_tensors
        grad_NV = ctx.kernels.logits_gradient(logits_NV, targets_N, logs_N, d_loss, *ctx.of)
        return grad_NV.view(ctx.shape), None, None, None, None, None, None


def _all_tokens(hidden: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Return the hidden states of all positions, also where each y has its own alone, as [N, I]."""
    whole = gathered(hidden, axes.y) if axes.sequence_parallel else hidden
    return whole.reshape(-1, hidden.shape[-1])


def _chunks(x_NI: torch.Tensor, weight: Weight, kernels: Kernels) -> Iterator[slice]:
    size = tokens_at_once(x_NI.shape[0], weight.data.shape[0], kernels.logits_bytes)
    return (slice(start, start + size) for start in range(0, x_NI.shape[0], size))


def _logits(x_NI: torch.Tensor, weight: Weight, axes: Axes) -> torch.Tensor:
    """Return the logits of some tokens, not capped yet."""
    return axes.x.all_reduce(x_NI @ weight.data.to(x_NI.dtype).t())


def head_loss(
    hidden: torch.Tensor,
    weight: Weight,
    targets: torch.Tensor,
    first_id: int,
    num_ids: int,
    cap: float | None,
    axes: Axes,
    kernels: Kernels,
) -> torch.Tensor:
    """Return the sum over tokens of -log p(target), fp64 scalar, of normed hidden states [rows, positions, I].

    Hidden states have the positions of this y alone where the axes say so; targets are those of all positions.

    As `linear` over axes x and y, and `cross_entropy`. All ranks of both axes must call.
    """
    return _HeadLoss.apply(hidden, weight, targets, first_id, num_ids, cap, axes, kernels)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_id: int,
    num_ids: int,
    cap: float | None,
    y: Axis,
    kernels: Kernels,
) -> torch.Tensor:
    """Return the sum over tokens of -log p(target), fp64 scalar, for logits cut by y over the vocabulary.

    logits: [rows, positions, V], not capped yet, and written over by the backward pass; see `functions.token_losses`.
    targets: int64 [rows, positions]. All ranks of `y` must call.
    """
    return _CrossEntropy.apply(logits, targets, first_id, num_ids, cap, y, kernels)
