"""Operators run as torch operations one after the other, or each is compiled to fused kernels.

Both are the same pure functions of tensors. Communication lies between two of them, never inside. Compiled ones differ
in the last bits: values are rounded to the dtype once, at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.config.kernels import LOGITS_BYTES

Run = Callable[..., Any]
"""`run(function, *tensors, **constants)` returns what a pure function makes of tensors."""


def run_eagerly(function: Callable, *tensors: torch.Tensor, **constants):
    return function(*tensors, **constants)


@dataclass(frozen=True)
class Kernels:
    """The choice of kernels: `run` computes norms, rotary positions, gated activations and the loss."""

    run: Run = run_eagerly
    attention: str = "torch"
    """Backend of attention; see `hpctrain.model.operators.attention.attend`."""
    logits_bytes: int = LOGITS_BYTES
    """Most bytes of logits that may exist at once."""


def add_part(grad: torch.Tensor, part: torch.Tensor, overwrite: bool) -> None:
    """Add to a gradient; see `Addition` for this and others like it."""
    if overwrite:
        grad.copy_(part)
    else:
        grad += part
