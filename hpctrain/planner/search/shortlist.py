"""Lists the choices for a pool that are worth scoring: those that would be the fastest with the others' best. Pure."""

from bisect import insort
from collections.abc import Sequence
from functools import lru_cache

from hpctrain.planner.search.holders import HolderGroup
from hpctrain.planner.search.score import ROWS_OF_FULL_SPEED, Scorer
from hpctrain.planner.search.space import BEST, Pipelines, PoolUse, choices_of, choices_of_all
from hpctrain.planner.search.stage_variants import StageShape
from hpctrain.sharding.items import BLOCK

SLOWEST_SHARE = 0.5
"""Share of the speed of a pool's fastest choice that others must reach to be considered."""
MOST_CHOICES = 48
"""Maximum number of choices that are scored for a pool, unless all are."""


class Shortlists:
    """The best choices for each pool, by number of microbatches and by what the others do."""

    def __init__(self, scorer: Scorer, per_group: int | None, uses_all: bool = False):
        """`per_group` is how many combinations of choices are wanted; None: all. `uses_all`: only choices that use all
        slots of their pool, as the restricted spaces have."""
        self._scorer, self._costs, self._per_group = scorer, scorer.costs, per_group
        self._every = choices_of_all if uses_all or scorer.space.cut != BEST else choices_of
        self._power = [pool.num_devices * scorer.speed(number) for number, pool in enumerate(self._costs.pools)]
        self._rates = lru_cache(None)(self._rates_of)
        self._choose = lru_cache(None)(self._best_choices)
        self.left_out = 0
        """Number of choices that were not returned."""

    def choices(self, microbatches: int, pool: int, row: Sequence[int], pipelines: Pipelines) -> list[PoolUse]:
        """Return the choices for a pool of a pipeline `row`, the best first."""
        used = tuple(sorted(number for other in pipelines for number in other))
        return self._choose(microbatches, pool, tuple(sorted(row)), used)

    def _rates_of(self, pool: int, rows: int) -> tuple[list[tuple[float, PoolUse]], float]:
        """Return each choice with the blocks that it does in a second, and the most."""
        costs, space = self._costs, self._scorer.space
        seconds = costs.both_seconds
        slots = space.num_slots(costs.pools[pool], costs.grids[pool])
        result = [
            (choice.stages / seconds(pool, choice.grid, BLOCK, choice.rank_rows(rows), space.recompute[0]), choice)
            for choice in self._every(slots, costs.setup.model.num_layers, rows)
        ]
        return result, max((rate for rate, _ in result), default=0.0)

    def _best_choices(self, microbatches: int, pool: int, row: tuple[int, ...], used: tuple[int, ...]) -> list[PoolUse]:
        rows = self._scorer.global_batch // microbatches
        if self._per_group is None:
            return [choice for _, choice in self._rates(pool, rows)[0]]
        share = sum(self._power[n] for n in row) / sum(self._power[n] for n in used)
        rows = max(1, round(rows * share))
        every, best = self._rates(pool, rows)
        others = sum(self._rates(number, rows)[1] for number in row if number != pool)
        considered = [(rate, choice) for rate, choice in every if rate >= best * SLOWEST_SHARE] or every
        width = min(MOST_CHOICES, max(2, round(self._per_group ** (1 / len(used)))))
        self.left_out += len(every) - min(width, len(considered))
        # Those first that compute the fastest: once enough are known to be as fast, others need not be looked at.
        num_blocks = self._costs.setup.model.num_layers
        computed = sorted(
            ((microbatches - 1 + choice.stages) * (num_blocks / (rate + others)), i)
            for i, (rate, choice) in enumerate(considered)
        )
        scored: list[tuple[tuple[bool, float], int]] = []
        for seconds, i in computed:
            if len(scored) >= width and (False, seconds) > scored[width - 1][0]:
                break
            rate, choice = considered[i]
            insort(scored, (self._score(pool, choice, rate, others, rows, microbatches, len(row) == 1), i))
        return [considered[i][1] for _, i in scored[:width]]

    def _score(
        self, pool: int, choice: PoolUse, rate: float, others: float, rows: int, microbatches: int, is_alone: bool
    ) -> tuple[bool, float]:
        """Return about what a step takes with this choice, after whether it is short of memory at any rate; `is_alone`:
        in its pipeline."""
        costs, (grid, stages, replicas), space = self._costs, choice, self._scorer.space
        num_blocks, each = costs.setup.model.num_layers, choice.rank_rows(rows)
        slowest, of_stage = num_blocks / (rate + others), max(1, round(num_blocks * rate / (rate + others) / stages))
        row_chunks = each if is_alone and stages == 1 else 1  # with the loss, rows may go in chunks

        def is_short(recompute: str, zero: int, offload: str = "none") -> bool:
            stage = StageShape(pool, choice, each, kept=min(stages, microbatches), zero=zero, holders=replicas)
            return costs.most_blocks(stage, recompute, row_chunks, offload) < of_stage

        first, last = space.recompute[0], space.recompute[-1]
        if is_short(first, min(space.zero, key=lambda zero: abs(zero - 1))):
            few = min(each, ROWS_OF_FULL_SPEED)  # as many times as long whatever the rows, once they are not too few
            again, once = (costs.passes(pool, grid, BLOCK, few, recompute).both for recompute in (last, first))
            slowest *= again / once
        exchanged = costs.setup.gradient_bytes * int(costs.elements(grid, False, False).per_block * of_stage)
        ends = costs.places.seconds((HolderGroup(pool, grid.size, replicas),), exchanged, "all_reduce")
        return is_short(last, max(space.zero), self._scorer.offloads[pool][-1]), (
            microbatches - 1 + stages
        ) * slowest + ends
