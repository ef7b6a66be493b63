"""Into how many parts products next to collectives of a tensor grid are cut, where a job leaves it open. Pure.

Parts hide collectives behind products. Each is a message more and a smaller product, so that there is a best number.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from hpctrain.plan.tiling import Plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.predictor import Prediction, Predictor
from hpctrain.sharding.grid import TensorGrid

PART_COUNTS = 2, 4, 8
PAYS = 0.99
"""Of a step without, one with rows cut must be predicted to take less than this: predictions are not exact."""


def gathers_while_summing(grids: Iterable[TensorGrid]) -> bool:
    """Say whether parts have collectives of two groups in flight on any of the grids.

    Positions that y cuts are gathered while outputs are summed over x. On devices the two may wait for each other.
    """
    return any(grid.x > 1 and grid.sequence_parallel for grid in grids)


def part_counts(setup: Setup, grids: Sequence[TensorGrid]) -> tuple[int, ...]:
    """Return the numbers of parts to choose from on some grids: the given one, or 1 and those that may be better."""
    if setup.tensor_parts is not None:
        return (setup.tensor_parts,)
    is_open = "tensor" in setup.overlaps and "forward" not in setup.overlaps
    if is_open and any(grid.cuts_weights for grid in grids) and not gathers_while_summing(grids):
        return 1, *PART_COUNTS
    return (1,)


def predict_in_parts(
    setup: Setup, plan: Plan, make: Callable[[Setup], Predictor], promising: Collection[int] = PART_COUNTS
) -> tuple[Predictor, Prediction]:
    """Predict a step in the number of parts that is the best for a plan, if it is worth it, else in one.

    `make` makes a predictor of the plan for a setup. What is selected is in the predictor's. Only `promising` numbers
    are tried after the first.
    """
    first, *more = part_counts(setup, [tile.tensor for tile in plan.tiles])
    more = [count for count in more if count in promising]
    predictor = make(replace(setup, tensor_parts=first))
    whole = last = predictor.predict()
    best = predictor, whole
    if whole.breakdown_seconds["tensor"] < (1 - PAYS) * whole.step_seconds:
        return best
    for count in more:
        predictor = make(replace(setup, tensor_parts=count))
        prediction = predictor.predict()
        if (whole.fits and not prediction.fits) or prediction.step_seconds >= last.step_seconds:
            break
        last = prediction
        if last.step_seconds < PAYS * whole.step_seconds:
            best = predictor, last
    return best
