"""Channels: messages between neighbouring stages of a pipeline, copied when they are sent."""

from abc import ABC, abstractmethod
from collections import deque

import torch

from hpctrain.comm.groups.group import Group
from hpctrain.comm.groups.maker import RouteMaker
from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.progress.lanes import ProgressEngine
from hpctrain.comm.progress.operation import Operation
from hpctrain.comm.transports.members import Members
from hpctrain.comm.transports.transport import as_bytes
from hpctrain.comm.transports.window import NoRoomError, SharedWindow
from hpctrain.comm.waiting import Patience, Steps, until_all
from hpctrain.config.errors import CommError


class Channel(ABC):
    """A two-way channel between this rank and a peer. A tensor is copied by `send`, and may be changed at once."""

    route_name: str
    reason: str

    def __init__(self, patience: Patience, instruments: Instruments):
        self._patience, self._instruments = patience, instruments

    def send(self, tensor: torch.Tensor) -> None:
        """Copy a contiguous tensor and return; waits only if as many messages are in flight as the channel is deep."""
        Operation(self._instruments, "send", tensor.nbytes, self._sending(tensor), self._patience).wait()

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with the next message, which must have its size."""
        # The trace counts it as overlapped: the sender's work before the send is no communication.
        steps = self._receiving(tensor)
        Operation(self._instruments, "receive", tensor.nbytes, steps, self._patience, is_overlapped=True).wait()

    def expect(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """Announce the tensor for the next message: contiguous, and of the message's size.

        `receive` must be called with the announced tensors, in that order. Channels whose messages wait in slots do not
        need the call.
        """

    @abstractmethod
    def _sending(self, tensor: torch.Tensor) -> Steps: ...

    @abstractmethod
    def _receiving(self, tensor: torch.Tensor) -> Steps: ...

    @abstractmethod
    def abandon(self) -> None:
        """Leave without the other end: `close` will do nothing."""

    @abstractmethod
    def close(self) -> None:
        """Free the channel's resources. Both ends must call; a second call does nothing."""


class SharedChannel(Channel):
    """A two-way channel between two ranks of one host: per direction a ring of slots in the sender's memory.

    A send copies and returns; it waits only if `depth` messages are in flight. The receiver needs nothing from the
    sender while it computes.
    """

    route_name, reason = "shared memory", "of one host"

    def __init__(self, members: Members, num_bytes: int, depth: int, patience: Patience, instruments: Instruments):
        super().__init__(patience, instruments)
        self._slot_bytes, self._depth = -(-num_bytes // 64) * 64, depth
        self._window = SharedWindow(members, self._slot_bytes * depth)
        self._me, self._peer = members.rank, 1 - members.rank
        self._sent = self._received = 0

    def _until(self, index: int, value: int, awaited: str) -> Steps:
        counter = self._window.counters[self._peer]
        yield from until_all([lambda: counter[index] >= value], awaited)
        self._window.fence()

    def _sending(self, tensor: torch.Tensor) -> Steps:
        window, data = self._window, as_bytes(tensor)
        if data.numel() > self._slot_bytes:
            raise CommError(f"a message of {data.numel()} bytes on a channel made for {self._slot_bytes}")
        yield from self._until(1, self._sent - self._depth + 1, "the receiver to take an earlier message")
        start = self._sent % self._depth * self._slot_bytes
        window.bytes[self._me][start : start + data.numel()].copy_(data)
        self._sent += 1
        window.publish(0, self._sent)

    def _receiving(self, tensor: torch.Tensor) -> Steps:
        window, data = self._window, as_bytes(tensor)
        yield from self._until(0, self._received + 1, "a message from the other end of a channel")
        start = self._received % self._depth * self._slot_bytes
        data.copy_(window.bytes[self._peer][start : start + data.numel()])
        self._received += 1
        window.publish(1, self._received)

    def abandon(self) -> None:
        self._instruments.close(alone=True)
        self._window.close()

    def close(self) -> None:
        self._instruments.close()
        self._window.close()


class MessageChannel(Channel):
    """A two-way channel by messages, which move while the rank computes; each direction is a group with a lane."""

    def __init__(self, outgoing: Group, incoming: Group, depth: int, patience: Patience, instruments: Instruments):
        """Both groups have one backend."""
        super().__init__(patience, instruments)
        self.route_name, self.reason = outgoing.route_name, outgoing.reason
        self._outgoing, self._incoming, self._depth = outgoing, incoming, depth
        self._posts_early = outgoing.transport.polls_freely
        """Whether receives are posted as soon as they are announced."""
        self._in_flight: deque[Operation] = deque()
        self._expected: deque[tuple[torch.Tensor, Operation]] = deque()

    def _sending(self, tensor: torch.Tensor) -> Steps:
        if len(self._in_flight) >= self._depth:
            self._in_flight.popleft().wait()
        self._in_flight.append(self._outgoing.start_send(tensor.clone()))
        yield from ()

    def expect(self, tensor: torch.Tensor) -> None:
        """Post a receive after all those announced before it, where receives are posted early."""
        if self._posts_early:
            self._expected.append((tensor, self._incoming.start_receive(tensor)))

    def _receiving(self, tensor: torch.Tensor) -> Steps:
        if self._expected:
            expected, operation = self._expected.popleft()
            assert expected is tensor, "messages are received in the order in which they were expected"
        else:
            operation = self._incoming.start_receive(tensor)
        operation.wait()
        yield from ()

    def abandon(self) -> None:
        self._instruments.close(alone=True)
        self._incoming.abandon()
        self._outgoing.abandon()

    def close(self) -> None:
        # Sends may be in flight; receives were waited for. Both groups share what the first one frees.
        self._outgoing.close()
        self._incoming.close()
        self._instruments.close()


def make_channel(
    routes: RouteMaker,
    engine: ProgressEngine,
    peer: int,
    num_bytes: int,
    depth: int,
    patience: Patience,
    instruments: Instruments | None = None,
) -> Channel:
    """Return a channel between this rank and `peer`, for `depth` messages per direction. Both must call."""
    ranks, instruments = sorted((routes.rank, peer)), instruments or Instruments()
    refusal = ""
    if routes.shares_memory(ranks):
        try:
            return SharedChannel(routes.space.members(ranks), num_bytes, depth, patience, instruments)
        except NoRoomError as error:  # on both ends
            refusal = str(error)
    backend = routes.message_backend(ranks, instruments.pace)
    # The channel records messages; the trace also shows those that go out while the rank computes. All in flight are
    # posted at once: where bytes are long under way, a message does not wait for the one before to arrive.
    outgoing = Group(ranks, backend, patience, instruments.unrecorded(), engine.add_lane(moves_all=True))
    incoming = Group(ranks, backend, patience, Instruments(pace=instruments.pace), engine.add_lane(moves_all=True))
    channel = MessageChannel(outgoing, incoming, depth, patience, instruments)
    channel.reason = refusal or channel.reason
    return channel
