"""Replaces a module of torch such as `torch.cuda`, and CuPy: pooled streams, a current device of each thread."""

import ctypes
import itertools
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

POOL = 32
GIB = 1 << 30


class FakePlace:
    """An event; `passed` says whether the device has come to it."""

    def __init__(self, passed: bool = True):
        self.passed = passed

    def query(self) -> bool:
        return self.passed


class FakeTorchModule:
    """What a `TorchAccelerator` asks torch for. Device memory is counted, streams of the pool come again after 32."""

    def __init__(self, count: int = 2, name: str = "NVIDIA H200", total: int = 140 * GIB, context: int = GIB // 2):
        self.count, self.name, self.total, self.context = count, name, total, context
        self.reserved = self.peak_reserved = 0
        self.thread = threading.local()
        self.calls: list[str] = []
        self._turn = itertools.cycle(range(1, POOL + 1))
        module = self

        class Stream:
            def __init__(self, device=None, priority: int = 0):
                self.cuda_stream, self.waited = next(module._turn), []

            def record_event(self):
                return FakePlace()

            def wait_event(self, event):
                self.waited.append(event)

        class ExternalStream(Stream):
            def __init__(self, address: int, device=None):
                super().__init__()
                self.cuda_stream = address

        self.Stream, self.ExternalStream = Stream, ExternalStream
        self._default = Stream()
        self._default.cuda_stream = 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, index: int) -> str:
        return self.name

    def set_device(self, index: int) -> None:
        self.thread.index = index

    def current_device(self) -> int:
        return getattr(self.thread, "index", 0)  # a driver's default in every new thread

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.total - self.context - self.reserved, self.total

    def memory_reserved(self, index: int) -> int:
        return self.reserved

    def max_memory_reserved(self, index: int) -> int:
        return self.peak_reserved

    def memory_allocated(self, index: int) -> int:
        raise AssertionError("what is allocated is less than what nobody else can have")

    max_memory_allocated = memory_allocated

    def synchronize(self, *_) -> None:
        self.calls.append("synchronize")

    def current_stream(self, device=None):
        return getattr(self.thread, "stream", self._default)

    @contextmanager
    def stream(self, stream):
        before, self.thread.stream = self.current_stream(), stream
        yield
        self.thread.stream = before


class FakeCupy:
    """What is used of CuPy: streams that are nobody else's, a current device, views of memory by address."""

    def __init__(self):
        self.made, self.used = 0, threading.local()
        fake = self

        class Device:
            def __init__(self, index: int):
                self.index = index

            def use(self) -> None:
                fake.used.index = self.index

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

        class Stream:
            def __init__(self, non_blocking: bool = False):
                assert non_blocking, "a blocking stream waits for the default one, on which torch computes"
                fake.made += 1
                self.ptr = 10_000 + fake.made

        def unowned(address: int, size: int, owner: object, device: int):
            return SimpleNamespace(address=address, size=size, owner=owner)

        def pointer(memory, offset: int):
            return SimpleNamespace(memory=memory, offset=offset)

        self.memory: dict[int, ctypes.Array] = {}

        def malloc(size: int) -> int:
            made = (ctypes.c_uint8 * size)()
            self.memory[ctypes.addressof(made)] = made
            return ctypes.addressof(made)

        def open_handle(handle: bytes) -> int:
            self.opened.append(int(handle))
            return int(handle)

        self.opened: list[int] = []
        runtime = SimpleNamespace(
            malloc=malloc,
            free=self.memory.pop,
            ipcGetMemHandle=lambda address: b"%d" % address,
            ipcOpenMemHandle=open_handle,
            ipcCloseMemHandle=self.opened.remove,
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=Device, Stream=Stream, UnownedMemory=unowned, MemoryPointer=pointer
        )

    def ndarray(self, shape, dtype, memptr) -> np.ndarray:
        memory = memptr.memory
        assert memory.size == shape[0]
        return np.frombuffer((ctypes.c_uint8 * memory.size).from_address(memory.address + memptr.offset), dtype)
