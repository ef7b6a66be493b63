"""The last product and its loss, some tokens at a time: logits are never there all at once.

A vocabulary of 128 thousand ids makes logits of half a megabyte a token in fp32, several times what a block keeps. The
forward pass keeps two numbers a token; the backward pass computes the logits again, a third more work for this product.

Shape suffixes: N tokens, I input features, V vocabulary, all of them this rank's part.
"""

from collections.abc import Iterator

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.model.axes import Axes, Axis
from hpctrain.model.linear_layers import add_product
from hpctrain.model.positions import gathered, start_scatter
from hpctrain.model.units import Weight

LOGITS_BYTES = 256 << 20
"""Of logits in fp32 that may be there at once. Small models never have as many, and are computed at once."""


def tokens_at_once(num_tokens: int, columns: int) -> int:
    """Return for how many tokens the logits of so many columns are there at once, the same on all ranks of a grid."""
    return min(num_tokens, max(1, LOGITS_BYTES // (4 * columns)))


class _HeadLoss(Function):
    @staticmethod
    def forward(ctx, hidden, weight: Weight, targets, first_id: int, num_ids: int, cap: float | None, axes: Axes):
        x_NI = _all_tokens(hidden, axes)
        targets_N = targets.reshape(-1)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        logs_N = torch.empty(x_NI.shape[0], device=hidden.device)
        y: Axis = axes.y
        for at in _chunks(x_NI, weight):
            logits_NV = _logits(x_NI[at], weight, num_ids, cap, axes)
            top_N = y.all_reduce(logits_NV.amax(dim=1), "max").unsqueeze(1)
            local_N, absent_N, ignored_N = _places(targets_N[at], first_id, num_ids)
            own_N = (logits_NV.gather(1, local_N) - top_N).squeeze(1).masked_fill_(absent_N, 0)
            sums = y.all_reduce(torch.stack([logits_NV.sub_(top_N).exp_().sum(1), own_N]))
            logs = sums[0].log()
            loss += (logs - sums[1]).masked_fill_(ignored_N, 0).sum(dtype=torch.float64)
            logs_N[at] = logs + top_N.squeeze(1)
        ctx.save_for_backward(hidden, targets_N, logs_N)
        ctx.weight, ctx.first_id, ctx.num_ids, ctx.cap, ctx.axes = weight, first_id, num_ids, cap, axes
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        hidden, targets_N, logs_N = ctx.saved_tensors
        weight: Weight = ctx.weight
        axes: Axes = ctx.axes
        x_NI = _all_tokens(hidden, axes)
        dx_NI = torch.empty_like(x_NI)
        for at in _chunks(x_NI, weight):
            logits_NV = _logits(x_NI[at], weight, ctx.num_ids, ctx.cap, axes)
            local_N, absent_N, ignored_N = _places(targets_N[at], ctx.first_id, ctx.num_ids)
            slope_NV = None if ctx.cap is None else 1 - (logits_NV / ctx.cap).square_()
            grad_NV = logits_NV.sub_(logs_N[at].unsqueeze(1)).exp_()
            grad_NV.scatter_add_(1, local_N, (absent_N.to(grad_NV.dtype) - 1).unsqueeze(1))
            if slope_NV is not None:
                grad_NV *= slope_NV.nan_to_num_(0.0, 0.0, 0.0)  # of padding, whose logits are no numbers
            grad_NV *= torch.where(ignored_N, 0.0, d_loss).to(grad_NV.dtype).unsqueeze(1)
            d_logits_NV = grad_NV.to(x_NI.dtype)
            summed = d_logits_NV @ weight.data.to(x_NI.dtype)
            if not axes.sequence_parallel:
                axes.y.all_reduce(summed)
            dx_NI[at] = summed
            weight.accumulate(add_product, d_logits_NV, x_NI[at])
        dx = dx_NI.view(*hidden.shape[:1], -1, hidden.shape[-1])
        if axes.sequence_parallel:
            dx, scattering = start_scatter(dx, axes.y)
            scattering.wait()
        return dx, None, None, None, None, None, None


def _all_tokens(hidden: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Return the hidden states of all positions, also where each y has its own alone, as [N, I]."""
    whole = gathered(hidden, axes.y) if axes.sequence_parallel else hidden
    return whole.reshape(-1, hidden.shape[-1])


def _chunks(x_NI: torch.Tensor, weight: Weight) -> Iterator[slice]:
    size = tokens_at_once(x_NI.shape[0], weight.data.shape[0])
    return (slice(start, start + size) for start in range(0, x_NI.shape[0], size))


def _logits(x_NI: torch.Tensor, weight: Weight, num_ids: int, cap: float | None, axes: Axes):
    """Return the logits of some tokens in fp32, minus infinity in padded columns."""
    product_NV = axes.x.all_reduce(x_NI @ weight.data.to(x_NI.dtype).t())
    if cap is not None:
        product_NV = product_NV.div_(cap).tanh_().mul_(cap)
    logits_NV = product_NV.float()
    if num_ids < logits_NV.shape[1]:
        logits_NV[:, num_ids:] = -torch.inf
    return logits_NV


def _places(targets_N: torch.Tensor, first_id: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of each token the column of its target, [N, 1], whether that is on another rank, and whether it is left
    out of the loss."""
    local_N = targets_N - first_id
    absent_N = (local_N < 0) | (local_N >= num_ids) | (targets_N < 0)
    return local_N.masked_fill(absent_N, 0).unsqueeze(1), absent_N, targets_N < 0


def head_loss(
    hidden: torch.Tensor,
    weight: Weight,
    targets: torch.Tensor,
    first_id: int,
    num_ids: int,
    cap: float | None,
    axes: Axes,
) -> torch.Tensor:
    """Return the sum over tokens of -log p(target), fp64 scalar, of normed hidden states [rows, positions, I].

    Hidden states have the positions of this y alone where the axes say so; targets are those of all positions.

    As `linear` over axes x and y, `capped` where `cap` is set, and `cross_entropy`. All ranks of both axes must call.
    """
    return _HeadLoss.apply(hidden, weight, targets, first_id, num_ids, cap, axes)
