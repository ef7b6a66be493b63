"""The start with mpirun: one command line with a part for each component, and a file of hosts."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.errors import LaunchError
from hpctrain.launch.components import Component
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
