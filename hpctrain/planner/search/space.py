"""The plans that a search chooses from. Pure.

A *shape* says everything but the cuts:

- some of the pools (see `planner/search/pools.py`), divided into *pipelines* side by side, each of which is a sequence
  of pools: the families as one pipeline. Pools in no pipeline are unused;
- for each of these pools a `PoolUse`. Tensor grids take their pool's slots node by node, those of a stage side by
  side, stage after stage; what is left is unused;
- the number of microbatches;
- a ZeRO stage: 0 to 3. 1 where nobody shares a weight, so that it makes no difference. Pipelines side by side do not go
  through their items together: 1, or 2 and 3 where each of them is one stage, by the same tensor grid and in as many
  row chunks (heterogeneous ZeRO: Poplar, arXiv 2408.12596).

The cuts follow from the shape, see `planner/search/cut.py`: rows are given one by one to the pipeline that would be
done first, cut evenly among the replicas of a stage; blocks one by one to the stage that would be done first, in the
fastest variant that fits (`StageVariant`): with activations recomputed, rows in chunks at the loss, or host memory
used only where memory is short.

Two restricted spaces have the plans of a user who knows less, with all devices: `by_speed_space` and `even_space`. A
family alone needs no space of its own: `search` takes the families that it may use.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.planner.search.pools import Pool
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import divisors

Pipelines = tuple[tuple[int, ...], ...]
"""Numbers of pools: those of one pipeline, for each of the pipelines side by side."""
ALL_COUNTS_UP_TO = 8
MOST_VIRTUAL_STAGES = 10
"""Maximum number of virtual stages of a rank: with 10 the bubble is a tenth, and messages are many."""
BEST, BY_SPEED, EVEN = "best", "by speed", "even"


class PoolUse(NamedTuple):
    """The use of the devices of a pool: so many stages of so many replicas, each by a tensor grid."""

    grid: TensorGrid
    stages: int
    replicas: int

    def __str__(self) -> str:
        return f"{self.grid} x PP{self.stages} x DP{self.replicas}"

    def rank_rows(self, rows: int) -> int:
        """Return the rows of a rank with the most, where a stage has so many of a microbatch."""
        return -(-rows // self.replicas // self.grid.row_parts)


@dataclass(frozen=True)
class Space:
    """The plans that a search selects from; `None`: all that there are."""

    microbatches: tuple[int, ...] | None = None
    largest_grid: int | None = None
    """The most ranks of a tensor grid."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Variants of recomputing, from the fastest, which keeps the most, to the slowest."""
    most_virtual_stages: int = MOST_VIRTUAL_STAGES
    offload: tuple[str, ...] = ("none", "optimizer")
    """What stages keep in host memory where they are short of the device's, from nothing to the most."""
    cut: str = BEST
    """How rows and blocks are cut. `BY_SPEED` and `EVEN` restrict the shapes too."""

    def microbatch_counts(self, global_batch: int) -> list[int]:
        result = divisors(global_batch)
        return [count for count in result if self.microbatches is None or count in self.microbatches]

    def arrangements(self, num_pools: int) -> list[Pipelines]:
        """Return the arrangements of pools that the space has."""
        every = list(arrangements(num_pools))
        if self.cut == BEST:
            return every
        num_pipelines = {1, num_pools} if self.cut == BY_SPEED else range(num_pools + 1)
        return [p for p in every if sum(map(len, p)) == num_pools and len(p) in num_pipelines]

    def num_slots(self, pool: Pool, grids: Iterable[TensorGrid]) -> dict[TensorGrid, int]:
        """Return how many slots a pool has for each of some tensor grids; restricted spaces use all devices."""
        result = {g: len(pool.slots(g.size)) for g in grids if g.size <= (self.largest_grid or g.size)}
        return result if self.cut == BEST else {g: n for g, n in result.items() if n * g.size == pool.num_devices}


def by_speed_space(**restricted) -> Space:
    """Return the space of plans that are cut by the speeds of families alone; without memory, without communication."""
    return Space(cut=BY_SPEED, most_virtual_stages=1, **restricted)


def even_space(**restricted) -> Space:
    """Return the space of even plans: tensor grid x pipeline x data, as if all devices were equal."""
    return Space(cut=EVEN, most_virtual_stages=1, **restricted)


@dataclass(frozen=True)
class Shape:
    """A plan without its cuts."""

    pipelines: Pipelines
    choices: tuple[tuple[PoolUse, ...], ...]
    """Use of each pool of each pipeline."""
    microbatches: int
    zero: int

    @property
    def depths(self) -> tuple:
        """Return the arrangement, the number of microbatches, and how many stages each pool has."""
        return self.pipelines, self.microbatches, tuple(choice.stages for row in self.choices for choice in row)

    def zero_stages(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the wanted ZeRO stages that this can have; 1 stands for all where they make no difference."""
        choices = [choice for row in self.choices for choice in row]
        if len(self.pipelines) == 1:
            return wanted if any(choice.replicas > 1 for choice in choices) else (1,)
        return ((1,) if min(wanted) <= 1 else ()) + tuple(zero for zero in wanted if zero >= 2 and self.is_whole_models)

    @property
    def is_whole_models(self) -> bool:
        """Say whether all stages have the whole model, by one tensor grid."""
        grids = {row[0].grid for row in self.choices}
        return len(grids) == 1 and all(len(row) == row[0].stages == 1 for row in self.choices)


def arrangements(num_pools: int) -> Iterator[Pipelines]:
    """Yield all divisions of some of the pools into pipelines, whose order is that of their first pools."""

    def divided(pools: tuple[int, ...]) -> Iterator[Pipelines]:
        if not pools:
            yield ()
            return
        first, *rest = pools
        for size in range(len(rest) + 1):
            for others in itertools.combinations(rest, size):
                left = tuple(pool for pool in rest if pool not in others)
                for row in itertools.permutations((first, *others)):
                    for further in divided(left):
                        yield (row, *further)

    for size in range(num_pools, 0, -1):
        for used in itertools.combinations(range(num_pools), size):
            yield from divided(used)


def replica_counts(most: int, rows: int) -> list[int]:
    """Return the numbers of replicas that a stage may have.

    Up to 8 possible replicas these are all counts, which may leave devices unused. Beyond, they are two: the most that
    are possible, and the most that divide the rows.
    """
    most = min(most, rows)
    if most <= ALL_COUNTS_UP_TO:
        return list(range(1, most + 1))
    dividing = next(count for count in range(most, 0, -1) if rows % count == 0)
    return sorted({dividing, most})


def stage_counts(most: int, num_blocks: int) -> list[int]:
    """Return the numbers of stages that a pool may have: all up to 8, beyond those that divide the blocks or the
    slots."""
    limit = min(most, num_blocks)
    wanted = {count for number in (num_blocks, most) for count in divisors(number) if count <= limit}
    return sorted(wanted | set(range(1, min(limit, ALL_COUNTS_UP_TO) + 1)))


def choices_of(num_slots: dict[TensorGrid, int], num_blocks: int, rows: int) -> Iterator[PoolUse]:
    """Yield what a pool can become that has so many slots for each tensor grid, for `rows` rows of a microbatch."""
    for grid, slots in num_slots.items():
        for stages in stage_counts(slots, num_blocks):
            for replicas in replica_counts(slots // stages, rows // grid.row_parts):
                yield PoolUse(grid, stages, replicas)


def choices_of_all(num_slots: dict[TensorGrid, int], num_blocks: int, rows: int) -> Iterator[PoolUse]:
    """Yield what a pool can become that uses all of its slots."""
    for grid, slots in num_slots.items():
        for stages in divisors(slots):
            if stages <= num_blocks and slots // stages * grid.row_parts <= rows:
                yield PoolUse(grid, stages, slots // stages)


def even_choices(
    pipelines: Pipelines, num_slots: Sequence[dict[TensorGrid, int]], num_blocks: int, rows: int
) -> Iterator[tuple[tuple[PoolUse, ...], ...]]:
    """Yield what the pools of an arrangement can become in even plans, which use all slots of each pool."""
    for grid in num_slots[0]:
        if not all(grid in slots for slots in num_slots):
            continue
        slots = [[num_slots[pool][grid] for pool in row] for row in pipelines]
        for stages in divisors(math.gcd(*map(sum, slots))):
            replicas = [sum(row) // stages for row in slots]
            divides = all(n % r == 0 for row, r in zip(slots, replicas, strict=True) for n in row)
            if (
                divides
                and stages <= num_blocks
                and rows % sum(replicas) == 0
                and rows // sum(replicas) >= grid.row_parts
            ):
                yield tuple(
                    tuple(PoolUse(grid, n // r, r) for n in row) for row, r in zip(slots, replicas, strict=True)
                )


def names_of(pipelines: Pipelines, names: Sequence[str]) -> str:
    """Say an arrangement in words, such as `fast then slow, side by side with slower`."""
    return ", side by side with ".join(" then ".join(names[pool] for pool in row) for row in pipelines)
