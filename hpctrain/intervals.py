"""Half-open integer intervals: the one piece of arithmetic that plans, shards and checkpoints share."""

import itertools
from typing import NamedTuple


class Interval(NamedTuple):
    """The integers from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: "Interval") -> "Interval":
        """Return what both hold; empty intervals have size 0."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> "Interval":
        return Interval(self.start + offset, self.stop + offset)


def cut_evenly(size: int, parts: int) -> tuple[Interval, ...]:
    """Cut `range(size)` into `parts` consecutive intervals whose sizes differ by one at most."""
    bounds = [size * i // parts for i in range(parts + 1)]
    return tuple(Interval(start, stop) for start, stop in itertools.pairwise(bounds))


def tiles_exactly(intervals: list[Interval], whole: Interval) -> bool:
    """Say whether the intervals, in any order, cover `whole` without gap or overlap."""
    at = whole.start
    for interval in sorted(intervals):
        if interval.start != at or interval.size == 0:
            return False
        at = interval.stop
    return at == whole.stop
