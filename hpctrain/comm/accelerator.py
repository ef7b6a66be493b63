"""The device that a rank computes on."""

import ctypes
import os
import time
from dataclasses import dataclass

import torch

from hpctrain.comm.world import World
from hpctrain.errors import TopologyError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# bf16 halves memory; it is taken where its products are at least this much faster than fp32's.
WORTHWHILE_SPEEDUP = 1.2
# From glibc's malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
MALLOC_SETTINGS = {-1: 2**31 - 1, -2: 64 * 2**20, -3: 2**30}


@dataclass(frozen=True)
class CpuAccelerator:
    """A CPU rank: one thread, host memory."""

    family: str = "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def bind(self) -> None:
        """Use one thread; ranks are the parallelism. Explicit OMP_NUM_THREADS wins. Keep freed memory."""
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        keep_freed_memory()

    def products_per_second(self, dtype: torch.dtype, size: int = 192, seconds: float = 0.02) -> float:
        """Return FLOP/s of square products, over `seconds` after a warm-up."""
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        a @ b
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            a @ b
            count += 1
        return count * 2 * size**3 / (time.perf_counter() - start)


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what is freed: a step frees and takes the same activations again and again.

    Without this each of them is mapped anew, a page fault for every 4 KiB. Other C libraries are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for parameter, value in MALLOC_SETTINGS.items():
        mallopt(parameter, value)


def agree_on_dtype(world: World, accelerator: CpuAccelerator) -> tuple[str, str]:
    """Measure which dtype computes best; return its name and the reason. All ranks must call.

    bf16 only if it is worthwhile on every rank, since all must use the same.
    """
    accelerator.bind()
    fp32, bf16 = (accelerator.products_per_second(DTYPES[name]) for name in ("fp32", "bf16"))
    speedup = world.smallest(bf16 / fp32)
    chosen = "bf16" if speedup > WORTHWHILE_SPEEDUP else "fp32"
    measured = f"{fp32 / 1e9:.1f} GFLOP/s in fp32, {bf16 / 1e9:.1f} in bf16"
    return chosen, f"{chosen}: products measured at {measured}; bf16 is {speedup:.2g}x as fast on the least suited rank"


def make_accelerator(family: str) -> CpuAccelerator:
    """Return the accelerator of a family.

    | family | device | streams | dtypes |
    |--------|--------|---------|--------|
    | cpu    | host   | no      | fp32, bf16 (measured; slow without AMX) |

    Raises TopologyError for a family that this version cannot drive.
    """
    if family != "cpu":
        raise TopologyError(f"family '{family}': only 'cpu' ranks can be driven by this version")
    return CpuAccelerator()
