"""Cuts a shape's blocks and rows: deals them one by one, each to the stage or pipeline that would then finish first.
Pure.

Where times grow with the number dealt, that is exact: no other cut into whole blocks or rows makes the slowest faster.
Equal stages differ by one at most, and the deepest has more.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.plan.tiling import counted
from hpctrain.planner.search.space import PoolUse, Shape
from hpctrain.planner.search.stage_variants import StageShape, StageVariant, StageVariants
from hpctrain.sharding.intervals import Interval

GIVEN_ONE_BY_ONE = 64
"""Rows of each pipeline, or blocks of each stage, that are dealt one by one; of more, most are dealt at once."""
ROUNDS = 12
"""Number of bisections of the time within which most are dealt at once."""


def cut_blocks(num_blocks: int, stages: Sequence[StageVariants]) -> list[int] | None:
    """Return how many blocks each stage takes, one at least, so that the slowest is as fast as can be.

    None where there are fewer blocks than stages, or the memory of all is too small.
    """
    # The deepest of equal stages is given more first: it keeps the fewest activations.
    deepest_first = deal_out(num_blocks, [1] * len(stages), [stage.seconds for stage in stages[::-1]])
    cuts = deepest_first and deepest_first[::-1]
    return cuts if cuts and all(stage.variant(n) for stage, n in zip(stages, cuts, strict=True)) else None


def deal_out(number: int, least: Sequence[int], seconds: Sequence[Callable[[int], float]]) -> list[int] | None:
    """Return how many rows each pipeline takes, or blocks each stage, so that the slowest is as fast as can be.

    Each takes at least its `least`. `seconds` return what each takes with so many. None if there are too few.
    """
    counts = list(least)
    left = number - sum(counts)
    if left < 0:
        return None
    if len(counts) == 1:
        return [number]
    if left > GIVEN_ONE_BY_ONE * len(counts):
        counts = _most_at_once(counts, left, seconds)
        left = number - sum(counts)
    with_one_more = [of(n + 1) for of, n in zip(seconds, counts, strict=True)]
    for _ in range(left):
        i = with_one_more.index(min(with_one_more))
        counts[i] += 1
        with_one_more[i] = seconds[i](counts[i] + 1)
    return counts


def _most_at_once(least: Sequence[int], left: int, seconds: Sequence[Callable[[int], float]]) -> list[int]:
    """Return the counts that each finishes before some time, by which no more than all are done.

    Dealt one by one, each would take as many or more.
    """

    def done_before(limit: float) -> list[int]:
        return [
            bisect_left(range(n + left + 1), limit, lo=n + 1, key=of) - 1 for of, n in zip(seconds, least, strict=True)
        ]

    low, high = 0.0, max(of(n + left) for of, n in zip(seconds, least, strict=True))
    counts = list(least)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        some = done_before(middle)
        if sum(some) - sum(least) <= left:
            low, counts = middle, some
        else:
            high = middle
    return counts


class CutStage(NamedTuple):
    """A stage of a pipeline, with its cut."""

    shape: StageShape
    blocks: int
    variant: StageVariant
    first_slot: int = 0
    """Number of the slot of its pool with which it begins."""

    @property
    def place(self) -> tuple[int, PoolUse, int]:
        """Return the slots that it has."""
        return self.pool, self.choice, self.first_slot

    @property
    def pool(self) -> int:
        return self.shape.pool

    @property
    def choice(self) -> PoolUse:
        return self.shape.choice


class SharedBlocks(NamedTuple):
    """Blocks, and maybe ends of the model, that the same stages hold."""

    members: list[tuple[int, int]]
    """The stages that hold the blocks: (pipeline, number in it)."""
    stages: list[CutStage]
    elements: list[float]
    """Number of weights of a rank, for each of these stages."""
    blocks: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, eq=False)
class CutShape:
    """A shape with its cuts."""

    shape: Shape
    rows: tuple[int, ...]
    """Rows of a microbatch, for each pipeline."""
    stages: tuple[tuple[CutStage, ...], ...]
    """Stages of each pipeline."""
    seconds: float
    """Seconds of a step by 1F1B, by the estimate that ranks layouts."""
    saved_seconds: float
    """Seconds of the step that other schedules may save, about and at best."""

    def items(self, pipeline: int) -> list[Interval]:
        """Return the items of each stage of a pipeline."""
        *ends, last = itertools.accumulate(2 * stage.blocks for stage in self.stages[pipeline])
        return [Interval(*pair) for pair in itertools.pairwise((0, *(end + 1 for end in ends), last + 2))]

    @property
    def is_short_of_memory(self) -> bool:
        """Say whether some stage could do better with more memory."""
        return any(
            stage.variant.recompute != "none"
            or stage.variant.offload != "none"
            or stage.variant.row_chunks > 1
            or stage.variant.most < stage.blocks + 1
            for stage in self.all_stages
        )

    def describe(self, names: Sequence[str]) -> str:
        """Return what each pool does, such as `fast: TP2 x PP2 x DP4, then slow: TP1 x PP1 x DP8`."""
        shape = self.shape
        rows = (
            ", then ".join(f"{names[pool]}: {choice}" for pool, choice in zip(row, choices, strict=True))
            for row, choices in zip(shape.pipelines, shape.choices, strict=True)
        )
        microbatches = counted(shape.microbatches, "microbatch")
        return f"{'; side by side with '.join(rows)}; {microbatches}, ZeRO {shape.zero}"

    @property
    def all_stages(self) -> list[CutStage]:
        return [stage for stages in self.stages for stage in stages]
