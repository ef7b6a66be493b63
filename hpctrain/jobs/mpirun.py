"""`hpctrain mpirun`: write the start of a job on families with software of their own, for mpirun."""

import shlex
from pathlib import Path

import click

from hpctrain.config.errors import LaunchError, describe_os_error
from hpctrain.jobs.arguments import PATH
from hpctrain.jobs.common import launch_options, launch_plan, override_option
from hpctrain.launch.folder import write_files
from hpctrain.launch.mpi import mpi_library
from hpctrain.launch.mpirun import IMPLEMENTATIONS, host_lines, start_script


@click.command("mpirun")
@click.argument("job")
@override_option
@launch_options
@click.option("--hosts", type=PATH, metavar="FILE", help="The hosts, one a line. Default: this.")
@click.option("--implementation", type=click.Choice(IMPLEMENTATIONS), help="Whose mpirun. Default: that of mpi4py.")
def command(job, overrides, cluster, plan, nodes, ranks_per_node, run_path, hosts, implementation):
    """Write a script that starts JOB with mpirun, each family with its own environment, and the run folder for it.

    \b
    hpctrain mpirun my.toml --cluster site.toml --hosts hosts.txt --run /scratch/me/run1
    /scratch/me/run1/start.sh

    The hosts are listed in the order of the cluster file's nodes. Modules, virtual environments and variables of a
    family are in the cluster file, [families.NAME.launch].
    """
    prepared = launch_plan(job, overrides, cluster, plan, nodes, ranks_per_node, run_path)
    if implementation is None:
        kind = mpi_library().kind
        implementation = "mpich" if kind == "cray" else kind
    files = dict(prepared.files)
    if hosts:
        files["launch/hosts"] = host_lines(prepared.components, _read_hosts(hosts), implementation)
    start = (prepared.components, prepared.run, Path.cwd(), implementation, bool(hosts), prepared.arguments)
    files["start.sh"] = start_script(*start)
    write_files(prepared.run, files)
    where = "" if hosts else ", all on this host"
    click.echo(f"{' + '.join(each.describe() for each in prepared.components)}, by mpirun of {implementation}{where}")
    for line in prepared.notes:
        click.echo(line)
    click.echo(f"start it with: {shlex.quote(str(prepared.run / 'start.sh'))}")


def _read_hosts(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[: -1 if path.read_text().endswith("\n") else None]
    except (OSError, UnicodeDecodeError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        raise LaunchError(f"{path}: cannot be read: {why}; give a file with a host a line") from None
