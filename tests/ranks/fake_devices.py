"""Devices that are not there: memory of the host, work that is done only when somebody looks, a library on MPI."""

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import ReduceOp

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

    def bind(self, in_one_order: bool = True) -> None:
        pass

    def memory(self) -> DeviceMemory:
        return DeviceMemory(1, 0, 0)

    def forget_peak(self) -> None:
        pass

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


class FakeLibrary:
    """Replaces torch's class of process groups: the same calls, done by MPI on host memory when they are made.

    The real ones return at once, and the host continues to move messages, which other ranks may be waiting for before
    they come to this call. These return when all is done, so they move the messages themselves.
    """

    def __init__(self, mpi, current: Callable[[], "FakeStream"]):
        """`current` returns the stream that the thread uses."""
        self.mpi, self.current = mpi, current
        self.calls: list[str] = []
        self._meanwhile: dict[int, tuple[FakeStream, list[Callable[[], None]]]] = {}

    def Options(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace()

    def __call__(self, store, rank: int, size: int, options) -> "FakeGroup":
        return FakeGroup(self, store, rank, size)

    def moves(self, stream: FakeStream, poll: Callable[[], None]) -> None:
        """Say what moves the messages of a group that uses a stream, which is kept, so that its address stays its."""
        self._meanwhile.setdefault(id(stream), (stream, []))[1].append(poll)

    def finish(self, name: str, requests: list) -> None:
        """Wait until the requests of a call are done."""
        self.calls.append(name)
        stream = id(self.current())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.mpi.Request.Testall(requests):
            assert time.monotonic() < deadline, f"others do not come to {name}, call {len(self.calls)}"
            for poll in self._meanwhile.get(stream, (None, [os.sched_yield]))[1]:
                poll()
        if stream in self._meanwhile:
            self._meanwhile[stream][0].add(_notice)  # the host finds that it is done only when it looks again


class FakeGroup:
    """One process group of the fake library."""

    def __init__(self, library: FakeLibrary, store, rank: int, size: int):
        self._library, self._mpi, self._rank = library, library.mpi, rank
        world = library.mpi.COMM_WORLD
        store.set(f"rank {rank}", str(world.rank))
        group = world.group.Incl([int(store.get(f"rank {i}")) for i in range(size)])
        self._comm = world.Create_group(group)

    def memory(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().numpy()

    def use(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Be told of an operation and of its tensors, before it is done."""

    def _operation(self, options):
        (name,) = (each for each in ("SUM", "MAX", "MIN") if options.reduceOp == getattr(ReduceOp, each))
        return getattr(self._mpi, name)

    def allreduce(self, tensors, options) -> None:
        (tensor,) = tensors
        self.use("allreduce", [], tensors)
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, self.memory(tensor), self._operation(options))
        self._library.finish("allreduce", [request])

    def _reduce_scatter_base(self, out, flat, options) -> None:
        self.use("_reduce_scatter_base", [flat], [out])
        before, total = self.memory(flat).copy(), np.empty_like(self.memory(out))
        request = self._comm.Ireduce_scatter_block(before, total, self._operation(options))
        self._library.finish("_reduce_scatter_base", [request])
        self.memory(out)[:] = total

    def reduce_scatter(self, outs, lists, options) -> None:
        (out,), (parts,) = outs, lists
        self.use("reduce_scatter", parts, [out])
        before = [self.memory(part).copy() for part in parts]
        total = [np.empty_like(part) for part in before]
        operation = self._operation(options)
        given = enumerate(zip(before, total, strict=True))
        requests = [self._comm.Ireduce(one, into, operation, root) for root, (one, into) in given]
        self._library.finish("reduce_scatter", requests)
        self.memory(out)[:] = total[self._rank]

    def _allgather_base(self, whole, own, options) -> None:
        others = [part for i, part in enumerate(whole.split(own.numel())) if i != self._rank]
        self.use("_allgather_base", [own], others)  # a part that is in its place stays as it is
        before = self.memory(own).copy()
        self._library.finish("_allgather_base", [self._comm.Iallgather(before, self.memory(whole))])

    def allgather(self, lists, owns, options) -> None:
        (parts,) = lists
        self.use("allgather", owns, [part for i, part in enumerate(parts) if i != self._rank])
        requests = [self._comm.Ibcast(self.memory(part), root) for root, part in enumerate(parts)]
        self._library.finish("allgather", requests)

    def alltoall(self, received, sent, options) -> None:
        self.use("alltoall", sent, received)
        requests = [self._comm.Irecv(self.memory(part), i) for i, part in enumerate(received) if part.numel()]
        requests += [self._comm.Isend(self.memory(part), i) for i, part in enumerate(sent) if part.numel()]
        self._library.finish("alltoall", requests)

    def get_error(self) -> ErrorType:
        """Nothing goes wrong by itself here."""
        return ErrorType.SUCCESS

    def shutdown(self) -> None:
        self._comm.Free()

    def abort(self) -> None:
        """What is in flight stays so: MPI has no end of a communicator without the others."""
