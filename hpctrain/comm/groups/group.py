"""Groups: operations on torch tensors over a set of ranks, by the route that fits where the ranks are.

Every operation must be called by all ranks of the group, in the same order. Tensors must be contiguous; any shape and
any dtype that torch trains with. Half precision is summed in fp32 and rounded once. Results are the same bits on every
rank, and in every run whose network is described by the same figures.

The maker's library may do an operation on a device. To wait for it means that the device waits: the host continues, and
must not read the result before the device has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

import torch

from hpctrain.comm.collectives.flat import Collectives, SilentCollectives
from hpctrain.comm.collectives.shared import SharedCollectives
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.operations import OPERATIONS
from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.progress.lanes import Lane
from hpctrain.comm.progress.operation import Operation
from hpctrain.comm.transports.transport import Transport, as_bytes
from hpctrain.comm.waiting import Patience, Phase, Ready, Steps, until_all, wait_until
from hpctrain.config.errors import CommError
from hpctrain.sharding.intervals import Interval, cut_evenly

REDUCTIONS = ("sum", "max", "min")
# Number of sizes whose even cuts are cached: computing them takes as long as moving a small message.
KEPT_CUTS = 64
ENDLESS = Patience(Phase("a group of one", float("inf"), ""))


class BackendPart(Protocol):
    """A resource of which a process, a device or MPI has a limited number."""

    def close(self) -> None:
        """Release the resource. All ranks must call."""
        ...

    def abandon(self) -> None:
        """Release what can be released without the others."""
        ...


@dataclass
class Backend:
    """The means by which a group communicates: its collectives, its messages, and the reasons.

    `groups/maker.py` makes it; `hpctrain.comm.collectives` lists the classes of collectives and their uses.
    """

    collectives: Collectives
    transport: Transport | None
    """The messages of the group; None where its ranks send none."""
    reason: str
    parts: Sequence[BackendPart] = ()
    """Resources of this backend, in the order in which they were made."""
    kept: list[object] = field(default_factory=list)
    """Steps and tensors of blocking operations that failed: MPI may still write into these. A world's list outlives its
    groups."""
    is_open: bool = True

    def abandon(self) -> None:
        """Leave without the others, and end operations on devices that wait for them. `close` will do nothing."""
        if self.is_open:
            self.is_open = False
            for part in reversed(self.parts):
                part.abandon()

    def close(self) -> None:
        """Free all parts. All ranks must call; a second call does nothing."""
        if self.is_open:
            self.is_open = False
            for part in reversed(self.parts):
                part.close()


class Group:
    """Some ranks that communicate. A group of one does nothing, at no cost.

    An operation that is called by its name blocks. A *started* one is overlapped where the group has a lane. Where it
    has none the operation has ended when `start_...` returns. Both give the same bits to the same calling code, which
    waits for each started operation once.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        backend: Backend | None = None,
        patience: Patience = ENDLESS,
        instruments: Instruments | None = None,
        lane: Lane | None = None,
    ):
        """`backend` is None for a group of one. The `lane` is this group's alone."""
        self._instruments, self._patience, self._lane = instruments or Instruments(), patience, lane
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self._backend = backend or Backend(SilentCollectives(0, 1), None, "a single rank")
        self._collectives, self.reason = self._backend.collectives, self._backend.reason
        self.rank, self.route_name = self._collectives.rank, self._collectives.name
        self._even_cuts = lru_cache(KEPT_CUTS)(partial(cut_evenly, parts=self.size))

    @property
    def bytes_sent(self) -> Sequence[int]:
        """The bytes sent to each rank by position in messages of the whole group, without those inside its domains."""
        return self._backend.transport.bytes_sent if self._backend.transport else (0,)

    @property
    def is_overlapped(self) -> bool:
        """Say whether started operations continue while the rank computes."""
        return self._lane is not None

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce in place over all ranks; `op` is sum, max or min. Return the tensor."""
        self._begin("all_reduce", tensor, op=op)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Operation:
        """Start an `all_reduce` of sums; do not touch the tensor before the wait for the operation."""
        return self._begin("all_reduce", tensor, is_started=True)

    def reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, cuts: Sequence[Interval] | None = None, op: str = "sum"
    ) -> torch.Tensor:
        """Reduce over ranks; rank i gets elements `cuts[i]` of the flat tensor (default: an even cut) in `out`. Return
        `out`."""
        self._begin("reduce_scatter", tensor, cuts, out, op)
        return out

    def start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, cuts: Sequence[Interval] | None = None
    ) -> Operation:
        """Start a `reduce_scatter` of sums; do not touch the tensors before the wait for the operation."""
        return self._begin("reduce_scatter", tensor, cuts, out, is_started=True)

    def all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> torch.Tensor:
        """Fill the flat tensor on all ranks in place; rank i contributes elements `cuts[i]`. Return the tensor."""
        self._begin("all_gather", tensor, cuts)
        return tensor

    def start_all_gather(self, tensor: torch.Tensor, cuts: Sequence[Interval] | None = None) -> Operation:
        """Start an `all_gather`; do not touch the tensor before the wait for the operation."""
        return self._begin("all_gather", tensor, cuts, is_started=True)

    def all_to_all(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        cuts: Sequence[Interval] | None = None,
        out_cuts: Sequence[Interval] | None = None,
    ) -> torch.Tensor:
        """Send elements `cuts[i]` of the flat tensor to rank i, and receive those for `out_cuts[i]` of `out` from it.
        Return `out`.

        Cuts are of any size (default: even cuts), and each rank's own. Both ranks of a pair give the same size.
        """
        self._begin("all_to_all", tensor, cuts, out, out_cuts=out_cuts)
        return out

    def start_all_to_all(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        cuts: Sequence[Interval] | None = None,
        out_cuts: Sequence[Interval] | None = None,
    ) -> Operation:
        """Start an `all_to_all`; do not touch the tensors before the wait for the operation."""
        return self._begin("all_to_all", tensor, cuts, out, is_started=True, out_cuts=out_cuts)

    def barrier(self) -> None:
        """Return when all ranks have called."""
        self._begin("barrier", torch.empty(0))

    def send(self, tensor: torch.Tensor) -> None:
        """Send to the other rank of a group of two, which receives as many bytes; ends when the tensor may be
        changed."""
        self._begin("send", tensor)

    def start_send(self, tensor: torch.Tensor) -> Operation:
        """Start a `send`; do not change the tensor before the wait for the operation."""
        return self._begin("send", tensor, is_started=True)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill the tensor with the next message of the other rank of a group of two."""
        self._begin("receive", tensor)

    def start_receive(self, tensor: torch.Tensor) -> Operation:
        """Start a `receive`; do not touch the tensor before the wait for the operation."""
        return self._begin("receive", tensor, is_started=True)

    def _begin(
        self,
        name: str,
        tensor: torch.Tensor,
        cuts: Sequence[Interval] | None = None,
        out: torch.Tensor | None = None,
        op: str = "sum",
        is_started: bool = False,
        out_cuts: Sequence[Interval] | None = None,
    ) -> Operation:
        """Give an operation its place in this rank's order: all operations begin here.

        Unless it is overlapped, it has ended on return.
        """
        steps, lane, launches, device = self._steps(name, tensor, cuts, out, out_cuts, op), None, None, None
        if is_started:
            lane = self._lane
        if isinstance(self._collectives, StreamedCollectives) and OPERATIONS[name].is_launched:
            launches = self._collectives.launches_of(tensor)
            device = launches.accelerator if launches is not None and self._collectives.is_launched else None
        what = self._instruments, name, tensor.nbytes, steps, self._patience
        operation = Operation(*what, lane is not None, device, kept=(tensor, out))
        try:
            if launches is not None:
                launches.begin(operation, lane)
            elif lane is not None:
                lane.begin(operation)
            if lane is None:
                if self._lane is not None:  # it has the same connection, and goes first
                    self._lane.finish()
                operation.finish()
        except BaseException:
            if operation.poll is None:  # those of a lane are the lane's
                self._backend.kept.append(operation.abandon())
            raise
        return operation

    def _steps(
        self,
        name: str,
        tensor: torch.Tensor,
        cuts: Sequence[Interval] | None,
        out: torch.Tensor | None,
        out_cuts: Sequence[Interval] | None,
        op: str,
    ) -> Steps:
        """Check the arguments of an operation; return its steps with those of them that its row says it has."""
        row = OPERATIONS[name]
        if not row.transfers:
            return self._collectives.steps(name, tensor)
        flat, arguments = self._flat(tensor), []
        if row.matching:
            return self._message(name, flat)
        if row.is_cut:
            cuts = self._checked_cuts(cuts, flat)
            arguments.append(cuts)
            if row.is_pairwise:
                assert out is not None, f"{name} has an output"
                received = self._flat(out)
                out_cuts = self._checked_cuts(out_cuts, received)
                if cuts[self.rank].size != out_cuts[self.rank].size:
                    sizes = f"{cuts[self.rank].size} elements to itself, and gets {out_cuts[self.rank].size}"
                    raise CommError(f"rank {self.rank} sends {sizes}")
                return self._collectives.steps(name, flat, cuts, received, out_cuts)
            if out is not None:
                if out.numel() != cuts[self.rank].size:
                    size = cuts[self.rank].size
                    raise CommError(f"{out.numel()} elements of output, where rank {self.rank} gets {size}")
                arguments.append(self._flat(out))
        if row.is_sum:
            if op not in REDUCTIONS:
                raise CommError(f"no reduction '{op}'; there are {', '.join(REDUCTIONS)}")
            arguments.append(op)
        return self._collectives.steps(name, flat, *arguments) if flat.numel() else iter(())

    def _checked_cuts(self, cuts: Sequence[Interval] | None, flat: torch.Tensor) -> Sequence[Interval]:
        """Return the cuts of a flat tensor, by default even ones."""
        if cuts is None:
            return self._even_cuts(flat.numel())
        if len(cuts) != self.size or cuts[-1].stop > flat.numel():
            sizes = f"{self.size} ranks and {flat.numel()} elements"
            raise CommError(f"{len(cuts)} cuts up to {cuts[-1].stop} for {sizes}")
        return cuts

    def _message(self, name: str, flat: torch.Tensor) -> Steps:
        if self.size != 2:
            raise CommError(f"a message in a group of {self.size} ranks; groups of two have messages")
        transport, data, peer = self.transport, as_bytes(flat), 1 - self.rank
        move = transport.send if name == "send" else transport.receive
        after = transport.queued(data)  # its place in the caller's stream: a lane may reach the first step much later

        def steps() -> Steps:
            yield from until_all([move(peer, data, after)], f"rank {peer} of 2")

        return steps()

    @property
    def transport(self) -> Transport:
        """The group's messages."""
        assert self._backend.transport is not None, "a group of one has no peer"
        return self._backend.transport

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise CommError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
        return tensor.view(-1)

    def await_ready(self, ready: Ready, awaited: str) -> None:
        """Wait with this group's patience for something of this rank alone, such as its device. Raises CommError."""
        wait_until(ready, lambda: awaited, self._patience)

    def allocate_common(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return zeros [numel] in one memory that all ranks share; None where the group has no such memory.

        A writer must make sure by `barrier` that nobody reads. All ranks must call.
        """
        collectives = self._collectives
        if not isinstance(collectives, SharedCollectives) or device.type != "cpu" or not numel:
            return None
        memory = collectives.allocate_common(numel * dtype.itemsize)
        return None if memory is None else memory.view(dtype)

    def abandon(self) -> None:
        """Leave the group and its operations in flight without the others; `close` will do nothing. For error paths."""
        if self._lane is not None:
            self._lane.abandon()
        self._instruments.close(alone=True)
        self._backend.abandon()

    def close(self) -> None:
        """Free the group's resources, when all operations have ended. All ranks must call; a second call does
        nothing."""
        if self._lane is not None:
            self._lane.close()
        self._instruments.close()
        self._backend.close()
