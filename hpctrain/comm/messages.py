"""The message route: MPI on host memory, for groups of ranks that do not all share one node.

MPI has no dependable bf16 and promises no order of summation, so that bytes are moved by MPI and reduced by us, in
the order of ranks: the same result on every rank and in every run.
"""

from collections.abc import Sequence

import torch

from hpctrain.comm.shared import as_bytes, sum_in_order
from hpctrain.comm.waiting import wait_until
from hpctrain.intervals import Interval, cut_evenly

SMALL_BYTES = 8 * 1024


class MessageCollectives:
    """Collectives of a group over MPI. Tensors are contiguous and on the host."""

    name = "MPI messages"

    def __init__(self, mpi, comm, timeout_seconds: float):
        self._mpi, self._comm = mpi, comm
        self._timeout_seconds = timeout_seconds
        self.rank, self.size = comm.rank, comm.size
        self._abandoned = False

    def _wait(self, request, what: str) -> None:
        wait_until(request.Test, lambda: f"{what} among {self.size} ranks", self._timeout_seconds)

    def barrier(self) -> None:
        self._wait(self._comm.Ibarrier(), "barrier")

    def all_reduce(self, flat: torch.Tensor, op: str) -> None:
        if flat.numel() * flat.element_size() <= SMALL_BYTES:
            parts = flat.new_empty(self.size, flat.numel())
            request = self._comm.Iallgather(as_bytes(flat).numpy(), as_bytes(parts).numpy())
            self._wait(request, "all_reduce")
            sum_in_order(list(parts), flat, op)
            return
        cuts = cut_evenly(flat.numel(), self.size)
        own = cuts[self.rank]
        self._reduce_scatter(flat, cuts, flat[slice(*own)], op)
        self.all_gather(flat, cuts)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor) -> None:
        self._reduce_scatter(flat, cuts, out, "sum")

    def _reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> None:
        scale, own = flat.element_size(), cuts[self.rank]
        parts = flat.new_empty(self.size, own.size)
        sent = [as_bytes(flat).numpy(), _counts(cuts, scale), self._mpi.BYTE]
        row = own.size * scale
        received = [as_bytes(parts).numpy(), ([row] * self.size, [row * i for i in range(self.size)]), self._mpi.BYTE]
        self._wait(self._comm.Ialltoallv(sent, received), "reduce_scatter")
        if own.size:
            sum_in_order(list(parts), out, op)

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> None:
        everything = [as_bytes(flat).numpy(), _counts(cuts, flat.element_size()), self._mpi.BYTE]
        self._wait(self._comm.Iallgatherv(self._mpi.IN_PLACE, everything), "all_gather")

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        self._wait(self._comm.Ibcast(as_bytes(flat).numpy(), root=root), "broadcast")

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
        if not self._abandoned:
            self._abandoned = True
            self._comm.Free()


def _counts(cuts: Sequence[Interval], scale: int) -> tuple[list[int], list[int]]:
    return [cut.size * scale for cut in cuts], [cut.start * scale for cut in cuts]


class MessageChannel:
    """A two-way channel over MPI. A send copies and is under way when it returns."""

    def __init__(self, mpi, comm, depth: int, timeout_seconds: float):
        self._comm, self._depth, self._timeout_seconds = comm, depth, timeout_seconds
        self._peer = 1 - comm.rank
        self._under_way: list[tuple] = []
        self._abandoned = False

    def send(self, tensor: torch.Tensor) -> None:
        if len(self._under_way) >= self._depth:
            request, _ = self._under_way.pop(0)
            wait_until(request.Test, lambda: "the receiver to take an earlier message", self._timeout_seconds)
        copy = as_bytes(tensor).clone()
        self._under_way.append((self._comm.Isend(copy.numpy(), dest=self._peer), copy))

    def receive(self, tensor: torch.Tensor) -> None:
        request = self._comm.Irecv(as_bytes(tensor).numpy(), source=self._peer)
        wait_until(request.Test, lambda: "a message from the other end of a channel", self._timeout_seconds)
        self._under_way = [(sent, copy) for sent, copy in self._under_way if not sent.Test()]

    def abandon(self) -> None:
        self._abandoned = True

    def close(self) -> None:
        if self._abandoned:
            return
        self._abandoned = True
        for request, _ in self._under_way:
            wait_until(request.Test, lambda: "the receiver to take the last messages", self._timeout_seconds)
        self._comm.Free()
