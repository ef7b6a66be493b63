"""Channels: what neighbouring stages of a pipeline send each other, copied when it is sent."""

from collections import deque

import torch

from hpctrain.comm.communicator import Journal, Lane, Started
from hpctrain.comm.lanes import Progress
from hpctrain.comm.reduction import as_bytes
from hpctrain.comm.routes.maker import RouteMaker
from hpctrain.comm.traced import GroupTrace
from hpctrain.comm.waiting import Patience, wait_until
from hpctrain.comm.window import SharedWindow
from hpctrain.config.errors import CommError


class SharedChannel:
    """A two-way channel between two ranks of one host: per direction a ring of slots in the sender's memory.

    A send copies and returns; it waits only if `depth` messages are in flight. The receiver needs nothing from the
    sender while it computes.
    """

    route, reason = "shared memory", "of one host"

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

    def expect(self, tensor: torch.Tensor) -> None:
        """Do nothing: messages wait in slots, whose memory is there."""

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


class LaneChannel:
    """A two-way channel by messages, over a lane per direction; they move while the rank computes."""

    def __init__(self, outgoing: Lane, incoming: Lane, depth: int, posts_early: bool):
        """`posts_early` says whether receives are posted when they are expected."""
        self.route, self.reason = outgoing.route, outgoing.reason
        self._outgoing, self._incoming, self._depth = outgoing, incoming, depth
        self._posts_early = posts_early
        self._peer = 1 - outgoing.rank
        self._in_flight: deque[Started] = deque()
        self._expected: deque[tuple[torch.Tensor, Started]] = deque()
        self._open = True

    def send(self, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor and return; waits only if `depth` messages are in flight."""
        if len(self._in_flight) >= self._depth:
            self._in_flight.popleft().wait()
        self._in_flight.append(self._outgoing.send(tensor.clone(), self._peer))

    def expect(self, tensor: torch.Tensor) -> None:
        """Say where the next message goes that nobody expects: into a contiguous tensor of its size.

        It moves when those that were expected before it are there, or when it is received. `receive` must be called
        with what was expected, in that order.
        """
        if self._posts_early:
            self._expected.append((tensor, self._incoming.receive(tensor, self._peer)))

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with the next message, which must have its size."""
        if not self._expected:
            self._incoming.receive(tensor, self._peer).wait()
            return
        expected, work = self._expected.popleft()
        assert expected is tensor, "messages are received in the order in which they were expected"
        work.wait()

    def abandon(self) -> None:
        self._open = False
        self._outgoing.abandon()

    def close(self) -> None:
        """Both ends must call; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        for work in self._in_flight:
            work.wait()
        self._outgoing.close()  # and with it the incoming one's: they have the same communicator


class RecordedChannel:
    """A channel whose messages are in the rank's flight record, and in its trace if there is one."""

    def __init__(self, inner: SharedChannel | LaneChannel, journal: Journal, trace: GroupTrace | None = None):
        self.route, self.reason = inner.route, inner.reason
        self._inner, self._journal, self._trace = inner, journal, trace

    def send(self, tensor: torch.Tensor) -> None:
        since, num_bytes = self._trace.now() if self._trace else 0.0, tensor.numel() * tensor.element_size()
        handle = self._journal.start("send", num_bytes, None)
        self._inner.send(tensor)
        self._journal.finish(handle)
        if self._trace:
            self._trace.exposed("send", num_bytes, since)

    def expect(self, tensor: torch.Tensor) -> None:
        self._inner.expect(tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        since = self._trace.now() if self._trace else 0.0
        handle = self._journal.start("receive", tensor.numel() * tensor.element_size(), None)
        self._inner.receive(tensor)
        self._journal.finish(handle)
        if self._trace:  # for the sender, too: what it did until then is no communication
            self._trace.waited("receive", since)

    def abandon(self) -> None:
        self._inner.abandon()

    def close(self) -> None:
        self._inner.close()


Channel = SharedChannel | LaneChannel | RecordedChannel


def make_channel(
    routes: RouteMaker,
    progress: Progress,
    peer: int,
    num_bytes: int,
    depth: int,
    patience: Patience,
    trace: GroupTrace | None = None,
) -> SharedChannel | LaneChannel:
    """Return a channel between this rank and `peer`, for `depth` messages per direction. Both must call.

    `trace` records messages that go out while the rank computes.
    """
    ranks = sorted((routes.rank, peer))
    if routes.shares_memory(ranks):
        return SharedChannel(routes.mpi, routes.sub_communicator(ranks), num_bytes, depth, patience)
    backend = routes.message_backend(ranks)
    outgoing = Lane(ranks, backend, progress, patience, trace=trace)
    incoming = Lane(ranks, backend, progress, patience)
    return LaneChannel(outgoing, incoming, depth, posts_early=backend.transport.polls_freely)
