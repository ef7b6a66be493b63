"""Cuts the stages of a layout again, between attention and feed-forward part too, so that the slowest is faster. Pure.

The search scores plans of whole, equal blocks, in closed form. Here each item has its own price, by kind: what a stage
takes from one item to another is a difference of two sums. The least time of the slowest stage is searched by halving:
within a time, each stage takes as many items as it can, the last one first. That is exact, since times grow with items.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hpctrain.planner.cut import Placed, SearchLayout, whole_cuts
from hpctrain.planner.stages import Holders, Stage, StageCosts
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
    pool, choice, variant = placed.pool, placed.choice, placed.variant
    stage = Stage(pool, choice, choice.rank_rows(rows), exchanging=Holders.of_stage(pool, choice, zero))
    of_kind = {
        kind: costs.piecewise(stage, Interval(kind, kind + 1), variant.recompute, variant.row_chunks).both
        for kind in set(costs.setup.first_equal)
    }
    return list(itertools.accumulate((of_kind[kind] for kind in costs.setup.first_equal), initial=0.0))


def _cut(stages: Sequence[_Stage], old: Sequence[int], slowest: float) -> tuple[list[int], float]:
    """Return where stages begin, and the last one ends, and what the slowest takes: the `old` cuts, of which it takes
    so long, where none are better."""
    low, high = 0.0, slowest
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if _starts(stages, middle) is None:
            low = middle
        else:
            high = middle
    cuts = _starts(stages, high * (1 + EPSILON)) or list(old)
    taken = _slowest(stages, cuts)
    return (cuts, taken) if taken * (1 + EPSILON) < slowest else (list(old), slowest)


def _slowest(stages: Sequence[_Stage], cuts: Sequence[int]) -> float:
    pairs = zip(stages, itertools.pairwise(cuts), strict=True)
    return max(stage.taken(*items) if items[1] - items[0] <= stage.most else math.inf for stage, items in pairs)


def _starts(stages: Sequence[_Stage], limit: float) -> list[int] | None:
    """Return where stages begin, and the last one ends, of which each takes all that it can in a time, the last one
    first, as it keeps the fewest activations; None if items are left over."""
    num_items = len(stages[0].seconds) - 1
    cuts = [num_items]
    for number in range(len(stages) - 1, 0, -1):
        start = max(stages[number].first(cuts[0], limit), number + 1)  # those before it have an item each
        if start >= cuts[0] - (cuts[0] == num_items):  # and with an end of the model a stage has a branch, too
            return None
        cuts.insert(0, start)
    cuts.insert(0, 0)
    return cuts if stages[0].taken(0, cuts[1]) <= limit and cuts[1] <= stages[0].most else None
