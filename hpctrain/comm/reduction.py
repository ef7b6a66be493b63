"""Sums in a fixed order, and bytes of tensors: what all routes share."""

from collections.abc import Sequence

import torch

from hpctrain.sharding.intervals import Interval

HALF = (torch.bfloat16, torch.float16)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as its bytes, without copying."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)


def partial_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which partial results travel: sums of half precision are fp32 until they are complete."""
    return torch.float32 if op == "sum" and dtype in HALF else dtype


def reduce_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """Reduce `parts` (same shape and dtype) first to last into `out`, which may be one of them.

    Half precision is summed in fp32; a result of another dtype than that of the parts is rounded once, at the end.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if partial_dtype(parts[0].dtype, op) != parts[0].dtype:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    usable = out.dtype == parts[0].dtype and not any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = out if usable else torch.empty_like(parts[0])
    combine(parts[0], parts[1], out=total)
    for part in parts[2:]:
        combine(total, part, out=total)
    if total is not out:
        out.copy_(total)


def section_of(cut: Interval, start: int, size: int) -> Interval:
    """Return the `size` elements from `start` on of a cut; fewer, or none, at its end."""
    return Interval(min(cut.start + start, cut.stop), min(cut.start + start + size, cut.stop))
