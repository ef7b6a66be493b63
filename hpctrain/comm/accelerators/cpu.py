"""A CPU rank: one thread, host memory, no streams."""

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from hpctrain.comm.accelerators.base import Accelerator, DeviceMemory, Event, Stream
from hpctrain.comm.start.launcher import asked_threads, host_memory_bytes

# From glibc's malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
MALLOC_SETTINGS = {-1: 2**31 - 1, -2: 64 * 2**20, -3: 2**30}
MEASURED_SIZE, MEASURED_SECONDS = 192, 0.02


class Done:
    """The event and the stream of a device that does everything at once."""

    def query(self) -> bool:
        return True

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> Event:
        return self


DONE = Done()


class CpuAccelerator(Accelerator):
    """The host's processor; each rank uses one thread of it."""

    shares_memory = True

    def __init__(self, family: str = "cpu"):
        super().__init__("cpu", family, torch.device("cpu"), _processor_name())
        self.threads_per_core = 1.0
        """Computing threads of the host's ranks for each core, 1 or more; set by `bind_accelerator`."""

    def bind(self, in_one_order: bool = True) -> None:
        """Use one thread; ranks are the parallelism. Explicit OMP_NUM_THREADS wins. Keep freed memory.

        glibc's malloc would map the activations of each step anew, a page fault for every 4 KiB. Other C libraries are
        left alone.
        """
        torch.set_num_threads(asked_threads() or 1)
        with suppress(AttributeError, OSError):
            mallopt = ctypes.CDLL(None).mallopt
            for parameter, value in MALLOC_SETTINGS.items():
                mallopt(parameter, value)

    def memory(self) -> DeviceMemory:
        """Return the memory of this process; `total` is that of the host, which its ranks share."""
        with open("/proc/self/status") as status:
            fields = dict(line.split(":", 1) for line in status)
        used, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return DeviceMemory(host_memory_bytes(), used, max(used, peak))

    def forget_peak(self) -> None:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:  # some containers forbid it
            file.write("5")

    def synchronize(self) -> None:
        pass

    def compute_stopwatch(self) -> Callable[[], float]:
        """Measure the processor time of this thread: time that other processes take does not count.

        Ranks of this host that share cores do count, since they compute at the same time in training. The shortest of
        several wall times would not show them: a short measurement often has a core to itself.
        """
        start = time.thread_time()
        return lambda: (time.thread_time() - start) * self.threads_per_core

    def new_stream(self) -> Stream:
        return DONE

    def on(self, stream: Stream) -> AbstractContextManager:
        return nullcontext()

    def queued(self) -> Event:
        return DONE

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        target.copy_(source)
        return DONE

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return False  # MPI may touch all memory of the host

    def products_per_second(self, dtype: torch.dtype) -> float:
        a, b = (torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=dtype) for _ in range(2))
        torch.matmul(a, b)
        taken, end, count = self.compute_stopwatch(), time.perf_counter() + MEASURED_SECONDS, 0
        while not count or time.perf_counter() < end:
            torch.matmul(a, b)
            count += 1
        return count * 2 * MEASURED_SIZE**3 / taken()


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine
