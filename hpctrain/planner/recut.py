"""Cuts the stages of a layout again, between attention and feed-forward part too, so that the slowest is faster. Pure.

The search scores plans of whole, equal blocks, in closed form. Here each item has its own price, by kind: what a stage
takes from one item to another is a difference of two sums. The least time of the slowest stage is searched by halving:
within a time, one stage after the other takes as many items as it can. That is exact, since times grow with items.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hpctrain.planner.cut import Placed, SearchLayout, whole_cuts
from hpctrain.planner.score import exchanging_holders, rank_rows
from hpctrain.planner.stages import StageCosts
from hpctrain.sharding.intervals import Interval

LEAST_GAIN = 0.002
"""Of the slowest stage: a plan of whole blocks is easier to read."""
ROUNDS = 20
"""Of halving a time."""
EPSILON = 1e-9
"""Of a time: sums are rounded."""


class _Stage(NamedTuple):
    seconds: Sequence[float]
    """For each item: of all items before it, had the stage these."""
    most: int
    """Items for which it has memory, by whole blocks."""

    def reach(self, start: int, limit: float) -> int:
        """Return up to which item it can go from another one in a time."""
        return min(bisect_right(self.seconds, self.seconds[start] + limit) - 1, start + self.most)

    def first(self, stop: int, limit: float) -> int:
        """Return the first item from which it can go up to another one in a time."""
        places = range(max(0, stop - self.most), stop)
        return places.start + bisect_left(places, True, key=lambda i: self.taken(i, stop) <= limit)

    def taken(self, start: int, stop: int) -> float:
        return self.seconds[stop] - self.seconds[start]


def recut(costs: StageCosts, layout: SearchLayout) -> SearchLayout:
    """Return a layout with better cuts, or the same one where there are none."""
    if layout.shape.zero >= 2 and len(layout.stages) > 1:
        return layout  # who exchanges in every pass has the same items
    if any(placed.variant.offload in ("activations", "all") for placed in layout.all_stages):
        return layout  # what is exposed of copies is no sum over items
    microbatches, cuts, pipelines = layout.shape.microbatches, [], []
    slowest, before = 0.0, 0.0
    for rows, stages in zip(layout.rows, layout.stages, strict=True):
        old, last = whole_cuts(stages), len(stages) - 1
        made = [
            _Stage(_sums(costs, placed, rows, layout.shape.zero), 2 * placed.variant.most + (i == 0) + (i == last))
            for i, placed in enumerate(stages)
        ]
        had = _slowest(made, old)
        new, least = _cut(made, old, had)
        cuts.append(tuple(new))
        taken = (stage.taken(*items) for stage, items in zip(made, itertools.pairwise(new), strict=True))
        pipelines.append(tuple(_with_seconds(*pair) for pair in zip(stages, taken, strict=True)))
        before, slowest = max(before, had), max(slowest, least)
    if slowest > before * (1 - LEAST_GAIN):
        return layout
    seconds = layout.seconds - microbatches * (before - slowest)
    return replace(layout, stages=tuple(pipelines), cuts=tuple(cuts), seconds=seconds, whole=layout)


def _with_seconds(placed: Placed, seconds: float) -> Placed:
    """Return a stage with as much of blocks as takes so long."""
    forward, backward = placed.variant.forward, placed.variant.backward
    return placed._replace(blocks=(seconds - forward.base - backward.base) / (forward.each + backward.each))


def _sums(costs: StageCosts, placed: Placed, rows: int, zero: int) -> list[float]:
    pool, grid, variant = placed.pool, placed.choice.grid, placed.variant
    each, holders, of_kind = rank_rows(placed.choice, rows), exchanging_holders(pool, placed.choice, zero), {}
    for item in set(costs.setup.first_equal):
        what = pool, grid, Interval(item, item + 1), each, variant.recompute, variant.row_chunks
        of_kind[item] = costs.piecewise(*what, holders).both
    return list(itertools.accumulate((of_kind[kind] for kind in costs.setup.first_equal), initial=0.0))


def _cut(stages: Sequence[_Stage], old: Sequence[int], slowest: float) -> tuple[list[int], float]:
    """Return where stages begin, and the last one ends, and what the slowest takes: as near to the `old` cuts, of which
    the slowest takes so long, as the least time allows."""
    low, high = 0.0, slowest
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if _ends(stages, middle) is None:
            low = middle
        else:
            high = middle
    limit = high * (1 + EPSILON)
    latest, earliest = _ends(stages, limit), _starts(stages, limit)
    if latest is None or earliest is None:
        return list(old), slowest
    cuts = [0]
    for number, (stage, wanted) in enumerate(zip(stages, old[1:], strict=True)):
        farthest = min(stage.reach(cuts[-1], limit), latest[number])
        cuts.append(max(min(wanted, farthest), earliest[number], cuts[-1] + 1))
    taken = _slowest(stages, cuts)
    return (cuts, taken) if taken <= limit else (list(old), slowest)


def _slowest(stages: Sequence[_Stage], cuts: Sequence[int]) -> float:
    pairs = zip(stages, itertools.pairwise(cuts), strict=True)
    return max(stage.taken(*items) if items[1] - items[0] <= stage.most else math.inf for stage, items in pairs)


def _ends(stages: Sequence[_Stage], limit: float) -> list[int] | None:
    """Return where each stage ends that takes all that it can in a time, and leaves those behind it an item each; None
    if items are left over."""
    num_items, at, result = len(stages[0].seconds) - 1, 0, []
    for left, stage in zip(range(len(stages) - 1, -1, -1), stages, strict=True):
        # With an end of the model a stage has a branch, too.
        stop = min(stage.reach(at, limit), num_items - left - (left > 0))
        if stop <= at + (at == 0):
            return None
        result.append(stop)
        at = stop
    return result if at == num_items else None


def _starts(stages: Sequence[_Stage], limit: float) -> list[int] | None:
    """Return where each stage must end at least, that those behind it can take the rest in a time."""
    num_items = len(stages[0].seconds) - 1
    at, result = num_items, [num_items]
    for number, stage in reversed(list(enumerate(stages))[1:]):
        at = max(stage.first(at, limit), number + 1)
        result.append(at)
    return result[::-1]
