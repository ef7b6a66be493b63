"""Rotary positions (RoFormer, Su et al. 2021), with the halves of a head as pairs.

Shapes: x [rows, positions, heads, head size]; cos and sin fp32 [positions, 1, head size / 2]. The gradients of queries,
keys and values become one, that of the product which made them, in the pass that turns the first two back.
"""

import math
from collections.abc import Sequence

import torch
from torch.autograd import Function

from hpctrain.architectures.description import Attention, Rotary, yarn_attention_factor
from hpctrain.model.operators.running import Run
from hpctrain.sharding.intervals import Interval


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Turn each pair (a, b) by its angle, in another dtype than that of x where one is given."""
    a, b = x.to(dtype or x.dtype).chunk(2, dim=-1)
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    if torch.compiler.is_compiling():  # compiled code cannot write into part of a tensor, and fuses intermediates
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    result = torch.empty(x.shape, dtype=a.dtype, device=x.device)
    first, second = result.chunk(2, dim=-1)
    torch.sub(a * cos, b * sin, out=first)
    torch.add(b * cos, a * sin, out=second)
    return result.to(x.dtype)


def backward(
    cos: torch.Tensor, sin: torch.Tensor, *gradients: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Turn the gradients of queries and keys back; return these and that of values, if it is there, as one."""
    if torch.compiler.is_compiling():
        turned = [forward(each, cos, -sin, dtype=dtype) for each in gradients[:2]]
        return torch.cat([*turned, *gradients[2:]], dim=2)
    result = torch.cat(gradients, dim=2)
    turned = result[:, :, : sum(each.shape[2] for each in gradients[:2])]
    wide = turned.to(dtype or turned.dtype)
    a, b = wide.chunk(2, dim=-1)
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    of_a, of_b = a * sin, b * sin
    a.mul_(cos).add_(of_b)
    b.mul_(cos).sub_(of_a)
    if wide is not turned:
        turned.copy_(wide)
    return result


class _Rotate(Function):
    @staticmethod
    def forward(ctx, x, cos, sin, counts: Sequence[int], run: Run, dtype: torch.dtype | None):
        ctx.cos, ctx.sin, ctx.run, ctx.dtype = cos, sin, run, dtype
        rotated = run(forward, x.narrow(2, 0, sum(counts[:2])), cos, sin, dtype=dtype)
        return *rotated.split_with_sizes(counts[:2], dim=2), *x.split_with_sizes(counts, dim=2)[2:]

    @staticmethod
    def backward(ctx, *gradients):
        dx = ctx.run(backward, ctx.cos, ctx.sin, *gradients, dtype=ctx.dtype)
        return dx, None, None, None, None, None


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    counts: Sequence[int],
    run: Run,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return queries and keys with rotary positions, which lie in one tensor, and values as they are, if x has them.

    `counts` are the heads of each. Positions are computed in `dtype`, if it is given.
    """
    return _Rotate.apply(x, cos, sin, counts, run, dtype)


def frequencies(rotary: Rotary, half: int) -> torch.Tensor:
    """Return the angle by which each pair of a head turns from one position to the next, fp64 [half]."""
    result = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    scaling = rotary.scaling
    if scaling is None:
        return result
    if scaling.kind == "linear":
        return result / scaling.factor
    # Waves longer than those of pre-training are stretched, short ones stay, between both it is a mixture.
    if scaling.kind == "yarn":  # linear in the number of the pair; bounds and 0.001 are of the transformers library
        turns = (scaling.beta_fast, scaling.beta_slow)
        waves = [math.log(scaling.original_positions / (each * 2 * math.pi)) for each in turns]
        first, last = (half * wave / math.log(rotary.base) for wave in waves)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        share = 1 - (torch.arange(half, dtype=torch.float64) - first) / (last - first or 0.001)
    else:  # Llama 3: linear in the number of waves
        waves_in_training = scaling.original_positions * result / (2 * torch.pi)
        share = (waves_in_training - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    return result * (share.clamp(0, 1) + (1 - share.clamp(0, 1)) / scaling.factor)


def angles(rotary: Rotary, positions: int, half: int) -> torch.Tensor:
    """Return the angle of each pair at each position, fp64 [positions, 1, half]."""
    return torch.arange(positions, dtype=torch.float64)[:, None, None] * frequencies(rotary, half)


def tables(rotary: Rotary, positions: int, half: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the angles, rounded to fp32 on a device; YaRN multiplies both by its attention factor."""
    exact, scaling, scale = angles(rotary, positions, half), rotary.scaling, 1.0
    if scaling is not None and scaling.kind == "yarn":
        scale = scaling.attention_factor or yarn_attention_factor(scaling.factor)
    return (exact.cos() * scale).float().to(device), (exact.sin() * scale).float().to(device)


class Tables:
    """The cos and sin of rotary positions, which all blocks of a tile share. They are made again for more positions."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Rotary, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._joined: dict[tuple, tuple[torch.Tensor, ...]] = {}

    def get(self, attention: Attention, positions: Sequence[Interval], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return both for the positions of x, which are these: fp32 [positions, 1, head size / 2]."""
        assert attention.rotary is not None, "asked for where there is one"
        key, stop = (attention.rotary, attention.head_size // 2), positions[-1].stop
        if key not in self._tables or len(self._tables[key][0]) < stop:
            self._tables[key] = tables(attention.rotary, stop, attention.head_size // 2, x.device)
        if len(positions) == 1:
            return tuple(table[slice(*positions[0])] for table in self._tables[key])
        joined = *key, *positions
        if joined not in self._joined:
            self._joined[joined] = tuple(torch.cat([t[slice(*i)] for i in positions]) for t in self._tables[key])
        return self._joined[joined]
