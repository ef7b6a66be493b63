"""Messages to or from one peer, in parts that pass several stages. Any poll moves all parts as far as possible.

A message is posted to MPI in parts, the same at both ends. Where both ends give MPI memory of devices, it is one part.
Otherwise it is in chunks whose size follows from the message's, whether memory is the host's or a device's.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.comm.waiting import Ready

# Seconds of overhead of a chunk, in addition to the copies: an event is polled late, a message is posted.
CHUNK_OVERHEAD_SECONDS = 20e-6
# Bytes/s of the slower of network and copy, which overlap, on today's machines.
BANDWIDTH_BYTES_PER_SECOND = 10e9
SMALLEST_CHUNK_BYTES = 256 * 1024
LARGEST_CHUNK_BYTES = 4 << 20
# Chunks of a message in flight at once on a near link: while one is on the network, the other is copied.
FEWEST_IN_FLIGHT = 2


def chunk_bytes(num_bytes: int) -> int:
    """Return the chunk for a message of `num_bytes`; both ends compute it. Pure.

    A message of n bytes in chunks of c takes n / B, the first copy c / B, and n / c overheads. The sum is least at c =
    sqrt(n * overhead * B), here 0.45 MB for 1 MB and 3.6 MB for 64 MB. The chunk is a power of two, so that buffers are
    reused. It is at most 4 MiB, to bound the pinned memory (two chunks for each message in flight, and those that a far
    link has under way).
    """
    best = math.sqrt(max(1, num_bytes) * CHUNK_OVERHEAD_SECONDS * BANDWIDTH_BYTES_PER_SECOND)
    return min(max(1 << math.ceil(math.log2(best)), SMALLEST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)


class Request(Protocol):
    """A request of mpi4py."""

    def Test(self) -> bool: ...  # noqa: N802


Post = Callable[[torch.Tensor], Request]
"""Gives bytes to MPI, to be sent or filled."""


class MessagePart:
    """A part of a message, which is in one of its stages."""

    __slots__ = ("buffer", "data", "ready")

    def __init__(self, data: torch.Tensor):
        self.data, self.buffer = data, data
        """The part's memory, and its host buffer if it has one; both are kept until it has arrived."""
        self.ready: Ready = _at_once
        """Says whether it has completed its stage."""


class MessageStage(NamedTuple):
    """A stage of each part of a message: a copy, or a message of MPI."""

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
        """Parts of the next message may begin when those of this one have completed `num_ordered - 1` stages.

        `end` is called for each part that has completed all stages.
        """
        self._stages, self._end, self._num_ordered, self._most = stages, end, num_ordered, most_in_flight
        self._queues = [deque(map(MessagePart, parts)), *(deque[MessagePart]() for _ in stages)]
        """Queues of parts: those that have begun no stage, those in the first one, and so on."""
        self._num_in_flight = 0

    @property
    def posted(self) -> bool:
        """Say whether the next message to the same peer may begin."""
        return not any(self._queues[: self._num_ordered])

    @property
    def done(self) -> bool:
        return not any(self._queues)

    def move(self) -> None:
        """Move all parts as far as possible without waiting."""
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
    """Return a message in memory that MPI itself reads and writes, which begins after the event `queued`."""
    return Message(parts, [MessageStage(lambda part: post(part.data).Test, queued.query)], num_ordered=1)


def staged_message(
    post: Post,
    parts: Sequence[torch.Tensor],
    queued: Event,
    accelerator: Accelerator,
    is_sent: bool,
    bytes_under_way: int = 0,
) -> Message:
    """Return a message of a device through host buffers: copied and then sent, or received and then copied.

    In flight are two chunks, and as many more as `bytes_under_way` fill: with two alone a link would rest while they
    travel.

    The host checks whether the event `queued` has passed, and no stream waits for it. A stream that waits for other
    ranks could delay a message that they wait for.
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
    in_flight = FEWEST_IN_FLIGHT + bytes_under_way // max(1, parts[0].numel())
    return Message(parts, stages, 1 + is_sent, lambda part: pool.release(part.buffer), in_flight)
