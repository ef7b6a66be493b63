"""Measures by how much a rank computes more slowly while it communicates."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.bind import DTYPES
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.probe.device_timing import SHARE_OF_MEMORY

# Products short enough that many are computed while bytes move, and large enough to keep the device busy.
PRODUCT_SIZE, PRODUCT_SIZE_ON_CPUS = 2048, 256
MOVED_BYTES, MOVED_BYTES_ON_CPUS = 256 << 20, 32 << 20
SAMPLE_BYTES, SHORTEST_SECONDS = 1 << 20, 0.2
"""Of a first all-reduce, by which the number of bytes is set; and of those that are measured, at most the time that
there is."""


def _affordable_count(comm: Communicator, accelerator: Accelerator, most_bytes: int, seconds: float) -> int:
    """Return how many floats an all-reduce sums in so many seconds at most, the same on all ranks."""
    sample = torch.zeros(min(SAMPLE_BYTES, most_bytes) // 4, device=accelerator.device)
    for _ in range(2):  # the first one connects the ranks
        taken = accelerator.stopwatch()
        comm.all_reduce(sample)
        once = taken()
    affordable = min(most_bytes // 4, int(sample.numel() * max(1.0, seconds / once)))
    fewest = torch.tensor([affordable], dtype=torch.int64, device=accelerator.device)
    comm.all_reduce(fewest, "min")  # different devices, and hosts, have different memory
    return int(fewest.item())


class _Computed(NamedTuple):
    products: int = 0
    seconds: float = 0.0

    def __add__(self, other: "_Computed") -> "_Computed":
        return _Computed(self.products + other.products, self.seconds + other.seconds)


def measure_overlap(comm: Communicator, accelerator: Accelerator, memory_bytes: int, seconds: float) -> float | None:
    """Measure for about so many seconds how many times as long a product takes while an all-reduce is in flight.

    At least 1; None where the group has no lane, which a thread must move. All ranks must call.
    """
    if not comm.is_overlapped:
        return None
    on_cpu = accelerator.kind == "cpu"
    size = PRODUCT_SIZE_ON_CPUS if on_cpu else PRODUCT_SIZE
    num_bytes = min(MOVED_BYTES_ON_CPUS if on_cpu else MOVED_BYTES, memory_bytes // SHARE_OF_MEMORY)
    measured = [DTYPES[name] for name in accelerator.measured_dtypes]
    device, dtype = accelerator.device, max(measured, key=accelerator.products_per_second)
    a, b = (torch.empty(size, size, dtype=dtype, device=device).uniform_(-1, 1) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    moved = torch.zeros(
        _affordable_count(comm, accelerator, num_bytes, max(seconds / 2, SHORTEST_SECONDS)), device=device
    )

    def compute(until: Callable[[], bool]) -> _Computed:
        """Compute a product, and others until something is so."""
        count, start = 0, time.perf_counter()
        while not count or not until():
            torch.mm(a, b, out=out)
            accelerator.finish_queued()  # a whole device would wait for the all-reduce too
            count += 1
        return _Computed(count, time.perf_counter() - start)

    alone = overlapped = _Computed()
    agreed, end, is_warm = torch.zeros(1, device=device), time.monotonic() + seconds, False
    while not agreed.item():
        work = comm.start_all_reduce(moved)
        result = compute(lambda work=work: work.ended)  # no poll: a thread moves the bytes
        work.wait()
        comm.barrier()
        stop = time.perf_counter() + result.seconds
        other = compute(lambda stop=stop: time.perf_counter() >= stop)
        if is_warm:  # the first time memory is touched, and threads are woken
            alone, overlapped = alone + other, overlapped + result
        agreed.fill_(is_warm and time.monotonic() >= end)
        is_warm = True
        comm.all_reduce(agreed, "max")
    return max(1.0, (overlapped.seconds / overlapped.products) / (alone.seconds / alone.products))
