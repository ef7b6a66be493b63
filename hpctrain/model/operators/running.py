"""Operators are computed by torch's operations one after the other, or each is compiled to fused kernels.

Both are the same pure functions of tensors. What calls other ranks lies between two of them, and is in neither.
Compiled ones have other last bits: values are rounded to the dtype once, at the end.
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
    """See `hpctrain.model.operators.attention.attend`."""
    logits_bytes: int = LOGITS_BYTES
    """How many bytes of logits may be there at once."""


def add_part(grad: torch.Tensor, part: torch.Tensor, overwrite: bool) -> None:
    """Add to a gradient; see `Addition` for this and others like it."""
    if overwrite:
        grad.copy_(part)
    else:
        grad += part
