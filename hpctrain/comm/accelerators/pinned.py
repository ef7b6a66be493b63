"""Pinned host memory of exactly the bytes that were asked for: torch rounds its own up to a power of two."""

import mmap
from collections.abc import Callable
from typing import Any

import torch


class _Registered(mmap.mmap):
    """Memory that the driver knows until nothing of it is used."""

    unregister: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister()


def register_memory(num_bytes: int, runtime: Any) -> torch.Tensor | None:
    """Return pinned uint8 memory, or None where the driver refuses it. `runtime` is that of `torch.cuda.cudart`."""
    memory = _Registered(-1, num_bytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, num_bytes, 0)):
        return None
    memory.unregister = lambda: runtime.cudaHostUnregister(address)
    return tensor
