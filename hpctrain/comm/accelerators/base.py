"""A device, as engine and routes know it.

Work on a device is queued on *streams* and done later, in order on each; an *event* marks a place in a stream. MPI
knows nothing of either: it may see a buffer only after an event after the last write to it has passed.
"""

import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch

from hpctrain.comm.accelerators.compiling import try_compile
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.accelerators.launches import Event, LaunchOrder, Stream
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


class DeviceMemory(NamedTuple):
    """A device's memory, in bytes."""

    total: int
    used: int
    """By this process, now."""
    peak: int
    """The most that this process used so far."""


class ExportedMemory(NamedTuple):
    """Memory of a device that another process may open."""

    memory: torch.Tensor
    """uint8."""
    handle: bytes
    """What the other process opens it by."""


class BufferPool:
    """Host buffers that are used again and again; what was taken once is kept. Any thread may call."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]):
        self._allocate = allocate
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0
        """That were allocated so far."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [a power of two, at least `num_bytes`]; pair with `release`."""
        size = 1 << max(0, num_bytes - 1).bit_length()
        try:
            return self._free[size].pop()
        except IndexError:
            self.num_bytes += size
            return self._allocate(size)

    def release(self, buffer: torch.Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


class Accelerator(ABC):
    """One rank's device. Methods may be called from any thread; none involves other ranks.

    | kind      | device        | class            | streams | products measured in          |
    |-----------|---------------|------------------|---------|-------------------------------|
    | cpu       | host          | CpuAccelerator   | no      | fp32, bf16 (slow without AMX) |
    | cuda      | NVIDIA        | TorchAccelerator | yes     | fp32, bf16, fp16              |
    | rocm      | AMD           | TorchAccelerator | yes     | fp32, bf16, fp16              |
    | xpu, npu  | Intel, Huawei | TorchAccelerator | yes     | fp32, bf16, fp16              |
    """

    shares_memory = False
    """Whether its memory is that of all ranks of the host together."""
    measured_dtypes: tuple[str, ...] = ("fp32", "bf16")
    """Names of the dtypes in which a probe measures products."""
    time_scale = 1.0
    """How many seconds of `now` are one of the device: of pretended ones more than 1."""

    overridden: Sequence[str] = ()
    """Which of a site's variables were replaced when it was bound, and by what."""

    def __init__(self, kind: str, family: str, device: torch.device, model: str):
        self.kind, self.family, self.device = kind, family, device
        self.model = model
        """What its maker calls it."""
        self.staging = BufferPool(self.host_buffer)
        """Host memory through which tensors go that MPI cannot be given."""

    @cached_property
    def launches(self) -> LaunchOrder:
        """The order in which the vendor's library gets its operations."""
        return LaunchOrder(self)

    @abstractmethod
    def bind(self, in_one_order: bool = True) -> None:
        """Make it the device of this process, and make its results the same in every run where sums are to be
        `in_one_order`."""

    def sum_in_one_order(self, always: bool) -> None:  # noqa: B027
        """Have the same bits in every run, as after `bind`, or not: hosts always have."""

    def use(self) -> None:  # noqa: B027
        """Make it the current device of the calling thread. Every thread that queues work or calls MPI does so first;
        hosts have nothing to set."""

    @abstractmethod
    def memory(self) -> DeviceMemory: ...

    def free_bytes(self) -> int | None:
        """Return what nobody uses of the device's memory now; None where the driver does not say it."""
        return None

    def reserved_bytes(self) -> int:
        """Return what of its memory no plan may fill: context, libraries, fragmentation; nothing on hosts."""
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was queued is done."""

    def release(self) -> None:  # noqa: B027
        """Give memory that was freed, and is kept to be used again, back to the device. Most keep none."""

    def running(self) -> AbstractContextManager:
        """Enclose all that is computed on the device; for devices that must see it."""
        return nullcontext()

    def now(self) -> float:
        """Return the time of this rank, in seconds of `time.monotonic`.

        A pretended device returns the time until which it has computed. For a real device it is the time of the host,
        which may be ahead of the device.
        """
        return time.monotonic()

    def stopwatch(self) -> Callable[[], float]:
        """Start to measure; return a function that returns the seconds that the device took until then."""
        self.synchronize()
        start = time.perf_counter()

        def read() -> float:
            self.synchronize()
            return time.perf_counter() - start

        return read

    def step_stopwatch(self) -> Callable[[], float]:
        """Start to measure a step, which waits for the device in its middle; return a function that returns its
        seconds. What is queued after that wait counts to the next step, which a device with a queue begins at once."""
        return self.stopwatch()

    def compute_stopwatch(self) -> Callable[[], float]:
        """Start to measure; return a function that returns the seconds of computing since.

        Other processes' noise is left out.

        Ranks that share processor cores are slower by as much as they share.
        """
        return self.stopwatch()

    @property
    def overrun(self) -> float | None:
        """The share of time by which a rank is behind its pretended device (docs/rehearsal.md); None for real ones."""
        return None

    @abstractmethod
    def new_stream(self) -> Stream: ...

    def launch_stream(self) -> Stream:
        """Return a stream that nobody shares, and that goes first: operations on it wait for other ranks."""
        return self.new_stream()

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager:
        """Let what this thread queues inside the block go to a stream."""

    @abstractmethod
    def queued(self) -> Event:
        """Return the place after all that this thread has queued, on the stream that it uses now."""

    def wait_for(self, event: Event) -> None:  # noqa: B027
        """Let what this thread queues from now on, on the stream that it uses, start after an event. The host
        continues. Devices that do everything at once have nothing to wait for."""

    def view_for_mpi(self, data: torch.Tensor) -> object | None:
        """Return bytes in memory of the device as an array that MPI is given, or None: then it is given the address."""
        return None

    def export_memory(self, num_bytes: int) -> ExportedMemory | None:
        """Return new memory of the device for other processes of the host; None where none can open it.

        Pair with `free_memory`. Raises what the driver's library raises.
        """
        return None

    def import_memory(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        """Return what another process has exported, as uint8. Pair with `close_memory`. Raises as `export_memory`."""
        raise NotImplementedError(f"memory of {self.kind} is not opened by other processes")

    def close_memory(self, imported: torch.Tensor) -> None:  # noqa: B027
        """Close what was imported, before its owner frees it."""

    def free_memory(self, exported: torch.Tensor) -> None:  # noqa: B027
        """Free what was exported, and is open nowhere."""

    def finish_queued(self) -> None:
        """Return when what this thread has queued on its stream is done, whatever other streams still do."""
        done = self.queued()
        while not done.query():
            os.sched_yield()

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy between the device and a host buffer. Each direction has a stream that does nothing else.

        It starts at once, whatever else is queued: what it reads must be there. Keep both tensors until the event.
        """

    def move(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Copy between the device and a host buffer after an event; return the event of its end. The host continues.

        Copies of each direction have a stream of their own where the device has streams, other than those of `copy`:
        what waits for computation must not delay a message. Keep both tensors until the event.
        """
        self.wait_for(after)
        target.copy_(source)
        return self.queued()

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 host memory that the device copies from and to by itself (pinned)."""

    @abstractmethod
    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is in memory of the device, which the host must not touch."""

    def compiles(self) -> Ability:
        """Say whether functions can be compiled for the device: tried, which takes seconds. Never raises."""
        return try_compile(self.device)

    @abstractmethod
    def products_per_second(self, dtype: torch.dtype) -> float:
        """Return FLOP/s of square products of a dtype, measured in well under a second."""


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
