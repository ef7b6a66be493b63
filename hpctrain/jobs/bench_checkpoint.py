"""`hpctrain bench checkpoint`: the price of saving and loading a job's state, compared with plain files."""

import json
import tempfile
from pathlib import Path

import click

from hpctrain.engine.resolve import prepare_run
from hpctrain.jobs.arguments import COUNT, PATH
from hpctrain.jobs.common import load_job_on, override_option, started_world


@click.command("checkpoint")
@click.argument("job")
@override_option
@click.option("--folder", type=PATH, default=Path(), help="On the disk to measure, seen by all ranks. Default: here.")
@click.option("--rounds", default=3, show_default=True, type=COUNT, help="Saves and loads that are timed.")
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps timed before each save that they hide.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(job, overrides, folder, rounds, steps, as_json):
    """Save and load the state of JOB on the ranks that were started, and write and read as many bytes plainly.

    \b
    mpirun -n 2 hpctrain bench checkpoint tiny --folder /scratch --json

    Both are timed alternately, in one run, in a new folder that is removed. Every file is synced, and read from the
    disk rather than from memory. Ratios are medians over rounds. The folder needs space for twice the state.
    """
    with started_world() as world:
        prepared = prepare_run(world, load_job_on(world, job, overrides))

        from hpctrain.checkpoint.state import attempt
        from hpctrain.comm.accelerators.bind import bind_accelerator
        from hpctrain.engine.checkpoint_benchmark import CheckpointBenchmark
        from hpctrain.engine.phases import phases_of
        from hpctrain.engine.trainer import Trainer

        make = lambda: tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder)  # noqa: E731
        made = attempt(folder / "bench-checkpoint", make) if world.rank == 0 else None
        where = Path(world.broadcast_object(made.name if made else None))
        try:
            trainer = Trainer(world, bind_accelerator(world), prepared.job, prepared.plan)
            trainer.initialise()
            world.enter(phases_of(prepared.job.observe).first_step)
            for _ in range(2):
                trainer.step(prepared.training)
            benchmark = CheckpointBenchmark(world, trainer, prepared.training, where)
            summary = {
                "plan": prepared.plan.describe(),
                "ranks": world.size,
                "state_bytes": benchmark.state_bytes,
                "extra_memory_of_state": benchmark.memory(),
                **benchmark.stalls(rounds, steps),
                **benchmark.files(rounds),
            }
        finally:
            if made:
                made.cleanup()
        if world.rank == 0:
            print(json.dumps(summary) if as_json else "\n".join(f"{k:28} {v}" for k, v in summary.items()), flush=True)
