"""`hpctrain mpirun`: write a script that starts a job by mpirun, with separate software for each family."""

import shlex
from pathlib import Path

import click

from hpctrain.config.errors import LaunchError, describe_os_error
from hpctrain.config.paths import read_bytes
from hpctrain.jobs.arguments import PATH
from hpctrain.jobs.starts import start_options, write_start
from hpctrain.launch.mpi import mpi_library
from hpctrain.launch.scripts import MPIRUNS, Start, host_lines, mpirun_script


@click.command("mpirun")
@start_options
@click.option("--hosts", type=PATH, metavar="FILE", help="The hosts, one a line; # begins a comment. Default: this.")
@click.option("--implementation", type=click.Choice(MPIRUNS), help="Whose mpirun. Default: that of mpi4py.")
def command(start: Start, hosts, implementation):
    """Write a script that starts JOB with mpirun, each family with its own environment, and the run folder for it.

    \b
    hpctrain mpirun my.toml --cluster site.toml --hosts hosts.txt --run /scratch/me/run1
    /scratch/me/run1/start.sh

    The hosts are listed in the order of the cluster file's nodes. Modules, virtual environments and variables of a
    family are in the cluster file, [families.NAME.launch].
    """
    if implementation is None:
        kind = mpi_library().kind
        implementation = "mpich" if kind == "cray" else kind
    scripts = {"launch/hosts": host_lines(start, _read_hosts(hosts), implementation)} if hosts else {}
    scripts["start.sh"] = mpirun_script(start, implementation, bool(hosts))
    where = "" if hosts else ", all on this host"
    launcher = f", by mpirun of {implementation}{where}"
    write_start(start, scripts, launcher, shlex.quote(str(start.run / "start.sh")))


def _read_hosts(path: Path) -> list[str]:
    try:
        lines = (line.partition("#")[0].strip() for line in read_bytes(path).decode().split("\n"))
        return [line for line in lines if line]
    except (OSError, UnicodeDecodeError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        raise LaunchError(f"{path}: cannot be read: {why}; give a file with a host a line") from None
