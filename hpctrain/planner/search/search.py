"""Finds the plan of a job on a cluster that is predicted to take the least time. It needs no device.

One queue, the most promising candidate first. A candidate has one of four levels, each with seconds and their error:

1. a *group* of shapes (`space.py`) that have the arrangement of pools and the number of microbatches in common; the
   best choices come first (`shortlist.py`). Its seconds are the least of the shapes that were scored last;
2. a shape that is cut (`cut.py`) and *scored* (`score.py`);
3. a plan that is *simulated* (`changes.py`), instruction by instruction, with cuts inside of blocks where these pay. It
   must fit by `prediction/memory.py`. That alone decides;
4. a *changed* plan (`changes.py`): extra warm-up, other schedules.

Each has about the least seconds that may come of it, by the error of its level. Of shapes that were not scored nothing
is known: groups come first, in the order of their seconds. Of the layouts half are simulated in the order of the
estimate, the others in the order of what other schedules may make of them. Refining a candidate makes candidates of the
next level. The search ends where no candidate may be faster than the best plan, or the budget is spent. The answer
depends on the budget, not on the machine; a limit in seconds ends it earlier. `planner/choose.py` and
`planner/explain.py` say why a plan was chosen.
"""

import gc
import heapq
import itertools
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.changes import SimulatedPlan, Simulator
from hpctrain.planner.search.cut import CutShape
from hpctrain.planner.search.pools import Pool, pools_of
from hpctrain.planner.search.score import Scorer
from hpctrain.planner.search.shortlist import Shortlists
from hpctrain.planner.search.space import BEST, EVEN, Pipelines, PoolUse, Shape, Space, even_choices
from hpctrain.planner.search.stages import StageCosts

SCORED, SIMULATED = 2000, 13
"""Numbers of plans that are scored, and simulated, unless a user limits them."""
ROUND_GROWS = 4
"""Factor between the plans that are scored in all until the end of a round and of the next one, from `SCORED` on. Each
round simulates anew."""
PER_GROUP = 100
"""Approximate number of shapes of a group that are scored: the choices for a pool are limited, see `Shortlists`."""
AT_ONCE = 8
"""How many shapes of a group are scored before it is compared with the other candidates again."""
FIRST_OF_GROUP = 3
"""How many shapes of a group are scored at first, until one fits in memory."""
LOOKING_SHARE = 0.5
"""Share of the budget for a first look at the groups, one fitting shape of each."""
BOUNDED = 500
"""Number of arrangements that are ranked by their promise: six pools have 8,463. Those with one order of the same pools
come first, and of these those with the fewest unused pools."""
ORDER_SHARE = 0.05
"""How much less each further order of the same pools promises: five pools in one pipeline have 120."""
SCORING_SHARE, SIMULATING_SHARE = 0.6, 0.85
"""Shares of a limit in seconds at which scoring, and simulating by 1F1B, ends."""
MOST_EQUIVALENT = 4
"""Maximum number of simulated layouts that differ by tensor grids and replicas alone, which the estimate ranks well."""
TRIED = 5
"""Number of layouts that are simulated, whatever the limits, while none fits. The first are simulated at once, so that
there is a plan."""

ESTIMATED_SHARE = 0.5
"""Share of the simulated layouts that the estimate by 1F1B chooses. What other schedules save chooses the rest."""
ESTIMATE_ERROR = 0.03
"""Relative error of the estimate that is rarely exceeded."""


@dataclass(frozen=True)
class Limits:
    """The limits of a search; `None`: it goes to the end."""

    scored: int | None = SCORED
    simulated: int | None = SIMULATED
    """How many layouts that fit are simulated. None: all are, whatever the estimate says of them, with all changes."""
    per_group: int | None = PER_GROUP
    seconds: float | None = None
    known_seconds: float = math.inf
    """The step of a plan that is known: after a first plan, only what may be faster is refined."""


SCORE_ALL = Limits(scored=None, simulated=40, per_group=None)
"""All shapes are scored, and up to 40 layouts simulated whose estimates are within `ESTIMATE_ERROR` of the best."""


@dataclass(eq=False)
class ShapeGroup:
    """The plans with an arrangement of pools and a number of microbatches in common, of which some were scored."""

    shapes: Iterator[Shape]
    """Those that were not scored yet."""
    seconds: float = math.inf
    """The least score of the last shapes that were scored; infinite where none of these fits."""


Candidate = Iterator[ShapeGroup] | ShapeGroup | CutShape | SimulatedPlan


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    plans: tuple[SimulatedPlan, ...]
    """The fastest first; of each layout the fastest of its changes."""
    pools: tuple[Pool, ...]
    searched: dict[str, int]
    is_complete: bool
    """Whether every plan of the space was simulated, so that none is faster. An estimate has an error and no bound: it
    proves nothing of the plans that it left out."""
    wall_seconds: float
    first_plan_seconds: float
    """Seconds until the first simulated plan that fits."""
    least_by_arrangement: dict[Pipelines, float]
    """Least seconds by the estimate, for each arrangement of pools that fits."""
    least_by_microbatches: dict[int, float]

    @property
    def best(self) -> SimulatedPlan:
        return self.plans[0]


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


class Search:
    """A search in flight; see `search`."""

    def __init__(self, setup, global_batch, cluster, families, space, limits, clock, setup_of=None):
        self._setup, self._cluster, self._space, self._limits, self._clock = setup, cluster, space, limits, clock
        self._started = clock()
        self._pools = pools_of(cluster, families or list(cluster.families), setup)
        # Counts with about one row of a microbatch per node come first: they fit in memory, and are near the best.
        num_nodes = sum(len(pool.nodes) for pool in self._pools)
        counts = space.microbatch_counts(global_batch)
        self._counts = sorted(counts, key=lambda m: abs(math.log(global_batch / m / num_nodes)))
        self._arrangements = space.arrangements(len(self._pools))
        self._global_batch = global_batch
        self.costs = StageCosts(setup, cluster, self._pools)
        self.scorer = Scorer(self.costs, global_batch, space)
        # Choices that use all devices are those of the restricted spaces. The larger space has them as candidates, too.
        is_part = space.cut == BEST and limits.per_group is not None
        restrictions = (False, True) if is_part else (False,)
        self._shortlists = [Shortlists(self.scorer, limits.per_group, uses_all) for uses_all in restrictions]
        self._simulator = Simulator(self.scorer, setup_of or (lambda _: setup), tries_all=limits.simulated is None)
        self._queue: list[tuple[tuple[float, float], int, Candidate]] = []
        self.layouts: list[CutShape] = []
        self._num_equivalent: Counter[tuple] = Counter()
        """How many layouts were simulated of each arrangement, number of microbatches and depth of each pool."""
        self._plans: dict[CutShape, SimulatedPlan] = {}
        """The fastest plan of each layout that was simulated and fits."""
        self._best_score = self._best_seconds = math.inf
        """The least of all layouts by the estimate, and of all plans."""
        self._first_after: float | None = None
        self.num_simulated, self._by_estimate = 0, True
        self._num_pushed = self._num_scored = self._num_groups = 0
        self._is_complete = True
        self._left: list[Candidate] = []
        """The candidates for which the budget did not suffice."""
        self._num_before = 0
        """How many layouts were simulated, and fit, before this round."""

    def run(self) -> SearchResult:
        """Search, and return the plans that were simulated with what was learnt. Raises PlanError where none fits."""
        with _without_garbage_collector():
            self._left.append(self._groups())
            for most in self._budgets():
                self._begin_round(most)
                self._refine_most_promising()
                if self._is_over(SIMULATING_SHARE):
                    break
        if not self._plans and not self._simulator.shortage:
            # By the estimate nothing fits. Simulating what comes nearest says what it lacks, if it does not fit either.
            self._push(self._refined(self._nearest()))
        if not self._plans:
            raise PlanError(self._simulator.shortage)
        seconds = self._clock() - self._started
        return SearchResult(
            plans=tuple(sorted(self._plans.values(), key=_by_seconds)),
            pools=self._pools,
            searched={
                "groups": self._num_groups,
                "scored": self._num_scored,
                "fitting": len(self.layouts),
                "timed": len(self._plans),
            },
            is_complete=self._is_complete and not self._left and not any(lists.left_out for lists in self._shortlists),
            wall_seconds=seconds,
            first_plan_seconds=seconds if self._first_after is None else self._first_after,
            least_by_arrangement=self._least(lambda shape: shape.pipelines),
            least_by_microbatches=self._least(lambda shape: shape.microbatches),
        )

    def _least(self, key: Callable[[Shape], object]) -> dict:
        """Return the least seconds of all layouts by something of their shapes."""
        least: dict = {}
        for layout in sorted(self.layouts, key=_by_seconds):
            least.setdefault(key(layout.shape), layout.seconds)
        return least

    # ---- the queue ---------------------------------------------------------------------------------------------------

    def _budgets(self) -> list[int | None]:
        """Return how many plans are scored at the end of each round.

        A large budget begins with the rounds of a smaller one: else layouts that only the estimate prefers would take
        the place of those that a smaller budget simulates.
        """
        most = self._limits.scored
        rounds = itertools.accumulate(itertools.repeat(ROUND_GROWS), operator.mul, initial=SCORED)
        return [most] if most is None else [*itertools.takewhile(lambda scored: scored < most, rounds), most]

    def _begin_round(self, scored: int | None) -> None:
        """Take up the candidates that the rounds so far had no budget for."""
        self._limits = replace(self._limits, scored=scored)
        self._by_estimate, self._num_before = self._limits.simulated is not None, len(self._plans)
        self.num_simulated = 0
        self._num_equivalent.clear()
        left, self._left = self._left, []
        self._push(left)

    def _refine_most_promising(self) -> None:
        """Refine candidates until none left may be faster than the best plan, or the budget is spent."""
        while self._queue:
            if self._by_estimate and self.num_simulated >= ESTIMATED_SHARE * (self._limits.simulated or math.inf):
                self._by_estimate = False
                self._queue = [(self._priority(candidate), number, candidate) for _, number, candidate in self._queue]
                heapq.heapify(self._queue)
            _, _, candidate = heapq.heappop(self._queue)
            fastest = min(self._best_seconds, self._known_seconds)
            if self._least_seconds(candidate) >= fastest:
                self._is_complete = False
            elif not self._is_affordable(candidate):
                self._left.append(candidate)
            else:
                self._push(self._refined(candidate))

    @property
    def _known_seconds(self) -> float:
        return self._limits.known_seconds if self._plans else math.inf

    def _push(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if isinstance(candidate, SimulatedPlan):
                self._note(candidate)
                if not candidate.left:
                    continue
            self._num_pushed += 1  # of equals the first comes first
            heapq.heappush(self._queue, (self._priority(candidate), self._num_pushed, candidate))

    def _note(self, plan: SimulatedPlan) -> None:
        self._plans[plan.layout] = min(self._plans.get(plan.layout, plan), plan, key=_by_seconds)
        self._best_seconds = min(self._best_seconds, plan.seconds)
        if self._first_after is None:
            self._first_after = self._clock() - self._started

    def _priority(self, candidate: Candidate) -> tuple[float, float]:
        """Return two sort keys: about the least seconds that may come of a candidate, and seconds to order equal
        ones.

        Of the layouts that are simulated, a share is chosen by the estimate alone; then what other schedules may save
        of their bubbles counts. Either order misses plans that the other one finds.
        """
        if isinstance(candidate, ShapeGroup):
            return 0.0, candidate.seconds
        is_first = not self._plans and len(self.layouts) <= TRIED  # so that there is a plan
        if not isinstance(candidate, (CutShape, SimulatedPlan)) or is_first:
            return 0.0, 0.0
        if self._limits.simulated is None:
            return 0.0, candidate.seconds
        if isinstance(candidate, CutShape):
            least = candidate.seconds * (1 - ESTIMATE_ERROR) if self._by_estimate else self._least_seconds(candidate)
            return least, candidate.seconds
        return self._least_seconds(candidate), candidate.seconds

    def _least_seconds(self, candidate: Candidate) -> float:
        """Return about the least seconds that may come of a candidate; 0 where nothing is known, or all are tried."""
        if self._limits.simulated is None:
            return 0.0
        if isinstance(candidate, CutShape):
            return candidate.seconds * (1 - ESTIMATE_ERROR) - candidate.saved_seconds
        if isinstance(candidate, SimulatedPlan):
            return min(map(candidate.optimistic_seconds, candidate.left))
        return 0.0

    def _is_affordable(self, candidate: Candidate) -> bool:
        """Say whether the budget suffices to refine a candidate; it always does for a first plan."""
        if isinstance(candidate, SimulatedPlan):
            return not self._is_over(1.0)
        if isinstance(candidate, CutShape):
            most, is_over = self._limits.simulated, self._is_over(SIMULATING_SHARE)
            if not self._plans:
                return not is_over or self.num_simulated < TRIED
            num_equivalent = self._num_equivalent[candidate.shape.depths]
            num_plans = len(self._plans) - self._num_before
            return most is None or not (is_over or num_plans >= most or num_equivalent >= MOST_EQUIVALENT)
        share = 1.0 if isinstance(candidate, ShapeGroup) else LOOKING_SHARE
        most, is_over = self._limits.scored, self._is_over(SCORING_SHARE * share)
        return not self.layouts or not (is_over or (most is not None and self._num_scored >= most * share))

    def _is_over(self, share: float) -> bool:
        seconds = self._limits.seconds
        return seconds is not None and self._clock() - self._started > seconds * share

    def _refined(self, candidate: Candidate) -> Iterable[Candidate]:
        if isinstance(candidate, SimulatedPlan):
            return self._simulator.changed(candidate)
        if isinstance(candidate, CutShape):
            self.num_simulated += 1
            self._num_equivalent[candidate.shape.depths] += 1
            return self._simulator.simulated(candidate)
        if isinstance(candidate, ShapeGroup):
            return self._scored(candidate, AT_ONCE)
        return self._looked_at(candidate)

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _looked_at(self, groups: Iterator[ShapeGroup]) -> Iterator[Candidate]:
        """Yield the first layouts of the next group, that group, and the iterator of the others."""
        if group := next(groups, None):
            self._num_groups += 1
            yield from self._scored(group, FIRST_OF_GROUP, until_one_fits=True)
            yield groups

    def _scored(self, group: ShapeGroup, count: int, until_one_fits: bool = False) -> Iterator[Candidate]:
        """Yield the layouts of the next shapes of a group, and the group as long as there are more."""
        group.seconds, num_taken = math.inf, 0
        for shape in itertools.islice(group.shapes, count):
            num_taken += 1
            for layout in self._layouts_of(shape):
                yield layout
                group.seconds = min(group.seconds, layout.seconds)
            if group.seconds < math.inf and until_one_fits:
                break
        if num_taken:
            yield group

    def _groups(self) -> Iterator[ShapeGroup]:
        """Yield all groups. First all pools side by side, and as one pipeline in the order of their numbers.

        Then the others: those first whose arrangement and number of microbatches promise the shortest steps. The
        former is bounded by one shape of each; the latter is known when the first groups were looked at.
        """
        pools = range(len(self._pools))
        simplest = tuple((pool,) for pool in pools), (tuple(pools),)
        first = [pipelines for pipelines in dict.fromkeys(simplest) if pipelines in self._arrangements]
        yield from itertools.starmap(self._group, itertools.product(first, self._counts))
        by_count = self._least(lambda shape: shape.microbatches)
        usual = min(by_count, key=by_count.__getitem__, default=self._counts[0])

        def optimistic(pipelines: Pipelines) -> float:
            shapes = itertools.islice(self._shapes(pipelines, usual), 1)
            return min(map(self.scorer.optimistic_seconds, shapes), default=math.inf)

        num_orders: Counter[tuple] = Counter()
        others = []
        for pipelines in (each for each in self._arrangements if each not in first):
            pools_of_each = tuple(sorted(tuple(sorted(pools)) for pools in pipelines))
            others.append((num_orders[pools_of_each], -sum(map(len, pipelines)), pipelines))
            num_orders[pools_of_each] += 1
        others.sort()
        bounded = [(pipelines, optimistic(pipelines) * (1 + ORDER_SHARE * n)) for n, _, pipelines in others[:BOUNDED]]
        promising = itertools.product(bounded, self._counts)
        promising = sorted(promising, key=lambda each: each[0][1] * by_count.get(each[1], math.inf))
        yield from (self._group(pipelines, count) for (pipelines, _), count in promising)
        yield from itertools.starmap(
            self._group, itertools.product((each for *_, each in others[BOUNDED:]), self._counts)
        )

    def _group(self, pipelines: Pipelines, microbatches: int) -> ShapeGroup:
        return ShapeGroup(self._shapes(pipelines, microbatches))

    def _shapes(self, pipelines: Pipelines, microbatches: int) -> Iterator[Shape]:
        """Yield the shapes of a group, those of the best choices first."""
        if self._space.cut == EVEN:
            slots = [self._space.num_slots(*of) for of in zip(self._pools, self.costs.grids, strict=True)]
            rows, num_blocks = self._global_batch // microbatches, self._setup.model.num_layers
            for choices in even_choices(pipelines, slots, num_blocks, rows):
                yield Shape(pipelines, choices, microbatches, 1)
            return
        combined = (self._combined(lists, pipelines, microbatches) for lists in self._shortlists)
        for choices in dict.fromkeys(itertools.chain.from_iterable(itertools.zip_longest(*combined))):
            if choices is not None:
                yield Shape(pipelines, choices, microbatches, 1)

    @staticmethod
    def _combined(
        shortlists: Shortlists, pipelines: Pipelines, microbatches: int
    ) -> Iterator[tuple[tuple[PoolUse, ...], ...]]:
        """Yield all combinations of the choices for the pools of pipelines, those of the best choices first."""
        lists = [shortlists.choices(microbatches, pool, row, pipelines) for row in pipelines for pool in row]
        for numbers in sorted(itertools.product(*(range(len(choices)) for choices in lists)), key=sum):
            chosen = iter(choices[number] for choices, number in zip(lists, numbers, strict=True))
            yield tuple(tuple(next(chosen) for _ in row) for row in pipelines)

    def _layouts_of(self, shape: Shape) -> Iterator[CutShape]:
        """Yield a shape cut and scored in each ZeRO stage that may pay and fits.

        One that cannot be near the best so far counts as scored, and as one that does not fit.
        """
        may_skip = self._limits.scored is not None and self._space.cut == BEST
        least = min(self._best_score, self._known_seconds)
        if may_skip and self.scorer.optimistic_seconds(shape) > least * (1 + ESTIMATE_ERROR):
            self._num_scored += 1
            self._is_complete = False
            return
        is_short = False
        for zero in sorted(shape.zero_stages(self._space.zero), key=lambda zero: (zero != 1, zero)):
            if not self._may_pay(zero, is_short):
                continue
            self._num_scored += 1
            layout = self.scorer.score(replace(shape, zero=zero))
            if zero == 1:
                is_short = layout is None or layout.is_short_of_memory
            if layout is not None:
                self.layouts.append(layout)
                self._best_score = min(self._best_score, layout.seconds)
                yield layout

    def _may_pay(self, zero: int, is_short: bool) -> bool:
        """Say whether a ZeRO stage may be faster than stage 1, which may be short of memory (`is_short`).

        Stage 0 needs more memory. Stages 2 and 3 exchange more, and pay only where memory is short.
        """
        if 1 not in self._space.zero or zero == 1:
            return True
        return is_short if zero >= 2 else not is_short

    def _nearest(self) -> CutShape:
        """Return the layout that comes nearest to fitting, of those that keep the least. Raises PlanError if there is
        none."""
        space = replace(self._space, recompute=self._space.recompute[-1:], offload=self._space.offload[-1:])
        scorer = Scorer(self.costs, self._global_batch, space, ignores_memory=True)
        groups = itertools.starmap(self._shapes, itertools.product(self._arrangements, self._counts))
        shapes = (shape for group in groups for shape in itertools.islice(group, self._limits.per_group))
        zeros = ((shape, shape.zero_stages(self._space.zero)[-1:]) for shape in shapes)
        layouts = (scorer.score(replace(shape, zero=zero)) for shape, highest in zeros for zero in highest)

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
