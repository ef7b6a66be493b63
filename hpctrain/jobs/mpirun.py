"""`hpctrain mpirun`: write the start of a job on families with software of their own, for mpirun."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from hpctrain.config.errors import LaunchError, describe_os_error
from hpctrain.config.paths import read_bytes
from hpctrain.jobs.arguments import PATH
from hpctrain.jobs.common import launch_options, launch_plan, override_option
from hpctrain.launch.components import Component
from hpctrain.launch.folder import write_files
from hpctrain.launch.mpi import mpi_library
from hpctrain.launch.slurm import title

IMPLEMENTATIONS = ("mpich", "openmpi", "intel")
SLOTS = {"mpich": "{host}:{count}", "openmpi": "{host} slots={count}", "intel": "{host}:{count}"}
OPTIONS = {"mpich": "-f", "openmpi": "--hostfile", "intel": "-machinefile"}


def host_lines(components: Sequence[Component], hosts: Sequence[str], implementation: str) -> str:
    """Return a file of hosts: the hosts in the order of the cluster's nodes, each with its number of ranks.

    Raises LaunchError where there are more or fewer hosts than nodes, or a name that such a file cannot hold.
    """
    sizes = [component.ranks_per_node for component in components for _ in range(component.num_nodes)]
    if len(hosts) != len(sizes):
        raise LaunchError(
            f"{len(hosts)} hosts for {len(sizes)} nodes ({' + '.join(each.describe() for each in components)}); list a"
            " host for each node, in the order of the cluster file, one a line"
        )
    for host in hosts:
        if not host or set(host) & set(" \t:=#") or not host.isprintable():
            raise LaunchError(f"{host!r} is no name of a host; list a name or an address a line, and nothing else")
    pairs = zip(hosts, sizes, strict=True)
    return "".join(SLOTS[implementation].format(host=host, count=count) + "\n" for host, count in pairs)


def start_script(
    components: Sequence[Component],
    run: Path,
    folder: Path,
    implementation: str,
    has_hosts: bool,
    arguments: Sequence[str] = (),
) -> str:
    """Return a script that starts all components as one MPI job; without hosts on this one."""
    hosts = f' {OPTIONS[implementation]} "$run/launch/hosts"' if has_hosts else ""
    words = ["train", '"$run/launch/job.toml"', "--run", '"$run"', *arguments, '"$@"']
    parts = [
        f'  -n {component.num_ranks} "$run/launch/rank-{number}.sh" {" ".join(words)}'
        for number, component in enumerate(components)
    ]
    own = Path(sys.executable).with_name("mpirun")  # a wheel's, which needs no module
    program = shlex.quote(str(own)) if own.exists() else "mpirun"
    lines = ["#!/bin/bash", *title(components), "set -euo pipefail"]
    lines += [f"run={shlex.quote(str(run))}", f"cd -- {shlex.quote(str(folder))}", f"exec {program}{hosts} \\"]
    return "\n".join([*lines, " : \\\n".join(parts)]) + "\n"


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
    write_files(prepared.run, files, prepared.components)
    where = "" if hosts else ", all on this host"
    click.echo(f"{' + '.join(each.describe() for each in prepared.components)}, by mpirun of {implementation}{where}")
    for line in prepared.notes:
        click.echo(line)
    click.echo(f"start it with: {shlex.quote(str(prepared.run / 'start.sh'))}")


def _read_hosts(path: Path) -> list[str]:
    try:
        return read_bytes(path).decode().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = describe_os_error(error) if isinstance(error, OSError) else error
        raise LaunchError(f"{path}: cannot be read: {why}; give a file with a host a line") from None
