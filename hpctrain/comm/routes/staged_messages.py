"""Messages of one peer in one direction, as state machines: whoever polls moves them as far as they go.

A message is posted to MPI in parts, the same at both ends. Where both ends give MPI memory of devices, it is one part.
Otherwise it is chunks whose size follows from the message's, whether memory is the host's or a device's.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event

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
    """What mpi4py's requests offer."""

    def Test(self) -> bool: ...  # noqa: N802


Post = Callable[[torch.Tensor], Request]
"""Gives bytes to MPI, to send or to fill."""


class Message(Protocol):
    """One message."""

    posted: bool
    """Whether MPI knows all of it: the next one to the same peer may be posted."""
    done: bool

    def move(self) -> None:
        """Go as far as it goes without waiting."""
        ...


class PlainMessage:
    """A message in memory that MPI itself reads and writes, posted once what was queued before it is done."""

    def __init__(self, post: Post, parts: Sequence[torch.Tensor], queued: Event):
        self._post, self._parts, self._queued = post, parts, queued  # keeps the memory until all is done
        self._requests: list[Request] = []
        self.posted = self.done = False

    def move(self) -> None:
        if not self.posted:
            if not self._queued.query():
                return
            self._requests = [self._post(part) for part in self._parts]
            self.posted = True
        self._requests = [request for request in self._requests if not request.Test()]
        self.done = not self._requests


class _Staged:
    """What both directions through host buffers share."""

    def __init__(self, post: Post, parts: Sequence[torch.Tensor], queued: Event, accelerator: Accelerator):
        self._post, self._parts, self._queued = post, parts, queued
        self._accelerator, self._pool = accelerator, accelerator.staging
        self._is_ready = False
        self._next = 0
        self._copying: deque[tuple[Event, torch.Tensor, int]] = deque()
        self._in_flight: deque[tuple[Request, torch.Tensor, int]] = deque()
        self.posted = self.done = False

    def _may_copy(self) -> bool:
        """Say whether all is done that was queued before the message.

        The host looks, and nothing waits on the device: behind a message that waits for other ranks there may be one
        that they wait for.
        """
        self._is_ready = self._is_ready or self._queued.query()
        return self._is_ready

    def _has_free_buffer(self) -> bool:
        in_use = len(self._copying) + len(self._in_flight)
        return self._next < len(self._parts) and in_use < BUFFERS_PER_MESSAGE

    def _take(self) -> tuple[int, torch.Tensor]:
        part = self._next
        self._next += 1
        return part, self._pool.take(self._parts[part].numel())

    def _filled(self, buffer: torch.Tensor, part: int) -> torch.Tensor:
        return buffer[: self._parts[part].numel()]


class StagedSend(_Staged):
    """From a device through host buffers: each part is copied, then sent."""

    def move(self) -> None:
        while self._in_flight and self._in_flight[0][0].Test():
            self._pool.release(self._in_flight.popleft()[1])
        while self._has_free_buffer() and self._may_copy():
            part, buffer = self._take()
            event = self._accelerator.copy(self._filled(buffer, part), self._parts[part])
            self._copying.append((event, buffer, part))
        while self._copying and self._copying[0][0].query():
            _, buffer, part = self._copying.popleft()
            self._in_flight.append((self._post(self._filled(buffer, part)), buffer, part))
        self.posted = self._next == len(self._parts) and not self._copying
        self.done = self.posted and not self._in_flight


class StagedReceive(_Staged):
    """To a device through host buffers: each part is received, then copied."""

    def move(self) -> None:
        while self._copying and self._copying[0][0].query():
            self._pool.release(self._copying.popleft()[1])
        while self._in_flight and self._may_copy() and self._in_flight[0][0].Test():
            _, buffer, part = self._in_flight.popleft()
            event = self._accelerator.copy(self._parts[part], self._filled(buffer, part))
            self._copying.append((event, buffer, part))
        while self._has_free_buffer():
            part, buffer = self._take()
            self._in_flight.append((self._post(self._filled(buffer, part)), buffer, part))
        self.posted = self._next == len(self._parts)
        self.done = self.posted and not self._in_flight and not self._copying
