"""Times the plans that a search thinks best, by simulation. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hpctrain.config.cluster import Cluster
from hpctrain.plan.tiling import Plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.cut import SearchLayout
from hpctrain.planner.extra_warmup import with_extra_warmup
from hpctrain.planner.parts import predict_in_parts
from hpctrain.planner.predictor import Prediction, Predictor
from hpctrain.planner.score import Scorer
from hpctrain.sharding.intervals import Interval

FEW = 5
"""So many are timed at least."""
FEW_MORE = 3
"""So many interleaved ones are timed at most, where the number is limited."""
CLOSED_FORM_ERROR = 0.03
"""By more than this the closed form is rarely wrong: plans that are worse by it are not timed."""
MIB = 2**20


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan that fits, and how long it takes."""

    layout: SearchLayout
    plan: Plan
    prediction: Prediction
    plain_seconds: float | None = None
    """Of a step by 1F1B with no extra warm-up, if that is slower than the plan's own schedule."""

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

    def _predictor(self, plan: Plan, setup: Setup) -> Predictor:
        return Predictor(setup, plan, self._cluster, network=self._scorer.costs.network)

    def one(self, layout: SearchLayout) -> SimulatedPlan | None:
        """Return a layout with its time, cut into whole blocks where it does not fit else; None where neither does."""
        return self._one(layout) or (self._one(layout.whole) if layout.whole else None)

    def _one(self, layout: SearchLayout) -> SimulatedPlan | None:
        plan = self._scorer.plan(layout)
        counts = {self._scorer.costs.part_count(placed.pool, placed.choice.grid) for placed in layout.all_stages}
        predictor, prediction = predict_in_parts(self._setup, plan, partial(self._predictor, plan), counts)
        if prediction.fits:
            return self._with_best_schedule(SimulatedPlan(layout, plan, prediction), predictor)
        if not self.shortage and prediction.host_shortage:
            self.shortage = f"no plan of {self._cluster.describe()} fits in memory: {prediction.host_shortage}"
        if not self.shortage:
            stage = max(prediction.memory, key=lambda s: s.memory.total - s.available_bytes)
            which = stage.tile.items, stage.tile.family, stage.memory.total, stage.available_bytes
            self.shortage = format_shortage(self._cluster, self._setup, plan, *which)
        return None

    def _with_best_schedule(self, timed: SimulatedPlan, predictor: Predictor) -> SimulatedPlan:
        """Return the same tiles by the fastest schedule that fits: 1F1B, with more in flight, or ZB-H1."""
        result, predictors = [timed], []
        if plan := with_extra_warmup(timed.plan, predictor.costs, predictor.headroom):
            predictors.append(predictor.for_plan(plan))
        if plan := zero_bubble(timed.plan):
            predictors.append(self._predictor(plan, predictor.setup))
        for other in predictors:
            prediction = other.predict()
            if prediction.fits:
                result.append(SimulatedPlan(timed.layout, other.plan, prediction, timed.seconds))
        return min(result, key=_by_seconds)

    def time(
        self, layouts: Sequence[SearchLayout], known: SimulatedPlan | None = None
    ) -> tuple[list[SimulatedPlan], bool]:
        """Return those that were timed and fit, the fastest first, and whether no other one can be faster.

        `layouts` are in the order of what the closed form says; `known` is one of them, if it was timed before.
        """
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
        of_whole = (timed.layout.whole for timed in sorted(result, key=_by_seconds)[: 1 if self._limit else None])
        result += filter(None, (self._one(layout) for layout in of_whole if layout))
        return sorted(result, key=_by_seconds), all_done

    def improve(
        self, layouts: Sequence[SearchLayout], plans: Sequence[SimulatedPlan]
    ) -> tuple[list[SimulatedPlan], bool]:
        """Return `plans` and those of other layouts that are expected to be about as fast as the best of them, the
        fastest first, and whether no other one can be faster.

        `layouts` are in the order of what the closed form says. A few are timed, if the number is limited.
        """
        result = list(plans)
        for number, layout in enumerate(layouts):
            best = min(timed.seconds for timed in result)
            is_slower = self._limit is not None and layout.seconds > best * (1 + CLOSED_FORM_ERROR)
            is_late = self._limit is not None and len(result) - len(plans) >= min(FEW_MORE, self._limit)
            if is_slower or is_late or self._is_over():
                is_complete = all(self._scorer.bound(other) >= best for other in layouts[number:])
                return sorted(result, key=_by_seconds), is_complete
            if self._scorer.bound(layout) < best and (timed := self.one(layout)):
                result.append(timed)
        return sorted(result, key=_by_seconds), True

    def _is_enough(self, num_timed: int, slower_share: float) -> bool:
        """Say whether no more plans are timed, the next of which is expected to be slower by so much."""
        if self._is_over():
            return True
        if self._limit is None:
            return False
        return num_timed >= self._limit or (num_timed >= FEW and slower_share > CLOSED_FORM_ERROR)


def zero_bubble(plan: Plan) -> Plan | None:
    """Return a plan by ZB-H1 in place of 1F1B; None where tiles are in no pipeline, or must do backward passes whole.

    Tiles with row chunks, ZeRO 2 or 3, or activations in host memory have no memory for the operands of dW.
    """
    splits = all(tile.zero < 2 and tile.row_chunks == 1 and not tile.offloads_activations for tile in plan.tiles)
    is_pipeline = any(map(plan.upstream, plan.tiles)) and all(
        len(plan.virtual_stages(tile)) == 1 for tile in plan.tiles
    )
    return replace(plan, schedule="zb-h1") if splits and is_pipeline and plan.microbatches > 1 else None


def _by_seconds(timed: SimulatedPlan) -> float:
    return timed.seconds


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
