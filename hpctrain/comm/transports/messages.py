"""Messages of one peer in one direction, in parts that pass stages: whoever polls moves them as far as they go.

A message is posted to MPI in parts, the same at both ends. Where both ends give MPI memory of devices, it is one part.
Otherwise it is chunks whose size follows from the message's, whether memory is the host's or a device's.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.comm.waiting import Ready

# A chunk costs its sender and its receiver about so much on top of the copies: an event polled late, a message posted.
CHUNK_OVERHEAD_SECONDS = 20e-6
# The slower of the two things that overlap, network and copy, on machines of the day.
BANDWIDTH_BYTES_PER_SECOND = 10e9
SMALLEST_CHUNK_BYTES = 256 * 1024
LARGEST_CHUNK_BYTES = 4 << 20
# Of a message in flight at once: while one is on the network, the other is copied.
BUFFERS_PER_MESSAGE = 2


def chunk_bytes(num_bytes: int) -> int:
    """Return the chunk for a message of `num_bytes`; both ends compute it. Pure.

    A message of n bytes in chunks of c takes n / B, and the first copy c / B, and n / c overheads: least at
    c = sqrt(n * overhead * B), here 0.45 MB for 1 MB and 3.6 MB for 64 MB. A power of two, so that buffers are used
    again; no larger than 4 MiB, to bound the memory that is pinned (two chunks a message in flight).
    """
    best = math.sqrt(max(1, num_bytes) * CHUNK_OVERHEAD_SECONDS * BANDWIDTH_BYTES_PER_SECOND)
    return min(max(1 << math.ceil(math.log2(best)), SMALLEST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)


class Request(Protocol):
    """A request of mpi4py."""

    def Test(self) -> bool: ...  # noqa: N802


Post = Callable[[torch.Tensor], Request]
"""Gives bytes to MPI, to send or to fill."""


class MessagePart:
    """A part of a message, in one of its stages."""

    __slots__ = ("buffer", "data", "ready")

    def __init__(self, data: torch.Tensor):
        self.data, self.buffer = data, data
        """Its memory, and that of the host which it goes through, if it does; both are kept until it has arrived."""
        self.ready: Ready = _at_once
        """Says whether it is through with its stage."""


class MessageStage(NamedTuple):
    """A copy, or a message of MPI, that each part of a message is."""

    begin: Callable[[MessagePart], Ready]
    may_begin: Ready = lambda: True


class Message:
    """A message whose parts pass the same stages, in order."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        stages: Sequence[MessageStage],
        num_ordered: int,
        end: Callable[[MessagePart], None] = lambda part: None,
        most_in_flight: float = math.inf,
    ):
        """Parts of the next message may begin when those of this one are through with `num_ordered - 1` stages.

        `end` is called of each part that has passed all of them.
        """
        self._stages, self._end, self._num_ordered, self._most = stages, end, num_ordered, most_in_flight
        self._queues = [deque(map(MessagePart, parts)), *(deque[MessagePart]() for _ in stages)]
        """Parts that have begun no stage, the first one, and so on."""
        self._num_in_flight = 0

    @property
    def posted(self) -> bool:
        """Say whether the next message to the same peer may be moved."""
        return not any(self._queues[: self._num_ordered])

    @property
    def done(self) -> bool:
        return not any(self._queues)

    def move(self) -> None:
        """Go as far as it goes without waiting."""
        while self._move_on():
            pass

    def _move_on(self) -> bool:
        moved = False
        for number, stage in enumerate(self._stages):
            before, after = self._queues[number], self._queues[number + 1]
            while before and (number or self._num_in_flight < self._most) and stage.may_begin() and before[0].ready():
                self._num_in_flight += not number
                part = before.popleft()
                part.ready = stage.begin(part)
                after.append(part)
                moved = True
        while self._queues[-1] and self._queues[-1][0].ready():
            self._end(self._queues[-1].popleft())
            self._num_in_flight -= 1
            moved = True
        return moved


def _at_once() -> bool:
    return True


def plain_message(post: Post, parts: Sequence[torch.Tensor], queued: Event) -> Message:
    """Return a message in memory that MPI itself reads and writes, once what was `queued` before it is done."""
    return Message(parts, [MessageStage(lambda part: post(part.data).Test, queued.query)], num_ordered=1)


def staged_message(
    post: Post, parts: Sequence[torch.Tensor], queued: Event, accelerator: Accelerator, is_sent: bool
) -> Message:
    """Return a message of a device through buffers of the host: copied and then sent, or received and then copied.

    The host looks whether all is done that was `queued` before, and nothing waits on the device: behind a message that
    waits for other ranks there may be one that they wait for.
    """
    pool = accelerator.staging

    def through(part: MessagePart) -> torch.Tensor:
        return part.buffer[: part.data.numel()]

    def copy_in(part: MessagePart) -> Ready:
        part.buffer = pool.take(part.data.numel())
        return accelerator.copy(through(part), part.data).query

    def post_taken(part: MessagePart) -> Ready:
        part.buffer = pool.take(part.data.numel())
        return post(through(part)).Test

    def copy_out(part: MessagePart) -> Ready:
        return accelerator.copy(part.data, through(part)).query

    if is_sent:
        stages = [MessageStage(copy_in, queued.query), MessageStage(lambda part: post(through(part)).Test)]
    else:
        stages = [MessageStage(post_taken), MessageStage(copy_out, queued.query)]
    return Message(parts, stages, 1 + is_sent, lambda part: pool.release(part.buffer), BUFFERS_PER_MESSAGE)
