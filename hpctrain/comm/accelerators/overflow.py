"""Which errors mean that memory did not suffice: torch's own, and those of libraries that allocate without torch."""

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.config.errors import HpctrainError

OVERFLOWS = (
    "out of memory",
    "can't allocate memory",
    "_alloc_failed",  # of cuBLAS, cuDNN and hipBLAS
    "rocblas_status_memory_error",
    "out_of_device_memory",
)
UNCLEAR = ("unhandled_cuda_error", "unhandled cuda error", "cublas_status_not_initialized")
"""What NCCL and cuBLAS say where they could not allocate, and of other faults as well."""
FULL_BYTES = 512 << 20
"""A device with less free memory is full: NCCL takes 0.1 to 0.4 GB for a communicator."""


def describe_overflow(error: BaseException | None, accelerator: Accelerator) -> str | None:
    """Return in a line what an error says of memory that did not suffice; None for other errors.

    An error of ours is what caused it on this rank: the text of another rank's overflow is none of this one.
    """
    while isinstance(error, HpctrainError):
        error = error.__cause__
    if not isinstance(error, RuntimeError):
        return None
    lines = str(error).splitlines() or [""]
    if line := next((line for line in lines if any(text in line.lower() for text in OVERFLOWS)), ""):
        return line
    if isinstance(error, torch.OutOfMemoryError):
        return lines[0]
    line = next((line for line in lines if any(text in line.lower() for text in UNCLEAR)), "")
    free = accelerator.free_bytes() if line else None
    if free is None or free >= FULL_BYTES:
        return None
    return f"{line}, out of memory: {free / 2**20:,.0f} MiB of the device are free"
