"""The script that starts one rank: it sets up the software of the rank's family, and becomes hpctrain."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from hpctrain.launch.components import Component

LOCAL_RANK = "${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${PMI_LOCAL_RANK:-0}}}}"
MODULES = """\
if ! command -v module > /dev/null; then
  for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /etc/profile.d/z00_lmod.sh; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
fi"""


def rank_script(component: Component) -> str:
    """Return the script of a component's ranks; all texts of the cluster file are quoted.

    Of several families on a node a rank takes its own by its number on the node.
    """
    title = f"# Starts one rank of {component.describe()}. Arguments: those of hpctrain."
    lines = ["#!/bin/bash", title, "set -eo pipefail"]
    if len(component.devices) == 1:
        lines += _set_up(component, next(iter(component.devices)))
    else:
        lines.append(f'case "{LOCAL_RANK}" in')
        first = 0
        for name, count in component.devices.items():
            lines.append(f"{'|'.join(str(number) for number in range(first, first + count))})")
            lines += [f"  {line}" for line in _set_up(component, name)]
            lines.append("  ;;")
            first += count
        lines += [
            "*)",
            f'  echo "hpctrain: rank {LOCAL_RANK} of node $(hostname): {component.ranks_per_node} ranks are for a node;'
            ' start as many" >&2',
            "  exit 12",
            "  ;;",
            "esac",
        ]
    lines.append('exec "$HPCTRAIN_PROGRAM" "$@"')
    return "\n".join(lines) + "\n"


def _set_up(component: Component, family: str) -> Iterator[str]:
    launch = component.launch[family]
    if family:
        yield f"export HPCTRAIN_FAMILY={shlex.quote(family)}"
    if launch.modules:
        yield from MODULES.splitlines()
        yield f"module load {shlex.join(launch.modules)}"
    folder = Path(launch.venv) if launch.venv else Path(sys.prefix)
    if launch.venv or sys.prefix != sys.base_prefix:
        yield f"export VIRTUAL_ENV={shlex.quote(str(folder))}"
        yield 'export PATH="$VIRTUAL_ENV/bin:$PATH"'
        yield 'HPCTRAIN_PROGRAM="$VIRTUAL_ENV/bin/hpctrain"'
    else:
        yield "HPCTRAIN_PROGRAM=hpctrain"
    cores = launch.cores_per_rank or "${SLURM_CPUS_PER_TASK:-1}"
    yield f"export OMP_NUM_THREADS={cores}"
    for name, value in launch.environment.items():
        yield f"export {name}={shlex.quote(value)}"
