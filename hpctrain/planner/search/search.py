"""Finds the plan of a job on a cluster that is predicted to take the least time. It needs no device.

1. *Shapes* (`space.py`) say everything of a plan but its cuts. They are in groups that have the arrangement of pools
   and the number of microbatches in common; of each group the best choices come first (`shortlist.py`).
2. Shapes are cut and *scored* (`cut.py`, `score.py`): one of each group, then those of the most promising groups, until
   a budget is spent. Shapes that cannot be near the best are skipped.
3. The layouts with the best scores are *simulated*, instruction by instruction (`prediction/simulate.py`), which alone
   decides, and must fit by `prediction/memory.py`. Of each the *changes* of `changes.py` by 1F1B are tried, and other
   schedules of those that would be the fastest with short bubbles.

The answer depends on the budget, not on the machine; a limit in seconds ends it earlier. `planner/choose.py` and
`planner/explain.py` say why a plan was chosen.
"""

import gc
import heapq
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.plan.checks import check_passes
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.cut_products import predict_in_parts
from hpctrain.planner.prediction.offload import format_shortage
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.bound import lower_bound
from hpctrain.planner.search.changes import (
    Change,
    SimulatedPlan,
    cuts_inside_blocks,
    more_in_flight,
    virtual_stages,
    zero_bubble,
)
from hpctrain.planner.search.cut import CutShape
from hpctrain.planner.search.pools import Pool, pools_of
from hpctrain.planner.search.score import Scorer
from hpctrain.planner.search.shortlist import Shortlists
from hpctrain.planner.search.space import BEST, EVEN, Pipelines, PoolUse, Shape, Space, even_choices
from hpctrain.planner.search.stages import StageCosts

SCORED, SIMULATED = 2000, 13
"""How many plans are scored, and simulated, unless a user limits it."""
PER_GROUP = 100
"""About how many shapes of a group are scored: the choices for a pool are limited, see `Shortlists`."""

FIRST_OF_GROUP = 3
"""How many plans of a group are scored at first, until one fits in memory."""
AT_ONCE = 8
"""How many plans of the most promising group are scored before it is compared with the others again."""
LOOKING_SHARE = 0.5
"""Of the budget, for looking at one plan of each group."""
BOUNDED = 500
"""The promise of how many arrangements is found, of those that leave the fewest pools unused: six pools have 8,463."""
SCORING_SHARE, SIMULATING_SHARE = 0.6, 0.85
"""Of a limit in seconds, until when plans are scored and simulated by 1F1B."""
FIRST_SIMULATED = 3
"""How many of the first layouts are simulated at once, until one fits, so that there is a plan."""
LEAST_SIMULATED = 5
"""How many layouts that fit are simulated even if the next ones are expected to be slower than the best. So many are
tried, too, if time is over while none fits."""
RESCHEDULED, CHECKED = 3, 40
"""How many plans are simulated by other schedules, and of how many the memory is looked at for that. These shorten
bubbles, and most need more memory: of the layouts those come first that would be the fastest with short ones."""
BUBBLES_SHORTEN = 4
"""How many times shorter bubbles are by other schedules, about and at best. Virtual stages may shorten them more."""
ESTIMATE_ERROR = 0.03
"""By more than this the estimate is rarely wrong: plans that are worse by it are not simulated."""


@dataclass(frozen=True)
class Limits:
    """The limits of a search; `None`: it goes to the end."""

    scored: int | None = SCORED
    simulated: int | None = SIMULATED
    """How many plans that fit are simulated."""
    per_group: int | None = PER_GROUP
    seconds: float | None = None


SCORE_ALL = Limits(scored=None, simulated=40, per_group=None)
"""All shapes are scored, and up to 40 layouts simulated whose estimates are within `ESTIMATE_ERROR` of the best."""


class PlanGroup(NamedTuple):
    """The plans with an arrangement of pools and a number of microbatches in common."""

    pipelines: Pipelines
    microbatches: int


class StartedGroup(NamedTuple):
    """A group of which some shapes were scored. Sorted, the most promising are first."""

    seconds: float
    """The least score of the last shapes that were scored; infinite where none of these fits."""
    number: int
    """Makes no two groups equal."""
    others: Iterator[Shape]
    """The shapes that were not scored yet."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    plans: tuple[SimulatedPlan, ...]
    """The fastest first."""
    pools: tuple[Pool, ...]
    lower_bound_seconds: float
    """No plan is predicted to take less, whether it was looked at or not; see `planner/search/bound.py`."""
    searched: dict[str, int]
    is_complete: bool
    """Whether all plans of the space were scored and simulated, so that none is faster."""
    wall_seconds: float
    first_plan_seconds: float
    """After which the first plan was there that fits, by simulation."""
    least_by_arrangement: dict[Pipelines, float]
    """By the estimate, for each arrangement of pools that fits."""
    least_by_microbatches: dict[int, float]

    @property
    def best(self) -> SimulatedPlan:
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
    setup_of: Callable[[Plan], Setup] | None = None,
) -> SearchResult:
    """Return the best plans for a step of `global_batch` sequences on the devices of some families, or of all.

    Devices of other families are unused. Plans are scored by `setup`, and simulated by `setup_of` each of them, where
    that is given. Raises PlanError, with the numbers, if none fits in memory, or if a family does not compute in the
    dtype.
    """
    return Search(setup, global_batch, cluster, families, space or Space(), limits or Limits(), clock, setup_of).run()


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector: a search makes almost no cycles, and collecting takes a quarter of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_by_seconds = operator.attrgetter("seconds")


def _if_rescheduled(plan: CutShape | SimulatedPlan) -> float:
    """Return about what a step by 1F1B takes at best by another schedule."""
    return plan.seconds - plan.bubble_seconds * (1 - 1 / BUBBLES_SHORTEN)


class Search:
    """A search in flight; see `search`."""

    def __init__(self, setup, global_batch, cluster, families, space, limits, clock, setup_of=None):
        self._setup, self._cluster, self._space, self._limits, self._clock = setup, cluster, space, limits, clock
        self._started = clock()
        self._pools = pools_of(cluster, families or list(cluster.families), setup)
        # The first ones to be looked at give some rows to each node: they fit in memory, and are not far from the best.
        num_nodes = sum(len(pool.nodes) for pool in self._pools)
        counts = space.microbatch_counts(global_batch)
        self._counts = sorted(counts, key=lambda m: abs(math.log(global_batch / m / num_nodes)))
        self._arrangements = space.arrangements(len(self._pools))
        self.costs = StageCosts(setup, cluster, self._pools)
        self.scorer = Scorer(self.costs, global_batch, space)
        self._global_batch = global_batch
        self._shortlists = Shortlists(self.scorer, limits.per_group)
        self._setup_of = setup_of or (lambda _: setup)
        self._schedules = zero_bubble, partial(virtual_stages, most=space.most_virtual_stages)
        self._shortage = ""
        """What the first plan lacked that did not fit after all, or why it is none."""
        self._first: SimulatedPlan | None = None
        self._first_after = math.inf
        self.layouts: list[CutShape] = []
        self._best_score = math.inf
        """The least seconds of all layouts, by the estimate."""
        self._num_scored = self._num_groups = self._num_skipped = 0

    def _is_over(self, share: float) -> bool:
        seconds = self._limits.seconds
        return seconds is not None and self._clock() - self._started > seconds * share

    @_without_garbage_collector()
    def run(self) -> SearchResult:
        """Search, and return the plans that were simulated with what was learnt. Raises PlanError where none fits."""
        all_scored = self._score_groups() and not self._shortlists.left_out and not self._num_skipped
        self.layouts.sort(key=_by_seconds)
        plans, all_simulated = self._simulate_layouts()
        if not plans and not self._shortage:
            # By the estimate nothing fits. Simulating what comes nearest says what it lacks, if it does not fit either.
            plans = list(filter(None, [self._simulate(self._nearest())]))
        if not plans:
            raise PlanError(self._shortage)
        return SearchResult(
            plans=tuple(plans),
            pools=self._pools,
            lower_bound_seconds=lower_bound(self.costs, self._global_batch, self._space),
            searched={
                "groups": self._num_groups,
                "scored": self._num_scored,
                "fitting": len(self.layouts),
                "timed": len(plans),
            },
            is_complete=all_scored and all_simulated,
            wall_seconds=self._clock() - self._started,
            first_plan_seconds=min(self._first_after, self._clock() - self._started),
            least_by_arrangement=self._least(lambda shape: shape.pipelines),
            least_by_microbatches=self._least(lambda shape: shape.microbatches),
        )

    def _least(self, key: Callable[[Shape], object]) -> dict:
        """Return the least seconds of all layouts by something of their shapes."""
        least: dict = {}
        for layout in sorted(self.layouts, key=_by_seconds):
            least.setdefault(key(layout.shape), layout.seconds)
        return least

    def _simulate_first(self, layout: CutShape) -> None:
        """Simulate the first plan at once, so that there is one; or the next one, where that does not fit after all."""
        if self._first is None and len(self.layouts) <= FIRST_SIMULATED:
            self._first = self._simulate(layout)
            self._first_after = self._clock() - self._started if self._first else math.inf

    # ---- scoring -----------------------------------------------------------------------------------------------------

    def _score_groups(self) -> bool:
        """Score a plan that fits of each group, then others, a few at a time of the group that is the most promising
        by its last ones; return whether all were."""
        started: list[StartedGroup] = []
        for group in self._groups():
            if self.layouts and self._is_spent(LOOKING_SHARE):
                break
            seconds, shapes = math.inf, self._shapes(group)
            for shape in itertools.islice(shapes, FIRST_OF_GROUP):
                seconds = self._score(shape)
                if seconds < math.inf:
                    break
            started.append(StartedGroup(seconds, len(started), shapes))
        self._num_groups = len(started)
        heapq.heapify(started)
        while started:
            promising, least = heapq.heappop(started), math.inf
            shapes = list(itertools.islice(promising.others, AT_ONCE))
            for shape in shapes:
                if self.layouts and self._is_spent(1.0):
                    return False
                least = min(least, self._score(shape))
            if shapes:
                heapq.heappush(started, promising._replace(seconds=least))
        return self._num_groups == len(self._arrangements) * len(self._counts)

    def _groups(self) -> Iterator[PlanGroup]:
        """Yield all groups. First all pools side by side, and as one pipeline in the order of their numbers.

        Then the others: those first whose arrangement and number of microbatches promise the shortest steps. The
        former is bounded by one shape of each; the latter is known when the caller has scored the first groups.
        """
        pools = range(len(self._pools))
        simplest = tuple((pool,) for pool in pools), (tuple(pools),)
        first = [pipelines for pipelines in dict.fromkeys(simplest) if pipelines in self._arrangements]
        yield from itertools.starmap(PlanGroup, itertools.product(first, self._counts))
        by_count = self._least(lambda shape: shape.microbatches)
        usual = min(by_count, key=by_count.__getitem__, default=self._counts[0])

        def optimistic(pipelines: Pipelines) -> float:
            shapes = itertools.islice(self._shapes(PlanGroup(pipelines, usual)), 1)
            return min(map(self.scorer.optimistic_seconds, shapes), default=math.inf)

        others = [pipelines for pipelines in self._arrangements if pipelines not in first]
        others.sort(key=lambda pipelines: -sum(map(len, pipelines)))
        bounded = [(pipelines, optimistic(pipelines)) for pipelines in others[:BOUNDED]]
        promising = itertools.product(bounded, self._counts)
        promising = sorted(promising, key=lambda each: each[0][1] * by_count.get(each[1], math.inf))
        yield from (PlanGroup(pipelines, count) for (pipelines, _), count in promising)
        yield from itertools.starmap(PlanGroup, itertools.product(others[BOUNDED:], self._counts))

    def _nearest(self) -> CutShape:
        """Return the layout that comes nearest to fitting, of those that keep the least. Raises PlanError if there is
        none."""
        space = replace(self._space, recompute=self._space.recompute[-1:], offload=self._space.offload[-1:])
        roomy = Scorer(self.costs, self._global_batch, space, is_short_of_nothing=True)
        groups = itertools.starmap(PlanGroup, itertools.product(self._arrangements, self._counts))
        shapes = (shape for group in groups for shape in itertools.islice(self._shapes(group), self._limits.per_group))
        zeros = ((shape, shape.zero_stages(self._space.zero)[-1:]) for shape in shapes)
        layouts = (roomy.score(replace(shape, zero=zero)) for shape, highest in zeros for zero in highest)

        def shortage(layout: CutShape) -> float:
            lacking = []
            for stage in layout.all_stages:
                how = stage.variant
                needs = self.costs.needs(stage.shape, how.recompute, how.row_chunks, how.offload)
                lacking.append(needs.device_bytes(stage.blocks) - self._pools[stage.pool].memory_bytes)
            return max(lacking)

        if nearest := min(filter(None, layouts), key=shortage, default=None):
            return nearest
        kind = "plan" if self._space.cut == BEST else f"{self._space.cut} plan"
        raise PlanError(
            f"no {kind} of {self._cluster.describe()} for {self._global_batch} rows of a step and"
            f" {self._setup.model.num_layers} blocks uses all devices; set train.global_batch to a multiple of"
            " their number, or train on fewer"
        )

    def _is_spent(self, share: float) -> bool:
        """Say whether a share of the budget, or of the time for scoring, is over."""
        budget = self._limits.scored
        return (budget is not None and self._num_scored >= budget * share) or self._is_over(SCORING_SHARE * share)

    def _shapes(self, group: PlanGroup) -> Iterator[Shape]:
        """Yield the shapes of a group, those of the best choices first."""
        pipelines, microbatches = group
        if self._space.cut == EVEN:
            slots = [self._space.num_slots(*of) for of in zip(self._pools, self.costs.grids, strict=True)]
            rows, num_blocks = self._global_batch // microbatches, self._setup.model.num_layers
            for choices in even_choices(pipelines, slots, num_blocks, rows):
                yield Shape(pipelines, choices, microbatches, 1)
            return
        lists = [self._shortlists.choices(microbatches, pool, row, pipelines) for row in pipelines for pool in row]
        for numbers in sorted(itertools.product(*(range(len(result)) for result in lists)), key=sum):
            resolved = iter(result[number] for result, number in zip(lists, numbers, strict=True))
            choices = tuple(tuple(next(resolved) for _ in row) for row in pipelines)
            yield Shape(pipelines, choices, microbatches, 1)

    def _score(self, shape: Shape) -> float:
        """Score a shape with each ZeRO stage that may pay; return the least seconds.

        One that cannot be near the best so far counts as scored, and as one that does not fit.
        """
        may_skip = self._limits.scored is not None and self._space.cut == BEST
        if may_skip and self.scorer.optimistic_seconds(shape) > self._best_score * (1 + ESTIMATE_ERROR):
            self._num_scored += 1
            self._num_skipped += 1
            return math.inf
        least, is_short = math.inf, False
        for zero in sorted(shape.zero_stages(self._space.zero), key=lambda zero: (zero != 1, zero)):
            if not self._may_pay(zero, is_short):
                continue
            self._num_scored += 1
            layout = self.scorer.score(replace(shape, zero=zero))
            if zero == 1:
                is_short = layout is None or layout.is_short_of_memory
            if layout is not None:
                self.layouts.append(layout)
                self._simulate_first(layout)
                least = min(least, layout.seconds)
        self._best_score = min(self._best_score, least)
        return least

    def _may_pay(self, zero: int, is_short: bool) -> bool:
        """Say whether a ZeRO stage may be faster than 1, where that is allowed and was short of memory or not: 0 needs
        more memory; 2 and 3 exchange more, and pay where memory is short alone."""
        if 1 not in self._space.zero or zero == 1:
            return True
        return is_short if zero >= 2 else not is_short

    # ---- simulating --------------------------------------------------------------------------------------------------

    def _predictor(self, plan: Plan, setup: Setup, like: Predictor | None) -> Predictor:
        return Predictor(setup, plan, self._cluster, prices=self.costs.prices, like=like)

    def _simulate(self, layout: CutShape) -> SimulatedPlan | None:
        """Return the fastest of a layout by 1F1B, that with cuts inside of blocks, and each of both with extra warm-up;
        None where it does not fit, or has more passes than a plan may have.

        Where the number of simulations is not limited, other schedules too.
        """
        plan = self.scorer.plan(layout)
        try:
            check_passes(plan)
        except PlanError as error:
            self._shortage = self._shortage or str(error)
            return None
        # Which number of parts of products is the best depends on the whole plan: those that are for a grid are tried.
        counts = {self.costs.part_count(stage.pool, stage.choice.grid) for stage in layout.all_stages}
        predictor, prediction = predict_in_parts(self._setup_of(plan), plan, partial(self._predictor, plan), counts)
        if not prediction.fits:
            shortage = format_shortage(prediction.memory, prediction.host_shortage)
            self._shortage = self._shortage or (
                f"no plan of {self._cluster.describe()} fits in memory; the nearest ({plan.describe()}) does not:"
                f" {shortage}; use more devices, or shorter sequences (data.sequence_length is {self._setup.positions})"
            )
            return None
        plain = SimulatedPlan(layout, predictor, prediction)
        cuts = [plain, *(self._changed(plain, cuts_inside_blocks) if self._space.cut == BEST else ())]
        plans = [*cuts, *(each for cut in cuts for each in self._changed(cut, more_in_flight))]
        if self._limits.simulated is None:
            plans += [each for cut in cuts for each in self._rescheduled(cut)]
        return min(plans, key=_by_seconds)

    def _rescheduled(self, base: SimulatedPlan) -> Iterator[SimulatedPlan]:
        """Yield a plan by other schedules: of each as much as makes it faster still, or all where the number of
        simulations is not limited."""
        for change in self._schedules:
            last = base.seconds
            for each in self._changed(base, change):
                yield each
                if each.seconds >= last and self._limits.simulated is not None:
                    break
                last = each.seconds

    def _changed(self, base: SimulatedPlan, change: Change) -> Iterator[SimulatedPlan]:
        """Yield what a change makes of a plan without extra warm-up, where that fits."""
        plan, predictor = base.plan, base.predictor
        if any(tile.extra_warmup for tile in plan.tiles):
            plan = replace(plan, tiles=tuple(replace(tile, extra_warmup=0) for tile in plan.tiles))
            predictor = self._predictor(plan, predictor.setup, predictor)
        for plan in change(predictor):
            predictor = self._predictor(plan, base.predictor.setup, base.predictor)
            if all(stage.fits for stage in predictor.memory) and (prediction := predictor.predict()).fits:
                yield SimulatedPlan(base.layout, predictor, prediction, base.seconds)

    def _simulate_layouts(self) -> tuple[list[SimulatedPlan], bool]:
        """Return the plans that fit of the sorted layouts, the fastest first, and whether all layouts were simulated.

        At least a few are, and at most as many as the limits say: in between those that are expected to be about as
        fast as the best. Of the most promising other schedules are simulated.
        """
        most, result, all_done = self._limits.simulated, [self._first] if self._first else [], True
        for number, layout in enumerate(self.layouts):
            if self._first and layout is self._first.layout:
                continue
            best = min((max(each.seconds, each.layout.seconds) for each in result), default=math.inf)
            is_slower = layout.seconds > best * (1 + ESTIMATE_ERROR)
            is_enough = most is not None and (len(result) >= most or (is_slower and len(result) >= LEAST_SIMULATED))
            if (result and is_enough) or ((result or number >= LEAST_SIMULATED) and self._is_over(SIMULATING_SHARE)):
                all_done = False
                break
            result += filter(None, [self._simulate(layout)])
        if most is not None:
            result, is_cut = self._reschedule(result)
            all_done = all_done and not is_cut
        return sorted(result, key=_by_seconds), all_done

    def _reschedule(self, plans: Sequence[SimulatedPlan]) -> tuple[list[SimulatedPlan], bool]:
        """Return simulated plans, and those of other layouts that may be the fastest by another schedule, each by its
        best schedule; and whether more layouts were left to look at."""
        every: dict[int, CutShape | SimulatedPlan] = {id(layout): layout for layout in self.layouts}
        simulated = {id(plan.layout): plan for plan in plans}
        promising = sorted((every | simulated).values(), key=_if_rescheduled)
        best, num_checked, num_rescheduled, is_cut = min(map(_by_seconds, plans), default=math.inf), 0, 0, False
        short: set[tuple[int, PoolUse, int]] = set()  # uses of pools that lack memory, for some microbatches
        for base in promising:
            if _if_rescheduled(base) >= best:
                break
            if num_checked == CHECKED or num_rescheduled == RESCHEDULED or self._is_over(1.0):
                is_cut = True
                break
            layout = base if isinstance(base, CutShape) else base.layout
            uses = {(stage.pool, stage.choice, layout.shape.microbatches) for stage in layout.all_stages}
            if not uses.isdisjoint(short):
                is_cut = True
                continue
            num_checked += 1
            lacking = self._lacking_memory(layout)
            short |= {use for use in uses if not lacking.isdisjoint(self._pools[use[0]].families)}
            plan = None if lacking else self._simulate(layout) if isinstance(base, CutShape) else base
            if plan is not None:
                simulated[id(layout)] = min((plan, *self._rescheduled(plan)), key=_by_seconds)
                best, num_rescheduled = min(best, simulated[id(layout)].seconds), num_rescheduled + 1
        return list(simulated.values()), is_cut

    def _lacking_memory(self, layout: CutShape) -> set[str]:
        """Return the families that lack memory by the last of the other schedules of a layout; none if one fits."""
        plan, lacking = self.scorer.plan(layout), {""}
        predictor = self._predictor(plan, self._setup_of(plan), None)
        for changed in itertools.chain.from_iterable(change(predictor) for change in self._schedules):
            stages = self._predictor(changed, predictor.setup, predictor).memory
            lacking = {str(stage.tile.family) for stage in stages if not stage.fits}
            if not lacking:
                break
        return lacking
