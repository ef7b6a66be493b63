"""A device as the engine and the routes see it.

Work on a device is queued on *streams*, and each stream does its work in order. An *event* marks a place in a stream.
MPI knows neither streams nor events. It may see a buffer only when an event after the last write has passed.
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
from hpctrain.comm.accelerators.launches import LaunchOrder
from hpctrain.comm.progress.operation import Event, Stream
from hpctrain.config.errors import HpctrainError

OVERFLOWS = (
    "out of memory",
    "can't allocate memory",
    "_alloc_failed",  # of cuBLAS, cuDNN and hipBLAS
    "rocblas_status_memory_error",
    "out_of_device_memory",
)
UNCLEAR = ("unhandled_cuda_error", "unhandled cuda error", "cublas_status_not_initialized")
"""Error texts that NCCL and cuBLAS use for failed allocations, and for other faults as well."""
FULL_BYTES = 512 << 20
"""A device with less free memory than this counts as full: NCCL takes 0.1 to 0.4 GB for a communicator."""


class DeviceMemory(NamedTuple):
    """A device's memory, in bytes."""

    total: int
    used: int
    """Bytes that this process uses now."""
    peak: int
    """The most bytes that this process has used so far."""


class ExportedMemory(NamedTuple):
    """Memory of a device that another process may open."""

    memory: torch.Tensor
    """The memory as uint8."""
    handle: bytes
    """The handle by which another process opens the memory."""


class BufferPool:
    """Reusable host buffers; memory that was allocated once is kept. Any thread may call."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]):
        self._allocate = allocate
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0
        """Bytes allocated so far."""

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
    """Whether all ranks of the host share the device's memory."""
    measured_dtypes: tuple[str, ...] = ("fp32", "bf16")
    """Names of the dtypes in which a probe measures products."""
    time_scale = 1.0
    """Seconds of `now` for each second of the device: more than 1 on a pretended device."""

    overridden: Sequence[str] = ()
    """Variables of the site that were replaced when the device was bound, each with its new value."""

    def __init__(self, kind: str, family: str, device: torch.device, model: str):
        self.kind, self.family, self.device = kind, family, device
        self.model = model
        """The maker's name of the device model."""
        self.staging = BufferPool(self.host_buffer)
        """Host buffers for tensors that MPI cannot be given directly."""

    @cached_property
    def launches(self) -> LaunchOrder:
        """The order in which the vendor's library receives this rank's operations."""
        return LaunchOrder(self)

    @abstractmethod
    def bind(self, in_one_order: bool = True) -> None:
        """Make it the device of this process. With `in_one_order` its results are the same bits in every run."""

    def sum_in_one_order(self, always: bool) -> None:  # noqa: B027
        """Choose whether results are the same bits in every run, as in `bind`. On hosts they always are."""

    def use(self) -> None:  # noqa: B027
        """Make it the current device of the calling thread. Every thread calls this before it queues work or calls MPI.
        Hosts have nothing to set."""

    @abstractmethod
    def memory(self) -> DeviceMemory: ...

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device's memory; None where the driver does not report them."""
        return None

    def reserved_bytes(self) -> int:
        """Return the bytes of its memory that no plan may fill: context, libraries, fragmentation. On hosts it is 0."""
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def release(self) -> None:  # noqa: B027
        """Return cached free memory to the device. Most devices cache none."""

    @abstractmethod
    def forget_peak(self) -> None:
        """Let the peak of `memory` be that of what is used from now on."""

    def running(self) -> AbstractContextManager:
        """Wrap all computation on the device, for devices that must observe it."""
        return nullcontext()

    def now(self) -> float:
        """Return the time of this rank, in seconds of `time.monotonic`.

        A pretended device returns the time until which it has computed. For a real device it is the time of the host,
        which may be ahead of the device.
        """
        return time.monotonic()

    def stopwatch(self) -> Callable[[], float]:
        """Start a measurement; return a function that returns the seconds until the device has done the work queued by
        then."""
        self.synchronize()
        start = time.perf_counter()

        def read() -> float:
            self.synchronize()
            return time.perf_counter() - start

        return read

    def step_stopwatch(self, step: int) -> Callable[[], float]:
        """Start to measure a step, counted from 1; return a function that returns its seconds.

        A step waits for the device in its middle. Work queued after that wait counts to the next step, which a device
        with a queue begins at once.
        """
        return self.stopwatch()

    def compute_stopwatch(self) -> Callable[[], float]:
        """Start to measure; return a function that returns the seconds of computing since.

        Noise of other processes is left out. Ranks that share processor cores do slow each other down, and that counts.
        """
        return self.stopwatch()

    @property
    def overrun(self) -> float | None:
        """The share of time by which a rank lags behind its pretended device (docs/rehearsal.md); None on real
        devices."""
        return None

    @abstractmethod
    def new_stream(self) -> Stream: ...

    def launch_stream(self) -> Stream:
        """Return a stream of its own with high priority, since operations on it wait for other ranks."""
        return self.new_stream()

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager:
        """Queue the work of this thread on a stream, inside the block."""

    @abstractmethod
    def queued(self) -> Event:
        """Return an event after all work that this thread has queued on its current stream."""

    def wait_for(self, event: Event) -> None:  # noqa: B027
        """Let work that this thread queues on its current stream from now on start after an event. The host continues.
        Devices without a queue have nothing to wait for."""

    def view_for_mpi(self, data: torch.Tensor) -> object | None:
        """Return device memory as an array that MPI accepts; None: MPI is given the address."""
        return None

    def export_memory(self, num_bytes: int) -> ExportedMemory | None:
        """Return new device memory that other processes of the host can open; None where none can.

        Pair with `free_memory`. Passes on the errors of the driver's library.
        """
        return None

    def import_memory(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        """Return memory that another process has exported, as uint8. Pair with `close_memory`. Raises as
        `export_memory`."""
        raise NotImplementedError(f"memory of {self.kind} is not opened by other processes")

    def close_memory(self, imported: torch.Tensor) -> None:  # noqa: B027
        """Close imported memory, before its owner frees it."""

    def free_memory(self, exported: torch.Tensor) -> None:  # noqa: B027
        """Free exported memory that no process has open."""

    def finish_queued(self) -> None:
        """Return when the work that this thread has queued on its stream is done. Other streams may still be busy."""
        done = self.queued()
        while not done.query():
            os.sched_yield()

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Event:
        """Copy between the device and a host buffer, on a stream for this direction alone.

        The copy starts at once, whatever else is queued: the source must be complete. Keep both tensors until the
        event.
        """

    def move(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Copy between the device and a host buffer after an event; return the event of its end. The host continues.

        On devices with streams each direction has one for `move`, separate from that of `copy`: a copy that waits for
        computation must not delay a message. Keep both tensors until the event.
        """
        self.wait_for(after)
        target.copy_(source)
        return self.queued()

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return pinned host memory, uint8, which the device reads and writes by itself."""

    @abstractmethod
    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is in device memory, which the host must not touch."""

    def compiles(self) -> Ability:
        """Say whether functions can be compiled for the device, by a trial that takes seconds. Never raises."""
        return try_compile(self.device)

    @abstractmethod
    def products_per_second(self, dtype: torch.dtype) -> float:
        """Return FLOP/s of square products of a dtype, measured in well under a second."""


def describe_overflow(error: BaseException | None, accelerator: Accelerator) -> str | None:
    """Return the line of an error that says that memory did not suffice; None for other errors.

    For an error of hpctrain its cause on this rank is examined: the text of another rank's overflow does not count.
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
