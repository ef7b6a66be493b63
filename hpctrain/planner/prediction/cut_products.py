"""Selects the number of parts into which a plan cuts products next to collectives, so that each hides one. Pure."""

from collections.abc import Callable, Collection
from dataclasses import replace

from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prices.prices import PART_COUNTS, part_counts
from hpctrain.planner.prices.setup import Setup

PAYS = 0.99
"""Share of the step without cut products; a cut plan must be predicted to take less, as predictions are not exact."""


def predict_in_parts(
    setup: Setup,
    plan: Plan,
    make: Callable[[Setup, Predictor | None], Predictor],
    promising: Collection[int] = PART_COUNTS,
) -> tuple[Predictor, Prediction]:
    """Predict a step with the best number of parts for a plan.

    The first number is kept unless another makes the step shorter than `PAYS` of it. `make` makes a predictor of the
    plan for a setup, which reuses what a given predictor computed. The setup of the returned predictor has the selected
    number. After the first only `promising` numbers are tried.
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
