"""Selects into how many parts a plan cuts products next to collectives, so that each hides one. Pure."""

from collections.abc import Callable, Collection
from dataclasses import replace

from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prices.prices import PART_COUNTS, part_counts
from hpctrain.planner.prices.setup import Setup

PAYS = 0.99
"""Of a step without, one with rows cut must be predicted to take less than this: predictions are not exact."""


def predict_in_parts(
    setup: Setup,
    plan: Plan,
    make: Callable[[Setup, Predictor | None], Predictor],
    promising: Collection[int] = PART_COUNTS,
) -> tuple[Predictor, Prediction]:
    """Predict a step in the number of parts that is the best for a plan, if it is worth it, else in one.

    `make` makes a predictor of the plan for a setup, like another one. What is selected is in the predictor's. Only
    `promising` numbers are tried after the first.
    """
    first, *more = part_counts(setup, [tile.tensor for tile in plan.tiles])
    more = [count for count in more if count in promising]
    predictor = alone = make(replace(setup, tensor_parts=first), None)
    whole = last = predictor.predict()
    best = predictor, whole
    if whole.breakdown_seconds["tensor"] < (1 - PAYS) * whole.step_seconds:
        return best
    for count in more:
        predictor = make(replace(setup, tensor_parts=count), alone)
        prediction = predictor.predict()
        if (whole.fits and not prediction.fits) or prediction.step_seconds >= last.step_seconds:
            break
        last = prediction
        if last.step_seconds < PAYS * whole.step_seconds:
            best = predictor, last
    return best
