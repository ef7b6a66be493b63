"""How a shape's blocks and rows are cut: one by one, each to who would then be done first. Pure.

That is exact: since times grow with what is taken, no other cut into whole blocks or rows makes the slowest faster.
Equal stages get equal parts.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.planner.stages import BlockLine

MANY_ROWS = 64
"""More are not all given one by one."""
ROUNDS = 12
"""Of halving the time by which rows are given at once."""


class StageVariant(NamedTuple):
    """One way to compute a stage."""

    recompute: str
    row_chunks: int
    """In which it goes through its rows of a microbatch."""
    forward: BlockLine
    backward: BlockLine
    beyond: int
    """Blocks, for which fewer pieces suffice."""
    most: int
    """Blocks, as far as memory goes."""
    needed_bytes: BlockLine
    kept_bytes: BlockLine
    """Of these, for each microbatch under way."""
    split: tuple[BlockLine, BlockLine] | None = None
    """The parts of `backward`, one by one, where the gradient is sent between them."""

    def seconds(self, blocks: int) -> float:
        """Return the time of one microbatch, forward and backward."""
        return self.forward.at(blocks) + self.backward.at(blocks)


@dataclass(frozen=True, eq=False)
class StageVariants:
    """What a stage would take with so many blocks."""

    variants: tuple[StageVariant, ...]

    def variant(self, blocks: int) -> StageVariant | None:
        """Return the fastest way that has memory for so many blocks, and no more pieces than that takes."""
        fitting = [variant for variant in self.variants if variant.beyond < blocks <= variant.most]
        return min(fitting, key=lambda variant: variant.seconds(blocks)) if fitting else None

    def seconds(self, blocks: int) -> float:
        """Return the time of one microbatch, forward and backward; without end where memory is short."""
        return min(
            (variant.seconds(blocks) for variant in self.variants if variant.beyond < blocks <= variant.most),
            default=math.inf,
        )


def cut_blocks(num_blocks: int, stages: Sequence[StageVariants]) -> list[int] | None:
    """Return how many blocks each stage takes, one at least, so that the slowest is as fast as can be.

    None where there are fewer blocks than stages, or the memory of all is too small.
    """
    if len(stages) > num_blocks:
        return None
    blocks = [1] * len(stages)
    # The deepest of equal stages is given more first: it keeps the fewest activations.
    waiting = [(stage.seconds(2), -i) for i, stage in enumerate(stages)]
    heapq.heapify(waiting)
    for _ in range(num_blocks - len(stages)):
        seconds, negative = waiting[0]
        if seconds == math.inf:
            return None
        blocks[-negative] += 1
        heapq.heapreplace(waiting, (stages[-negative].seconds(blocks[-negative] + 1), negative))
    return blocks if all(stage.variant(count) for stage, count in zip(stages, blocks, strict=True)) else None


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
    if left > MANY_ROWS:
        rows = _most_at_once(rows, left, seconds)
        left = num_rows - sum(rows)
    waiting = [(of(n + 1), i) for i, (of, n) in enumerate(zip(seconds, rows, strict=True))]
    heapq.heapify(waiting)
    for _ in range(left):
        _, i = waiting[0]
        rows[i] += 1
        heapq.heapreplace(waiting, (seconds[i](rows[i] + 1), i))
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
