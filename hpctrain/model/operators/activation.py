"""Activation functions, alone or gated (GLU variants, Shazeer 2020): activation(gate) * up; and the cap of scores.

Shapes: both [..., 2 * features], the gate's, then those of up; dy [..., features].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd import Function

from hpctrain.model.operators.running import Run


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": _gelu}
"""Activation functions, by their name in a description."""
GRADIENTS = {
    "silu": (torch.ops.aten.silu_backward, {}),
    "gelu": (torch.ops.aten.gelu_backward, {"approximate": "tanh"}),
}
"""Torch's backward operation of each activation, and its settings."""


CLAMPED, LIMIT, ALPHA = "clamped", 7.0, 1.702
"""The gated activation of gpt-oss: g sigmoid(ALPHA g) (u + 1), of g = min(gate, LIMIT) and u = up within +-LIMIT."""


def _clamped(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return g, its sigmoid, and u + 1."""
    gate, up = both.chunk(2, dim=-1)
    gate = gate.clamp(max=LIMIT)
    return gate, (gate * ALPHA).sigmoid_(), up.clamp(-LIMIT, LIMIT).add_(1)


def _clamped_backward(dy: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """Return the gradients of gate and up: dy (u + 1) s (1 + ALPHA g (1 - s)), of the sigmoid s, and dy g s."""
    (gate, share, up), (given_gate, given_up) = _clamped(both), both.chunk(2, dim=-1)
    d_up = (dy * gate).mul_(share).masked_fill_(given_up.abs() > LIMIT, 0)
    slope = gate.mul_(ALPHA).mul_(1 - share).add_(1)
    d_gate = up.mul_(dy).mul_(share).mul_(slope).masked_fill_(given_gate > LIMIT, 0)
    return torch.cat([d_gate, d_up], dim=-1)


def forward(both: torch.Tensor, *, activation: str) -> torch.Tensor:
    if activation == CLAMPED:
        gate, share, up = _clamped(both)
        return gate.mul_(share).mul_(up)
    gate, up = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def backward(dy: torch.Tensor, both: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Return the gradients of gate and up, as `both`."""
    if activation == CLAMPED:
        return _clamped_backward(dy, both)
    gate, up = both.chunk(2, dim=-1)
    result = torch.empty_like(both)
    d_gate, d_up = result.chunk(2, dim=-1)
    gradient, settings = GRADIENTS[activation]
    if torch.compiler.is_compiling():  # compiled code cannot write into part of a tensor, and fuses intermediates
        d_up.copy_(ACTIVATIONS[activation](gate)).mul_(dy)
        d_gate.copy_(gradient(dy * up, gate, **settings))
    else:
        torch.mul(dy, ACTIVATIONS[activation](gate), out=d_up)
        gradient.grad_input(dy * up, gate, **settings, grad_input=d_gate)
    return result


class _Gated(Function):
    """Keeps gate and up for the backward pass, and nothing in between."""

    @staticmethod
    def forward(ctx, both, activation: str, run: Run):
        ctx.save_for_backward(both)
        ctx.activation, ctx.run = activation, run
        return run(forward, both, activation=activation)

    @staticmethod
    def backward(ctx, dy):
        return ctx.run(backward, dy, *ctx.saved_tensors, activation=ctx.activation), None, None


def activate(x: torch.Tensor, activation: str, is_gated: bool, run: Run) -> torch.Tensor:
    """Return activation(x), or activation(gate) * up where x has both."""
    return _Gated.apply(x, activation, run) if is_gated else ACTIVATIONS[activation](x)


def capped(values: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(values / cap)."""
    return (values / cap).tanh() * cap
