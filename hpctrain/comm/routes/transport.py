"""Point-to-point messages of bytes: what collectives over several hosts or families are built from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from hpctrain.comm.reduction import as_bytes
from hpctrain.comm.steps import Ready

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Event


class Transport(Protocol):
    """Messages among the ranks of one group; between two ranks they arrive in the order in which they were sent.

    Tensors are contiguous; their bytes are sent. A tensor may be touched again when what `send` or `receive` returned
    has said True.
    """

    name: str
    rank: int
    size: int
    bytes_sent: Sequence[int]
    """To each peer, since the start: what the interfaces' counters are compared with."""
    polls_freely: bool
    """Whether cores have nothing else to do, so that it costs nothing to look for a message long before it comes."""

    def queued(self, tensor: torch.Tensor) -> "Event | None":
        """Return the place of the caller's stream after which a message of a tensor may move; None: at once."""
        ...

    def send(self, peer: int, tensor: torch.Tensor, after: "Event | None" = None) -> Ready:
        """`after` is what `queued` returned; without it the place is that of this call."""
        ...

    def receive(self, peer: int, tensor: torch.Tensor, after: "Event | None" = None) -> Ready: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class HostTransport:
    """MPI on host memory, without copies of ours."""

    name = "MPI on host memory"
    polls_freely = False

    def __init__(self, comm):
        """`comm` is the group's own duplicate, and owned from now on."""
        self.rank, self.size = comm.rank, comm.size
        self.bytes_sent = [0] * comm.size
        self._comm = comm
        self._open = True

    def queued(self, tensor: torch.Tensor) -> None:
        """Hosts have no streams."""

    def send(self, peer: int, tensor: torch.Tensor, after: "Event | None" = None) -> Ready:
        data = as_bytes(tensor)
        self.bytes_sent[peer] += data.numel()
        return self._comm.Isend(data.numpy(), dest=peer).Test

    def receive(self, peer: int, tensor: torch.Tensor, after: "Event | None" = None) -> Ready:
        return self._comm.Irecv(as_bytes(tensor).numpy(), source=peer).Test

    def abandon(self) -> None:
        self._open = False

    def close(self) -> None:
        """All ranks must call."""
        if self._open:
            self._open = False
            self._comm.Free()
