"""Cuts a pipeline between any two items, so that its slowest stage is as fast as can be. Pure.

Each item has its own price, by kind: what a stage takes from one item to another is a difference of two sums. The
least time of the slowest stage is searched by halving: within a time, each stage takes as many items as it can, the
last one first. That is exact, since times grow with items.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

ROUNDS = 20
"""Number of bisections of the time of the slowest stage."""


class PricedItems(NamedTuple):
    """The seconds of a stage for any items, and how many of them fit."""

    seconds: Sequence[float]
    """Seconds of all items before each item, if the stage had them (prefix sums)."""
    most: int
    """Number of items that fit in its memory."""

    def first(self, stop: int, limit: float) -> int:
        """Return the first item from which it can go up to another one in a time."""
        return bisect_left(self.seconds, self.seconds[stop] - limit, max(0, stop - self.most), stop)

    def taken(self, start: int, stop: int) -> float:
        return self.seconds[stop] - self.seconds[start]


def best_cuts(stages: Sequence[PricedItems], old: Sequence[int]) -> Sequence[int]:
    """Return where stages begin, and the last one ends, so that the slowest is as fast as can be: the `old` cuts where
    none are better."""
    cuts, low, high = old, 0.0, slowest_seconds(stages, old)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if better := _starts(stages, middle):
            cuts, high = better, middle
        else:
            low = middle
    return cuts


def slowest_seconds(stages: Sequence[PricedItems], cuts: Sequence[int]) -> float:
    """Return what the slowest of some stages takes; without end where one has no memory for its items."""
    pairs = zip(stages, itertools.pairwise(cuts), strict=True)
    return max(stage.taken(*items) if items[1] - items[0] <= stage.most else math.inf for stage, items in pairs)


def _starts(stages: Sequence[PricedItems], limit: float) -> list[int] | None:
    """Return where stages begin, and the last one ends, if each takes all items that it can compute in a time.

    The last stage takes first, as it keeps the fewest activations. None if items are left over.
    """
    num_items = len(stages[0].seconds) - 1
    cuts = [num_items]
    for number in range(len(stages) - 1, 0, -1):
        start = max(stages[number].first(cuts[0], limit), number + 1)  # those before it have an item each
        if start >= cuts[0] - (cuts[0] == num_items):  # and with an end of the model a stage has a branch, too
            return None
        cuts.insert(0, start)
    cuts.insert(0, 0)
    return cuts if stages[0].taken(0, cuts[1]) <= limit and cuts[1] <= stages[0].most else None
