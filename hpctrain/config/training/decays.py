"""The decays of learning rates: of each, how much is left when a share of it is over."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import AfterValidator

from hpctrain.config.errors import did_you_mean

DECAYS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "constant": lambda progress: 1.0,
}
"""By name: how much of the way from the highest to the least rate is left, when a share of the decay is over."""


def _is_there(name: str) -> str:
    if name not in DECAYS:
        raise ValueError(f"'{name}' is no decay{did_you_mean(name, DECAYS)}")
    return name


DecayName = Annotated[str, AfterValidator(_is_there)]
