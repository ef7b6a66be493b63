"""Point-to-point messages of bytes, on which collectives over several hosts or families are built."""

from collections import deque
from collections.abc import Collection
from functools import partial
from typing import Protocol

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.comm.accelerators.cpu import DONE
from hpctrain.comm.transports.cuda_aware import mpi_buffer
from hpctrain.comm.transports.members import GroupMessages
from hpctrain.comm.transports.messages import Message, Request, chunk_bytes, plain_message, staged_message
from hpctrain.comm.transports.peer_memory import PeerMemory
from hpctrain.comm.waiting import Ready


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as its bytes, without copying."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)


class Transport(Protocol):
    """Messages among the ranks of one group; between two ranks they arrive in the order in which they were sent.

    Tensors are contiguous; their bytes are sent. A tensor may be touched again when the function that `send` or
    `receive` returned has returned True.
    """

    name: str
    rank: int
    size: int
    bytes_sent: list[int]
    """Bytes sent to each peer since the start, for comparison with the counters of network interfaces."""
    polls_freely: bool
    """Whether polling is free because the cores are otherwise idle, so that receives may be posted early."""

    def queued(self, tensor: torch.Tensor) -> Event | None:
        """Return the event in the caller's stream after which a message of a tensor may move; None: at once."""
        ...

    def send(self, peer: int, tensor: torch.Tensor, after: Event | None = None) -> Ready:
        """Start a send. `after` is the event from `queued`; by default it is taken in this call."""
        ...

    def receive(self, peer: int, tensor: torch.Tensor, after: Event | None = None) -> Ready: ...


class HostTransport:
    """MPI on host memory, without copies by hpctrain."""

    name = "MPI on host memory"
    polls_freely = False

    def __init__(self, messages: GroupMessages):
        self._messages = messages
        self.rank, self.size = messages.rank, messages.size
        self.bytes_sent = [0] * self.size

    def queued(self, tensor: torch.Tensor) -> None:
        """Return None: hosts have no streams."""

    def send(self, peer: int, tensor: torch.Tensor, after: Event | None = None) -> Ready:
        data = as_bytes(tensor)
        self.bytes_sent[peer] += data.numel()
        return self._messages.send(data.numpy(), peer).Test

    def receive(self, peer: int, tensor: torch.Tensor, after: Event | None = None) -> Ready:
        return self._messages.receive(as_bytes(tensor).numpy(), peer).Test


class DeviceTransport:
    """MPI on device memory where both ends accept it (`direct` peers), else through host buffers.

    Two ranks whose devices copy from each other's memory (`peers`) do that instead.

    Tensors may be on the host too, at either end. A message moves after the work that the caller's stream had before
    `send`, `receive` or `queued`. Work queued after `ready` has returned True sees the message. Polling one message
    moves all.
    """

    polls_freely = True

    def __init__(
        self,
        messages: GroupMessages,
        accelerator: Accelerator,
        direct: Collection[int] = (),
        peers: PeerMemory | None = None,
        bytes_under_way: int = 0,
    ):
        """`direct` peers (positions) must be the same at both ends. `peers` is for groups of two.

        `bytes_under_way` are those that must be posted to a peer for a full link.
        """
        self._messages, self._mpi = messages, messages.space.mpi
        self.rank, self.size = messages.rank, messages.size
        self.bytes_sent = [0] * self.size
        self._accelerator = accelerator
        self._direct, self._peers, self._bytes_under_way = frozenset(direct), peers, bytes_under_way
        self.is_direct = bool(self._direct)
        """Whether any message is in device memory."""
        self._moving: dict[tuple[int, bool], deque[Message]] = {}
        others = self.size - 1
        through_host = "MPI through pinned host buffers"
        self.name = "MPI on device memory" if others and len(self._direct) == others else through_host
        if 0 < len(self._direct) < others:
            self.name += f", on device memory to {len(self._direct)} of {others}"
        if peers is not None:
            self.name = "copies from the other device's memory"

    def queued(self, tensor: torch.Tensor) -> Event:
        return self._accelerator.queued() if self._accelerator.is_on_device(tensor) else DONE

    def send(self, peer: int, tensor: torch.Tensor, after: Event | None = None) -> Ready:
        data = as_bytes(tensor)
        self.bytes_sent[peer] += data.numel()
        return self._enter(peer, True, data, after)

    def receive(self, peer: int, tensor: torch.Tensor, after: Event | None = None) -> Ready:
        return self._enter(peer, False, as_bytes(tensor), after)

    def _post(self, peer: int, is_sent: bool, part: torch.Tensor) -> Request:
        pointer = mpi_buffer(self._mpi, self._accelerator, part)
        return self._messages.send(pointer, peer) if is_sent else self._messages.receive(pointer, peer)

    def _message(self, peer: int, is_sent: bool, data: torch.Tensor, after: Event | None) -> Message:
        queued = self.queued(data) if after is None else after
        if self._peers is not None:
            make = self._peers.send if is_sent else self._peers.receive
            return make(data.split(self._peers.slot_bytes), queued)
        post = partial(self._post, peer, is_sent)
        if peer in self._direct:
            return plain_message(post, [data], queued)
        parts = data.split(chunk_bytes(data.numel()))
        if self._accelerator.is_on_device(data):
            return staged_message(post, parts, queued, self._accelerator, is_sent, self._bytes_under_way)
        return plain_message(post, parts, queued)

    def _enter(self, peer: int, is_sent: bool, data: torch.Tensor, after: Event | None) -> Ready:
        message = self._message(peer, is_sent, data, after)
        self._moving.setdefault((peer, is_sent), deque()).append(message)
        self.poll()

        def ready() -> bool:
            if not message.done:
                self.poll()
            return message.done

        return ready

    def poll(self) -> None:
        """Move all messages; to one peer, and from one, they are posted in order."""
        for direction, messages in list(self._moving.items()):
            for message in messages:
                message.move()
                if not message.posted:
                    break
            while messages and messages[0].done:
                messages.popleft()
            if not messages:
                del self._moving[direction]
