"""`hpctrain train`: train a job on all ranks that were started."""

import gc
import json
import sys

import click

from hpctrain.comm.start.launcher import record_exit
from hpctrain.comm.start.process import StopSignals
from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.errors import InterruptionError
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.jobs.arguments import (
    LARGE_COUNT,
    NONE_OR_MORE,
    PATH,
    cluster_option,
    complete_job,
    override_option,
    rehearse_option,
    time_scale_option,
)
from hpctrain.jobs.common import load_described, load_job_on, start_rehearsal, started_world


@click.command("train")
@click.argument("job", shell_complete=complete_job)
@override_option
@click.option("--run", "run_path", type=PATH, help="Run folder. Default: runs/NAME-DATE-TIME.")
@click.option("--stop-after", type=LARGE_COUNT, metavar="STEP", help="Stop (with a checkpoint) after this step.")
@rehearse_option
@time_scale_option
@cluster_option("A cluster file of what the ranks run on. Default: measured here.", required=False)
@click.option(
    "--fresh-probe",
    is_flag=True,
    help="Measure this machine again. A run that continues is planned again where that pays.",
)
@click.option("--trace", is_flag=True, help="Same as --set observe.trace=true: write a trace of the first steps.")
@click.option("--progress/--no-progress", default=None, help="Progress bar. Default: if a terminal is seen.")
@click.option(
    "--sample", default=200, show_default=True, type=NONE_OR_MORE, help="Tokens of sample text at the end; 0: none."
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON last, and nothing else on stdout.")
@click.pass_obj
def command(
    signals: StopSignals | None,
    job,
    overrides,
    run_path,
    stop_after,
    rehearse,
    time_scale,
    cluster,
    fresh_probe,
    trace,
    progress,
    sample,
    as_json,
):
    """Train JOB, a job file, a ready-made job (`tiny`, `mixed`) or a preset, on all ranks that were started.

    \b
    mpirun -n 4 hpctrain train tiny
    mpirun -n 4 hpctrain train tiny --set plan.tensor.y=2 --set plan.pipeline=2
    srun hpctrain train my.toml --run /scratch/me/run1

    A run folder that has a checkpoint is continued from the latest one: starting the same command again after an
    interruption gives the same numbers as if there had been none. With --rehearse the numbers are the same too, but
    times and memory are those of the described devices; a large job is scaled down with the cluster.

    The plan is searched for on the machine that there is, unless the job has one ([plan]): that of --rehearse or
    --cluster, else this one, which is measured the first time that ranks are started on it. The end compares steps
    with their prediction, and a mixed run with what its families do alone.

    SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM, SIGXCPU and the end of a batch job end the run in order, with a
    checkpoint and exit code 75: start it again. A file `stop` in the run folder ends it with a checkpoint and exit code
    0; a file `save` asks for a checkpoint. A file `resize` with a number of ranks, or a plan `next-plan.toml`, lets the
    run go on by another plan. A run continues where its output is lost.
    """
    rehearsed = load_described(rehearse) if rehearse else None
    with started_world(rehearsed) as world:
        parsed = load_job_on(world, job, (*overrides, "observe.trace=true") if trace else overrides)
        if rehearsed:
            parsed, described = start_rehearsal(world, rehearsed, parsed, time_scale)
        elif cluster:
            with world.all_or_none():  # a run folder is for others to read: it does not get the variables of a start
                described = MachineDescription(load_cluster(cluster).without_environment(), cluster)
        else:
            described = None

        from hpctrain.engine.run import Run  # and with it torch and h5py: when MPI is started, and the files are right

        gc.freeze()  # what is imported: to look through it took a change of plans 0.11 s of a core on each rank

        options = {"fresh_probe": fresh_probe, "on_stderr": as_json, "bar": progress}
        run = Run(world, parsed, run_path, described, signals=signals, **options)
        summary, ended = run.train(stop_after)
        if world.rank == 0:
            if sample and not ended:
                run.show_sample(sample)
            if as_json:
                print(json.dumps(summary), flush=True)
    if ended and ended.continues:
        record_exit(InterruptionError.exit_code)
        sys.exit(InterruptionError.exit_code)
    if world.rank == 0:
        record_exit(0)
