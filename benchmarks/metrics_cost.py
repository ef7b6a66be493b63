"""What metrics cost: the seconds that a run spends on them, over those of its steps.

    mpirun -n 4 python -m benchmarks.metrics_cost tiny

Every second step is logged. Counted are, in logged steps, on each rank: `figures`, which are gathered, and on rank 0
written to metrics.jsonl, events.jsonl and ranks.json; `tracers`, which say where time goes; and `progress`, the line.
Waiting for a core in there counts too, so on a busy machine the share is an upper bound. The last figure compares both
kinds of steps from end to end, with the standard error of the ratio.
"""

import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import click

from hpctrain.jobs.common import load_job_on, override_option, started_world

TRACED = ("computed", "exposed", "waited", "overlapped", "moved")
FIRST = 4
"""Steps that do not count: they allocate memory, and the third is sampled for the report. Even, as step 1 is logged."""


class Stopwatch:
    """Adds up the seconds in which watched methods run, by label; inner ones within outer ones are counted once."""

    def __init__(self):
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._lock, self._local = threading.Lock(), threading.local()

    def watch(self, label: str, owner: type, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(label, getattr(owner, name)))

    def _timed(self, label: str, method):
        def timed(*arguments, **options):
            if getattr(self._local, "is_inside", False):
                return method(*arguments, **options)
            self._local.is_inside, begun = True, time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._local.is_inside = False
                with self._lock:
                    self.seconds[label] += time.perf_counter() - begun

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
        stopwatch.watch("figures", RunMetrics, "record")
        stopwatch.watch("tracers", PartMeter, *TRACED)
        stopwatch.watch("tracers", SampledStep, *TRACED)
        stopwatch.watch("tracers", Expectation, "step_is_done")
        stopwatch.watch("progress", Console, "step")
        last = Expectation.step_is_done  # the last thing of a step

        def step_is_done(self, seconds):
            last(self, seconds)
            ends.append((time.perf_counter(), dict(stopwatch.seconds)))

        Expectation.step_is_done = step_is_done
        with tempfile.TemporaryDirectory() as folder:
            TrainingRun(world, parsed, Path(world.broadcast_object(folder)) / "run").train()
        seconds = [end - begin for (begin, _), (end, _) in pairwise(ends)]  # of steps 2, 3, ...
        spent = [
            {key: after[key] - before.get(key, 0.0) for key in after} for (_, before), (_, after) in pairwise(ends)
        ]
        logged, others = seconds[FIRST + 1 :: 2], seconds[FIRST::2]
        spent_in_logged = spent[FIRST + 1 :: 2]
        percent = {
            label: 100 * sum(each[label] for each in spent_in_logged) / sum(logged) for label in stopwatch.seconds
        }
        shares = world.gather_objects(percent)
        if world.rank == 0:
            summary = {"ranks": world.size, "steps": len(ends), **_summary(logged, others, shares)}
            print(json.dumps(summary, indent=1), flush=True)


def _summary(logged: list[float], others: list[float], shares: list[dict[str, float]]) -> dict:
    """Return what shares of ranks, in percent, and seconds of logged and of other steps come to."""
    ratios = [a / b for a, b in zip(logged, others, strict=False)]
    return {
        "step_ms": round(1e3 * statistics.median(logged), 1),
        "percent_of_rank_0": {label: round(share, 3) for label, share in shares[0].items()},
        "percent_of_rank_0_in_all": round(sum(shares[0].values()), 3),
        "most_percent_of_another_rank": round(max((sum(each.values()) for each in shares[1:]), default=0.0), 3),
        "logged_over_not_logged": round(statistics.median(ratios), 4),
        "standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
    }


if __name__ == "__main__":
    main()
