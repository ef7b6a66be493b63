"""A device of a described cluster, impersonated by a CPU rank: real numerics, pretended time and memory."""

import os
import random
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.accelerators.base import DeviceMemory, Event
from hpctrain.comm.accelerators.cpu import DONE, CpuAccelerator
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.config.clusters.truth import DeviceEvent, PretendDevice
from hpctrain.rehearsal.clock import Clock, DeviceQueue

MEASURED_SIZE = 256

aten = torch.ops.aten
# [m, k] @ [k, n], of operands at these places of the call; `b` products at once.
_PRODUCTS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.addmm_: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
# Attention [batch, heads, positions, head size]: two products forward, five backward, of which a causal mask halves.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 2, 5),
}
# What touches rows of a table and not the whole: by the place of the rows, how often these are passed over.
_ROWS = {aten.embedding: (None, 2), aten.index_add_: (3, 3)}
_FREE = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided)
_FILLS = (aten.zero_, aten.fill_, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones)
WIDE_PRODUCT = "hpctrain.add_wide_product"
"""Of the model: a product of half precision, added to an fp32 gradient."""
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


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
        """`seed` seeds the jitter, and differs between ranks."""
        super().__init__(family)
        self.model = f"{family}, pretended by {self.model}"
        self.clock = clock
        self._truth, self.time_scale = device, time_scale
        self._random = random.Random(seed)
        self._live: dict[int, weakref.ref] = {}
        self._used = self._peak = 0
        self.host_bytes = self.host_peak_bytes = 0
        """The bytes of buffers in host memory, now and at most: they are no memory of the device."""
        self._host: dict[int, weakref.ref] = {}
        """Storages of host buffers."""
        self._makes_host_buffer = False
        self._host_queues = DeviceQueue(), DeviceQueue()
        """Copies from and to host memory, each of which has a stream of its own."""
        self.events: Sequence[DeviceEvent] = ()
        """Changes of this device's speed, which come with steps."""
        self._slower = 1.0
        self.overcommits = False
        """Whether it only notes what does not fit, as its peak, and continues."""
        self.slow_network: Callable[[float], None] | None = None
        """Lets the pretended network take so many times as long; one rank of all has it."""

    def step_stopwatch(self, step: int) -> Callable[[], float]:
        for event in self.events:
            if event.lost and event.step == step:
                os.kill(os.getpid(), signal.SIGKILL if event.lost == "killed" else signal.SIGSTOP)
        past = [event for event in self.events if event.slower and event.step <= step]
        self._slower = max(past, key=lambda event: event.step).slower or 1.0 if past else 1.0
        return self.stopwatch()

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
        read = self.clock.dilated_stopwatch()
        return lambda: read() / self.time_scale

    def compute_stopwatch(self) -> Callable[[], float]:
        return self.stopwatch()

    @property
    def overrun(self) -> float | None:
        return self.clock.overrun

    def raise_time_scale(self, times: float) -> None:
        """Let everything take `times` as long from now on, and forget the overrun so far. All ranks must call."""
        self.time_scale *= times
        self.clock.late_seconds = self.clock.measured_seconds = 0.0
        self.clock.take_overrun()
        if self.slow_network:
            self.slow_network(times)

    @property
    def busy_seconds(self) -> float:
        """Return the seconds that the described device computed."""
        return self.clock.busy_seconds / self.time_scale

    def forget_peak(self) -> None:
        self._peak, self.host_peak_bytes = self._used, self.host_bytes

    def start_anew(self) -> None:
        """Forget the peak of memory and the overrun so far, and how long it computed."""
        self.forget_peak()
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
        """Charge the clock for an operation, which the watch has seen."""
        clock, truth = self.clock, self._truth
        if clock.is_communicating:
            return
        seconds = seconds_of(func, args, outputs, truth)
        if seconds:
            if truth.jitter_share:
                seconds *= max(0.0, self._random.gauss(1.0, truth.jitter_share))
            clock.charge(clock.slowed(seconds * self._slower * self.time_scale, truth.overlap_slowdown))

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


def seconds_of(func, args: tuple, outputs: list[torch.Tensor], device: PretendDevice) -> float:
    """Return the seconds of one operation, given what it was called with and what it returned.

    A product is priced by its shape, attention by its products, a lookup by the rows that it reads, everything else
    by the bytes that it reads and writes. Views cost nothing, nor does memory that nobody fills.
    """
    packet = func.overloadpacket
    if str(packet) == WIDE_PRODUCT:
        grad, dy, x = args[:3]
        seconds = device.product_seconds(_name(x), dy.shape[1], dy.shape[0], x.shape[1])
        return seconds + device.pass_seconds(2 * _num_bytes(grad))
    if (places := _PRODUCTS.get(packet)) is not None:
        a, b = (args[place] for place in places)
        batch = a.shape[0] if a.dim() == 3 else 1
        return device.product_seconds(_name(a), a.shape[-2], a.shape[-1], b.shape[-1], batch)
    if (places := _ATTENTION.get(packet)) is not None:
        query, key, products = args[places[0]], args[places[1]], places[2]
        rows = query.shape[0] * query.shape[1]
        causal = any(value is True for value in args)
        share = 0.5 if causal else 1.0
        once = device.product_seconds(_name(query), query.shape[2], query.shape[3], key.shape[2], rows)
        return max(device.launch_seconds, once * products * share)
    if (rows := _ROWS.get(packet)) is not None:
        place, times = rows
        return device.pass_seconds(times * _num_bytes(outputs[0] if place is None else args[place]))
    if packet in _FREE:
        return 0.0
    if packet in _FILLS:
        return device.pass_seconds(_num_bytes(outputs[0]))
    if packet is aten.copy_:
        return device.pass_seconds(_num_bytes(args[0]) + _num_bytes(args[1]))
    inputs = _tensors(args)
    if func._schema.is_mutable:
        pairs = zip(args, func._schema.arguments, strict=False)  # what has a default may be left out
        written = outputs or _tensors([value for value, about in pairs if about.alias_info is not None])
        return device.pass_seconds(sum(map(_num_bytes, (*inputs, *written))))
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    if any(tensor.untyped_storage()._cdata not in own for tensor in outputs):
        return device.pass_seconds(sum(map(_num_bytes, (*inputs, *outputs))))
    return 0.0


def _tensors(values) -> list[torch.Tensor]:
    """Return the tensors among values and in lists among them."""
    lists = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return [value for values in lists for value in values if isinstance(value, torch.Tensor)]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(tensor: torch.Tensor) -> str:
    return DTYPE_NAMES[tensor.dtype]
