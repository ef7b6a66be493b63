"""Channels: what neighbouring stages of a pipeline send each other, copied when it is sent."""

from collections.abc import Sequence

import torch

from hpctrain.comm.communicator import Journal
from hpctrain.comm.reduction import as_bytes
from hpctrain.comm.routes import sub_communicator
from hpctrain.comm.topology import Preferences, Topology
from hpctrain.comm.waiting import Patience, wait_until
from hpctrain.comm.window import SharedWindow
from hpctrain.errors import CommError


class SharedChannel:
    """A two-way channel between two ranks of one host: for each way a ring of slots in the sender's memory.

    A send copies and returns; it waits only if `depth` messages are under way. The receiver needs nothing from the
    sender while it computes.
    """

    def __init__(self, mpi, comm, num_bytes: int, depth: int, patience: Patience):
        self._slot_bytes = -(-num_bytes // 64) * 64
        self._depth, self._patience = depth, patience
        self._window = SharedWindow(mpi, comm, self._slot_bytes * depth)
        self._me, self._peer = comm.rank, 1 - comm.rank
        self._sent = self._received = 0

    def _await(self, index: int, value: int, what: str) -> None:
        counter = self._window.counters[self._peer]
        if counter[index] < value:
            wait_until(lambda: counter[index] >= value, lambda: what, self._patience)
        self._window.fence()

    def send(self, tensor: torch.Tensor) -> None:
        """Copy a contiguous host tensor into the channel."""
        window, data = self._window, as_bytes(tensor)
        if data.numel() > self._slot_bytes:
            raise CommError(f"a message of {data.numel()} bytes on a channel made for {self._slot_bytes}")
        self._await(1, self._sent - self._depth + 1, "the receiver to take an earlier message")
        start = self._sent % self._depth * self._slot_bytes
        window.bytes[self._me][start : start + data.numel()].copy_(data)
        self._sent += 1
        window.publish(0, self._sent)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous host tensor with the next message, which must have its size."""
        window, data = self._window, as_bytes(tensor)
        self._await(0, self._received + 1, "a message from the other end of a channel")
        start = self._received % self._depth * self._slot_bytes
        data.copy_(window.bytes[self._peer][start : start + data.numel()])
        self._received += 1
        window.publish(1, self._received)

    def abandon(self) -> None:
        self._window.abandon()

    def close(self) -> None:
        self._window.close()


class MessageChannel:
    """A two-way channel over MPI. A send copies and is under way when it returns."""

    def __init__(self, comm, depth: int, patience: Patience):
        self._comm, self._depth, self._patience = comm, depth, patience
        self._peer = 1 - comm.rank
        self._under_way: list[tuple] = []
        self._open = True

    def send(self, tensor: torch.Tensor) -> None:
        if len(self._under_way) >= self._depth:
            request, _ = self._under_way.pop(0)
            wait_until(request.Test, lambda: "the receiver to take an earlier message", self._patience)
        copy = as_bytes(tensor).clone()
        self._under_way.append((self._comm.Isend(copy.numpy(), dest=self._peer), copy))

    def receive(self, tensor: torch.Tensor) -> None:
        request = self._comm.Irecv(as_bytes(tensor).numpy(), source=self._peer)
        wait_until(request.Test, lambda: "a message from the other end of a channel", self._patience)
        self._under_way = [(sent, copy) for sent, copy in self._under_way if not sent.Test()]

    def abandon(self) -> None:
        self._open = False

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for request, _ in self._under_way:
            wait_until(request.Test, lambda: "the receiver to take the last messages", self._patience)
        self._comm.Free()


class RecordedChannel:
    """A channel whose messages are in the rank's flight record."""

    def __init__(self, inner: SharedChannel | MessageChannel, journal: Journal):
        self._inner, self._journal = inner, journal

    def send(self, tensor: torch.Tensor) -> None:
        handle = self._journal.start("send", tensor.numel() * tensor.element_size(), None)
        self._inner.send(tensor)
        self._journal.finish(handle)

    def receive(self, tensor: torch.Tensor) -> None:
        handle = self._journal.start("receive", tensor.numel() * tensor.element_size(), None)
        self._inner.receive(tensor)
        self._journal.finish(handle)

    def abandon(self) -> None:
        self._inner.abandon()

    def close(self) -> None:
        self._inner.close()


Channel = SharedChannel | MessageChannel | RecordedChannel


def make_channel(
    mpi, parent, topology: Topology, preferences: Preferences, peer: int, num_bytes: int, depth: int, patience: Patience
) -> SharedChannel | MessageChannel:
    """Make a channel between this rank and `peer`. Both must call."""
    ranks: Sequence[int] = sorted((parent.rank, peer))
    comm = sub_communicator(mpi, parent, ranks)
    if topology.route(ranks, preferences.route).kind == "shared":
        return SharedChannel(mpi, comm, num_bytes, depth, patience)
    return MessageChannel(comm, depth, patience)
