"""Devices that are not there: memory of the host, work that is done only when somebody looks, a library on MPI."""

import ctypes
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import torch

from hpctrain.comm.accelerators.base import Accelerator, DeviceMemory, ExportedMemory

POISON = 0xEE
PATIENCE_SECONDS = 60.0
"""After which a call of the fake library that other ranks do not come to fails, with the stack of its rank."""


class FakeEvent:
    """A place in a fake stream. Each look does one thing that is queued, and says no if it was not yet there."""

    def __init__(self, stream: "FakeStream", at: int):
        self._stream, self._at = stream, at

    def query(self) -> bool:
        return self._stream.step_towards(self._at)

    def force(self) -> None:
        while not self.query():
            pass


class FakeStream:
    """A queue of functions. Any thread may call, as with those of a device: lanes have a thread of their own."""

    def __init__(self):
        self._queue = deque()
        self._done = self._added = 0
        self._lock = threading.RLock()

    @property
    def pending(self) -> int:
        """How many functions are not yet done."""
        return len(self._queue)

    def add(self, function) -> FakeEvent:
        with self._lock:
            self._queue.append(function)
            self._added += 1
            return self.record_event()

    def step_towards(self, at: int) -> bool:
        """Say whether so many functions are done; if not, do one."""
        with self._lock:
            if self._done >= at:
                return True
            self._queue.popleft()()
            self._done += 1
            return False

    def record_event(self) -> FakeEvent:
        with self._lock:
            return FakeEvent(self, self._added)

    def wait_event(self, event: FakeEvent) -> None:
        event.force()  # torch's operations on the host are done at once, so they cannot be queued behind it


class FakeAccelerator(Accelerator):
    """A device whose memory is the host's. What is given to `later` is done late, as on a device.

    As with a driver, each thread has a current device, number 0 at first; work of this one's (number `INDEX`) that is
    queued by a thread which never said `use` is refused, unless it goes to a stream, which says whose it is.
    """

    INDEX = 3

    def __init__(self, family: str = "fake", kind: str = "cuda", exports: bool = False):
        """If it `exports`, other processes may open memory of it: a file in memory that both map."""
        super().__init__(kind, family, torch.device("cpu"), "a fake")
        self._default, self._copies = FakeStream(), [FakeStream(), FakeStream()]
        self._current = threading.local()
        self._made: list[FakeStream] = []
        self._exports, self.open_memory = exports, 0
        self.use()

    def use(self) -> None:
        self._current.index = self.INDEX

    @property
    def _stream(self) -> FakeStream:
        stream = getattr(self._current, "stream", self._default)
        if stream is self._default:
            self._check_current()
        return stream

    def _check_current(self) -> None:
        index = getattr(self._current, "index", 0)
        assert index == self.INDEX, f"thread {threading.current_thread().name} has device {index}, not {self.INDEX}"

    def view_for_mpi(self, data: torch.Tensor):
        """An MPI that is given memory of a device asks the driver for the thread's current one."""
        self._check_current()

    def later(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor that will have these values once the current stream comes to it."""
        tensor = torch.empty_like(values)
        if values.numel():
            tensor.view(torch.uint8).fill_(POISON)
        self._stream.add(lambda: tensor.copy_(values))
        return tensor

    def bind(self) -> None:
        pass

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1, 0, 0)

    def synchronize(self) -> None:
        """Of the whole device: all of its streams."""
        for stream in (self._default, *self._copies, *self._made):
            stream.record_event().force()

    def new_stream(self) -> FakeStream:
        self._made.append(FakeStream())
        return self._made[-1]

    def wait_for(self, event) -> None:
        self._stream.wait_event(event)

    @contextmanager
    def on(self, stream: FakeStream):
        before = self._stream
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def queued(self) -> FakeEvent:
        return self._stream.record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> FakeEvent:
        return self._copies[target.data_ptr() > source.data_ptr()].add(lambda: target.copy_(source))

    def export_memory(self, num_bytes: int) -> ExportedMemory | None:
        if not self._exports:
            return None
        self.open_memory += 1
        return share_memory(num_bytes)

    def import_memory(self, handle: bytes, num_bytes: int) -> torch.Tensor:
        self.open_memory += 1
        return open_shared_memory(handle, num_bytes)

    def close_memory(self, imported: torch.Tensor) -> None:
        self.open_memory -= 1

    free_memory = close_memory

    def stream_address(self) -> int:
        return id(self._stream)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return True

    def products_per_second(self, dtype: torch.dtype) -> float:
        return 1.0


def share_memory(num_bytes: int) -> ExportedMemory:
    """Return memory of the host, poisoned, that another process may open."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as file:
        file.write(bytes([POISON]) * num_bytes)
    return ExportedMemory(_mapped(file.name), file.name.encode())


def open_shared_memory(handle: bytes, num_bytes: int) -> torch.Tensor:
    memory = _mapped(handle.decode())
    os.unlink(handle)
    assert memory.numel() == num_bytes
    return memory


def _mapped(path: str) -> torch.Tensor:
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+"))


def _notice() -> None:
    pass


class FakeNccl:
    """Replaces the module `cupy.cuda.nccl`: the same calls, done by MPI on host memory when they are made.

    The real one's calls return at once, and the host continues to move messages, which other ranks may be waiting for
    before they come to this call. These return when all is done, so they move the messages themselves.
    """

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT32, NCCL_FLOAT64 = 0, 1, 2, 4, 7, 8
    NCCL_SUM, NCCL_MAX, NCCL_MIN = 0, 2, 3

    def __init__(self, mpi):
        self.mpi = mpi
        self.calls: list[str] = []
        self.grouped: list | None = None
        self.dtypes = {0: "i1", 1: "u1", 2: "i4", 4: "i8", 7: "f4", 8: "f8"}
        self._meanwhile: dict[int, tuple[FakeStream, list[Callable[[], None]]]] = {}
        self._made = 0

    def moves(self, stream: FakeStream, poll: Callable[[], None]) -> None:
        """Say what moves the messages of a group that uses a stream, which is kept, so that its address stays its."""
        self._meanwhile.setdefault(id(stream), (stream, []))[1].append(poll)

    def get_unique_id(self):
        self._made += 1
        return (self.mpi.COMM_WORLD.rank, self._made)

    def groupStart(self):  # noqa: N802
        assert self.grouped is None
        self.grouped = []

    def groupEnd(self):  # noqa: N802
        grouped, self.grouped = self.grouped, None
        self.finish(grouped)

    def finish(self, calls: list) -> None:
        """Start all calls, and wait until they are done. Each is a stream and a generator that yields its request."""
        started = [(stream, call, next(call)) for stream, call in calls]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.mpi.Request.Testall([request for _, _, request in started]):
            assert time.monotonic() < deadline, f"others do not come to {self.calls[-1]}, call {len(self.calls)}"
            for stream, _, _ in started:
                for poll in self._meanwhile.get(stream, (None, [os.sched_yield]))[1]:
                    poll()
        for _, call, _ in started:
            next(call, None)
        for stream in {stream for stream, _, _ in started} & self._meanwhile.keys():
            self._meanwhile[stream][0].add(_notice)  # the host finds that it is done only when it looks again

    def NcclCommunicator(self, size, key, rank):  # noqa: N802
        return FakeNcclCommunicator(self, size, key, rank)


class FakeNcclCommunicator:
    """One communicator of the fake library. Ranks synchronise at the one that made the key."""

    def __init__(self, nccl: FakeNccl, size: int, key, rank: int):
        self._nccl, self._mpi = nccl, nccl.mpi
        world, (root, tag) = nccl.mpi.COMM_WORLD, key
        if rank == 0:
            placed = dict([(0, world.rank), *(world.recv(tag=tag) for _ in range(size - 1))])
            for other in range(1, size):
                world.send(placed, dest=placed[other], tag=tag)
        else:
            world.send((rank, world.rank), dest=root, tag=tag)
            placed = world.recv(source=root, tag=tag)
        group = world.group.Incl([placed[i] for i in range(size)])
        self._comm = world.Create_group(group)

    def _memory(self, address: int, count: int, number: int) -> np.ndarray:
        dtype = np.dtype(self._nccl.dtypes[number])
        if not count:
            return np.empty(0, dtype)
        return np.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address), dtype)

    def _operation(self, op: int):
        return {0: self._mpi.SUM, 2: self._mpi.MAX, 3: self._mpi.MIN}[op]

    def _call(self, name: str, stream: int, call):
        self._nccl.calls.append(name)
        if self._nccl.grouped is None:
            self._nccl.finish([(stream, call)])
        else:
            self._nccl.grouped.append((stream, call))

    def allReduce(self, sent, received, count, number, op, stream):  # noqa: N802
        assert sent == received
        memory = self._memory(sent, count, number)

        def call():
            yield self._comm.Iallreduce(self._mpi.IN_PLACE, memory, self._operation(op))

        self._call("allReduce", stream, call())

    def reduce(self, sent, received, count, number, op, root, stream):
        given = self._memory(sent, count, number)
        into = self._memory(received, count, number)

        def call():
            before, total = given.copy(), np.empty_like(given)
            yield self._comm.Ireduce(before, total, self._operation(op), root)
            if self._comm.rank == root:
                into[:] = total

        self._call("reduce", stream, call())

    def reduceScatter(self, sent, received, count, number, op, stream):  # noqa: N802
        given = self._memory(sent, count * self._comm.size, number)
        into = self._memory(received, count, number)

        def call():
            before, total = given.copy(), np.empty(count, given.dtype)
            yield self._comm.Ireduce_scatter_block(before, total, self._operation(op))
            into[:] = total

        self._call("reduceScatter", stream, call())

    def allGather(self, sent, received, count, number, stream):  # noqa: N802
        given, into = self._memory(sent, count, number), self._memory(received, count * self._comm.size, number)

        def call():
            before = given.copy()
            yield self._comm.Iallgather(before, into)

        self._call("allGather", stream, call())

    def broadcast(self, sent, received, count, number, root, stream):
        assert sent == received

        def call():
            yield self._comm.Ibcast(self._memory(sent, count, number), root)

        self._call("broadcast", stream, call())

    def send(self, address, count, number, peer, stream):
        def call():
            yield self._comm.Isend(self._memory(address, count, number), peer)

        self._call("send", stream, call())

    def recv(self, address, count, number, peer, stream):
        def call():
            yield self._comm.Irecv(self._memory(address, count, number), peer)

        self._call("recv", stream, call())

    def destroy(self):
        self._comm.Free()

    def check_async_error(self):
        """Nothing goes wrong by itself here."""

    def abort(self):
        """What is in flight stays so: MPI has no end of a communicator without the others."""
