"""Operators are computed by torch's operations one after the other, or each is compiled to fused kernels.

Both are the same pure functions of tensors. What calls other ranks lies between two of them, and is in neither.
Compiled ones have other last bits: values are rounded to the dtype once, at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.comm.accelerators.compiling import Compiled
from hpctrain.config.kernels import LOGITS_BYTES, KernelChoice

Run = Callable[..., Any]
"""`run(function, *tensors, **constants)` returns what a pure function makes of tensors."""


def run_eagerly(function: Callable, *tensors: torch.Tensor, **constants):
    return function(*tensors, **constants)


@dataclass(frozen=True)
class Kernels:
    """The choice of kernels: `run` computes norms, rotary positions, gated activations and the loss."""

    run: Run = run_eagerly
    attention: str = "auto"
    """Which of torch's kernels, a key of `ATTENTION_BACKENDS`."""
    logits_bytes: int = LOGITS_BYTES
    """How many bytes of logits may be there at once."""


def make_kernels(choice: KernelChoice, family: str) -> Kernels:
    """Return the kernels of a rank of a family. They are not fused where the choice is still open."""
    run = Compiled() if choice.fused_of(family) else run_eagerly
    return Kernels(run, choice.attention, choice.logits_bytes)


def add_part(grad: torch.Tensor, part: torch.Tensor, overwrite: bool) -> None:
    """Add to a gradient; see `Addition` for this and others like it."""
    if overwrite:
        grad.copy_(part)
    else:
        grad += part
