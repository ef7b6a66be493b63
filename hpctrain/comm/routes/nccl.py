"""The vendor's collectives inside a family: NCCL, or RCCL, which has the same interface, through CuPy."""

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.launches import ErrorWatch
from hpctrain.comm.reduction import HALF, as_bytes, reduce_in_order, window_of
from hpctrain.comm.routes.abilities import Ability
from hpctrain.comm.steps import Steps
from hpctrain.config.errors import CommError
from hpctrain.sharding.intervals import Interval, cut_evenly

# Set before NCCL is first used, unless they are set already. NVLS and CollNet let switches sum, in an order that
# changes from call to call. Connections are made when a communicator is, where all ranks are at the same place: made at
# the first operation they would block the host inside a lane, where ranks may be at different places.
SETTINGS = {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0"}
# Bounds the memory for what is received before it is summed.
SEGMENT_BYTES = 64 << 20
# Set to 0: do without NCCL.
NATIVE_VARIABLE = "HPCTRAIN_NATIVE"
CONNECTED_AT_ONCE = 64
"""How many ranks of a group are connected each with each when it is made. A connection takes megabytes of a device, and
larger groups sum fp32, over rings alone. One that needs more opens it at its first operation, which all come to."""
ABORT_SECONDS = 3.0
"""How long leaving a communicator in an error may take; one that takes longer is left as it is."""


class Library(NamedTuple):
    """CuPy's module `cupy.cuda.nccl`, if it is there."""

    module: Any
    ability: Ability


def load_nccl() -> Library:
    """Return the library, or why it cannot be used. Loads CuPy."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if os.environ.get(NATIVE_VARIABLE) == "0":
        return Library(None, Ability(False, f"{NATIVE_VARIABLE}=0"))
    try:
        from cupy.cuda import nccl  # pyright: ignore[reportMissingImports] - an extra

        if not getattr(nccl, "available", False):
            return Library(None, Ability(False, "CuPy was built without NCCL, or cannot load libnccl.so.2"))
        version = nccl.get_version()
    except Exception as error:  # whatever a broken installation raises
        return Library(None, Ability(False, f"CuPy cannot be used ({type(error).__name__}: {error})"))
    name = "RCCL" if torch.version.hip else "NCCL"
    return Library(nccl, Ability(True, f"{name} {version // 10000}.{version // 100 % 100}.{version % 100}"))


class Connection:
    """One communicator of the library, watched for errors that it notices by itself.

    Without that a peer that is gone shows only when somebody's patience ends: the host waits for its device, and the
    device for the peer. On an error the communicator is aborted, which ends what waits on the device.
    """

    def __init__(self, name: str, communicator: Any, watch: ErrorWatch):
        self.name, self.communicator, self._watch = name, communicator, watch
        self._error: str | None = None
        self._is_open = True
        self._lock = threading.Lock()
        watch.add(self)

    def look(self) -> None:
        """Take note of an error, and abort. For `ErrorWatch`."""
        try:
            with self._lock:  # nobody gives it back while it is looked at
                if self._is_open:
                    self.communicator.check_async_error()
        except Exception as error:  # CuPy's, which is not there to be imported everywhere
            self._error = str(error)
            self.abort()

    def check(self) -> None:
        """Raise CommError where the library has noticed an error since the start."""
        if self._error is not None:
            raise CommError(
                f"{self.name} reports: {self._error}; a rank or its network is gone. NCCL_DEBUG=INFO shows which"
            )

    def abort(self) -> None:
        """Leave without the others, whatever is in flight: the communicator is aborted, not destroyed.

        Destroying waits for what is in flight, and the interpreter would do it at its exit to what is left. One whose
        abort does not end in `ABORT_SECONDS` is therefore never released.
        """
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self._watch.remove(self)
        ended = threading.Event()

        def work() -> None:
            with suppress(Exception):  # the process is about to end, and says why elsewhere
                self._watch.enter()
                self.communicator.abort()
            ended.set()

        threading.Thread(target=work, name=f"{self.name} abort", daemon=True).start()
        deadline = time.monotonic() + ABORT_SECONDS
        while not ended.is_set() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not ended.is_set():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.communicator))

    def destroy(self) -> None:
        """Give it back in order: all ranks call, and nothing is in flight."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self._watch.remove(self)
        self.communicator.destroy()


class NativeCollectives:
    """Collectives queued on the stream that the caller's thread uses when it takes the steps; they wait for nothing.

    Sums are the library's in fp32, fp64 and integers, in an order that depends on ranks, sizes and the machine alone;
    half precision, which it would round at every addition, is exchanged and summed here, in fp32 and in order of rank.
    Of several groups a device does one operation at a time (see `hpctrain.comm.launches`).
    """

    def __init__(self, nccl, comm, accelerator: Accelerator):
        """`comm` is the group's MPI communicator, used here alone. All ranks must call, with their devices bound."""
        self.rank, self.size = comm.rank, comm.size
        self.name = "RCCL" if accelerator.kind == "rocm" else "NCCL"
        self._nccl, self._accelerator = nccl, accelerator
        self._operations = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX, "min": nccl.NCCL_MIN}
        self._numbers = {
            torch.float32: nccl.NCCL_FLOAT32,
            torch.float64: nccl.NCCL_FLOAT64,
            torch.int32: nccl.NCCL_INT32,
            torch.int64: nccl.NCCL_INT64,
            torch.int8: nccl.NCCL_INT8,
            torch.uint8: nccl.NCCL_UINT8,
        }
        accelerator.synchronize()  # ranks connect on the host, while no other group's operation waits for them
        key = comm.bcast(_unique_id(nccl) if comm.rank == 0 else None)
        if isinstance(key, Exception):
            raise key  # on all ranks: none of them waits for the others
        self._comm = nccl.NcclCommunicator(comm.size, key, comm.rank)
        self.connection = Connection(self.name, self._comm, accelerator.launches.errors)
        accelerator.launches.watch(self.connection)
        if comm.size <= CONNECTED_AT_ONCE:
            with accelerator.on(accelerator.launches.stream):
                self._connect()

    def _connect(self) -> None:
        """Send one message between each pair: the first one opens a connection, which blocks the host."""
        sent = torch.zeros(self.size, dtype=torch.uint8, device=self._accelerator.device)
        self._swap(sent.split(1), torch.empty_like(sent).split(1))
        self._accelerator.synchronize()

    def _number(self, dtype: torch.dtype) -> int:
        if dtype not in self._numbers:
            raise CommError(f"{self.name} cannot reduce {dtype}; convert the tensor to float32 or int64")
        return self._numbers[dtype]

    @contextmanager
    def _together(self) -> Iterator[int]:
        """Start all operations of a block together; gives the stream's address."""
        self._nccl.groupStart()
        try:
            yield self._accelerator.stream_address()
        finally:
            self._nccl.groupEnd()

    def barrier(self) -> Steps:
        """Of devices: ends on each when all have come to it."""
        yield from self.all_reduce(torch.zeros(1, dtype=torch.int32, device=self._accelerator.device), "sum")

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        if flat.dtype in HALF:
            cuts = cut_evenly(flat.numel(), self.size)
            self._exchange(flat, cuts, flat[slice(*cuts[self.rank])], op)
            yield from self.all_gather(flat, cuts)
            return
        at, stream = flat.data_ptr(), self._accelerator.stream_address()
        self._comm.allReduce(at, at, flat.numel(), self._number(flat.dtype), self._operations[op], stream)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        """Uneven cuts, of which the library knows nothing, are a reduction to each rank, started together."""
        if flat.dtype in HALF:
            self._exchange(flat, cuts, out, op)
            return
        number, operation = self._number(flat.dtype), self._operations[op]
        if _are_even(cuts):
            stream = self._accelerator.stream_address()
            self._comm.reduceScatter(flat.data_ptr(), out.data_ptr(), cuts[0].size, number, operation, stream)
            return
        with self._together() as stream:
            for root, cut in enumerate(cuts):
                if cut.size:
                    at = flat[slice(*cut)].data_ptr()
                    into = out.data_ptr() if root == self.rank else at
                    self._comm.reduce(at, into, cut.size, number, operation, root, stream)
        yield from ()

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        """Uneven cuts are a broadcast from each rank, started together."""
        parts = [as_bytes(flat[slice(*cut)]) for cut in cuts]
        if _are_even(cuts):
            own, stream = parts[self.rank], self._accelerator.stream_address()
            self._comm.allGather(own.data_ptr(), flat.data_ptr(), own.numel(), self._nccl.NCCL_UINT8, stream)
            return
        with self._together() as stream:
            for root, part in enumerate(parts):
                if part.numel():
                    at = part.data_ptr()
                    self._comm.broadcast(at, at, part.numel(), self._nccl.NCCL_UINT8, root, stream)
        yield from ()

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        data, stream = as_bytes(flat), self._accelerator.stream_address()
        self._comm.broadcast(data.data_ptr(), data.data_ptr(), data.numel(), self._nccl.NCCL_UINT8, root, stream)
        yield from ()

    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Steps:
        received[self.rank].copy_(sent[self.rank])
        self._swap(sent, received)
        yield from ()

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Exchange with all others; what this rank has for itself is left out."""
        with self._together() as stream:
            for peer in range(self.size):
                ours, theirs = as_bytes(sent[peer]), as_bytes(received[peer])
                if peer != self.rank and ours.numel():
                    self._comm.send(ours.data_ptr(), ours.numel(), self._nccl.NCCL_UINT8, peer, stream)
                if peer != self.rank and theirs.numel():
                    self._comm.recv(theirs.data_ptr(), theirs.numel(), self._nccl.NCCL_UINT8, peer, stream)

    def _exchange(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> None:
        """Reduce-scatter by sending each rank its part as it is, half the bytes of partial sums in fp32."""
        step = max(1, SEGMENT_BYTES // (self.size * flat.element_size()))
        buffer = flat.new_empty(self.size, min(step, cuts[self.rank].size))
        for start in range(0, max(cut.size for cut in cuts), step):
            parts = [window_of(cut, start, step) for cut in cuts]
            own = parts[self.rank]
            seen = [part[: own.size] for part in buffer]
            seen[self.rank] = flat[slice(*own)]
            self._swap([flat[slice(*section)] for section in parts], seen)
            if own.size:
                reduce_in_order(seen, out[start : start + own.size], op)

    def check(self) -> None:
        """Raise CommError where the library has noticed that a peer or a network is gone."""
        self.connection.check()

    def abandon(self) -> None:
        """Leave without the others; what is in flight is aborted, since waiting for it could be for ever."""
        self._accelerator.launches.forget(self.connection)
        self.connection.abort()

    def close(self) -> None:
        """All ranks must call."""
        self._accelerator.synchronize()
        self._accelerator.launches.note_ended()
        self._accelerator.launches.forget(self.connection)
        self.connection.destroy()


def connect_native(nccl, comm, accelerator: Accelerator) -> NativeCollectives | Ability:
    """Return the library's collectives over the ranks of `comm`, or why it refuses them, the same on all of them.

    It refuses several ranks on a device, and parts of one (MIG). All ranks must call, with their devices bound.
    """
    made, refusal = None, None
    try:
        made = NativeCollectives(nccl, comm, accelerator)
    except Exception as error:  # CuPy's of the library, and what it raises for numbers of errors that are new to it
        refusal = f"{type(error).__name__}: {error}"
    refusals = [text for text in comm.allgather(refusal) if text is not None]
    if not refusals:
        assert made is not None
        return made
    if made is not None:
        made.abandon()
    name = "RCCL" if accelerator.kind == "rocm" else "NCCL"
    return Ability(
        False, f"{name} refuses these {comm.size} ranks ({refusals[0]}; NCCL_DEBUG=INFO shows why), so that MPI is used"
    )


def _unique_id(nccl) -> object:
    """Return the key of a new communicator, or the exception that is raised in its place."""
    try:
        return nccl.get_unique_id()
    except Exception as error:
        return RuntimeError(f"{type(error).__name__}: {error}")  # CuPy's own need not be sent as they are


def _are_even(cuts: Sequence[Interval]) -> bool:
    size = cuts[0].size
    return size > 0 and all(cut == (i * size, (i + 1) * size) for i, cut in enumerate(cuts))
