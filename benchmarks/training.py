"""How long training steps of a job take. Machines are shared and noisy: compare figures of one run only."""

import statistics
import time

import click

from hpctrain.cli import main
from hpctrain.comm.bind import bind_accelerator
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.step.phases import phases_of
from hpctrain.engine.trainer import Trainer
from hpctrain.jobs.arguments import (
    COUNT,
    NONE_OR_MORE,
    json_option,
    override_option,
    print_result,
    rehearse_option,
    time_scale_option,
)
from hpctrain.jobs.common import load_described, load_job_on, start_rehearsal, started_world

CREATED = time.time()
"""When this module was loaded: before the ranks' MPI and devices."""


@click.command("benchmarks.training")
@click.argument("job")
@override_option
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps that are timed.")
@click.option("--warmup", default=1, show_default=True, type=NONE_OR_MORE, help="Steps before them.")
@rehearse_option
@time_scale_option
@json_option
def command(job, overrides, steps, warmup, rehearse, time_scale, as_json):
    """Time training steps of JOB on all ranks that were started; writes no run folder.

    \b
    mpirun -n 4 python -m benchmarks.training tiny --set plan.data=4 --json
    """
    described = load_described(rehearse) if rehearse else None
    with started_world(described) as world:
        parsed = load_job_on(world, job, overrides)
        if described:
            parsed, described = start_rehearsal(world, described, parsed, time_scale)
        prepared = prepare_run(world, parsed, described=described)
        trainer = Trainer(world, bind_accelerator(world), prepared.job, prepared.plan)
        trainer.initialise()
        world.enter(phases_of(prepared.job.observe).first_step)
        begun = time.time()
        steps_done = [trainer.step(prepared.training)[0] for _ in range(warmup + steps)]
        timed = steps_done[warmup:]
        seconds = [metrics["step_seconds"] for metrics in timed]
        summary = {
            "plan": prepared.plan.describe(),
            "ranks": world.size,
            "dtype": prepared.job.train.dtype,
            "tokens_per_second": trainer.tokens_per_step / statistics.median(seconds),
            "step_seconds": seconds,
            "loss": timed[-1]["loss"],
            "losses": [metrics["loss"] for metrics in steps_done],
            "start_seconds": begun - CREATED,
            "first_step_seconds": steps_done[0]["step_seconds"],
            "kernels": prepared.reasons.get("kernels.attention", ""),
        }
        if (overrun := trainer.overrun()) is not None:
            summary["overrun"] = overrun
        if world.rank == 0:
            print_result(summary, "\n".join(f"{key:18} {value}" for key, value in summary.items()), as_json)


if __name__ == "__main__":
    main(command)
