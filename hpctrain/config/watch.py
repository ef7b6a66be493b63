"""The faults that a run looks for in its own numbers: the `[watch]` section of a job file."""

from typing import Annotated

from pydantic import AfterValidator, Field

from hpctrain.config.bounds import MOST_NUMBER, WholeNumber
from hpctrain.config.tables import Table


def _is_off_or_a_rise(factor: float) -> float:
    if 0 < factor <= 1:
        raise ValueError("must be more than 1, or 0 for off")
    return factor


class Watch(Table):
    jump: Annotated[float, Field(ge=0, le=MOST_NUMBER), AfterValidator(_is_off_or_a_rise)] = 10.0
    """A loss or a norm of the gradient above so many times the median of the last 50 steps is said, and kept as an
    event; 0: off."""
    replicas_every: WholeNumber = 100
    """Steps between comparisons of the weights that several ranks hold alike, which are compared before each checkpoint
    and copy too; the run stops where they differ. 0: off."""
