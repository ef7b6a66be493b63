"""A device of a described cluster, impersonated by a CPU rank: real numerics, pretended time and memory."""

import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.accelerators.base import DeviceMemory, Event
from hpctrain.comm.accelerators.cpu import DONE, CpuAccelerator
from hpctrain.comm.routes.abilities import Ability
from hpctrain.config.truth import PretendDevice
from hpctrain.rehearsal.clock import Clock, DeviceQueue
from hpctrain.rehearsal.work import DTYPE_NAMES, seconds_of

MEASURED_SIZE = 256


class _Copied(NamedTuple):
    """The end of a copy between the device and host memory."""

    done_at: float
    late: float

    def query(self) -> bool:
        return time.monotonic() >= self.done_at


class RehearsedAccelerator(CpuAccelerator):
    """One rank's pretended device.

    What is computed inside `running` is charged to the clock, operation by operation. Every storage that is allocated
    there counts against the device's memory, as a device's allocator would count it.
    """

    shares_memory = False

    def __init__(self, family: str, device: PretendDevice, clock: Clock, time_scale: float, seed: int):
        """`seed` is of the jitter, and different on every rank."""
        super().__init__(family)
        self.model = f"{family}, pretended by {self.model}"
        self.clock = clock
        self._truth, self.time_scale = device, time_scale
        self._random = random.Random(seed)
        self._live: dict[int, weakref.ref] = {}
        self._used = self._peak = 0
        self.host_bytes = self.host_peak_bytes = 0
        """Of buffers in host memory, now and at most: they do not count as memory of the device."""
        self._host: dict[int, weakref.ref] = {}
        """Storages of host buffers."""
        self._makes_host_buffer = False
        self._host_queues = DeviceQueue(), DeviceQueue()
        """Copies from and to host memory, each of which has a stream of its own."""
        self.overcommits = False
        """Whether it only notes what does not fit, as its peak, and continues."""

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self._truth.memory_bytes, self._used, self._peak)

    @contextmanager
    def running(self) -> Iterator[None]:
        with _Watch(self):
            yield

    def synchronize(self) -> None:
        self.clock.catch_up()

    def queued(self) -> Event:
        return DONE

    def wait_for(self, event: Event) -> None:
        if isinstance(event, _Copied):
            self.clock.compute.reach(event.done_at, event.late)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self._makes_host_buffer = True
        try:
            buffer = super().host_buffer(num_bytes)
        finally:
            self._makes_host_buffer = False
        storage = buffer.untyped_storage()
        key = id(storage)
        self.host_bytes += num_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        self._live[key] = self._host[key] = weakref.ref(storage, lambda _: self._forget_host(key, num_bytes))
        return buffer

    def _forget_host(self, key: int, num_bytes: int) -> None:
        del self._live[key], self._host[key]
        self.host_bytes -= num_bytes

    def move(self, target: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Copy at once, and charge the stream of copies to the host, or from it, for the time."""
        clock, was_communicating = self.clock, self.clock.is_communicating
        clock.is_communicating = True  # what the copy takes is charged below
        target.copy_(source)
        clock.is_communicating = was_communicating
        queue = self._host_queues[id(target.untyped_storage()) in self._host]
        if isinstance(after, _Copied):
            queue.reach(after.done_at, after.late)
        else:
            queue.reach(clock.now, clock.compute.late)
        queue.done_at += self._truth.host_copy_seconds(target.numel() * target.element_size()) * self.time_scale
        return _Copied(queue.done_at, queue.late)

    def now(self) -> float:
        return self.clock.now

    def stopwatch(self) -> Callable[[], float]:
        read = self.clock.stopwatch()
        return lambda: read() / self.time_scale

    def compute_stopwatch(self) -> Callable[[], float]:
        return self.stopwatch()

    @property
    def overrun(self) -> float | None:
        return self.clock.overrun

    @property
    def busy_seconds(self) -> float:
        """That the described device computed."""
        return self.clock.busy_seconds / self.time_scale

    def start_anew(self) -> None:
        """Forget the peak of memory and the overrun so far, and how long it computed."""
        self._peak = self._used
        self.clock.forget()

    def products_per_second(self, dtype: torch.dtype) -> float:
        """Measure it by the pretended clock, as on a real device; 0 for a dtype that it does not have."""
        if DTYPE_NAMES[dtype] not in self._truth.flops_per_second:
            return 0.0
        a, b = (torch.ones(MEASURED_SIZE, MEASURED_SIZE, dtype=dtype) for _ in range(2))
        read = self.stopwatch()
        with self.running():
            torch.matmul(a, b)
        return 2 * MEASURED_SIZE**3 / read()

    def compiles(self) -> Ability:
        return Ability(False, "a pretended device sees operations one by one")

    def charge(self, func, args: tuple, outputs: list[torch.Tensor]) -> None:
        """Take the time of an operation. For what watches them."""
        clock, truth = self.clock, self._truth
        if clock.is_communicating:
            return
        seconds = seconds_of(func, args, outputs, truth)
        if seconds:
            if clock.is_moving:
                seconds *= truth.overlap_slowdown
            if truth.jitter_share:
                seconds *= max(0.0, self._random.gauss(1.0, truth.jitter_share))
            clock.charge(seconds * self.time_scale)

    def count(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor for as long as it lives. Raises torch.OutOfMemoryError as a device would."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if not size or key in self._live or self._makes_host_buffer:
            return
        if self._used + size > self._truth.memory_bytes and not self.overcommits:
            raise torch.OutOfMemoryError(
                f"the pretended {self.family} is out of memory: {size} bytes more than the {self._used} in use are"
                f" beyond its {self._truth.memory_bytes}"
            )
        self._used += size
        self._peak = max(self._peak, self._used)
        self._live[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        del self._live[key]
        self._used -= size


class _Watch(TorchDispatchMode):
    """Sees every operation of this thread."""

    def __init__(self, accelerator: RehearsedAccelerator):
        super().__init__()
        self._accelerator = accelerator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own question. Nothing is compiled here; its wrapper is a call for each operation, and an import."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        listed = result if isinstance(result, (tuple, list)) else (result,)
        outputs = [value for value in listed if isinstance(value, torch.Tensor)]
        for tensor in outputs:
            self._accelerator.count(tensor)
        self._accelerator.charge(func, args, outputs)
        return result
