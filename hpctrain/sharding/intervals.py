"""Half-open integer intervals: the arithmetic that plans, shards and checkpoints share."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
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

    def scale(self, factor: int) -> "Interval":
        return Interval(self.start * factor, self.stop * factor)

    def place_of(self, inner: "Interval") -> slice:
        """Return where an array of the elements of this interval has those of an interval inside of it."""
        return slice(inner.start - self.start, inner.stop - self.start)

    def part(self, some: "Interval", of: int) -> "Interval":
        """Return the parts `some` of this interval, which is cut evenly into `of` parts."""
        return Interval(self.start + self.size * some.start // of, self.start + self.size * some.stop // of)


@lru_cache(maxsize=512)
def cut_evenly(size: int, parts: int) -> tuple[Interval, ...]:
    """Cut `range(size)` into `parts` consecutive intervals whose sizes differ by one at most."""
    bounds = [size * i // parts for i in range(parts + 1)]
    return tuple(Interval(start, stop) for start, stop in itertools.pairwise(bounds))


@lru_cache(maxsize=512)
def cut_zigzag(size: int, shares: tuple[int, ...]) -> tuple[tuple[Interval, ...], ...]:
    """Cut `range(size)` into a part for each share, of an interval and of the one that mirrors it at the middle.

    The mean position of each part is the middle. So the part's share is that of positions and of causal attention: who
    has early positions, which see few keys, has as many late ones.
    """
    halves = cut_by_shares(size, (*shares, *reversed(shares)))
    pairs = zip(halves, reversed(halves[len(shares) :]), strict=False)
    return tuple((Interval(a.start, b.stop),) if a.stop == b.start else (a, b) for a, b in pairs)


def section(intervals: Sequence[Interval], places: Interval) -> tuple[Interval, ...]:
    """Return what lies at some places of intervals that lie one after the other."""
    result, before = [], 0
    for interval in intervals:
        part = interval.intersect(places.shift(interval.start - before))
        result += [part] if part.size else []
        before += interval.size
    return tuple(result)


def intersections(one: Sequence[Interval], other: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return what intervals have in common with others, in their order."""
    return tuple(both for a in one for b in other if (both := a.intersect(b)).size)


def seen_by(
    own: Sequence[Interval], window: int | None = None, begin: Callable[[int], int] | None = None
) -> tuple[Interval, ...]:
    """Return the positions that causal attention sees from those of some intervals, which ascend: in a window, and from
    the `begin` of the document that an interval's first position is in."""
    result: list[Interval] = []
    for interval in own:
        first = max(begin(interval.start) if begin else 0, interval.start + 1 - (window or interval.stop))
        if result and first <= result[-1].stop:
            first = result.pop().start
        result.append(Interval(first, interval.stop))
    return tuple(result)


def seen_by_each(
    contexts: Sequence[Sequence[Interval]], window: int | None, begin: Callable[[int], int] | None = None
) -> list[tuple[Interval, ...]]:
    """Return the positions whose keys and values each rank of c receives: those that its own see; all of them on every
    rank, where one sees all."""
    seen, whole = [seen_by(own, window, begin) for own in contexts], Interval(0, max(own[-1].stop for own in contexts))
    return [(whole,)] * len(seen) if (whole,) in seen else seen


def place_in(intervals: Sequence[Interval], inner: Interval) -> Interval:
    """Return the place of an interval, which is inside of one of several, where these lie one after the other."""
    before = 0
    for interval in intervals:
        if interval.start <= inner.start and inner.stop <= interval.stop:
            return inner.shift(before - interval.start)
        before += interval.size
    raise ValueError(f"{inner} is inside of none of {list(intervals)}")


def tiles_exactly(intervals: list[Interval], whole: Interval) -> bool:
    """Say whether the intervals, in any order, cover `whole` without gap or overlap."""
    at = whole.start
    for interval in sorted(intervals):
        if interval.start != at or interval.size == 0:
            return False
        at = interval.stop
    return at == whole.stop


@lru_cache(maxsize=64)
def cut_by_shares(size: int, shares: tuple[int, ...]) -> tuple[Interval, ...]:
    """Cut `range(size)` into consecutive intervals in proportion to `shares`, rounded; equal ones as `cut_evenly`."""
    total = sum(shares)
    bounds = [size * sum_before // total for sum_before in itertools.accumulate(shares, initial=0)]
    return tuple(Interval(start, stop) for start, stop in itertools.pairwise(bounds))


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, from 1 to itself."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]
