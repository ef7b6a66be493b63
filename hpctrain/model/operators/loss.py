"""The loss of logits, and the last product with its loss, some tokens at a time: logits are never there all at once.

A vocabulary of 128 thousand ids makes logits of half a megabyte a token in fp32, several times what a block keeps. Loss
and gradient are computed while the logits of some tokens are there, in the backward pass (as Liger does in the forward
pass, Hsu et al. 2024): no product is computed twice, and gradients of weights are there to be added to.

Shape suffixes: N tokens, I input features, V vocabulary, all of them this rank's part. Columns from `num_ids` on are
padding. Logits are given without their cap.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd import Function

from hpctrain.config.kernels import tokens_at_once
from hpctrain.model.operators.linear import add_product
from hpctrain.model.operators.running import Kernels
from hpctrain.model.parallel.axes import Axes
from hpctrain.model.parallel.gathering import gathered, start_scatter
from hpctrain.model.storage.units import Weight


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
    if torch.compiler.is_compiling():  # adding in some places would be a separate kernel
        grad_NV = grad_NV - ((_columns(logits_NV) == local_N[:, None]) & ~absent_N[:, None]).float()
    else:
        local_N1 = local_N.masked_fill(absent_N, 0).unsqueeze(1)
        grad_NV.scatter_add_(1, local_N1, (absent_N.to(grad_NV.dtype) - 1).unsqueeze(1))
    if slope_NV is not None:
        grad_NV *= slope_NV.nan_to_num_(0.0, 0.0, 0.0)  # slopes of padding, whose logits are no numbers
    grad_NV *= scales_N.unsqueeze(1)
    return grad_NV.to(logits_NV.dtype)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of tokens, whose logits are cut by y over the vocabulary and given without their cap."""

    axes: Axes
    kernels: Kernels
    first_id: int
    """This rank's columns are ids first_id, first_id + 1, ..."""
    num_ids: int
    """How many of this rank's columns are not padding."""
    cap: float | None

    def losses(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -log p(target) of each token, 0 where targets are negative, and the logarithm of its sum of
        exponentials, both fp32 [N]. All ranks of y must call."""
        run, y, of = self.kernels.run, self.axes.y, {"num_ids": self.num_ids, "cap": self.cap}
        of_all = (y.all_reduce(run(tops, logits_NV, **of), "max"),) if y.size > 1 else ()
        sums_2N, tops_N = run(forward, logits_NV, targets_N - self.first_id, *of_all, **of)
        logs_N = y.all_reduce(sums_2N)[0].log()
        return (logs_N - sums_2N[1]).masked_fill_(targets_N < 0, 0), logs_N + tops_N

    def gradient(
        self, logits_NV: torch.Tensor, targets_N: torch.Tensor, logs_N: torch.Tensor, d_loss: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the logits, where the sum of the losses has the gradient `d_loss`, a scalar.

        It may be written over the logits. `logs_N` is what `losses` returned.
        """
        scales_N = torch.where(targets_N < 0, 0.0, d_loss).float()
        operands = logits_NV, logs_N, targets_N - self.first_id, scales_N
        return self.kernels.run(backward, *operands, num_ids=self.num_ids, cap=self.cap)

    def logits(self, x_NI: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return the logits of some tokens, not capped yet. All ranks of x must call."""
        return self.axes.x.all_reduce(x_NI @ weight.data.to(x_NI.dtype).t())

    def all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of all positions, also where each y has its own alone, as [N, I]."""
        whole = gathered(hidden, self.axes.y) if self.axes.sequence_parallel else hidden
        return whole.reshape(-1, hidden.shape[-1])

    def chunks(self, x_NI: torch.Tensor, weight: Weight) -> Iterator[slice]:
        """Yield so many tokens at once as may have logits."""
        size = tokens_at_once(x_NI.shape[0], weight.data.shape[0], self.kernels.logits_bytes)
        return (slice(start, start + size) for start in range(0, x_NI.shape[0], size))


class _HeadLoss(Function):
    @staticmethod
    def forward(ctx, hidden, weight: Weight, targets, loss: TokenLoss):
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, targets.reshape(-1))
            ctx.weight, ctx.loss, ctx.total = weight, loss, total.detach()
            return total
        x_NI, targets_N = loss.all_tokens(hidden), targets.reshape(-1)
        for at in loss.chunks(x_NI, weight):
            total += loss.losses(loss.logits(x_NI[at], weight), targets_N[at])[0].sum(dtype=torch.float64)
        return total

    @staticmethod
    def backward(ctx, d_loss):
        hidden, targets_N = ctx.saved_tensors
        weight: Weight = ctx.weight
        loss: TokenLoss = ctx.loss
        x_NI = loss.all_tokens(hidden)
        dx_NI = torch.empty_like(x_NI)
        for at in loss.chunks(x_NI, weight):
            logits_NV = loss.logits(x_NI[at], weight)
            losses_N, logs_N = loss.losses(logits_NV, targets_N[at])
            ctx.total += losses_N.sum(dtype=torch.float64)
            d_logits_NV = loss.gradient(logits_NV, targets_N[at], logs_N, d_loss)
            summed = d_logits_NV @ weight.data.to(x_NI.dtype)
            if not loss.axes.sequence_parallel:
                loss.axes.y.all_reduce(summed)
            dx_NI[at] = summed
            weight.accumulate(add_product, d_logits_NV, x_NI[at])
            del logits_NV, d_logits_NV  # before those of the next tokens are there
        dx = dx_NI.view(*hidden.shape[:1], -1, hidden.shape[-1])
        if loss.axes.sequence_parallel:
            dx, scattering = start_scatter(dx, loss.axes.y)
            scattering.wait()
        return dx, None, None, None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, targets, loss: TokenLoss):
        logits_NV, targets_N = logits.detach().reshape(-1, logits.shape[-1]), targets.reshape(-1)
        losses_N, logs_N = loss.losses(logits_NV, targets_N)
        ctx.save_for_backward(logits_NV, targets_N, logs_N)
        ctx.loss, ctx.shape = loss, logits.shape
        return losses_N.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx, d_loss):
        return ctx.loss.gradient(*ctx.saved_tensors, d_loss).view(ctx.shape), None, None


def head_loss(hidden: torch.Tensor, weight: Weight, targets: torch.Tensor, loss: TokenLoss) -> torch.Tensor:
    """Return the sum over tokens of -log p(target), fp64 scalar, of normed hidden states [rows, positions, I].

    Hidden states have the positions of this y alone where the axes say so; targets are those of all positions. Where
    autograd records, the sum is there after the backward pass, and 0 before it.

    As a linear layer over axes x and y, and `cross_entropy`. All ranks of both axes must call.
    """
    return _HeadLoss.apply(hidden, weight, targets, loss)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, loss: TokenLoss) -> torch.Tensor:
    """Return the sum over tokens of -log p(target), fp64 scalar, for logits cut by y over the vocabulary.

    logits: [rows, positions, V], not capped yet, and written over by the backward pass.
    targets: int64 [rows, positions]. All ranks of y must call.
    """
    return _CrossEntropy.apply(logits, targets, loss)
