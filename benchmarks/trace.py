"""What the recorder of a run costs: steps of four trainers in turn, of which the middle ones are recorded.

Which of several trainers was made first makes a difference of its own; so the order of the kinds is there both ways.
Ranks of one host send messages, of which there is more to record than of memory that they share.

mpirun -n 2 python -m benchmarks.trace tiny --set plan.tensor.z=2
"""

import json
import statistics
from dataclasses import replace

import click

from hpctrain.engine.start.resolve import prepare_run
from hpctrain.jobs.arguments import override_option
from hpctrain.jobs.common import load_job_on, started_world


@click.command()
@click.argument("job")
@override_option
@click.option("--steps", default=40, show_default=True, type=click.IntRange(2), help="Of each kind.")
def main(job, overrides, steps):
    with started_world() as world:
        prepared = prepare_run(world, load_job_on(world, job, overrides))

        from hpctrain.comm.bind import bind_accelerator
        from hpctrain.engine.step.phases import phases_of
        from hpctrain.engine.trainer import Trainer
        from hpctrain.observe.folder.spans import StepRecorder

        world.configure(topology=replace(world.topology, shares_memory=False))
        accelerator = bind_accelerator(world)
        recording = StepRecorder(accelerator)
        trainers, untraced = [], world.tracer
        for tracer in (untraced, recording, recording, untraced):
            world.configure(tracer=tracer)
            trainers.append(Trainer(world, accelerator, prepared.job, prepared.plan))
            trainers[-1].initialise()
        world.enter(phases_of(prepared.job.observe).first_step)
        seconds: tuple[list[float], list[float]] = ([], [])
        counted = 0
        for number in range(2 * steps):
            trainer, counted = trainers[number % 4], len(recording.step_spans) or counted
            recording.begin_step()
            taken = world.largest(trainer.step(prepared.training)[0]["step_seconds"])
            if number >= 4:
                seconds[number % 4 in (1, 2)].append(taken)
        medians = [statistics.median(each) for each in seconds]
        summary = {
            "ranks": world.size,
            "plan": prepared.plan.describe(),
            "step_ms": [round(1e3 * each, 2) for each in medians],
            "traced_over_untraced": round(medians[1] / medians[0], 4),
            "fastest_traced_over_fastest_untraced": round(min(seconds[1]) / min(seconds[0]), 4),
            "spans_a_step": counted,
        }
        if world.rank == 0:
            print(json.dumps(summary, indent=1), flush=True)


if __name__ == "__main__":
    main()
