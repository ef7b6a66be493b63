"""The differentiable operations of a transformer on a tensor grid, each with its backward pass written out.

Linear layers are in `linear_layers.py`. Shape suffixes: N tokens (rows x positions, flattened), V vocabulary, this
rank's part. Gradients of weights are added straight into `Weight.grad` (fp32), never returned. So accumulation
over microbatches costs no pass of its own, and may be left for later (`Weight.accumulate`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.attention as attention_of_torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpctrain.architectures.description import Attention, Norm
from hpctrain.comm.reduction import HALF
from hpctrain.model.axes import Axis
from hpctrain.model.documents import Documents, visible
from hpctrain.model.linear_layers import add_part
from hpctrain.model.units import Weight

OfInput = Callable[[torch.Tensor], torch.Tensor]
"""Computes a result once more from the same input."""


class _RmsNorm(Function):
    @staticmethod
    def forward(
        ctx,
        x,
        weight: Weight,
        x_axis: Axis | None,
        features: int,
        epsilon: float,
        offset: float,
        again: list[OfInput] | None,
    ):
        x32 = x.float()
        squares = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_()
        rstd = _summed(squares, x_axis).div_(features).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.x_axis, ctx.features, ctx.offset = weight, x_axis, features, offset
        if again is not None:
            again.append(partial(_rms_normed, rstd=rstd, weight=weight, offset=offset))
        return _rms_scaled(x32, rstd, weight, offset).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        dy32 = dy.float()
        product = dy32 * normed
        scale = _scale(ctx.weight, ctx.offset)
        ctx.weight.accumulate(add_part, product.flatten(0, -2).sum(0))
        # sum over features of dy * w * normed
        along = _summed(product @ scale.float().unsqueeze(1), ctx.x_axis).div_(ctx.features)
        dx = (dy32 * scale).sub_(normed.mul_(along)).mul_(rstd)
        return dx.to(x.dtype), None, None, None, None, None, None


def _rms_scaled(x32: torch.Tensor, rstd: torch.Tensor, weight: Weight, offset: float) -> torch.Tensor:
    return (x32 * rstd).mul_(_scale(weight, offset))


def _rms_normed(x: torch.Tensor, rstd: torch.Tensor, weight: Weight, offset: float) -> torch.Tensor:
    return _rms_scaled(x.float(), rstd, weight, offset).to(x.dtype)


def _summed(values: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    return axis.all_reduce(values) if axis else values


def _scale(weight: Weight, offset: float) -> torch.Tensor:
    return weight.data.float() + offset if offset else weight.data


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx,
        x,
        weight: Weight,
        bias: Weight,
        x_axis: Axis,
        features: int,
        epsilon: float,
        again: list[OfInput] | None,
    ):
        x32 = x.float()
        mean = x_axis.all_reduce(x32.sum(-1, keepdim=True)).div_(features)
        centred = x32 - mean
        squares = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).square_()
        rstd = x_axis.all_reduce(squares).div_(features).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.x_axis, ctx.features = weight, bias, x_axis, features
        if again is not None:
            again.append(partial(_layer_normed, mean=mean, rstd=rstd, weight=weight, bias=bias))
        return _layer_scaled(centred, rstd, weight, bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        normed = (x.float() - mean).mul_(rstd)
        dy32 = dy.float()
        ctx.bias.accumulate(add_part, dy32.flatten(0, -2).sum(0))
        ctx.weight.accumulate(add_part, (dy32 * normed).flatten(0, -2).sum(0))
        scaled = dy32 * ctx.weight.data
        sums = torch.cat([scaled.sum(-1, keepdim=True), (scaled * normed).sum(-1, keepdim=True)], dim=-1)
        sums = ctx.x_axis.all_reduce(sums).div_(ctx.features)
        dx = scaled.sub_(sums[..., :1]).sub_(normed.mul_(sums[..., 1:])).mul_(rstd)
        return dx.to(x.dtype), None, None, None, None, None, None


def _layer_scaled(centred: torch.Tensor, rstd: torch.Tensor, weight: Weight, bias: Weight) -> torch.Tensor:
    return centred.mul_(rstd).mul_(weight.data).add_(bias.data)


def _layer_normed(
    x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Weight, bias: Weight
) -> torch.Tensor:
    return _layer_scaled(x.float() - mean, rstd, weight, bias).to(x.dtype)


def norm(
    x: torch.Tensor,
    weights: list[Weight],
    x_axis: Axis,
    features: int,
    of: Norm,
    again: list[OfInput] | None = None,
) -> torch.Tensor:
    """Normalise over features that are cut by x.

    x: [..., features / x]. All ranks of `x_axis` must call. What computes the result again, of x and with the
    statistics, which are kept, is added to `again`: it calls nobody.
    """
    if of.has_bias:
        return _LayerNorm.apply(x, *weights, x_axis, features, of.epsilon, again)
    return _RmsNorm.apply(x, *weights, x_axis, features, of.epsilon, of.offset, again)


def head_norm(x: torch.Tensor, weight: Weight, of: Norm) -> torch.Tensor:
    """Apply an RMSNorm to each head alone. x: [..., heads, head size]; weight: [head size]."""
    return _RmsNorm.apply(x, weight, None, x.shape[-1], of.epsilon, of.offset, None)


def local_ids(ids: torch.Tensor, first_id: int, table: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of this rank's part of a table, 0 for ids of other ranks, and which ids these are."""
    local = ids - first_id
    absent = (local < 0) | (local >= table.data.shape[0])
    return local.masked_fill(absent, 0), absent


class _Embed(Function):
    @staticmethod
    def forward(ctx, anchor, ids, table: Weight, first_id: int, y: Axis):
        local, absent = local_ids(ids, first_id, table)
        ctx.save_for_backward(local, absent)
        ctx.table = table
        out = F.embedding(local, table.data)
        if y.size > 1:
            y.all_reduce(out.masked_fill_(absent.unsqueeze(-1), 0))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        ctx.table.accumulate(add_rows, dy, *ctx.saved_tensors)
        return None, None, None, None, None


def add_rows(grad: torch.Tensor, dy: torch.Tensor, local: torch.Tensor, absent: torch.Tensor, fresh: bool) -> None:
    """Add dy, [..., features], to the rows `local` of a table's gradient, but for those that are `absent`."""
    if fresh:
        grad.zero_()
    dy = dy.float().masked_fill(absent.unsqueeze(-1), 0)
    grad.index_add_(0, local.reshape(-1), dy.reshape(-1, dy.shape[-1]))


def embed(anchor: torch.Tensor, ids: torch.Tensor, table: Weight, first_id: int, y: Axis) -> torch.Tensor:
    """Look up ids in a table cut by y over ids and by x over features.

    ids: int64 [rows, positions]; result: [rows, positions, hidden / x], the same on all y. `anchor` is any tensor that
    requires a gradient: it makes autograd call the backward pass. All ranks of `y` must call.
    """
    return _Embed.apply(anchor, ids, table, first_id, y)


class _AddPositions(Function):
    @staticmethod
    def forward(ctx, x, table: Weight, first: int, places: torch.Tensor | None):
        ctx.table, ctx.places, ctx.first = table, places, first
        return x + table.data[slice(first, first + x.shape[1]) if places is None else places]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if ctx.places is None:
            ctx.table.accumulate(partial(add_consecutive, first=ctx.first), dy)
        else:
            ctx.table.accumulate(add_rows, dy, ctx.places, torch.zeros_like(ctx.places, dtype=torch.bool))
        return dy, None, None, None


def add_consecutive(grad: torch.Tensor, dy: torch.Tensor, fresh: bool, first: int) -> None:
    """Add dy, [rows, positions, features], summed over rows, to the gradients of positions `first`, `first` + 1, ..."""
    if fresh:
        grad.zero_()
    grad[first : first + dy.shape[1]] += dy.sum(0, dtype=torch.float32)


def add_positions(x: torch.Tensor, table: Weight, first: int = 0, places: torch.Tensor | None = None) -> torch.Tensor:
    """Add learned positions, [positions, hidden / x], to x: [rows, positions, hidden / x].

    They are `first`, `first` + 1, ..., or `places`, int64 [rows, positions].
    """
    return _AddPositions.apply(x, table, first, places)


class _Rotate(Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, -sin), None, None


def _rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = out.chunk(2, dim=-1)
    torch.sub(a * cos, b * sin, out=first)
    torch.add(b * cos, a * sin, out=second)
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions (RoFormer, Su et al. 2021; halves as pairs) to x: [rows, positions, heads, head size].

    cos, sin: [positions, 1, head size / 2].
    """
    return _Rotate.apply(x, cos.to(x.dtype), sin.to(x.dtype))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": _gelu}
"""By the name in a description."""


class _Gated(Function):
    """activation(gate) * up, which keeps both and nothing in between."""

    @staticmethod
    def forward(ctx, both, activation: str):
        ctx.save_for_backward(both)
        ctx.activation = activation
        gate, up = both.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        grad = torch.empty_like(both)
        d_gate, d_up = grad.chunk(2, dim=-1)
        torch.mul(dy, ACTIVATIONS[ctx.activation](gate), out=d_up)
        if ctx.activation == "silu":
            torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        else:
            torch.ops.aten.gelu_backward.grad_input(dy * up, gate, approximate="tanh", grad_input=d_gate)
        return grad, None


def gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, where both: [..., 2 * features] is gate, then up."""
    return _Gated.apply(both, activation)


ATTENTION_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "flash4": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""By the name that jobs have for it."""
FLASH_VERSIONS = {"flash3": "FA3", "flash4": "FA4"}
"""Versions of flash attention that torch, from 2.11, takes from another package in the place of its own."""


def _select_flash(backend: str) -> None:
    """Have torch use the version of flash attention that a backend asks for, from now on. Raises RuntimeError."""
    wanted, current = FLASH_VERSIONS.get(backend), getattr(attention_of_torch, "current_flash_attention_impl", None)
    if wanted == (current and current()):
        return
    try:
        if wanted is None:
            attention_of_torch.restore_flash_attention_impl()
        else:
            attention_of_torch.activate_flash_attention_impl(wanted)
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        raise RuntimeError(f"torch {torch.__version__} cannot use {wanted}: {error}") from None


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention: Attention,
    first: int = 0,
    documents: Documents | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Mix values by causal attention, in the window and with the cap that the description has.

    queries: [rows, heads, positions, head size]; keys, values: [rows, key/value heads, all positions, head size];
    result as queries. Queries are those of positions `first`, `first` + 1, ...; with `documents` each attends to no
    position before its own document. `backend` is a key of `ATTENTION_BACKENDS`, for scores without a cap.

    Raises RuntimeError where torch has no such kernel for the inputs.
    """
    scale = (attention.score_divisor or queries.shape[-1]) ** -0.5
    count, total = queries.shape[2], keys.shape[2]
    is_windowed = attention.window is not None and attention.window < total
    if attention.score_cap is None:
        is_causal = not is_windowed and count == total and documents is None
        if repeats_heads(queries, keys, is_causal and backend != "efficient"):
            keys, values = (_repeated(each, queries.shape[1]) for each in (keys, values))
        _select_flash(backend)
        with sdpa_kernel(ATTENTION_BACKENDS[backend]) if backend != "auto" else nullcontext():
            return F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=None if is_causal else _mask(queries, first, total, attention.window, documents),
                is_causal=is_causal,
                scale=scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
    keys, values = (_repeated(each, queries.shape[1]) for each in (keys, values))
    scores = capped(queries @ keys.transpose(2, 3) * scale, attention.score_cap)
    scores = scores.masked_fill(~_mask(queries, first, total, attention.window, documents), -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype) @ values


def repeats_heads(queries: torch.Tensor, keys: torch.Tensor, is_causal: bool) -> bool:
    """Say whether each key/value head is repeated for the query heads that share it, before a kernel sees them.

    Kernels that share heads by themselves are that of CPUs, and on NVIDIA the one for half precision without a mask.
    For all else torch would take its slow path, which writes all scores to memory.
    """
    if queries.shape[1] == keys.shape[1] or queries.device.type == "cpu":
        return False
    shares = queries.device.type == "cuda" and torch.version.hip is None and queries.dtype in HALF
    return not (shares and is_causal)


def _repeated(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Return [rows, count, positions, head size] of fewer heads, each repeated for its neighbours."""
    return heads.repeat_interleave(count // heads.shape[1], dim=1)


def _mask(
    queries: torch.Tensor, first: int, total: int, window: int | None, documents: Documents | None
) -> torch.Tensor:
    return documents.mask(queries, first, total, window) if documents else visible(queries, first, total, window)


def capped(values: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(values / cap)."""
    return (values / cap).tanh() * cap


def token_losses(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, first_id: int, num_ids: int, cap: float | None, y: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -log p(target) of each token, 0 of those that are left out, and the logarithm of its sum of exponentials.

    logits: [N, V], not capped yet; this rank's columns are ids first_id, first_id + 1, ...; columns from `num_ids` on
    are padding. targets: int64 [N], negative ones are left out. Both results are fp32 [N]. All ranks of `y` must call.
    """
    values_NV = _capped_in_fp32(logits_NV, num_ids, cap)
    top_N1 = y.all_reduce(values_NV.amax(dim=1), "max").unsqueeze(1)
    local_N1, absent_N = _places(targets_N, first_id, num_ids)
    own_N = (values_NV.gather(1, local_N1) - top_N1).squeeze(1).masked_fill_(absent_N, 0)
    is_copy = values_NV.dtype != logits_NV.dtype or cap is not None
    exp_NV = values_NV.sub_(top_N1).exp_() if is_copy else (values_NV - top_N1).exp_()
    sums = y.all_reduce(torch.stack([exp_NV.sum(1), own_N]))
    logs_N = sums[0].log()
    return (logs_N - sums[1]).masked_fill_(targets_N < 0, 0), logs_N + top_N1.squeeze(1)


def logits_gradient(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    logs_N: torch.Tensor,
    d_loss: torch.Tensor,
    first_id: int,
    num_ids: int,
    cap: float | None,
) -> torch.Tensor:
    """Return the gradient of the logits of `token_losses`, whose sum over tokens has the gradient `d_loss`, a scalar.

    It may be written over the logits. `logs_N` is what `token_losses` returned.
    """
    values_NV = _capped_in_fp32(logits_NV, num_ids, cap)
    slope_NV = None if cap is None else 1 - (values_NV / cap).square_()
    local_N1, absent_N = _places(targets_N, first_id, num_ids)
    grad_NV = values_NV.sub_(logs_N.unsqueeze(1)).exp_()
    grad_NV.scatter_add_(1, local_N1, (absent_N.to(grad_NV.dtype) - 1).unsqueeze(1))
    if slope_NV is not None:
        grad_NV *= slope_NV.nan_to_num_(0.0, 0.0, 0.0)  # of padding, whose logits are no numbers
    grad_NV *= torch.where(targets_N < 0, 0.0, d_loss).to(grad_NV.dtype).unsqueeze(1)
    return grad_NV.to(logits_NV.dtype)


def _capped_in_fp32(logits_NV: torch.Tensor, num_ids: int, cap: float | None) -> torch.Tensor:
    """Return capped logits in fp32, minus infinity in padded columns: the given ones where nothing has to be cast."""
    values_NV = logits_NV.float()
    if cap is not None:
        values_NV = (values_NV / cap).tanh_().mul_(cap)
    if num_ids < values_NV.shape[1]:
        values_NV[:, num_ids:] = -torch.inf
    return values_NV


def _places(targets_N: torch.Tensor, first_id: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each token's target, [N, 1], and whether this rank does not have it."""
    local_N = targets_N - first_id
    absent_N = (local_N < 0) | (local_N >= num_ids) | (targets_N < 0)
    return local_N.masked_fill(absent_N, 0).unsqueeze(1), absent_N
