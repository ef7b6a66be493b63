"""Finds the plan of a job on a cluster that is predicted to take the least time. Pure, and needs no device.

What is chosen from is in `planner/space.py`. The search goes through *groups* of plans that have the arrangement of
pools and the number of microbatches in common. A closed form (`planner/weigh.py`) weighs one plan of each, then those
of the most promising groups, until a budget is spent; the best by weight are timed by the simulation of their
instructions, which alone decides, and must fit by `planner/memory.py`. A plan that cannot be faster than the best by
its bound is not timed. The answer depends on the budget, not on the machine; a limit in seconds ends it earlier.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpctrain.cluster import Cluster
from hpctrain.errors import PlanError
from hpctrain.plan import Plan
from hpctrain.planner.bound import least_seconds
from hpctrain.planner.cost import Setup
from hpctrain.planner.pools import Pool, pools_of
from hpctrain.planner.predict import Prediction, Predictor
from hpctrain.planner.shortlist import Shortlists
from hpctrain.planner.space import Pipelines, Shape, Space, arrangements
from hpctrain.planner.stages import StageCosts
from hpctrain.planner.weigh import Layout, Weigher

WEIGHED, TIMED = 4000, 12
"""How many plans are weighed, and timed, unless it is said."""
PER_GROUP = 64
"""About how many plans of a group are weighed."""
WEIGHING_SHARE = 0.6
"""Of a limit in seconds; the rest is for timing."""


@dataclass(frozen=True)
class Limits:
    """How far a search goes; `None`: to the end."""

    weighed: int | None = WEIGHED
    timed: int | None = TIMED
    per_group: int | None = PER_GROUP
    seconds: float | None = None


@dataclass(frozen=True)
class Timed:
    """A plan that fits, and how long it takes."""

    layout: Layout
    plan: Plan
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    plans: tuple[Timed, ...]
    """The fastest first."""
    pools: tuple[Pool, ...]
    lower_bound_seconds: float
    """No plan is predicted to take less, whether it was looked at or not; see `planner/bound.py`."""
    searched: dict[str, int]
    is_complete: bool
    """Whether no plan of the space can be faster, by its bound."""
    wall_seconds: float
    least_by_arrangement: dict[Pipelines, float]
    """By the closed form, for each arrangement of pools that fits."""
    least_by_microbatches: dict[int, float]

    @property
    def best(self) -> Timed:
        return self.plans[0]

    @property
    def gap(self) -> float:
        """Return by which share the best one is above the lower bound."""
        return self.best.seconds / self.lower_bound_seconds - 1


def search(
    setup: Setup,
    global_batch: int,
    cluster: Cluster,
    families: Sequence[str] | None = None,
    space: Space | None = None,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Found:
    """Return the best plans found for a step of `global_batch` sequences on the devices of some families, or of all.

    The others are unused. Raises PlanError, with the numbers, if none is found that fits in memory, or if a family does
    not compute in the dtype.
    """
    return _Search(setup, global_batch, cluster, families, space or Space(), limits or Limits(), clock).run()


class _Search:
    def __init__(self, setup, global_batch, cluster, families, space, limits, clock):
        self._setup, self._cluster, self._space, self._limits, self._clock = setup, cluster, space, limits, clock
        self._started = clock()
        self._pools = pools_of(cluster, families or list(cluster.families))
        self._counts = space.microbatch_counts(global_batch)
        self._costs = StageCosts(setup, cluster, self._pools)
        self._weigher = Weigher(self._costs, global_batch, space)
        self._global_batch = global_batch
        self._shortlists = Shortlists(self._weigher, limits.per_group)
        self._layouts: list[Layout] = []
        self._num_weighed = self._num_groups = 0

    def _is_over(self, share: float = 1.0) -> bool:
        seconds = self._limits.seconds
        return seconds is not None and self._clock() - self._started > seconds * share

    def run(self) -> Found:
        is_complete = self._weigh_groups() and not self._shortlists.left_out
        self._layouts.sort(key=lambda layout: layout.seconds)
        plans, all_timed = self._time()
        bound = min(least_seconds(self._costs, self._global_batch, self._space), plans[0].seconds)
        return Found(
            plans=tuple(plans),
            pools=self._pools,
            lower_bound_seconds=bound,
            searched={
                "groups": self._num_groups,
                "weighed": self._num_weighed,
                "fitting": len(self._layouts),
                "timed": len(plans),
            },
            is_complete=is_complete and all_timed,
            wall_seconds=self._clock() - self._started,
            least_by_arrangement=self._least(lambda shape: shape.pipelines),
            least_by_microbatches=self._least(lambda shape: shape.microbatches),
        )

    def _least(self, key: Callable[[Shape], object]) -> dict:
        """Return the least seconds of all layouts, which are sorted, by something of their shapes."""
        least: dict = {}
        for layout in self._layouts:
            least.setdefault(key(layout.shape), layout.seconds)
        return least

    # ---- weighing ----------------------------------------------------------------------------------------------------

    def _weigh_groups(self) -> bool:
        """Weigh groups, the most promising first; return whether all were."""
        groups: list[tuple[float, int, Pipelines, int]] = []
        for pipelines, microbatches in itertools.product(arrangements(len(self._pools)), self._counts):
            if self._layouts and self._is_over(WEIGHING_SHARE / 2):
                break
            seconds = self._weigh(next(self._shapes(pipelines, microbatches), None))
            groups.append((seconds, len(groups), pipelines, microbatches))
        self._num_groups = len(groups)
        for _, _, pipelines, microbatches in sorted(groups):
            for shape in itertools.islice(self._shapes(pipelines, microbatches), 1, None):
                if self._is_spent() and self._layouts:
                    return False
                self._weigh(shape)
        return True

    def _is_spent(self) -> bool:
        budget = self._limits.weighed
        return (budget is not None and self._num_weighed >= budget) or self._is_over(WEIGHING_SHARE)

    def _shapes(self, pipelines: Pipelines, microbatches: int):
        """Yield the shapes of a group, those of the best choices first."""
        lists = [
            self._shortlists.choices(microbatches, pool, row, pipelines) for row in pipelines for pool in row
        ]
        for places in sorted(itertools.product(*(range(len(found)) for found in lists)), key=sum):
            chosen = iter(found[place] for found, place in zip(lists, places, strict=True))
            choices = tuple(tuple(next(chosen) for _ in row) for row in pipelines)
            yield Shape(pipelines, choices, microbatches, 1)

    def _weigh(self, shape: Shape | None) -> float:
        """Weigh a shape with each ZeRO stage that may pay; return the least seconds."""
        if shape is None:
            return math.inf
        least, is_short = math.inf, False
        for zero in sorted(shape.zero_stages(self._space.zero), key=lambda zero: (zero != 1, zero)):
            # 2 and 3 exchange more than 1, and pay where memory is short alone
            if zero >= 2 and 1 in self._space.zero and not is_short:
                continue
            self._num_weighed += 1
            layout = self._weigher.weigh(replace(shape, zero=zero))
            is_short |= layout is None or layout.is_short_of_memory
            if layout is not None:
                self._layouts.append(layout)
                least = min(least, layout.seconds)
        return least

    # ---- timing ------------------------------------------------------------------------------------------------------

    def _time(self) -> tuple[list[Timed], bool]:
        """Return the best plans by simulation, the fastest first, and whether no other one can be faster."""
        found: list[Timed] = []
        shortage = ""
        best = math.inf
        for number, layout in enumerate(self._layouts):
            if found and self._weigher.bound(layout) >= best:
                continue
            limit = self._limits.timed
            if found and ((limit is not None and len(found) >= limit) or self._is_over()):
                rest = self._layouts[number:]
                return _sorted(found), all(self._weigher.bound(other) >= best for other in rest)
            plan = self._weigher.plan(layout)
            prediction = Predictor(self._setup, plan, self._cluster).predict(1)
            if prediction.fits:
                found.append(Timed(layout, plan, prediction))
                best = min(best, prediction.step_seconds)
            elif not shortage:
                stage = max(prediction.memory, key=lambda s: s.memory.total - s.available_bytes)
                tile, needed = stage.tile, stage.memory.total
                shortage = self._tell_shortage(plan, tuple(tile.items), tile.family, needed, stage.available_bytes)
        if not found:
            raise PlanError(shortage or self._least_shortage())
        return _sorted(found), True

    def _least_shortage(self) -> str:
        """Say what the plan lacks that comes nearest to fitting, of those that keep the least."""
        zero, recompute = max(self._space.zero), self._space.recompute[-1]
        space = replace(self._space, recompute=(recompute,))
        roomy = Weigher(self._costs, self._global_batch, space, is_short_of_nothing=True)
        lacking = []
        for pipelines in arrangements(len(self._pools)):
            for microbatches in self._counts:
                for shape in itertools.islice(self._shapes(pipelines, microbatches), self._limits.per_group):
                    zeros = shape.zero_stages((zero,))
                    if layout := roomy.weigh(replace(shape, zero=zeros[0])):
                        lacking.append((roomy.worst_shortage(layout), len(lacking), layout))
        (lack, number, at), _, layout = min(lacking)
        plan = roomy.plan(layout)
        tiles = list(dict.fromkeys((tile.items, tile.family) for tile in plan.tiles))
        items, family = tiles[at]
        available = self._pools[number].memory_bytes
        return self._tell_shortage(plan, tuple(items), family, available + lack, available)

    def _tell_shortage(self, plan: Plan, items: tuple[int, int], family: str, needed: float, available: int) -> str:
        return (
            f"no plan of {self._cluster.describe()} fits in memory; the nearest ({plan.describe()}) needs"
            f" {needed / 2**20:,.1f} MiB for items {list(items)} on a rank of family '{family}', which has"
            f" {available / 2**20:,.1f} MiB: {(needed - available) / 2**20:,.1f} MiB too few; use more devices,"
            f" or shorter sequences (data.sequence_length is {self._setup.positions})"
        )


def _sorted(found: list[Timed]) -> list[Timed]:
    return sorted(found, key=lambda timed: timed.seconds)
