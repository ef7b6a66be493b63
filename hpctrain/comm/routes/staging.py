"""Host buffers between device memory and MPI, and how much goes through one at a time."""

import math
from collections import defaultdict
from collections.abc import Callable

import torch

# A chunk costs its sender and its receiver about so much on top of the copies: an event polled late, a message posted.
CHUNK_OVERHEAD_SECONDS = 20e-6
# The slower of the two things that overlap, network and copy, on machines of the day.
BANDWIDTH_BYTES_PER_SECOND = 10e9
SMALLEST_CHUNK_BYTES = 256 * 1024
LARGEST_CHUNK_BYTES = 4 << 20


def chunk_bytes(num_bytes: int) -> int:
    """Return the chunk for a message of `num_bytes`; both ends compute it. Pure.

    A message of n bytes in chunks of c takes n / B, and the first copy c / B, and n / c overheads: least at
    c = sqrt(n * overhead * B), here 0.45 MB for 1 MB and 3.6 MB for 64 MB. A power of two, so that buffers are used
    again; no larger than 4 MiB, to bound the memory that is pinned (two chunks a message in flight).
    """
    best = math.sqrt(max(1, num_bytes) * CHUNK_OVERHEAD_SECONDS * BANDWIDTH_BYTES_PER_SECOND)
    return min(max(1 << math.ceil(math.log2(best)), SMALLEST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)


class BufferPool:
    """Host buffers that are used again and again; what was taken once is kept. Any thread may call."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]):
        self._allocate = allocate
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0
        """That were allocated so far."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [a power of two, at least `num_bytes`]; pair with `release`."""
        size = 1 << max(0, num_bytes - 1).bit_length()
        try:
            return self._free[size].pop()
        except IndexError:
            self.num_bytes += size
            return self._allocate(size)

    def release(self, buffer: torch.Tensor) -> None:
        self._free[buffer.numel()].append(buffer)
