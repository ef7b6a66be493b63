"""Communicators: collectives on torch tensors over a set of ranks, by the route that fits where the ranks are.

Every collective must be called by all ranks of the group, in the same order. Tensors must be contiguous; any shape and
any dtype that torch trains with. Half precision is summed in fp32 and rounded once. Results are the same bits on every
rank, and in every run whose network is described by the same figures. A `Communicator` blocks; a `Lane` offers the same
and returns a `WorkHandle`, as a rule before the operation has ended. Where the vendor's library does an operation on a
device, to wait for it means that the device waits: the host continues, and must not look at the result before the
device is there.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from hpctrain.comm.accelerators.launches import CompositeOperation, DeviceLaunch, DeviceOperation, Procedure
from hpctrain.comm.collectives.flat import Collectives, SilentCollectives
from hpctrain.comm.collectives.shared import SharedCollectives
from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.progress.lanes import ENDED, Ended, ProgressEngine, Work
from hpctrain.comm.transports.transport import Transport, as_bytes
from hpctrain.comm.waiting import Patience, Phase, Ready, Steps, complete, until_all, wait_until
from hpctrain.config.errors import CommError
from hpctrain.sharding.intervals import Interval, cut_evenly

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Event
    from hpctrain.comm.collectives.native import NativeCollectives
    from hpctrain.comm.collectives.streamed import StreamedCollectives

WorkHandle = Work | DeviceLaunch | Ended
"""What a started operation returns: `done` says whether it has ended, `wait` waits for that."""


REDUCTIONS = ("sum", "max", "min")
# Of how many sizes the even cuts are kept: computing them takes as long as moving a small message.
KEPT_CUTS = 64
ENDLESS = Patience(Phase("a group of one", float("inf"), ""))


class BackendPart(Protocol):
    """Something of which a process, a device or MPI has a limited number."""

    def close(self) -> None:
        """Give it back. All ranks must call."""
        ...


@dataclass
class Backend:
    """The means by which a group communicates: its collectives, its messages, and why these.

    `groups/maker.py` makes it; `hpctrain.comm.collectives` says which class of collectives is whose.
    """

    collectives: "Collectives | StreamedCollectives"
    transport: Transport | None
    """None where nobody is sent anything."""
    reason: str
    parts: "Sequence[BackendPart]" = ()
    """What was made for it, in this order."""
    natives: "Sequence[NativeCollectives]" = ()
    """Those of them that are of a maker's library."""
    is_open: bool = True

    @property
    def is_launched(self) -> bool:
        """Say whether operations on tensors of devices are launched at once, in the order in which they are asked."""
        return getattr(self.collectives, "is_launched", False)

    def abandon(self) -> None:
        """Leave without the others: end what waits for them on devices. `close` will do nothing."""
        if self.is_open:
            self.is_open = False
            for native in self.natives:
                native.abandon()

    def close(self) -> None:
        """Free all parts. All ranks must call; a second call does nothing."""
        if self.is_open:
            self.is_open = False
            for part in reversed(self.parts):
                part.close()


Result = TypeVar("Result")


class Operations(ABC, Generic[Result]):
    """The operations of a group, on its ranks by position; what they return is up to who carries them out."""

    def __init__(self, ranks: Sequence[int], backend: Backend | None, instruments: Instruments | None):
        """`backend` is None for a group of one."""
        self._instruments = instruments or Instruments()
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self._backend = backend or Backend(SilentCollectives(0, 1), None, "a single rank")
        self._collectives, self.reason = self._backend.collectives, self._backend.reason
        self.rank, self.route_name = self._collectives.rank, self._collectives.name
        self._even_cuts = lru_cache(KEPT_CUTS)(partial(cut_evenly, parts=self.size))

    @abstractmethod
    def _execute(self, operation: str, tensor: torch.Tensor, procedure: Procedure) -> Result: ...

    @property
    def bytes_sent(self) -> Sequence[int]:
        """The bytes sent to each rank by position, as messages of the whole group; not those inside its domains."""
        return self._backend.transport.bytes_sent if self._backend.transport else (0,)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise CommError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
        return tensor.view(-1)

    def _cuts(self, flat: torch.Tensor, cuts: Sequence[Interval] | None) -> Sequence[Interval]:
        if cuts is None:
            return self._even_cuts(flat.numel())
        if len(cuts) != self.size or cuts[-1].stop > flat.numel():
            raise CommError(f"{len(cuts)} cuts up to {cuts[-1].stop} for {self.size} ranks and {flat.numel()} elements")
        return cuts

    def _check_reduction(self, op: str) -> None:
        if op not in REDUCTIONS:
            raise CommError(f"no reduction '{op}'; there are {', '.join(REDUCTIONS)}")

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Result:
        """Reduce in place over all ranks; `op` is sum, max or min."""
        self._check_reduction(op)
        flat = self._flat(tensor)
        steps = self._collectives.all_reduce(flat, op) if flat.numel() else iter(())
        return self._execute("all_reduce", tensor, steps)

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, cuts: Sequence[Interval] | None = None, op: str = "sum"
    ) -> Result:
        """Reduce over ranks; rank i gets elements `cuts[i]` of the flat tensor (default: an even cut) in `out`."""
        self._check_reduction(op)
        flat, into = self._flat(tensor), self._flat(out)
        cuts = self._cuts(flat, cuts)
        if into.numel() != cuts[self.rank].size:
            raise CommError(f"{into.numel()} elements of output, where rank {self.rank} gets {cuts[self.rank].size}")
        return self._execute("reduce_scatter", tensor, self._collectives.reduce_scatter(flat, cuts, into, op))

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> Result:
        """Fill the flat tensor on all ranks in place, of which rank i brings elements `cuts[i]`."""
        flat = self._flat(tensor)
        steps = self._collectives.all_gather(flat, self._cuts(flat, cuts)) if flat.numel() else iter(())
        return self._execute("all_gather", tensor, steps)

    def barrier(self) -> Result:
        return self._execute("barrier", torch.empty(0), self._collectives.barrier())

    def send(self, tensor: torch.Tensor) -> Result:
        """Send to the other rank of a group of two, which receives as many bytes; ends when the tensor may be
        changed."""
        return self._execute("send", tensor, self._message(self.transport.send, tensor))

    def receive(self, tensor: torch.Tensor) -> Result:
        """Fill the tensor with the next message of the other rank of a group of two."""
        return self._execute("receive", tensor, self._message(self.transport.receive, tensor))

    @property
    def transport(self) -> Transport:
        """The messages of its ranks."""
        assert self._backend.transport is not None, "a group of one has no peer"
        return self._backend.transport

    def _message(self, move, tensor: torch.Tensor) -> Steps:
        """Take the message's place in the caller's stream now: a lane may come to its first step much later."""
        if self.size != 2:
            raise CommError(f"a message in a group of {self.size} ranks; groups of two have messages")
        data = as_bytes(self._flat(tensor))
        return self._moved(move, data, self.transport.queued(data))

    def _moved(self, move, data: torch.Tensor, after: "Event | None") -> Steps:
        peer = 1 - self.rank
        yield from until_all([move(peer, data, after)], f"rank {peer} of 2")

    @property
    def is_open(self) -> bool:
        """Say whether others are waited for, and not left."""
        return self._backend.is_open

    def abandon(self) -> None:
        """Leave without the others: `close` will do nothing. For error paths."""
        self._backend.abandon()

    def close(self) -> None:
        """Free what it uses. All ranks must call; a second call does nothing."""
        self._backend.close()


class Communicator(Operations[torch.Tensor]):
    """Blocking operations; each returns the tensor that it was given. A group of one does nothing, at no cost.

    What is *started* is overlapped where the group has a lane, and blocks where it has none: the same bits, and the
    same code for who calls.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        backend: Backend | None = None,
        patience: Patience = ENDLESS,
        instruments: Instruments | None = None,
        lane: "Lane | None" = None,
    ):
        """`lane` is over the same ranks in the same order; it is closed by who made it."""
        super().__init__(ranks, backend, instruments)
        self._patience, self._lane = patience, lane

    def _execute(self, operation: str, tensor: torch.Tensor, procedure: Procedure) -> torch.Tensor:
        observed = self._instruments.start(operation, tensor.nbytes)
        if isinstance(procedure, DeviceOperation):
            procedure.order.launch(procedure, self._patience, observed).wait()
        else:
            # A rehearsal slows steps down. An operation that raises is not ended: the flight record shows what hung.
            complete(observed.steps(_steps_of(procedure)), operation, self._patience)
            observed.end()
            observed.end_wait()
        return tensor

    @property
    def bytes_sent(self) -> Sequence[int]:
        """The bytes sent to each rank by position; what was started is counted with the rest."""
        own = super().bytes_sent
        if self._lane is None or self._lane._backend is self._backend:
            return own
        return [a + b for a, b in zip(own, self._lane.bytes_sent, strict=True)]

    @property
    def is_overlapped(self) -> bool:
        """Say whether what is started continues while the rank computes."""
        return self._lane is not None

    def await_ready(self, ready: Ready, awaited: str) -> None:
        """Wait with this group's patience for something of this rank's own, such as its device. Raises CommError."""
        wait_until(ready, lambda: awaited, self._patience)

    def start_all_reduce(self, tensor: torch.Tensor) -> WorkHandle:
        """Sum in place over all ranks; leave the tensor alone until the work is done."""
        if self._lane is not None:
            return self._lane.all_reduce(tensor)
        self.all_reduce(tensor)
        return ENDED

    def start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, cuts: Sequence[Interval] | None = None
    ) -> WorkHandle:
        """Start a `reduce_scatter` of sums; leave both tensors alone until the work is done."""
        if self._lane is not None:
            return self._lane.reduce_scatter(tensor, out, cuts)
        self.reduce_scatter(tensor, out, cuts)
        return ENDED

    def start_all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> WorkHandle:
        """Start an `all_gather`; leave the tensor alone until the work is done."""
        if self._lane is not None:
            return self._lane.all_gather(tensor, cuts)
        self.all_gather(tensor, cuts)
        return ENDED

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros [numel] in memory that this group's collectives work on with the fewest copies.

        All ranks must call with the same `numel`, and bring the same part of it to an operation. Blocking operations
        work on it; a lane copies. When the communicator is closed it is ordinary memory.
        """
        memory = self._allocate(numel, dtype, device, is_common=False)
        return torch.zeros(numel, dtype=dtype, device=device) if memory is None else memory

    def allocate_common(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return zeros [numel] that are one memory for all ranks; None where the group has no such memory.

        Who writes must see to it that nobody reads, by `barrier`. All ranks must call.
        """
        return self._allocate(numel, dtype, device, is_common=True)

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device, is_common: bool) -> torch.Tensor | None:
        collectives = self._collectives
        if not isinstance(collectives, SharedCollectives) or device.type != "cpu" or not numel:
            return None
        memory = collectives.allocate(numel * dtype.itemsize, is_common)
        return None if memory is None else memory.view(dtype)


class Lane(Operations[WorkHandle]):
    """Operations that continue while the rank computes, one after the other; each returns its `WorkHandle`.

    Tensors must be left alone until their work is done.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        backend: Backend | None,
        engine: ProgressEngine,
        patience: Patience,
        instruments: Instruments | None = None,
    ):
        super().__init__(ranks, backend, instruments)
        self._engine, self._patience = engine, patience
        self._queue: deque[Work] = engine.add_lane()

    def _execute(self, operation: str, tensor: torch.Tensor, procedure: Procedure) -> WorkHandle:
        observed = self._instruments.start(operation, tensor.nbytes, is_overlapped=True)
        if isinstance(procedure, DeviceOperation):
            return procedure.order.launch(procedure, self._patience, observed)
        work = Work(self._engine, observed.steps(_steps_of(procedure)), self._patience, observed)
        self._engine.submit(self._queue, work)
        if isinstance(procedure, CompositeOperation):
            procedure.order.start_composite(work)
            if procedure.order.blocks:
                work.wait()
        return work

    def drain(self) -> None:
        """Wait for what is in flight, unless it was abandoned. All ranks must call."""
        for work in tuple(self._queue) if self.is_open else ():
            work.wait()


def _steps_of(procedure: Steps | CompositeOperation) -> Steps:
    """Return the steps of an operation; of a composite one when its parts may be launched."""
    if isinstance(procedure, CompositeOperation):
        procedure.order.finish_composite()
        return procedure.steps
    return procedure
