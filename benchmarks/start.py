"""Seconds from mpirun to the end of the first step, by part, on the ranks that this is started on.

mpirun -n 4 python -m benchmarks.start [JOB] [--fresh-probe] [more of hpctrain train]

Parts are those of rank 0 and do not overlap. `rest` is what no part names: imports of commands, run folder.
"""

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from hpctrain.comm.start.process import process_start

PARTS: dict[str, float] = {}
_NESTED = [0.0]


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which adds its own seconds to a part; those of parts inside of it count there."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        begun, outer = time.perf_counter(), _NESTED[0]
        _NESTED[0] = 0.0
        try:
            return function(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - begun
            PARTS[name] = PARTS.get(name, 0.0) + seconds - _NESTED[0]
            _NESTED[0] = outer + seconds

    return call


def main() -> None:
    PARTS["Python"] = time.time() - process_start()
    timed("import torch", lambda: __import__("torch"))()
    from hpctrain.comm.world import World

    World.start = staticmethod(timed("MPI", World.start))  # pyright: ignore[reportAttributeAccessIssue]
    from hpctrain.engine.start import resolve
    from hpctrain.engine.step.pipeline import Pipeline
    from hpctrain.engine.trainer import Trainer

    resolve.RESOLVERS = tuple(timed(each.__name__.replace("_", " "), each) for each in resolve.RESOLVERS)
    Trainer.__init__ = timed("groups and memory", Trainer.__init__)
    Trainer.initialise = timed("draw weights", Trainer.initialise)
    Pipeline.train = timed("first step", Pipeline.train)
    PARTS["import hpctrain"] = time.time() - process_start() - sum(PARTS.values())
    from hpctrain.jobs.train import command

    job, *more = sys.argv[1:] or ["tiny"]
    folder = os.environ.get("HPCTRAIN_BENCHMARK_RUN") or tempfile.mkdtemp()
    arguments = [job, "--run", folder, "--stop-after", "1", "--sample", "0", "--no-progress", *more]
    stepped = Pipeline.train

    def step(*args, **kwargs):
        result = stepped(*args, **kwargs)
        PARTS.setdefault("whole", time.time() - process_start())
        return result

    Pipeline.train = step
    command(arguments, standalone_mode=False)
    if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 0:
        whole = PARTS.pop("whole")
        PARTS["rest"] = whole - sum(PARTS.values())
        for name, seconds in [*PARTS.items(), ("whole", whole)]:
            print(f"{name:20} {seconds:6.2f} s")


if __name__ == "__main__":
    main()
