"""A device of a described cluster, impersonated by a CPU rank: real numerics, pretended time and memory."""

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.accelerators.base import DeviceMemory, Event
from hpctrain.comm.accelerators.cpu import DONE, CpuAccelerator
from hpctrain.config.truth import PretendDevice
from hpctrain.rehearsal.clock import Clock
from hpctrain.rehearsal.work import DTYPE_NAMES, seconds_of

MEASURED_SIZE = 256


class RehearsedAccelerator(CpuAccelerator):
    """One rank's pretended device.

    What is computed inside `running` is charged to the clock, operation by operation, and every storage that comes to
    live there counts against the device's memory, as a device's allocator would count them.
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
        if not size or key in self._live:
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
