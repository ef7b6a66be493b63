"""Initial weights drawn a second on one and on all cores, beside copying as many bytes in the same run.

python -m benchmarks.draw
"""

import os
import time
from collections.abc import Callable

import torch

from hpctrain.config.job import load_job
from hpctrain.model.initialise import fill_initial
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import Parameter

ROUNDS, SHAPE = 5, (8192, 4096)


def best(function: Callable[[], object]) -> float:
    """Return the seconds of the shortest of some rounds."""
    result = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        function()
        result.append(time.perf_counter() - begun)
    return min(result)


def main() -> None:
    model, count = load_job("tiny").model, SHAPE[0] * SHAPE[1]
    parameter = Parameter("blocks.0.ffn.up.weight", SHAPE, ("y", "x"), "normal")
    box = (Interval(0, SHAPE[0]), Interval(0, SHAPE[1]))
    out, other = torch.empty(count), torch.ones(count)
    for threads in dict.fromkeys((1, len(os.sched_getaffinity(0)))):
        torch.set_num_threads(threads)
        draw = best(lambda: fill_initial(parameter, box, Interval(0, count), model, 1, out))
        plain, copy = best(lambda: out.normal_()), best(lambda: out.copy_(other))
        print(
            f"{threads} threads: {count / draw / 1e6:,.0f} M weights/s, {plain / draw:.2f} of the speed of"
            f" torch.normal_, {copy / draw:.3f} of that of a copy"
        )


if __name__ == "__main__":
    main()
