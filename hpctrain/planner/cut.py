"""Cuts a shape's blocks and rows: gives them one by one, each to who would then be done first. Pure.

That is exact: since times grow with what is taken, no other cut into whole blocks or rows makes the slowest faster.
Equal stages get equal parts.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hpctrain.plan.tiling import counted
from hpctrain.planner.space import Shape, StageChoice
from hpctrain.planner.stages import StageCosts, StageShape, StageVariant, StageVariants
from hpctrain.sharding.intervals import Interval, cut_evenly

MANY_ROWS = 64
"""More of each pipeline, or blocks of each stage, are not all given one by one."""
TIE_DIGITS = 12
"""Of seconds: stages that differ by less are equal, and the order of sums decides nothing."""
ROUNDS = 12
"""Of halving the time by which rows are given at once."""
LEAST_GAIN = 0.002
"""Of the slowest stage: a plan of whole blocks is easier to read."""
RECUT_ROUNDS = 20
"""Of halving the time of the slowest stage."""


def cut_blocks(num_blocks: int, stages: Sequence[StageVariants]) -> list[int] | None:
    """Return how many blocks each stage takes, one at least, so that the slowest is as fast as can be.

    None where there are fewer blocks than stages, or the memory of all is too small.
    """
    seconds = [lambda n, stage=stage: round(stage.seconds(n), TIE_DIGITS) for stage in stages]
    # The deepest of equal stages is given more first: it keeps the fewest activations.
    deepest_first = cut_rows(num_blocks, [1] * len(stages), seconds[::-1])
    blocks = deepest_first and deepest_first[::-1]
    return blocks if blocks and all(map(StageVariants.variant, stages, blocks)) else None


def cut_rows(num_rows: int, least: Sequence[int], seconds: Sequence[Callable[[int], float]]) -> list[int] | None:
    """Return how many rows each pipeline takes, so that the slowest is as fast as can be; None if there are too few.

    `seconds` say what a pipeline takes with so many rows.
    """
    rows = list(least)
    left = num_rows - sum(rows)
    if left < 0:
        return None
    if len(rows) == 1:
        return [num_rows]
    if left > MANY_ROWS * len(rows):
        rows = _most_at_once(rows, left, seconds)
        left = num_rows - sum(rows)
    with_one_more = [of(n + 1) for of, n in zip(seconds, rows, strict=True)]
    for _ in range(left):
        i = with_one_more.index(min(with_one_more))
        rows[i] += 1
        with_one_more[i] = seconds[i](rows[i] + 1)
    return rows


def _most_at_once(least: Sequence[int], left: int, seconds: Sequence[Callable[[int], float]]) -> list[int]:
    """Return rows of which each pipeline would be given as many, or more, one by one: all that it does before some
    time, by which no more than all are done."""

    def done_before(limit: float) -> list[int]:
        return [
            bisect_left(range(n + left + 1), limit, lo=n + 1, key=of) - 1 for of, n in zip(seconds, least, strict=True)
        ]

    low, high = 0.0, max(of(n + left) for of, n in zip(seconds, least, strict=True))
    rows = list(least)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        some = done_before(middle)
        if sum(some) - sum(least) <= left:
            low, rows = middle, some
        else:
            high = middle
    return rows


class Placed(NamedTuple):
    """A stage of a pipeline, with its cut."""

    stage: StageShape
    blocks: float
    """Not whole where a stage is cut inside of one: then what takes as long."""
    variant: StageVariant

    @property
    def pool(self) -> int:
        return self.stage.pool

    @property
    def choice(self) -> StageChoice:
        return self.stage.choice

    @property
    def forward(self) -> float:
        return self.variant.forward.at(self.blocks)

    @property
    def backward(self) -> float:
        return self.variant.backward.at(self.blocks)

    @property
    def end_blocks(self) -> float:
        """Return how many blocks take as long as the ends of the model that it has."""
        both = self.variant.forward.plus(self.variant.backward)
        return both.base / both.each

    @property
    def needed_bytes(self) -> float:
        return self.variant.needed_bytes.at(self.blocks)


def whole_cuts(stages: Sequence[Placed]) -> list[int]:
    """Return the items where stages of whole blocks begin, and where the last one ends."""
    *ends, last = itertools.accumulate(2 * round(placed.blocks) for placed in stages)
    return [0, *(end + 1 for end in ends), last + 2]


def dealt_cuts(stages: Sequence[Placed], virtual_stages: int) -> list[int]:
    """Return the items where tiles begin, and where the last one ends, if each stage of whole blocks has several tiles.

    The longest tile of a stage is as short as can be: one with an end of the model has fewer blocks, but one at least.
    """
    parts, others = [], virtual_stages - 1
    for number, placed in enumerate(stages):
        blocks, end = round(placed.blocks), placed.end_blocks

        def lengths(own: int, blocks: int = blocks, end: float = end) -> tuple[float, float]:
            """Return the longest tile, and less than nothing by the shortest, if `own` blocks are with the end."""
            left = blocks - own
            return max(own + end, -(-left // others)), -min(own + end, left // others)

        own = min(range(1, blocks - others + 1), key=lengths)
        rest = [part.size for part in cut_evenly(blocks - own, others)]
        parts.append([*rest, own] if number == len(stages) - 1 else [own, *rest])
    sizes = itertools.chain(*zip(*parts, strict=True))
    *ends, last = itertools.accumulate(2 * size for size in sizes)
    return [0, *(end + 1 for end in ends), last + 2]


class SharedBlocks(NamedTuple):
    """Blocks, and maybe ends of the model, that the same stages hold."""

    members: list[tuple[int, int]]
    """These stages: pipeline, and place in it."""
    placed: list[Placed]
    elements: list[float]
    """For each of them how many weights a rank has."""
    blocks: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, eq=False)
class SearchLayout:
    """A shape with its cuts."""

    shape: Shape
    rows: tuple[int, ...]
    """Of a microbatch, for each pipeline."""
    stages: tuple[tuple[Placed, ...], ...]
    """Of each pipeline."""
    seconds: float
    """Of a step, by the estimate that ranks layouts."""
    cuts: tuple[tuple[int, ...], ...] = ()
    """Of each pipeline: the items where stages begin and the last one ends, where these are not whole blocks."""
    whole: "SearchLayout | None" = None
    """The same with whole blocks."""

    def items(self, pipeline: int) -> list[Interval]:
        """Return the items of each tile of a pipeline's first replicas: those of its stages, as often as these have
        virtual stages."""
        if self.shape.virtual_stages > 1:
            cuts = dealt_cuts(self.stages[pipeline], self.shape.virtual_stages)
        else:
            cuts = self.cuts[pipeline] if self.cuts else whole_cuts(self.stages[pipeline])
        return [Interval(*pair) for pair in itertools.pairwise(cuts)]

    def items_of_stages(self, pipeline: int) -> list[list[Interval]]:
        """Return the items of the tiles of each stage of a pipeline."""
        items, count = self.items(pipeline), len(self.stages[pipeline])
        return [items[number::count] for number in range(count)]

    @property
    def is_short_of_memory(self) -> bool:
        """Say whether some stage could do better with more memory."""
        return any(
            placed.variant.recompute != "none"
            or placed.variant.offload != "none"
            or placed.variant.row_chunks > 1
            or placed.variant.most < placed.blocks + 1
            for placed in self.all_stages
        )

    def describe(self, names: Sequence[str]) -> str:
        """Return what each pool does, such as `fast: TP2 x PP2 x DP4, then slow: TP1 x PP1 x DP8`."""
        shape = self.shape
        rows = (
            ", then ".join(f"{names[pool]}: {choice}" for pool, choice in zip(row, choices, strict=True))
            for row, choices in zip(shape.pipelines, shape.choices, strict=True)
        )
        interleaved = f", {shape.virtual_stages} virtual stages" if shape.virtual_stages > 1 else ""
        microbatches = counted(shape.microbatches, "microbatch")
        return f"{'; side by side with '.join(rows)}; {microbatches}{interleaved}, ZeRO {shape.zero}"

    @property
    def all_stages(self) -> list[Placed]:
        return [placed for stages in self.stages for placed in stages]


# ---- cuts between attention and feed-forward part -------------------------------------------------------------------
#
# Each item has its own price, by kind: what a stage takes from one item to another is a difference of two sums. The
# least time of the slowest stage is searched by halving: within a time, each stage takes as many items as it can, the
# last one first. That is exact, since times grow with items.


class PricedItems(NamedTuple):
    """The seconds of a stage for any items, and how many of them fit."""

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
    cuts, pipelines, slowest, before = [], [], 0.0, 0.0
    for stages in layout.stages:
        old, last = whole_cuts(stages), len(stages) - 1
        priced = [
            PricedItems(_sums(costs, placed), 2 * placed.variant.most + (i == 0) + (i == last))
            for i, placed in enumerate(stages)
        ]
        new = best_cuts(priced, old)
        taken = [stage.taken(*items) for stage, items in zip(priced, itertools.pairwise(new), strict=True)]
        cuts.append(tuple(new))
        pipelines.append(tuple(_with_seconds(*pair) for pair in zip(stages, taken, strict=True)))
        before, slowest = max(before, slowest_seconds(priced, old)), max(slowest, *taken)
    if slowest > before * (1 - LEAST_GAIN):
        return layout
    seconds = layout.seconds - layout.shape.microbatches * (before - slowest)
    return replace(layout, stages=tuple(pipelines), cuts=tuple(cuts), seconds=seconds, whole=layout)


def _with_seconds(placed: Placed, seconds: float) -> Placed:
    """Return a stage with as much of blocks as takes so long."""
    both = placed.variant.forward.plus(placed.variant.backward)
    return placed._replace(blocks=(seconds - both.base) / both.each)


def _sums(costs: StageCosts, placed: Placed) -> list[float]:
    kinds, how = costs.setup.first_equal, (placed.variant.recompute, placed.variant.row_chunks)
    seconds = {kind: costs.piecewise(placed.stage, Interval(kind, kind + 1), *how).both for kind in set(kinds)}
    return list(itertools.accumulate((seconds[kind] for kind in kinds), initial=0.0))


def best_cuts(stages: Sequence[PricedItems], old: Sequence[int]) -> Sequence[int]:
    """Return where stages begin, and the last one ends, so that the slowest is as fast as can be: the `old` cuts where
    none are better."""
    cuts, low, high = old, 0.0, slowest_seconds(stages, old)
    for _ in range(RECUT_ROUNDS):
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
