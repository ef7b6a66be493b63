"""Products of 8-bit operands with a scale for each tensor (Micikevicius et al. 2022, arXiv 2209.05433).

Inputs and weights are rounded to e4m3, gradients to e5m2; sums are in fp32. Scales are powers of two, so that numbers
are rounded to the same 8 bits whatever part of a tensor a rank has: only the smallest ones depend on the layout.
Devices without such products compute with the rounded operands in the dtype of the rest, which can hold them exactly.

Shape suffixes: N tokens, I input features, O output features.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
"""Of inputs and weights; the name of the whole recipe where a job pins products to fp8."""
FP8_GRADIENT = torch.float8_e5m2
TOP_EXPONENTS = {FP8: 8, FP8_GRADIENT: 15}
"""Of the largest power of two that each can hold."""
ALIGNED = 16
"""Sizes of operands must be multiples of it."""


class Rounded(NamedTuple):
    """A tensor in 8 bits: its numbers are `data` times `scale`."""

    data: torch.Tensor
    scale: torch.Tensor
    """fp32, no dims."""

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.data.float() * self.scale).to(dtype)


def round_to_8_bits(tensor: torch.Tensor, kind: torch.dtype) -> Rounded:
    """Return a tensor in 8 bits, scaled so that its largest number just fits. Nothing waits for the device.

    Where a number is not finite all become none: an overflow elsewhere must not be saturated and go unseen.
    """
    top = tensor.abs().amax().float() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)
    exponent = torch.frexp(top).exponent - TOP_EXPONENTS[kind]  # the largest number becomes less than 2^TOP
    exponent = exponent.clamp(-126, 127)  # of zeros, and of numbers too small for fp32
    one = torch.ones_like(top)
    scale = torch.ldexp(one, exponent)
    data = (tensor.float() * torch.ldexp(one, -exponent)).to(kind)
    return Rounded(data, torch.where(top.isfinite(), scale, torch.nan))


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, left_kind: torch.dtype, right_kind: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of two matrices, rounded to 8 bits each of its kind, in `dtype`."""
    a, b = round_to_8_bits(left, left_kind), round_to_8_bits(right, right_kind)
    is_aligned = not any(size % ALIGNED for size in (*left.shape, *right.shape))
    if is_aligned and has_scaled_products(left.device, dtype):
        columns = b.data.t().contiguous().t()
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] - torch has no public name for it
            a.data.contiguous(), columns, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype
        )
    exact = dtype if dtype == torch.float32 else left.dtype
    return (a.wide(exact) @ b.wide(exact)).to(dtype)


@lru_cache
def has_scaled_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether a device multiplies 8-bit operands with a result of `dtype`: by trying both kinds of operands.

    CPUs are left out: what torch has for them is slower than the products of whole numbers that it replaces.
    """
    return device.type != "cpu" and works_on(device, dtype)


def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether torch's scaled products give the right numbers on a device."""
    one = torch.ones((), device=device)
    for kind in (FP8, FP8_GRADIENT):
        left = torch.full((32, 32), 1.5, device=device).to(kind)
        right = torch.ones(32, 32, device=device).to(FP8)
        try:
            product = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                left, right.t(), scale_a=one, scale_b=2 * one, out_dtype=dtype
            )
        except (NotImplementedError, RuntimeError):
            return False
        if not bool((product == 96).all()):
            return False
    return True


def forward_product(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return x W^T, [N, O]."""
    return scaled_product(x_NI, weight_OI.t(), FP8, FP8, x_NI.dtype)


def input_gradient(dy_NO: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return dy W, [N, I]."""
    return scaled_product(dy_NO, weight_OI, FP8_GRADIENT, FP8, dy_NO.dtype)


def add_scaled_product(grad_OI: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor, overwrite: bool) -> None:
    """Add dy^T x to a weight's gradient in fp32; see `units.Addition`."""
    product = scaled_product(dy_NO.t(), x_NI, FP8_GRADIENT, FP8, torch.float32).to(grad_OI.dtype)
    if overwrite:
        grad_OI.copy_(product)
    else:
        grad_OI += product
