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


def forward(both: torch.Tensor, *, activation: str) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)


def backward(dy: torch.Tensor, both: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Return the gradients of gate and up, as `both`."""
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
