"""Parameters start as a function of (seed, name, element) alone, so that no layout changes them.

A parameter is cut into blocks of 65,536 consecutive elements. Each block has a generator of its own (SFC64), keyed by
the seed, the name and the block's number. A rank draws the blocks that its part touches, by several threads: numpy
releases the interpreter while it draws. A rank with a device computes by one thread, and has cores that are idle then.
"""

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hpctrain.config.job import Model
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import Box, Parameter, whole_rows

BLOCK = 1 << 16
"""Elements of a block. Seeding a generator takes 10 microseconds, drawing a block 400."""
ELEMENTS_AT_ONCE = 16 * BLOCK
"""Elements that a thread draws before it copies them: 4 MiB, which fit in part into a cache."""


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
    first, last = elements.start // BLOCK, -(-elements.stop // BLOCK)
    drawn = np.empty((last - first) * BLOCK, dtype=np.float32)
    for block in range(first, last):
        key = hashlib.blake2b(f"{seed}/{parameter.name}/{block}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.SFC64(np.frombuffer(key, dtype="<u4")))
        start = (block - first) * BLOCK
        generator.standard_normal(dtype=np.float32, out=drawn[start : start + BLOCK])
    return torch.from_numpy(drawn[elements.start - first * BLOCK : elements.stop - first * BLOCK]).mul_(std)


def fill_initial(
    parameter: Parameter, box: Box, elements: Interval, model: Model, seed: int, out: torch.Tensor, num_threads: int = 1
) -> None:
    """Fill `out`, fp32 [elements.size] on the host: the given elements of a box. Padding becomes zero."""
    num_threads = max(num_threads, torch.get_num_threads())
    width = math.prod(parameter.shape[1:])

    def fill(part: tuple[Interval, slice, int]) -> None:
        rows, columns, at = part
        values = initial_values(parameter, Interval(rows.start * width, rows.stop * width), model, seed)
        values = values.view(rows.size, width)[:, columns]
        out[at : at + values.numel()].view(values.shape).copy_(values)

    if sum(taken.size for *_, taken in whole_rows(parameter, box, elements)) < elements.size:
        out.zero_()
    parts = list(_parts(parameter, box, elements))
    if len(parts) == 1 or num_threads == 1:
        for part in parts:
            fill(part)
        return
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(fill, parts))


def _parts(parameter: Parameter, box: Box, elements: Interval) -> Iterator[tuple[Interval, slice, int]]:
    """Cut elements of a box into parts that are drawn at once: rows, columns, and position among the elements."""
    rows_at_once = max(1, ELEMENTS_AT_ONCE // math.prod(parameter.shape[1:]))
    for rows, columns, taken in whole_rows(parameter, box, elements):
        for first in range(rows.start, rows.stop, rows_at_once):
            some = Interval(first, min(first + rows_at_once, rows.stop))
            offset = (first - rows.start) * (columns.stop - columns.start)
            yield some, columns, taken.start - elements.start + offset
