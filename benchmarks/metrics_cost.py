"""What metrics cost: the seconds that a run spends on them, over those of its steps.

    mpirun -n 4 python -m benchmarks.metrics_cost tiny

Counted are on each rank the figures of a step and their gathering, the tracers that say where its time goes, and the
line of progress; on rank 0 also the lines of metrics.jsonl, events.jsonl and ranks.json. Times of waiting for a core in
there count too, so on a busy machine the share is an upper bound. Every second step is logged: the last figure compares
both kinds of steps from end to end, with the standard error of the ratio.
"""

import json
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import click

from hpctrain.jobs.common import load_job_on, override_option, started_world

FIRST = 4
"""Steps that do not count: they allocate memory, and the third is sampled for the report. Even, as step 1 is logged."""


class Stopwatch:
    """Adds up the seconds in which watched methods run, inner ones within outer ones counted once."""

    def __init__(self):
        self.seconds = 0.0
        self._lock, self._local = threading.Lock(), threading.local()

    def watch(self, owner: type, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method):
        def timed(*arguments, **options):
            if getattr(self._local, "is_inside", False):
                return method(*arguments, **options)
            self._local.is_inside, begun = True, time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._local.is_inside = False
                with self._lock:
                    self.seconds += time.perf_counter() - begun

        return timed


@click.command()
@click.argument("job")
@override_option
@click.option("--steps", default=64, show_default=True, type=click.IntRange(20))
def main(job, overrides, steps):
    more = (f"train.steps={steps}", "observe.log_every=2", "train.validate_every=0", "checkpoint.every=0")
    with started_world() as world:
        parsed = load_job_on(world, job, (*overrides, *more))

        from hpctrain.engine.run import TrainingRun
        from hpctrain.observe.console import Console
        from hpctrain.observe.drift import PartMeter
        from hpctrain.observe.expectation import Expectation
        from hpctrain.observe.metrics import RunMetrics
        from hpctrain.observe.sample import SampledStep

        stopwatch, ends = Stopwatch(), []
        stopwatch.watch(RunMetrics, "record")
        stopwatch.watch(PartMeter, "computed", "exposed", "waited", "overlapped", "moved")
        stopwatch.watch(SampledStep, "computed", "exposed", "waited", "overlapped", "moved")
        stopwatch.watch(Console, "step")
        stopwatch.watch(Expectation, "step_is_done")
        last = Expectation.step_is_done  # the last thing of a step

        def step_is_done(self, seconds):
            last(self, seconds)
            ends.append((time.perf_counter(), stopwatch.seconds))

        Expectation.step_is_done = step_is_done
        with tempfile.TemporaryDirectory() as folder:
            TrainingRun(world, parsed, Path(world.broadcast_object(folder)) / "run").train()
        shares = world.gather_objects((ends[-1][1] - ends[FIRST][1]) / (ends[-1][0] - ends[FIRST][0]))
        if world.rank == 0:
            print(json.dumps({"ranks": world.size, "steps": len(ends), **_summary(ends, shares)}, indent=1), flush=True)


def _summary(ends: list[tuple[float, float]], shares: list[float]) -> dict:
    """Return the shares in percent, and the mean of logged steps over that of those before them."""
    seconds = [end - begin for (begin, _), (end, _) in pairwise(ends)]  # of steps 2, 3, ...
    logged, others = seconds[FIRST + 1 :: 2], seconds[FIRST::2]
    ratios = [a / b for a, b in zip(logged, others, strict=False)]
    return {
        "step_ms": round(1e3 * statistics.median(seconds[FIRST:]), 1),
        "share_percent_rank_0": round(100 * shares[0], 3),
        "share_percent_most_of_others": round(100 * max(shares[1:], default=0.0), 3),
        "logged_over_not_logged": round(statistics.median(ratios), 4),
        "standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
    }


if __name__ == "__main__":
    main()
