"""`hpctrain slurm`: write a batch script, and a run folder that has all that it needs. Runs on a login node."""

import re
import shlex

import click

from hpctrain.config.errors import LaunchError
from hpctrain.jobs.arguments import PATH
from hpctrain.jobs.common import write_out
from hpctrain.jobs.starts import start_options, write_start
from hpctrain.launch.mpi import srun_interface
from hpctrain.launch.scripts import SlurmOptions, Start, batch_script, chain_script

MOST_STARTS = 1000
TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")


@click.command("slurm")
@start_options
@click.option("--out", type=PATH, metavar="FILE", help="Write the batch script here as well.")
@click.option("--time", metavar="TIME", help="The time limit, as Slurm writes it: 30:00, 12:00:00, 2-00:00:00.")
@click.option("--mpi", metavar="TYPE", help="The value of srun --mpi. Default: by the MPI library of mpi4py.")
@click.option(
    "--retries", type=click.IntRange(0, MOST_STARTS), default=3, show_default=True, help="Restarts after a failed rank."
)
@click.option("--shared-nodes", is_flag=True, help="Take cores of nodes that other jobs use too.")
@click.option(
    "--chain", type=click.IntRange(1, MOST_STARTS), metavar="N", help="Where requeue is forbidden: N jobs in a chain."
)
def command(start: Start, out, time, mpi, retries, shared_nodes, chain):
    """Write a batch script that trains JOB on the nodes of a cluster file, and the run folder that it uses.

    \b
    hpctrain slurm my.toml --cluster site.toml --run /scratch/me/run1
    hpctrain slurm my.toml --nodes 4 --ranks-per-node 8 --run /scratch/me/run1
    sbatch /scratch/me/run1/job.sbatch

    A cluster of several kinds of nodes becomes a heterogeneous job, whose ranks are one MPI job. Partitions, modules
    and virtual environments are in the cluster file, [families.NAME.launch]. Submitted again, or requeued, the job
    continues from its latest checkpoint. A job that starts on fewer nodes (launch.min_nodes) gets a plan of its own.
    """
    if time and not TIME.fullmatch(time):
        raise LaunchError(f"--time {time!r}: no time as Slurm writes it; give 30:00, 12:00:00 or 2-00:00:00")
    mpi = mpi or srun_interface()
    options = SlurmOptions(mpi, time, retries, shared_nodes, requeues=not chain)
    script, submit = start.run / "job.sbatch", "sbatch"
    scripts = {"job.sbatch": batch_script(start, options)}
    if out:
        write_out(out, scripts["job.sbatch"], is_script=True)
    if chain:
        scripts["chain.sh"] = chain_script(script, start.run, chain)
        script, submit = start.run / "chain.sh", "bash"
    elif out:
        script = out
    write_start(start, scripts, f"; srun --mpi={mpi}", f"{submit} {shlex.quote(str(script))}")
