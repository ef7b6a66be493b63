"""The loss of logits, and the last product with its loss, some tokens at a time: logits are never there all at once.

A vocabulary of 128 thousand ids makes logits of half a megabyte a token in fp32, several times what a block keeps. The
forward pass keeps two numbers a token; the backward pass computes the logits again, a third more work for this product.

Shape suffixes: N tokens, I input features, V vocabulary, all of them this rank's part. Columns from `num_ids` on are
padding. Logits are given without their cap.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.autograd import Function

from hpctrain.config.kernels import tokens_at_once
from hpctrain.model.axes import Axes, Axis
from hpctrain.model.operators.activation import reference_cap
from hpctrain.model.operators.linear import add_product
from hpctrain.model.operators.running import Kernels, Run
from hpctrain.model.positions import gathered, start_scatter
from hpctrain.model.units import Weight


def _values(logits_NV: torch.Tensor, num_ids: int, cap: float | None) -> torch.Tensor:
    """Return capped logits in fp32, minus infinity in padded columns: the given ones where nothing has to be cast.

    Compiled functions change none of their tensors, and get a copy, which is never stored.
    """
    values_NV = logits_NV.float()
    if cap is not None:
        values_NV = (values_NV / cap).tanh_().mul_(cap)
    if torch.compiler.is_compiling():
        return torch.where(_columns(logits_NV) < num_ids, values_NV, -torch.inf)
    if num_ids < values_NV.shape[1]:
        values_NV[:, num_ids:] = -torch.inf
    return values_NV


def _columns(logits_NV: torch.Tensor) -> torch.Tensor:
    return torch.arange(logits_NV.shape[1], device=logits_NV.device)


def _absent(local_N: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Return whether this rank does not have the column of a token's target."""
    return (local_N < 0) | (local_N >= num_ids)


def tops(logits_NV: torch.Tensor, *, num_ids: int, cap: float | None) -> torch.Tensor:
    """Return the largest logit of each token, fp32 [N]."""
    return _values(logits_NV, num_ids, cap).amax(dim=1)


def forward(
    logits_NV: torch.Tensor,
    local_N: torch.Tensor,
    tops_N: torch.Tensor | None = None,
    *,
    num_ids: int,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each token the sum of exponentials of its logits, and the logit of column `local_N`, fp32 [2, N].

    Both are relative to the largest logit, fp32 [N], which is returned too, and computed here where other ranks have
    no columns. A column that is not here counts 0.
    """
    values_NV = _values(logits_NV, num_ids, cap)
    tops_N = values_NV.amax(dim=1) if tops_N is None else tops_N
    tops_N1, absent_N = tops_N.unsqueeze(1), _absent(local_N, num_ids)
    own_N1 = values_NV.gather(1, local_N.masked_fill(absent_N, 0).unsqueeze(1)) - tops_N1
    is_copy = values_NV.dtype != logits_NV.dtype or cap is not None
    exp_NV = values_NV.sub_(tops_N1).exp_() if is_copy else (values_NV - tops_N1).exp_()
    return torch.stack([exp_NV.sum(1), own_N1.squeeze(1).masked_fill_(absent_N, 0)]), tops_N


def backward(
    logits_NV: torch.Tensor,
    logs_N: torch.Tensor,
    local_N: torch.Tensor,
    scales_N: torch.Tensor,
    *,
    num_ids: int,
    cap: float | None,
) -> torch.Tensor:
    """Return the gradient of the logits, in their dtype: (p - 1 for the target) times `scales_N`.

    It may be written over the logits. `logs_N` is the logarithm of the sum of exponentials.
    """
    values_NV = _values(logits_NV, num_ids, cap)
    slope_NV = None if cap is None else 1 - (values_NV / cap).square_()
    grad_NV = values_NV.sub_(logs_N.unsqueeze(1)).exp_()
    absent_N = _absent(local_N, num_ids)
    if torch.compiler.is_compiling():  # to add in some places would be a kernel of its own
        grad_NV = grad_NV - ((_columns(logits_NV) == local_N[:, None]) & ~absent_N[:, None]).float()
    else:
        local_N1 = local_N.masked_fill(absent_N, 0).unsqueeze(1)
        grad_NV.scatter_add_(1, local_N1, (absent_N.to(grad_NV.dtype) - 1).unsqueeze(1))
    if slope_NV is not None:
        grad_NV *= slope_NV.nan_to_num_(0.0, 0.0, 0.0)  # of padding, whose logits are no numbers
    grad_NV *= scales_N.unsqueeze(1)
    return grad_NV.to(logits_NV.dtype)


def token_losses(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, first_id: int, num_ids: int, cap: float | None, y: Axis, run: Run
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -log p(target) of each token, 0 of those that are left out, and the logarithm of its sum of exponentials.

    logits: [N, V]; this rank's columns are ids first_id, first_id + 1, ... targets: int64 [N], negative ones are left
    out. Both results are fp32 [N]. All ranks of `y` must call.
    """
    of = {"num_ids": num_ids, "cap": cap}
    of_all = (y.all_reduce(run(tops, logits_NV, **of), "max"),) if y.size > 1 else ()
    sums_2N, tops_N = run(forward, logits_NV, targets_N - first_id, *of_all, **of)
    logs_N = y.all_reduce(sums_2N)[0].log()
    return (logs_N - sums_2N[1]).masked_fill_(targets_N < 0, 0), logs_N + tops_N


def logits_gradient(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    logs_N: torch.Tensor,
    d_loss: torch.Tensor,
    first_id: int,
    num_ids: int,
    cap: float | None,
    run: Run,
) -> torch.Tensor:
    """Return the gradient of the logits of `token_losses`, whose sum over tokens has the gradient `d_loss`, a scalar.

    It may be written over the logits. `logs_N` is what `token_losses` returned.
    """
    scales_N = torch.where(targets_N < 0, 0.0, d_loss).float()
    return run(backward, logits_NV, logs_N, targets_N - first_id, scales_N, num_ids=num_ids, cap=cap)


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
            logits_NV = _logits(x_NI[at], weight, axes)
            losses_N, logs_N[at] = token_losses(logits_NV, targets_N[at], *ctx.of, axes.y, kernels.run)
            loss += losses_N.sum(dtype=torch.float64)
        ctx.save_for_backward(hidden, targets_N, logs_N)
        ctx.weight, ctx.axes, ctx.kernels = weight, axes, kernels
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        hidden, targets_N, logs_N = ctx.saved_tensors
        weight: Weight = ctx.weight
        axes: Axes = ctx.axes
        x_NI = _all_tokens(hidden, axes)
        dx_NI = torch.empty_like(x_NI)
        for at in _chunks(x_NI, weight, ctx.kernels):
            logits_NV = _logits(x_NI[at], weight, axes)
            d_logits_NV = logits_gradient(logits_NV, targets_N[at], logs_N[at], d_loss, *ctx.of, run=ctx.kernels.run)
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
    def forward(ctx, logits, targets, first_id: int, num_ids: int, cap: float | None, y: Axis, run: Run):
        logits_NV, targets_N = logits.detach().reshape(-1, logits.shape[-1]), targets.reshape(-1)
        ctx.of = first_id, num_ids, cap
        losses_N, logs_N = token_losses(logits_NV, targets_N, *ctx.of, y=y, run=run)
        ctx.save_for_backward(logits_NV, targets_N, logs_N)
        ctx.run, ctx.shape = run, logits.shape
        return losses_N.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx, d_loss):
        logits_NV, targets_N, logs_N = ctx.saved_tensors
        grad_NV = logits_gradient(logits_NV, targets_N, logs_N, d_loss, *ctx.of, run=ctx.run)
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
    run: Run,
) -> torch.Tensor:
    """Return the sum over tokens of -log p(target), fp64 scalar, for logits cut by y over the vocabulary.

    logits: [rows, positions, V], not capped yet, and written over by the backward pass; see `token_losses`.
    targets: int64 [rows, positions]. All ranks of `y` must call.
    """
    return _CrossEntropy.apply(logits, targets, first_id, num_ids, cap, y, run)


def reference(logits: torch.Tensor, targets: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return the summed loss of logits by torch's own cross entropy: differentiable."""
    return F.cross_entropy(reference_cap(logits, cap).flatten(0, -2), targets.flatten(), reduction="sum")
