"""The decays of learning rates: of each, how much is left when a share of it is over."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

from hpctrain.config.tables import named_in

FLOOR_SHARE = 10
"""The least rate is the highest divided by this, unless the job names one."""


class Decay(NamedTuple):
    """One way of a learning rate to fall."""

    left: Callable[[float], float]
    """How much of the way from the highest to the least rate is left, when a share of the decay is over."""
    meaning: str
    """Its description in `docs/job.md`."""


DECAYS: Mapping[str, Decay] = {
    "cosine": Decay(lambda progress: 0.5 * (1 + math.cos(math.pi * progress)), "slowly at first and at the end."),
    "linear": Decay(lambda progress: 1 - progress, "by as much in each step."),
    "sqrt": Decay(lambda progress: 1 - math.sqrt(progress), "by the root of the share that is over."),
    "constant": Decay(lambda progress: 1.0, "not at all."),
}
"""By the name that `train.decay` has."""
DecayName = Annotated[str, named_in(DECAYS, "decay")]
