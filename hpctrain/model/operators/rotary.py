"""Rotary positions (RoFormer, Su et al. 2021), with the halves of a head as pairs.

Shapes: x [rows, positions, heads, head size]; cos and sin fp32 [positions, 1, head size / 2].
"""

import torch
from torch.autograd import Function

from hpctrain.architectures.description import Attention, Rotary
from hpctrain.model.operators.running import Run


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (a, b) by its angle."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if torch.compiler.is_compiling():  # it writes into no part of a tensor, and needs no memory for what is between
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = result.chunk(2, dim=-1)
    torch.sub(a * cos, b * sin, out=first)
    torch.add(b * cos, a * sin, out=second)
    return result


def backward(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the gradient back."""
    return forward(dy, cos, -sin)


class _Rotate(Function):
    @staticmethod
    def forward(ctx, x, cos, sin, run: Run):
        ctx.cos, ctx.sin, ctx.run = cos, sin, run
        return run(forward, x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        return ctx.run(backward, dy, ctx.cos, ctx.sin), None, None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, run: Run) -> torch.Tensor:
    """Apply rotary positions to queries or keys."""
    return _Rotate.apply(x, cos, sin, run)


def frequencies(rotary: Rotary, half: int) -> torch.Tensor:
    """Return the angle by which each pair of a head turns from one position to the next, fp64 [half]."""
    result = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    scaling = rotary.scaling
    if scaling is None:
        return result
    if scaling.kind == "linear":
        return result / scaling.factor
    # Llama 3: waves longer than those of pre-training are stretched, short ones stay, between both it is a mixture.
    waves_in_training = scaling.original_positions * result / (2 * torch.pi)
    share = (waves_in_training - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    return result * (share.clamp(0, 1) + (1 - share.clamp(0, 1)) / scaling.factor)


def angles(rotary: Rotary, positions: int, half: int) -> torch.Tensor:
    """Return the angle of each pair at each position, fp64 [positions, 1, half]."""
    return torch.arange(positions, dtype=torch.float64)[:, None, None] * frequencies(rotary, half)


def tables(rotary: Rotary, positions: int, half: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the angles, rounded to fp32 on a device."""
    exact = angles(rotary, positions, half)
    return exact.cos().float().to(device), exact.sin().float().to(device)


class Tables:
    """The cos and sin of rotary positions, which all blocks of a tile share. They are made again for more positions."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Rotary, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, attention: Attention, first: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both for the positions of x, of which the first is at `first`: fp32 [positions, 1, head size / 2]."""
        assert attention.rotary is not None, "asked for where there is one"
        key, positions = (attention.rotary, attention.head_size // 2), first + x.shape[1]
        if key not in self._tables or len(self._tables[key][0]) < positions:
            self._tables[key] = tables(attention.rotary, positions, attention.head_size // 2, x.device)
        cos, sin = self._tables[key]
        return cos[first:positions], sin[first:positions]


def reference(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Return pairs of a head as complex numbers, multiplied by others of length 1: differentiable."""
    turns = angles(rotary, x.shape[1], x.shape[-1] // 2)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(turns), turns)
    return torch.cat([pairs.real, pairs.imag], dim=-1)
