"""Norms, rotary positions, gated activations and the loss as pure functions of tensors, forward and backward, to be
compiled.

Everything is computed in fp32 and rounded once. Shape suffixes: N tokens, F features, both this rank's part. Sums over
the features of a token are computed here where all of these are on this rank; else they are given, summed over ranks.
V is this rank's part of the vocabulary, of which columns from `num_ids` on are padding.
"""

import torch
import torch.nn.functional as F


def row_squares(x_NF: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each token, fp32 [N, 1]."""
    return x_NF.float().square().sum(-1, keepdim=True)


def rms_norm(
    x_NF: torch.Tensor,
    weight_F: torch.Tensor,
    squares_N1: torch.Tensor | None = None,
    *,
    features: int,
    epsilon: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x / rms(x) * (weight + offset), and 1 / rms(x), fp32 [N, 1]."""
    squares_N1 = row_squares(x_NF) if squares_N1 is None else squares_N1
    rstd_N1 = torch.rsqrt(squares_N1 / features + epsilon)
    return (x_NF.float() * rstd_N1 * (weight_F.float() + offset)).to(x_NF.dtype), rstd_N1


def rms_norm_sums(
    dy_NF: torch.Tensor, x_NF: torch.Tensor, rstd_N1: torch.Tensor, weight_F: torch.Tensor, *, offset: float
) -> torch.Tensor:
    """Return the sum over features of dy * weight * normed x, fp32 [N, 1]."""
    return (dy_NF.float() * (weight_F.float() + offset) * x_NF.float() * rstd_N1).sum(-1, keepdim=True)


def rms_norm_backward(
    dy_NF: torch.Tensor,
    x_NF: torch.Tensor,
    rstd_N1: torch.Tensor,
    weight_F: torch.Tensor,
    sums_N1: torch.Tensor | None = None,
    *,
    features: int,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and, in fp32, of the weight."""
    sums_N1 = rms_norm_sums(dy_NF, x_NF, rstd_N1, weight_F, offset=offset) if sums_N1 is None else sums_N1
    normed_NF = x_NF.float() * rstd_N1
    dx_NF = (dy_NF.float() * (weight_F.float() + offset) - normed_NF * (sums_N1 / features)) * rstd_N1
    return dx_NF.to(x_NF.dtype), (dy_NF.float() * normed_NF).sum(0)


def row_sums(x_NF: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token, fp32 [N, 1]."""
    return x_NF.float().sum(-1, keepdim=True)


def centred_squares(x_NF: torch.Tensor, mean_N1: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each token's distance from its mean, fp32 [N, 1]."""
    return (x_NF.float() - mean_N1).square().sum(-1, keepdim=True)


def layer_norm(
    x_NF: torch.Tensor,
    weight_F: torch.Tensor,
    bias_F: torch.Tensor,
    mean_N1: torch.Tensor | None = None,
    squares_N1: torch.Tensor | None = None,
    *,
    features: int,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x - mean) / deviation * weight + bias, and mean and 1 / deviation, fp32 [N, 1]."""
    mean_N1 = row_sums(x_NF) / features if mean_N1 is None else mean_N1
    squares_N1 = centred_squares(x_NF, mean_N1) if squares_N1 is None else squares_N1
    rstd_N1 = torch.rsqrt(squares_N1 / features + epsilon)
    result_NF = (x_NF.float() - mean_N1) * rstd_N1 * weight_F.float() + bias_F.float()
    return result_NF.to(x_NF.dtype), mean_N1, rstd_N1


def layer_norm_sums(
    dy_NF: torch.Tensor, x_NF: torch.Tensor, mean_N1: torch.Tensor, rstd_N1: torch.Tensor, weight_F: torch.Tensor
) -> torch.Tensor:
    """Return the sums over features of dy * weight, and of that times normed x, fp32 [N, 2]."""
    scaled_NF = dy_NF.float() * weight_F.float()
    along_N1 = (scaled_NF * (x_NF.float() - mean_N1) * rstd_N1).sum(-1, keepdim=True)
    return torch.cat([scaled_NF.sum(-1, keepdim=True), along_N1], dim=-1)


def layer_norm_backward(
    dy_NF: torch.Tensor,
    x_NF: torch.Tensor,
    mean_N1: torch.Tensor,
    rstd_N1: torch.Tensor,
    weight_F: torch.Tensor,
    sums_N2: torch.Tensor | None = None,
    *,
    features: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x and, in fp32, of weight and bias."""
    sums_N2 = layer_norm_sums(dy_NF, x_NF, mean_N1, rstd_N1, weight_F) if sums_N2 is None else sums_N2
    normed_NF = (x_NF.float() - mean_N1) * rstd_N1
    dy32_NF = dy_NF.float()
    means_N2 = sums_N2 / features
    dx_NF = (dy32_NF * weight_F.float() - means_N2[:, :1] - normed_NF * means_N2[:, 1:]) * rstd_N1
    return dx_NF.to(x_NF.dtype), (dy32_NF * normed_NF).sum(0), dy32_NF.sum(0)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return `functions.rotate` of the same shapes; cos and sin are fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rotate_backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x."""
    return rotate(dy, cos, -sin)


def gated(both_NF: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, where both: [N, 2 * features] is gate, then up."""
    gate, up = both_NF.float().chunk(2, dim=-1)
    return (_activated(gate, activation) * up).to(both_NF.dtype)


def gated_backward(dy: torch.Tensor, both_NF: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Return the gradients of gate and up, as [N, 2 * features]."""
    gate, up = both_NF.float().chunk(2, dim=-1)
    dy32 = dy.float()
    if activation == "silu":
        d_gate = torch.ops.aten.silu_backward(dy32 * up, gate)
    else:
        d_gate = torch.ops.aten.gelu_backward(dy32 * up, gate, approximate="tanh")
    return torch.cat([d_gate, dy32 * _activated(gate, activation)], dim=-1).to(both_NF.dtype)


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def token_tops(logits_NV: torch.Tensor, *, num_ids: int, cap: float | None) -> torch.Tensor:
    """Return the largest logit of each token, fp32 [N]."""
    return _capped(logits_NV, num_ids, cap).amax(dim=1)


def token_sums(
    logits_NV: torch.Tensor, tops_N: torch.Tensor, local_N: torch.Tensor, *, num_ids: int, cap: float | None
) -> torch.Tensor:
    """Return of each token the sum of exponentials of its logits, and the logit of column `local_N`, both relative to
    its largest, fp32 [2, N]; a column that is not here counts 0."""
    relative_NV = _capped(logits_NV, num_ids, cap) - tops_N[:, None]
    own_N = torch.where(_is_own(logits_NV, local_N, num_ids), relative_NV, 0.0).sum(dim=1)
    return torch.stack([relative_NV.exp().sum(dim=1), own_N])


def logits_gradient(
    logits_NV: torch.Tensor,
    logs_N: torch.Tensor,
    local_N: torch.Tensor,
    scales_N: torch.Tensor,
    *,
    num_ids: int,
    cap: float | None,
) -> torch.Tensor:
    """Return the gradient of the logits, in their dtype: (p - 1 for the target) times `scales_N`."""
    values_NV = _capped(logits_NV, num_ids, cap)
    gradient_NV = (values_NV - logs_N[:, None]).exp() - _is_own(logits_NV, local_N, num_ids).float()
    if cap is not None:
        gradient_NV = gradient_NV * torch.where(_is_real(logits_NV, num_ids), 1 - (values_NV / cap).square(), 0.0)
    return (gradient_NV * scales_N[:, None]).to(logits_NV.dtype)


def _capped(logits_NV: torch.Tensor, num_ids: int, cap: float | None) -> torch.Tensor:
    values_NV = logits_NV.float()
    if cap is not None:
        values_NV = torch.tanh(values_NV / cap) * cap
    return torch.where(_is_real(logits_NV, num_ids), values_NV, -torch.inf)


def _is_real(logits_NV: torch.Tensor, num_ids: int) -> torch.Tensor:
    return torch.arange(logits_NV.shape[1], device=logits_NV.device)[None, :] < num_ids


def _is_own(logits_NV: torch.Tensor, local_N: torch.Tensor, num_ids: int) -> torch.Tensor:
    columns_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    return (columns_V[None, :] == local_N[:, None]) & (columns_V < num_ids)
