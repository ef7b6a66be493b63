"""How parameters start: a function of (seed, name, element) alone, so that no layout changes it.

Element i of a parameter takes the i-th number of a counter-based generator (Philox 4x64, Salmon et al. 2011) keyed by
the seed and the name. A rank draws just the rows that its part touches.
"""

import hashlib
import math

import numpy as np
import torch

from hpctrain.config.job import Model
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import Box, Parameter, whole_rows

NUMBERS_PER_COUNT = 4  # a step of Philox's counter yields four 64-bit numbers
CHUNK = 1 << 22


def _uniform(seed: int, name: str, elements: Interval) -> np.ndarray:
    """Return float64 numbers in (0, 1) for these elements of a parameter."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    skip, extra = divmod(elements.start, NUMBERS_PER_COUNT)
    generator = np.random.Philox(key=key).advance(skip)
    raw = generator.random_raw(extra + elements.size)[extra:]
    return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def initial_values(parameter: Parameter, elements: Interval, model: Model, seed: int) -> torch.Tensor:
    """Return fp32 initial values of consecutive elements of the whole, unsplit, flattened parameter."""
    match parameter.init:
        case "ones":
            return torch.ones(elements.size)
        case "zeros":
            return torch.zeros(elements.size)
    std = model.init_std
    if parameter.init == "residual":  # GPT-2: the sum over the residual stream keeps its size
        std /= math.sqrt(2 * model.num_layers)
    normal = torch.special.ndtri(torch.from_numpy(_uniform(seed, parameter.name, elements)))
    return normal.mul_(std).float()


def fill_initial(
    parameter: Parameter, box: Box, elements: Interval, model: Model, seed: int, out: torch.Tensor
) -> None:
    """Fill `out`, the given elements of a box, with their initial values; padding becomes zero."""
    out.zero_()
    width = math.prod(parameter.shape[1:])
    rows_at_once = max(1, CHUNK // width)
    for rows, columns, taken in whole_rows(parameter, box, elements):
        for first in range(rows.start, rows.stop, rows_at_once):
            some = Interval(first, min(first + rows_at_once, rows.stop))
            values = initial_values(parameter, Interval(some.start * width, some.stop * width), model, seed)
            values = values.view(some.size, width)[:, columns].reshape(-1)
            at = taken.start - elements.start + (first - rows.start) * (columns.stop - columns.start)
            out[at : at + values.numel()] = values
