"""`hpctrain train`: train a job on all ranks that were started."""

import json
import sys
from pathlib import Path

import click

from hpctrain.jobs.common import (
    load_job_on,
    override_option,
    prepare_run,
    rehearse_option,
    start_rehearsal,
    started_world,
)
from hpctrain.jobs.yardstick import tell_yardstick, yardstick

INTERRUPTED_EXIT_CODE = 75  # EX_TEMPFAIL: start the same command again
LARGEST_SAMPLED_MODEL = 200_000_000  # parameters: the sample is made by one rank while the others wait


@click.command("train")
@click.argument("job")
@override_option
@click.option("--run", "run_path", type=click.Path(path_type=Path), help="Run folder. Default: runs/NAME-DATE-TIME.")
@click.option("--stop-after", type=click.IntRange(1), metavar="STEP", help="Stop (with a checkpoint) after this step.")
@rehearse_option
@click.option("--cluster", metavar="CLUSTER", help="What the ranks run on: steps are compared with their prediction.")
@click.option("--trace", is_flag=True, help="Same as --set observe.trace=true: write a trace of the first steps.")
@click.option("--progress/--no-progress", default=None, help="Progress bar. Default: if a terminal is seen.")
@click.option("--sample", default=200, show_default=True, help="Tokens of sample text at the end; 0: none.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON last, and nothing else on stdout.")
def command(job, overrides, run_path, stop_after, rehearse, cluster, trace, progress, sample, as_json):
    """Train JOB, a job file or the name of a ready-made job, on all ranks that were started.

    \b
    mpirun -n 4 hpctrain train tiny
    mpirun -n 4 hpctrain train tiny --set plan.tensor.y=2 --set plan.pipeline=2
    srun hpctrain train my.toml --run /scratch/me/run1

    A run folder that has a checkpoint is continued from the latest one: starting the same command again after an
    interruption gives the same numbers as if there had been none. With --rehearse the numbers are the same too, but
    times and memory are those of the described devices. With it, or with --cluster, the end tells how far steps
    were from their prediction. SIGTERM, SIGINT and SIGUSR1 end the run in order, with a checkpoint and exit code 75.
    """
    with started_world() as world:
        parsed = load_job_on(world, job, (*overrides, "observe.trace=true") if trace else overrides)
        described = start_rehearsal(world, rehearse) if rehearse else _described(world, cluster)
        where = rehearse or cluster
        summary, signal_name = _train(world, parsed, described, where, run_path, stop_after, progress, sample, as_json)
        if world.rank == 0 and as_json:
            print(json.dumps(summary), flush=True)
    if signal_name:
        sys.exit(INTERRUPTED_EXIT_CODE)


def _show_sample(console, job, checkpoint, num_tokens):
    from hpctrain.engine.generate import Generator
    from hpctrain.parameters import count_parameters

    if count_parameters(job.model) > LARGEST_SAMPLED_MODEL:
        console.say(f'no sample of a model this large; try: hpctrain generate {checkpoint} --prompt "..."')
    else:
        console.say(f"sample:\n{Generator(checkpoint).text('', num_tokens, seed=job.train.seed)}")


def _show_yardstick(console, job, cluster, name, tokens_per_second) -> dict:
    """Say what share of its families alone a mixed run is; return it as what the summary has of it."""
    told = yardstick(job, cluster, tokens_per_second)
    if told is None:
        return {}
    console.say(tell_yardstick(told, name))
    return {"yardstick": told}


def _described(world, reference):
    """Return the cluster that a file or a ready one's name describes; None without one. All ranks must call."""
    if reference is None:
        return None
    from hpctrain.cluster_file import find_cluster, load_cluster

    with world.all_or_none():
        return load_cluster(find_cluster(reference))


def _train(world, job, cluster, where, run_path, stop_after, progress, sample, as_json):
    from hpctrain.checkpoint.format import latest_checkpoint
    from hpctrain.comm.oversight.flight import FOLDER as FLIGHT
    from hpctrain.observe.run import RunFolder, default_run_folder

    path = world.broadcast_object(run_path or default_run_folder(job.name))
    checkpoint = None
    with world.all_or_none():
        if world.rank == 0:  # all go on from the same one, whatever their view of the file system
            checkpoint = latest_checkpoint(path)
    checkpoint = world.broadcast_object(checkpoint)
    prepared = prepare_run(world, job, checkpoint)
    job = prepared.job
    folder = None
    with world.all_or_none():
        if world.rank == 0:
            folder = RunFolder(path)
    world.keep_records(Path(path) / FLIGHT)

    from hpctrain.comm.accelerator import bind_accelerator  # heavy imports from here on, when nothing is wrong
    from hpctrain.engine.trainer import Trainer
    from hpctrain.jobs.expect import Expectation
    from hpctrain.observe.console import Console
    from hpctrain.observe.trace import RunTrace

    accelerator = bind_accelerator(world)
    trace = RunTrace(world, accelerator, path, job.observe.trace_steps) if job.observe.trace else None
    expectation = Expectation(world, accelerator, cluster, where) if cluster else None
    trainer = Trainer(world, accelerator, job, prepared.plan)
    if checkpoint:
        trainer.resume(checkpoint)
    else:
        trainer.initialise()
    until = min(job.train.steps, stop_after or job.train.steps)
    console = Console(speaks=world.rank == 0, on_stderr=as_json, bar=progress)
    with world.all_or_none():
        if folder:
            folder.describe(job, prepared.plan, prepared.reasons)
            folder.rewind_metrics(trainer.steps_done)
            console.start(job, prepared.plan, prepared.reasons, prepared.source, trainer.steps_done, checkpoint)
    if expectation:
        console.say(expectation.predict(job, prepared.plan))
    if trainer.steps_done >= until:
        console.say(f"{path}: nothing to do, {trainer.steps_done} steps are done")
    last: dict = {}
    saved = [checkpoint]
    tokenizer = prepared.source.tokenizer_json or ""
    about = {"tokenizer": tokenizer, "data": prepared.data_identity}

    def report(metrics: dict) -> None:
        last.clear()
        last.update(metrics)
        if expectation:
            expectation.step_is_done(metrics["step_seconds"])
        if folder and (metrics["step"] % job.observe.log_every == 0 or "validation_loss" in metrics):
            folder.log(metrics)
        console.step(metrics, until)
        if trace and (told := trace.step_is_done()):
            console.say(told)

    def save() -> None:
        saved[0] = trainer.save(path, about)

    if trace:
        trace.start()
    signal_name = trainer.fit(prepared.training, prepared.validation, until, save, report)
    if trace and (told := trace.finish()):
        console.say(told)
    compared = expectation.finish(path) if expectation else None
    if compared:
        console.say(compared)
    summary = console.finish(last, path, saved[0], prepared.source, signal_name, trainer.overrun())
    if cluster and last and world.rank == 0 and not signal_name:
        summary |= _show_yardstick(console, job, cluster, where, last["tokens_per_second"])
    if sample and world.rank == 0 and saved[0] and tokenizer and not signal_name:
        _show_sample(console, job, saved[0], sample)
    return summary, signal_name
