"""A maker's own collectives inside a family: what is the same for every library that does them."""

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from hpctrain.comm.accelerators.base import Accelerator, describe_overflow
from hpctrain.comm.accelerators.kinds import KINDS
from hpctrain.comm.launches import LaunchOrder
from hpctrain.comm.members import on_all
from hpctrain.comm.reduction import as_bytes, reduce_in_order, window_of
from hpctrain.comm.steps import Steps
from hpctrain.config.errors import CommError
from hpctrain.sharding.intervals import Interval, cut_evenly

# Bounds the memory for what is received before it is summed.
SEGMENT_BYTES = 64 << 20
# Set to 0: do without any library.
NATIVE_VARIABLE = "HPCTRAIN_NATIVE"
CONNECTED_AT_ONCE = 64
"""How many ranks of a group are connected each with each when it is made. A connection takes megabytes of a device, and
larger groups sum fp32, over rings alone. One that needs more opens it at its first operation, which all come to."""
CONNECT_SECONDS = 120.0
"""How long the first messages of a new group may take before the library counts as refusing its ranks."""
ABORT_SECONDS = 3.0
"""How long leaving a communicator in an error may take; one that takes longer is left as it is."""


class Connection:
    """One communicator of the library, watched for errors that it notices by itself.

    Without that a peer that is gone shows only when somebody's patience ends: the host waits for its device, and the
    device for the peer. On an error the communicator is aborted, which ends what waits on the device.
    """

    def __init__(self, name: str, communicator: Any, launches: LaunchOrder, debug: str = ""):
        """`launches` are those of the rank, which watch it; `debug` is the variable by which the library says more."""
        self.name, self.communicator, self._launches = name, communicator, launches
        self._hint = f". {debug} shows which" if debug else ""
        self._error: str | None = None
        self._is_open = True
        self._lock = threading.Lock()
        launches.watch(self)

    def look(self) -> None:
        """Take note of an error, and abort. For `LaunchOrder`."""
        try:
            with self._lock:  # nobody gives it back while it is looked at
                if self._is_open:
                    self.communicator.check_async_error()
        except Exception as error:  # the library's own, which is not there to be imported everywhere
            self._error = str(error)
            self.abort()

    def check(self) -> None:
        """Raise CommError where the library has noticed an error since the start."""
        if self._error is not None:
            raise CommError(f"{self.name} reports: {self._error}; a rank or its network is gone{self._hint}")

    def abort(self) -> None:
        """Leave without the others, whatever is in flight: the communicator is aborted, not destroyed.

        Destroying waits for what is in flight, and the interpreter would do it at its exit to what is left. One that is
        not aborted in `ABORT_SECONDS`, or cannot be, is therefore never released.
        """
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        ended = threading.Event()

        def work() -> None:
            with suppress(Exception):  # the process is about to end, and says why elsewhere
                self._launches.accelerator.use()
                self.communicator.abort()
                ended.set()

        thread = threading.Thread(target=work, name=f"{self.name} abort", daemon=True)
        thread.start()
        thread.join(ABORT_SECONDS)
        if not ended.is_set():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.communicator))

    def destroy(self) -> None:
        """Give it back in order: all ranks call, and nothing is in flight."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self.communicator.destroy()


class NativeCollectives(ABC):
    """Collectives queued on the stream that the caller's thread uses when it takes the steps; they wait for nothing.

    Sums are the library's in the dtypes `sums`, in an order that depends on ranks, sizes and the machine alone. Others,
    such as half precision, which it would round at every addition, are exchanged and summed here, in order of rank and
    at least in fp32. Of several groups a device does one operation at a time (see `hpctrain.comm.launches`).
    """

    sums: Collection[torch.dtype]

    def __init__(self, comm, accelerator: Accelerator):
        """`comm` is the group's members. All ranks must call, with their devices bound."""
        self.rank, self.size = comm.rank, comm.size
        self._accelerator, self._kind = accelerator, KINDS[accelerator.kind]
        self.name = self._kind.library
        accelerator.synchronize()  # ranks connect on the host, while no other group's operation waits for them
        made = self._open(comm)
        self.connection = Connection(self.name, made, accelerator.launches, self._kind.debug)
        try:
            with accelerator.on(accelerator.launches.stream):
                self._connect()
        except Exception:
            self.abandon()
            raise

    @abstractmethod
    def _open(self, comm) -> Any:
        """Return the group's new communicator, for `Connection`. Where one rank fails, all raise."""

    # Each queues one operation. Tensors are flat; those of bytes are uint8.

    @abstractmethod
    def _sum(self, flat: torch.Tensor, op: str) -> None: ...

    @abstractmethod
    def _sum_even(self, flat: torch.Tensor, out: torch.Tensor, op: str) -> None:
        """Reduce, and keep this rank's part of equal ones."""

    def _sum_uneven(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> None:
        self._exchange(flat, cuts, out, op)

    @abstractmethod
    def _gather_even(self, data: torch.Tensor, own: torch.Tensor) -> None:
        """Fill bytes with equal parts, of which `own` is this rank's, where it is."""

    @abstractmethod
    def _broadcast(self, data: torch.Tensor, root: int) -> None: ...

    @abstractmethod
    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Exchange with all others; what this rank has for itself is left out."""

    def _together(self) -> AbstractContextManager:
        """Start all operations of a block together, where the library can."""
        return nullcontext()

    def _connect(self) -> None:
        """Send one message between each pair: the first one opens a connection, which blocks the host."""
        if self.size <= CONNECTED_AT_ONCE:
            sent = torch.zeros(self.size, dtype=torch.uint8, device=self._accelerator.device)
            self._swap(sent.split(1), torch.empty_like(sent).split(1))
        done, deadline = self._accelerator.queued(), time.monotonic() + CONNECT_SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                raise CommError(f"first messages were not there after {CONNECT_SECONDS:g} s")
            time.sleep(1e-4)

    def barrier(self) -> Steps:
        """Wait for the devices of all ranks: it ends on each when all have come to it."""
        yield from self.all_reduce(torch.zeros(1, dtype=torch.int32, device=self._accelerator.device), "sum")

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        if flat.dtype in self.sums:
            self._sum(flat, op)
            return
        cuts = cut_evenly(flat.numel(), self.size)
        self._exchange(flat, cuts, flat[slice(*cuts[self.rank])], op)
        yield from self.all_gather(flat, cuts)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        if flat.dtype not in self.sums:
            self._exchange(flat, cuts, out, op)
        elif _are_even(cuts):
            self._sum_even(flat[: cuts[-1].stop], out, op)
        else:
            self._sum_uneven(flat, cuts, out, op)
        yield from ()

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        """Uneven cuts are a broadcast from each rank, started together."""
        parts = [as_bytes(flat[slice(*cut)]) for cut in cuts]
        if _are_even(cuts):
            self._gather_even(as_bytes(flat[: cuts[-1].stop]), parts[self.rank])
            return
        with self._together():
            for root, part in enumerate(parts):
                if part.numel():
                    self._broadcast(part, root)
        yield from ()

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        self._broadcast(as_bytes(flat), root)
        yield from ()

    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Steps:
        received[self.rank].copy_(sent[self.rank])
        self._swap(sent, received)
        yield from ()

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


def connect_native(
    make: Callable[[Any, Accelerator], NativeCollectives], comm, accelerator: Accelerator
) -> NativeCollectives:
    """Return the library's collectives over the ranks of `comm`. All ranks must call, with their devices bound.

    Raises CommError on all of them where the library refuses, with its words: without it a run would be many times
    slower, which is for a person to decide.
    """
    made: list[NativeCollectives] = []

    def connect() -> None:
        try:
            made.append(make(comm, accelerator))
        except Exception as error:
            if overflow := describe_overflow(error, accelerator):
                raise torch.OutOfMemoryError(overflow) from error
            raise

    try:
        on_all(comm, connect)
        return made[0]
    except CommError as error:
        for each in made:
            each.abandon()
        kind = KINDS[accelerator.kind]
        raise CommError(
            f"{kind.library} refuses these {comm.size} ranks ({error}); {kind.debug} shows why, {NATIVE_VARIABLE}=0"
            " does without it, through MPI"
        ) from error.__cause__


def _are_even(cuts: Sequence[Interval]) -> bool:
    size = cuts[0].size
    return size > 0 and all(cut == (i * size, (i + 1) * size) for i, cut in enumerate(cuts))
