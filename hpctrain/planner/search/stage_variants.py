"""A stage of a pipeline, as a search knows it: its shape, its quantities as lines in its number of blocks, and the
variants of computing it. Pure.

A quantity of k blocks has a fixed part (of the embedding or the head) and k times the mean of blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpctrain.planner.search.holders import ALONE, Holders
from hpctrain.planner.search.space import PoolUse
from hpctrain.sharding.intervals import Interval

TIE_DIGITS = 12
"""Decimals to which seconds are rounded, so that the order of sums does not decide between equal stages."""


class Passes(NamedTuple):
    """Seconds of a forward and a backward pass over a layer, or over a stage for one microbatch."""

    forward: float
    backward: float
    weight: float = 0.0
    """Seconds of `backward` that are gradients of weights, where these may come later."""

    @property
    def both(self) -> float:
        return self.forward + self.backward


class BlockLine(NamedTuple):
    """A quantity of a stage with k blocks: fixed + k * per_block, and `extra` for each of the first `num_leading`."""

    fixed: float
    per_block: float
    extra: float = 0.0
    num_leading: int = 0

    def at(self, k: float) -> float:
        return self.fixed + k * self.per_block + (self.extra * min(k, self.num_leading) if self.extra else 0.0)

    def plus(self, other: "BlockLine", times: float = 1.0) -> "BlockLine":
        return BlockLine(
            self.fixed + times * other.fixed,
            self.per_block + times * other.per_block,
            self.extra + times * other.extra,
            max(self.num_leading, other.num_leading),
        )

    def more(self, fixed: float) -> "BlockLine":
        return BlockLine(self.fixed + fixed, self.per_block, self.extra, self.num_leading)

    def times(self, factor: float) -> "BlockLine":
        return BlockLine(factor * self.fixed, factor * self.per_block, factor * self.extra, self.num_leading)

    def most(self, limit: float) -> int:
        """Return the number of blocks up to which the quantity stays within a limit."""
        leading = math.floor((limit - self.fixed) / (self.per_block + self.extra))
        if self.extra and leading >= self.num_leading:
            return math.floor((limit - self.fixed - self.extra * self.num_leading) / self.per_block)
        return max(0, leading)


NOTHING = BlockLine(0.0, 0.0)
LEADING = Interval(0, 0)
"""Stands for the mean of the leading blocks, as `BLOCK` does for that of the others."""


class StageShape(NamedTuple):
    """A stage of a shape, without its number of blocks."""

    pool: int
    choice: PoolUse
    rows: int
    """Rows of a microbatch on the rank that has the most."""
    ends: tuple[bool, bool] = (False, False)
    """Whether it has the first item, and the last one."""
    kept: float = 1.0
    """Number of microbatches whose activations are all kept at once."""
    zero: int = 1
    holders: int = 1
    """Minimum number of ranks that hold the same weights as one of its ranks."""
    meets_mixed: bool = False
    """Whether other pipelines have other grids, for which weights are packed."""
    microbatches: int = 1
    row_chunks: tuple[int, ...] = (1,)
    """Numbers of row chunks in which it may compute, the fewest first."""
    exchanging: Holders = ALONE


class StageMemoryNeeds(NamedTuple):
    """Bytes of a stage's rank."""

    on_device: tuple[BlockLine, ...]
    """Bytes while passes compute, and while the first and the last gradients are summed; the most of these counts."""
    on_host: BlockLine

    def device_bytes(self, blocks: float) -> float:
        return max(line.at(blocks) for line in self.on_device)


class HeldBytes(NamedTuple):
    """Bytes of a stage's rank that do not depend on rows."""

    always: BlockLine
    """Weights, gradients, the optimizer's state, what is gathered, and sums that are overlapped in every pass."""
    blocking: float
    """Scratch of sums in every pass that nothing overlaps."""
    first_sum: float
    """Scratch of the first sum at the end of a step, while one microbatch is kept."""
    last_sum: BlockLine
    on_host: BlockLine


class StageVariant(NamedTuple):
    """A variant of computing a stage."""

    recompute: str
    row_chunks: int
    """Number of row chunks in which it computes its rows of a microbatch."""
    forward: BlockLine
    backward: BlockLine
    most: int
    """Maximum number of blocks that fit in memory."""
    offload: str = "none"
    """State that it keeps in host memory: "none" or "optimizer"."""
    update: BlockLine = NOTHING
    """Seconds that offload adds to the update, divided among the microbatches of a step."""
    weight: BlockLine = NOTHING
    """Seconds of `backward` that are gradients of weights, where these may come later."""

    @property
    def line(self) -> BlockLine:
        """Return the time of one microbatch, forward and backward, with its share of what offload adds to a step."""
        return self.forward.plus(self.backward).plus(self.update)

    def seconds(self, blocks: float) -> float:
        """Return the time of one microbatch, as `line`."""
        return self.forward.at(blocks) + self.backward.at(blocks) + self.update.at(blocks)

    def passes(self, blocks: float) -> Passes:
        """Return the seconds of one microbatch's passes."""
        return Passes(self.forward.at(blocks), self.backward.at(blocks), self.weight.at(blocks))


@dataclass(frozen=True, eq=False)
class StageVariants:
    """The variants of a stage; its number of blocks decides which of them is used."""

    variants: tuple[StageVariant, ...]
    offloading: Callable[[], tuple[StageVariant, ...]] = tuple
    """Returns the variants that use host memory. Called where the first of the others does not fit on the device."""

    @cached_property
    def _all(self) -> tuple[StageVariant, ...]:
        return self.variants + self.offloading()

    @cached_property
    def _seconds(self) -> dict[float, float]:
        return {}

    def variant(self, blocks: float) -> StageVariant | None:
        """Return the fastest variant that has memory for so many blocks, and no more row chunks than that takes."""
        if self.variants and blocks <= self.variants[0].most:
            return self.variants[0]
        fitting = [variant for variant in self._all if blocks <= variant.most]
        return min(fitting, key=lambda variant: variant.seconds(blocks)) if fitting else None

    def seconds(self, blocks: float) -> float:
        """Return the time of one microbatch, forward and backward; without end where memory is short."""
        if blocks not in self._seconds:
            variant = self.variant(blocks)
            self._seconds[blocks] = round(variant.seconds(blocks), TIE_DIGITS) if variant else math.inf
        return self._seconds[blocks]


def row_chunk_counts(most: int, fewest: int) -> list[int]:
    """Return the numbers of row chunks in which ranks may compute their rows: powers of two, three times these, and a
    row each.

    `most` and `fewest` are the rows of the ranks with the most and the fewest.
    """
    wanted = {n << power for n in (2, 3) for power in range(fewest.bit_length())}
    result = [1, *sorted(count for count in wanted if count < fewest), *([fewest] if fewest > 1 else [])]
    # Of counts with the same rows per chunk, the fewest chunks.
    at_once = {-(-most // count): count for count in reversed(result)}
    return sorted(at_once.values())
