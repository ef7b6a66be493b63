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

    def __init__(
        self, setup_of: Callable[[Plan], Setup], cluster: Cluster, scorer: Scorer, is_over: Callable[[], bool]
    ):
        """`setup_of` returns by what a plan is timed; `is_over` says that time is."""
        self._setup_of, self._cluster, self._scorer, self._is_over = setup_of, cluster, scorer, is_over
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
        setup = self._setup_of(plan)
        predictor, prediction = predict_in_parts(setup, plan, partial(self._predictor, plan), counts)
        if prediction.fits:
            return self._with_best_schedule(SimulatedPlan(layout, plan, prediction), predictor)
        if not self.shortage and prediction.host_shortage:
            self.shortage = f"no plan of {self._cluster.describe()} fits in memory: {prediction.host_shortage}"
        if not self.shortage:
            stage = max(prediction.memory, key=lambda s: s.memory.total - s.available_bytes)
            which = stage.tile.items, stage.tile.family, stage.memory.total, stage.available_bytes
            self.shortage = format_shortage(self._cluster, setup, plan, *which)
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
        self, layouts: Sequence[SearchLayout], known: Sequence[SimulatedPlan], few: int, most: int | None
    ) -> tuple[list[SimulatedPlan], bool]:
        """Return `known` plans and those of other layouts that fit, the fastest first, and whether all were timed.

        `layouts` are in the order of what the closed form says. At least `few` plans are returned, and at most `most`
        (None: all): in between those that are expected to be about as fast as the best.
        """
        result, all_done = list(known), True
        best = min((timed.seconds for timed in result), default=math.inf)
        for number, layout in enumerate(layouts):
            if any(timed.layout in (layout, layout.whole) for timed in known):
                continue
            is_slower = layout.seconds > best * (1 + CLOSED_FORM_ERROR)
            is_enough = most is not None and (len(result) >= most or (is_slower and len(result) >= few))
            if (result and is_enough) or ((result or number >= FEW) and self._is_over()):
                all_done = False
                break
            if plan := self.one(layout):
                result.append(plan)
                best = min(best, plan.seconds)
        result.sort(key=_by_seconds)
        timed = {each.layout for each in result}
        wholes = (each.layout.whole for each in result[: 1 if most else None])
        result += filter(None, [self._one(whole) for whole in wholes if whole and whole not in timed])
        return sorted(result, key=_by_seconds), all_done


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
