"""Times the plans that a search thinks best, by simulation. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.config.cluster import Cluster
from hpctrain.plan.tiling import Plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.cut import SearchLayout
from hpctrain.planner.extra_warmup import with_extra_warmup
from hpctrain.planner.predictor import Prediction, Predictor
from hpctrain.planner.score import Scorer
from hpctrain.sharding.intervals import Interval

FEW = 5
"""So many are timed at least."""
CLOSED_FORM_ERROR = 0.03
"""By more than this the closed form is rarely wrong: plans that are worse by it are not timed."""
MIB = 2**20


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan that fits, and how long it takes."""

    layout: SearchLayout
    plan: Plan
    prediction: Prediction
    delay_seconds: float | None = None
    """Of a step with no more microbatches in flight than by 1F1B, if it has more because that is slower."""

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds


class Timer:
    """Times plans."""

    def __init__(self, setup: Setup, cluster: Cluster, scorer: Scorer, limit: int | None, is_over: Callable[[], bool]):
        """At most `limit` are timed; None: all that may be the fastest. `is_over` says that time is."""
        self._setup, self._cluster, self._scorer, self._limit, self._is_over = setup, cluster, scorer, limit, is_over
        self.shortage = ""
        """What the first plan lacked that did not fit after all."""

    def _predictor(self, plan: Plan) -> Predictor:
        return Predictor(self._setup, plan, self._cluster, network=self._scorer.costs.network)

    def one(self, layout: SearchLayout) -> SimulatedPlan | None:
        """Return a layout with its time, cut into whole blocks where it does not fit else; None where neither does."""
        return self._one(layout) or (self._one(layout.whole) if layout.whole else None)

    def _one(self, layout: SearchLayout) -> SimulatedPlan | None:
        plan = self._scorer.plan(layout)
        predictor = self._predictor(plan)
        prediction = predictor.predict()
        if prediction.fits:
            return self._with_extra_warmup(SimulatedPlan(layout, plan, prediction), predictor)
        if not self.shortage:
            stage = max(prediction.memory, key=lambda s: s.memory.total - s.available_bytes)
            which = stage.tile.items, stage.tile.family, stage.memory.total, stage.available_bytes
            self.shortage = format_shortage(self._cluster, self._setup, plan, *which)
        return None

    def _with_extra_warmup(self, timed: SimulatedPlan, predictor: Predictor) -> SimulatedPlan:
        """Return a plan with more microbatches in flight in place of the same one, if it fits and is faster."""
        plan = with_extra_warmup(timed.plan, predictor.costs, predictor.headroom)
        if plan is None:
            return timed
        prediction = predictor.for_plan(plan).predict()
        other = SimulatedPlan(timed.layout, plan, prediction, timed.seconds)
        return min(timed, other, key=lambda each: (not each.prediction.fits, each.seconds))

    def time(
        self, layouts: Sequence[SearchLayout], known: SimulatedPlan | None = None
    ) -> tuple[list[SimulatedPlan], bool]:
        """Return those that were timed and fit, the fastest first, and whether no other one can be faster.

        `layouts` are in the order of what the closed form says; `known` is one of them, if it was timed before.
        """

        def by_seconds(timed: SimulatedPlan) -> float:
            return timed.seconds

        result = [known] if known else []
        best, all_done = min((timed.seconds for timed in result), default=math.inf), True
        for number, layout in enumerate(layouts):
            if known and known.layout in (layout, layout.whole):
                continue
            is_late = not result and number >= FEW and self._is_over()
            if is_late or (result and self._is_enough(len(result), layout.seconds / best - 1)):
                all_done = all(self._scorer.bound(other) >= best for other in layouts[number:])
                break
            if len(result) >= FEW and self._scorer.bound(layout) >= best:
                continue
            if timed := self.one(layout):
                result.append(timed)
                best = min(best, timed.seconds)
        of_whole = (timed.layout.whole for timed in sorted(result, key=by_seconds)[: 1 if self._limit else None])
        result += filter(None, (self._one(layout) for layout in of_whole if layout))
        return sorted(result, key=by_seconds), all_done

    def _is_enough(self, num_timed: int, slower_share: float) -> bool:
        """Say whether no more plans are timed, the next of which is expected to be slower by so much."""
        if self._is_over():
            return True
        if self._limit is None:
            return False
        return num_timed >= self._limit or (num_timed >= FEW and slower_share > CLOSED_FORM_ERROR)


def format_shortage(
    cluster: Cluster, setup: Setup, plan: Plan, items: Interval, family: str, needed: float, available: int
) -> str:
    """Return the message that a plan does not fit in memory."""
    return (
        f"no plan of {cluster.describe()} fits in memory; the nearest ({plan.describe()}) needs"
        f" {needed / MIB:,.1f} MiB for items {list(items)} on a rank of family '{family}', which has"
        f" {available / MIB:,.1f} MiB: {(needed - available) / MIB:,.1f} MiB too few; use more devices,"
        f" or shorter sequences (data.sequence_length is {setup.positions})"
    )
