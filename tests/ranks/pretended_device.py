"""A device that is not there, for whole training runs. It finds what would fail, wait or race on a real one.

Its tensors have a device of their own in torch, which a host's operation refuses as it refuses a GPU's. Their numbers
are in memory of the host, and are computed there at once. What a real device does later is watched instead:

- Each stream has a vector clock (Fidge 1988, Mattern 1988). Two operations that touch the same bytes, of which one
  writes, must be ordered by a stream, an event, or a host that has waited; else they race.
- Memory that is freed is given to the next tensor of the stream that it was allocated on. Other streams must be done
  with it then.
- Copies to and from pinned memory, and memory of other processes, are done late. A host that does not wait for them has
  wrong numbers.
- Every wait of the host for work that is not known to be done is listed, hidden ones too.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hpctrain.comm.accelerators.base import ExportedMemory
from hpctrain.comm.accelerators.kinds import CUDA, DeviceKind
from hpctrain.comm.accelerators.torch_device import TorchAccelerator
from tests.ranks.fake_devices import POISON, open_shared_memory, share_memory
from tests.unit.fake_torch import FakeCupy, FakeTorchModule

NAME = "pretended"
DEVICE = torch.device("cpu")
WITHOUT_ONE_ORDER = (
    "bincount",
    "cumsum",
    "histc",
    "kthvalue",
    "median",
    "nll_loss2d",
    "put_",
    "scatter_reduce",
    "_embedding_bag",
)
"""What torch refuses on CUDA where sums must have one order (`torch.use_deterministic_algorithms`)."""
OF_DATA = ("nonzero", "masked_select", "_unique2", "_local_scalar_dense", "equal")
"""Whose result has a size or is a number that the host must know."""


class Clock(dict[int, int]):
    """How many operations of each stream are known to be done."""

    def learn(self, other: "Clock") -> None:
        for stream, ticks in other.items():
            self[stream] = max(self.get(stream, 0), ticks)


class Event:
    """A place in a stream. As on a device, the host finds that it has passed only when it looks again."""

    def __init__(self, device: "PretendedModule", stream: "Stream"):
        self._device, self._stream, self._at = device, stream, len(stream.late) + stream.done
        self.clock = Clock(stream.clock)
        self._was_looked_at = False

    def query(self) -> bool:
        with self._device.lock:
            if not self._was_looked_at:
                self._was_looked_at = True
                return False
            self.force()
            self._device.host.learn(self.clock)
            return True

    def force(self) -> None:
        self._stream.catch_up(self._at)


class Stream:
    """A queue of the device. Kernels are done at once, copies of pinned memory late."""

    def __init__(self, device: "PretendedModule"):
        self._device = device
        self.cuda_stream = id(self)
        self.clock = Clock()
        self.late: list = []
        self.done = 0

    def catch_up(self, at: int | None = None) -> None:
        while self.late and (at is None or self.done < at):
            self.late.pop(0)()
            self.done += 1

    def launch(self) -> int:
        """Begin an operation, after all that the host knows; return its number."""
        self.clock.learn(self._device.host)
        self.clock[self.cuda_stream] = self.clock.get(self.cuda_stream, 0) + 1
        return self.clock[self.cuda_stream]

    def record_event(self) -> Event:
        with self._device.lock:
            return Event(self._device, self)

    def wait_event(self, event: Event) -> None:
        with self._device.lock:
            self.catch_up()
            event.force()
            self.clock.learn(event.clock)

    def add(self, function) -> None:
        """For the library: notice that messages have come."""
        function()


class Access(NamedTuple):
    start: int
    stop: int
    stream: int
    writes: bool


class Block:
    """What one tensor was allocated with, and who touched it last."""

    def __init__(self, device: "PretendedModule", stream: Stream):
        self.stream, self._device = stream, device
        self.accesses: dict[Access, tuple[int, str]] = {}

    def touch(self, at: tuple[int, int], stream: Stream, tick: int, writes: bool, what: str) -> None:
        for other, (ticks, earlier) in list(self.accesses.items()):
            if other.stop <= at[0] or at[1] <= other.start:
                continue
            is_before = other.stream == stream.cuda_stream or stream.clock.get(other.stream, 0) >= ticks
            if not is_before and (writes or other.writes):
                self._device.complain(f"{what} does not wait for {earlier}, on another stream")
            if is_before and writes and at[0] <= other.start and other.stop <= at[1]:
                del self.accesses[other]
        self.accesses[Access(*at, stream.cuda_stream, writes)] = tick, what

    def check_seen(self, at: tuple[int, int], what: str) -> None:
        """Complain where the host cannot know that all writes are done."""
        for other, (ticks, earlier) in self.accesses.items():
            overlaps = other.start < at[1] and at[0] < other.stop
            if overlaps and other.writes and self._device.host.get(other.stream, 0) < ticks:
                self._device.complain(f"{what} does not wait for {earlier}")

    def __del__(self):
        known = Clock(self.stream.clock)
        known.learn(self._device.host)
        for other, (ticks, what) in self.accesses.items():
            if other.stream != self.stream.cuda_stream and known.get(other.stream, 0) < ticks:
                self._device.complain(f"memory is freed, and {what} on another stream may not have been done")


class PretendedModule(FakeTorchModule):
    """What `torch.cuda` is for a GPU, and what watches the tensors of the device."""

    is_initialized = is_available = lambda self: True
    _is_in_bad_fork = lambda self: False  # noqa: E731
    manual_seed_all = lambda self, seed: None  # noqa: E731

    def __init__(self):
        super().__init__(count=1)
        device = self

        class OwnStream(Stream):
            def __init__(self, *_, **__):
                super().__init__(device)
                device.streams.append(self)

        self.streams: list[Stream] = []
        self.Stream = self.ExternalStream = OwnStream  # pyright: ignore[reportAttributeAccessIssue]
        self._default = OwnStream()
        self.lock = threading.RLock()
        self.host = Clock()
        self.complaints: list[str] = []
        self.waits: list[str] = []
        self.blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self.pinned: list[torch.Tensor] = []
        self.last_error = ""
        """What a call of the driver failed by, which the next launch reports and so takes away."""
        self.libraries = 0
        """How many communicators a library of collectives has on the device."""
        self.launched = Clock()
        """The last operations of a library, by stream."""
        self.opened: list[torch.Tensor] = []
        """Memory that this process has exported, or another one has."""

    def complain(self, text: str) -> None:
        if text not in self.complaints:
            self.complaints.append(text)

    def wait(self, stream: Stream, what: str) -> None:
        """Let the host wait for a stream."""
        stream.catch_up()
        if any(self.host.get(of, 0) < ticks for of, ticks in stream.clock.items()):
            self.waits.append(what)
        self.host.learn(stream.clock)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{index}", total_memory=self.total)

    def synchronize(self, *_) -> None:
        with self.lock:
            for stream in self.streams:
                self.wait(stream, "synchronize")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return is_in(self.pinned, tensor)

    def touch(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], stream: Stream, what: str) -> None:
        tick = stream.launch()
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    tensor.block.touch(extent(tensor.held), stream, tick, is_write, what)


MODULE = PretendedModule()
_setup_privateuseone_for_python_backend(NAME, MODULE)
torch.utils.rename_privateuse1_backend(NAME)


def is_in(memory: Iterable[torch.Tensor], tensor: torch.Tensor) -> bool:
    at = tensor.data_ptr()
    return any(each.data_ptr() <= at < each.data_ptr() + each.numel() for each in memory)


def extent(held: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor that has elements lies."""
    last = sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
    return held.data_ptr(), held.data_ptr() + (last + 1) * held.itemsize


class DeviceTensor(torch.Tensor):
    """A tensor of the device: `held` has its numbers, `block` its memory."""

    held: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, held: torch.Tensor):
        self.held = held
        address = held.untyped_storage().data_ptr()
        block = MODULE.blocks.get(address) if address else None
        if block is None:
            block = Block(MODULE, MODULE.current_stream())
            if address:
                MODULE.blocks[address] = block
        self.block = block

    def __repr__(self, **_) -> str:
        return f"a tensor of the device, {tuple(self.shape)}"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)
        self.held, self.block = value.held, value.block

    def untyped_storage(self):
        return self.held.untyped_storage()

    def tolist(self):
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def is_on_device(value: object) -> bool:
    return isinstance(value, DeviceTensor)


def held(value):
    return value.held if isinstance(value, DeviceTensor) else value


def wrapped(value):
    return DeviceTensor(value) if isinstance(value, torch.Tensor) else value


def mapped(function, value):
    """Return lists, tuples and dicts with a function of each value in them; torch's own way takes most of a test."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(function, each) for each in value])
    return {k: mapped(function, v) for k, v in value.items()} if isinstance(value, dict) else function(value)


def tensors_in(*values) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(*(value.values() if isinstance(value, dict) else value))
    return found


@cache
def mutated(func) -> tuple[tuple[int, str], ...]:
    """Return place and name of the arguments that an operation writes."""
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def run(func, args, kwargs):
    """Do an operation that has to do with the device."""
    name = func._schema.name.removeprefix("aten::")
    with MODULE.lock:
        if MODULE.last_error:
            error, MODULE.last_error = MODULE.last_error, ""
            raise RuntimeError(f"CUDA error: {error}")
        if name in ("copy_", "_to_copy"):
            return copied(func, args, kwargs)
        given = tensors_in(args, kwargs)
        on_host = [each for each in given if not is_on_device(each)]
        on_device = [each for each in given if is_on_device(each)]
        is_index = name in ("index", "index_put_", "index_put", "_index_put_impl_")
        if on_device and any(each.dim() for each in on_host) and not is_index:
            raise RuntimeError(f"{func}: expected all tensors on one device, but found some on the host")
        if torch.are_deterministic_algorithms_enabled() and name.rstrip("_") in WITHOUT_ONE_ORDER:
            raise RuntimeError(f"{func} does not have a deterministic implementation on CUDA")
        stream = MODULE.current_stream()
        stream.catch_up()
        masks = [each for each in given if each.dtype == torch.bool] if is_index else []
        if name in OF_DATA or (is_index and (on_host or masks)):
            MODULE.wait(stream, f"the host needs what {name} returns")
        kwargs_held = mapped(held, kwargs)
        if kwargs_held.get("device") is not None:
            kwargs_held["device"] = DEVICE
        result = func(*mapped(held, args), **kwargs_held)
        if name.startswith(("empty", "new_empty")) and isinstance(result, torch.Tensor):
            poison(result)
        stores = {each.held.untyped_storage().data_ptr() for each in on_device}
        of_device = mapped(wrapped, result)
        made = tensors_in(of_device)
        fresh = [each for each in made if each.held.untyped_storage().data_ptr() not in stores]
        writes = [args[i] if i < len(args) else kwargs.get(key) for i, key in mutated(func)]
        written = [each for each in tensors_in(writes) if is_on_device(each)]
        is_view = not written and not fresh
        if not is_view and not name.startswith(("empty", "new_empty")):
            only_read = [each for each in on_device if not any(each is other for other in written)]
            MODULE.touch(only_read, [*written, *fresh], stream, name)
        if not written and len(fresh) == len(made):
            return of_device
        return return_and_correct_aliasing(func, args, kwargs, of_device)


def poison(held: torch.Tensor) -> None:
    held.fill_(float("nan") if held.is_floating_point() else POISON if held.dtype != torch.bool else True)


def copied(func, args, kwargs):
    """Do `copy_` and `to`, between the device and the host or on one side."""
    if func._schema.name == "aten::copy_":
        target, source = args[:2]
        is_late = (args[2:] or [kwargs.get("non_blocking", False)])[0]
        move(target, source, bool(is_late))
        return target
    (source,) = args
    device = kwargs.pop("device", None)
    is_late = kwargs.pop("non_blocking", False)
    to_device = is_on_device(source) if device is None else torch.device(device).type == NAME
    made = torch.empty_like(held(source), dtype=kwargs.get("dtype") or source.dtype)
    target = DeviceTensor(made) if to_device else made
    move(target, source, bool(is_late) and bool(made.numel()))
    return target


def move(target: torch.Tensor, source: torch.Tensor, is_late: bool) -> None:
    stream = MODULE.current_stream()
    stream.catch_up()
    reads, writes = ([each] if is_on_device(each) else [] for each in (source, target))
    MODULE.touch(reads, writes, stream, "a copy")
    into, values = held(target), held(source)
    if is_on_device(source) and is_on_device(target):
        if is_late and (is_in(MODULE.opened, into) or is_in(MODULE.opened, values)):
            if not is_in(MODULE.opened, into):
                poison(into)
            stream.late.append(lambda: into.copy_(values))
        else:
            into.copy_(values)
        return
    of_host = source if is_on_device(target) else target
    if is_late and MODULE.is_pinned(of_host):
        if not is_on_device(target):
            poison(into)
        stream.late.append(lambda: into.copy_(values))
        return
    if of_host.dim() or not is_on_device(target):  # a number goes with the launch
        MODULE.wait(stream, "a copy of memory that is not pinned, or one that blocks")
    into.copy_(values)


def _without_tensors(func, *args, **kwargs):
    """Make tensors of the device, such as `torch.empty` does."""
    return run(func, args, kwargs)


LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(_without_tensors, "PrivateUse1")

KIND = CUDA._replace(torch_type=NAME, pins_memory=False)


class PretendedDevice(TorchAccelerator):
    """The project's own class, on the module above. MPI may be given memory only when it is there."""

    exports = True
    """Whether other processes may open memory of it."""
    mixes: bool | None = False
    """Whether MPI may be given its memory while a library works on it: by plans of which that is proven. None: before
    there is a plan, when it may be given the memory while the library has communicators, and nothing to do."""

    def __init__(self, kind: DeviceKind = KIND, index: int = 0, family: str = "a", sharers: int = 1):
        super().__init__(kind, index, family, sharers, MODULE, FakeCupy())

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        made = super().host_buffer(num_bytes)
        MODULE.pinned.append(made)
        return made

    def export_memory(self, num_bytes: int) -> ExportedMemory | None:
        if not self.exports:
            return None
        shared = share_memory(num_bytes)
        return shared._replace(memory=self._opened(shared.memory))

    def import_memory(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        return self._opened(open_shared_memory(handle, num_bytes))

    @staticmethod
    def _opened(memory: torch.Tensor) -> torch.Tensor:
        MODULE.opened.append(memory)
        return DeviceTensor(memory)

    def close_memory(self, imported: torch.Tensor) -> None:
        MODULE.opened[:] = [each for each in MODULE.opened if each.data_ptr() != imported.data_ptr()]

    free_memory = close_memory

    def view_for_mpi(self, data: torch.Tensor):
        if self.is_on_device(data) and data.numel():
            data.block.check_seen(extent(held(data)), "a message of MPI")
            is_idle = all(MODULE.host.get(of, 0) >= ticks for of, ticks in MODULE.launched.items())
            if MODULE.libraries and not self.mixes and not (self.mixes is None and is_idle):
                MODULE.complain("MPI is given memory of a device on which a library works")
        return super().view_for_mpi(data)


def pin_by_copying() -> None:
    """Have tensors of the host be pinned, from now on, as the device's driver would."""

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        MODULE.pinned.append(made.flatten().view(torch.uint8))
        return made

    torch.Tensor.pin_memory = pinned


@contextmanager
def watched() -> Iterator[PretendedModule]:
    """Watch the device anew: its `complaints` and `waits` are those of the block."""
    MODULE.complaints.clear()
    MODULE.waits.clear()
    MODULE.libraries = 0
    torch.autograd.set_multithreading_enabled(False)
    try:
        with patch.object(torch.Tensor, "pin_memory"):
            pin_by_copying()
            yield MODULE
    finally:
        torch.autograd.set_multithreading_enabled(True)
        MODULE.pinned.clear()
