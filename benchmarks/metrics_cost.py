"""What metrics cost: the seconds that a run spends on them, over those of its steps.

    mpirun -n 4 python -m benchmarks.metrics_cost tiny

Every second step is logged. Counted are, in logged steps, on each rank: `figures`, which are gathered, and on rank 0
written to metrics.jsonl, events.jsonl and ranks.json; `tracers`, which say where time goes; and `progress`, the line.

Processor seconds are those of the counted code over those of the rank's process. Wall seconds have waits for a core in
them: with more ranks than cores, that time is another rank's step. The last figure compares both kinds of steps from
end to end, with the standard error of the ratio.
"""

import json
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click

from hpctrain.jobs.arguments import override_option
from hpctrain.jobs.common import load_job_on, started_world

TRACED = ("computed", "exposed", "waited", "overlapped")
FIRST = 4
"""Steps that do not count: they allocate memory, and the third is sampled for the report. Even, as step 1 is logged."""


class Spent(NamedTuple):
    """Seconds so far."""

    wall: float
    processor: float


class Stopwatch:
    """Adds up the time in which watched methods run, by label; inner ones within outer ones are counted once."""

    def __init__(self):
        self.spent: dict[str, Spent] = {}
        self._lock, self._local = threading.Lock(), threading.local()

    def watch(self, label: str, owner: type, *names: str) -> None:
        self.spent[label] = Spent(0.0, 0.0)
        for name in names:
            setattr(owner, name, self._timed(label, getattr(owner, name)))

    def _timed(self, label: str, method):
        def timed(*arguments, **options):
            if getattr(self._local, "is_inside", False):
                return method(*arguments, **options)
            self._local.is_inside, wall, processor = True, time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self._local.is_inside = False
                processor, wall = time.thread_time() - processor, time.perf_counter() - wall
                with self._lock:
                    before = self.spent[label]
                    self.spent[label] = Spent(before.wall + wall, before.processor + processor)

        return timed


@click.command()
@click.argument("job")
@override_option
@click.option("--steps", default=64, show_default=True, type=click.IntRange(20))
def main(job, overrides, steps):
    more = (f"train.steps={steps}", "observe.log_every=2", "train.validate_every=0", "checkpoint.every=0")
    with started_world() as world:
        parsed = load_job_on(world, job, (*overrides, *more))

        from hpctrain.engine.run import Run
        from hpctrain.observe.console import Console
        from hpctrain.observe.folder.spans import StepRecorder
        from hpctrain.observe.metrics import RunMetrics
        from hpctrain.observe.prediction_check import PredictionTracker

        stopwatch, ends = Stopwatch(), []
        stopwatch.watch("figures", RunMetrics, "record")
        stopwatch.watch("tracers", StepRecorder, *TRACED, "parts")
        stopwatch.watch("tracers", PredictionTracker, "step_is_done")
        stopwatch.watch("progress", Console, "step")
        last = PredictionTracker.step_is_done  # the last thing of a step

        def step_is_done(self, seconds):
            last(self, seconds)
            ends.append({"step": Spent(time.perf_counter(), time.process_time()), **stopwatch.spent})

        PredictionTracker.step_is_done = step_is_done
        with tempfile.TemporaryDirectory() as folder:
            Run(world, parsed, Path(world.broadcast_object(folder)) / "run").train()
        shares = world.gather_objects(_shares(ends))
        if world.rank == 0:
            others = (
                [max(sum(each[kind].values()) for each in shares[1:]) for kind in Spent._fields] if shares[1:] else []
            )
            summary = {
                "ranks": world.size,
                "steps": len(ends),
                "percent_of_a_logged_step_on_rank_0": shares[0],
                "in_all": {kind: round(sum(shares[0][kind].values()), 3) for kind in Spent._fields},
                "most_of_another_rank": dict(zip(Spent._fields, others, strict=False)),
                **_compare(ends),
            }
            print(json.dumps(summary, indent=1), flush=True)


def _intervals(ends: list[dict[str, Spent]], first: int) -> list[dict[str, Spent]]:
    """Return what was spent in every second step, from the `first` that counts (0 or 1)."""
    each = [
        {label: Spent(*(b - a for a, b in zip(before[label], spent, strict=True))) for label, spent in after.items()}
        for before, after in pairwise(ends)
    ]  # of steps 2, 3, ...
    return each[FIRST + first :: 2]


def _shares(ends: list[dict[str, Spent]]) -> dict[str, dict[str, float]]:
    """Return by kind of time and label the percentage of logged steps."""
    logged = _intervals(ends, 1)
    total = {label: [sum(kind) for kind in zip(*(each[label] for each in logged), strict=True)] for label in logged[0]}
    whole = total.pop("step")
    return {
        kind: {label: round(100 * seconds[number] / whole[number], 3) for label, seconds in total.items()}
        for number, kind in enumerate(Spent._fields)
    }


def _compare(ends: list[dict[str, Spent]]) -> dict[str, float]:
    """Return the wall seconds of logged steps over those of the steps before them."""
    pairs = zip(_intervals(ends, 1), _intervals(ends, 0), strict=False)
    ratios = [logged["step"].wall / other["step"].wall for logged, other in pairs]
    return {
        "step_ms": round(1e3 * statistics.median(each["step"].wall for each in _intervals(ends, 1)), 1),
        "logged_over_not_logged": round(statistics.median(ratios), 4),
        "standard_error": round(statistics.stdev(ratios) / len(ratios) ** 0.5, 4),
    }


if __name__ == "__main__":
    main()
