"""Scripts that start the ranks of all components as one MPI job: a batch script for Slurm, and a start with mpirun.

Their texts are the templates in this folder. Slurm splits lines `#SBATCH` by rules of its own. They have only words
that `Launch` has checked. Everything else is quoted for the shell.
"""

import ipaddress
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.config.clusters.launch import BATCH_WORD
from hpctrain.config.errors import JobError, LaunchError
from hpctrain.launch.components import Component
from hpctrain.launch.files import render

SIGNAL_SECONDS = 120
"""Before the time limit Slurm sends SIGTERM; hpctrain itself ends earlier where its steps are long."""
LONGEST_NAME = 60
OUTPUT = "slurm-%j.out"
MPIRUNS = ("mpich", "openmpi", "intel")
HOST_FORMATS = {"mpich": "{host}:{count}", "openmpi": "{host} slots={count}", "intel": "{host}:{count}"}
ANSWER_SECONDS = 20
"""Within which a host answers, before ranks are started on it again."""
ASKED_HOSTS = 32
"""Hosts that are asked at once."""
END_SECONDS = 30
"""Within which a launcher ends after a rank has written how the run ended."""
HOST_FILE_OPTIONS = {"mpich": "-f", "openmpi": "--hostfile", "intel": "-machinefile"}


@dataclass(frozen=True)
class Start:
    """A job that is to be started, by whatever launcher."""

    name: str
    run: Path
    """The run folder, absolute: it has the job, the scripts of ranks, and the output."""
    folder: Path
    """Where hpctrain runs, absolute: relative paths of the job start there."""
    components: Sequence[Component]
    arguments: Sequence[str] = ()
    """More of `hpctrain train`, as words of a shell."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files of the run folder, by name."""
    notes: Sequence[str] = ()
    """Messages for the person who starts it."""

    def describe(self) -> str:
        return " + ".join(component.describe() for component in self.components)

    def rank_command(self, number: int) -> str:
        """Return what starts a rank of a component."""
        words = [f'"$run/launch/rank-{number}.sh"', "train", '"$run/launch/job.toml"', "--run", '"$run"']
        return " ".join([*words, *self.arguments])

    def srun_options(self, component: Component) -> str:
        """Return more options of srun for a component: those of the cluster file, and its container by pyxis.

        Raises LaunchError for a folder that pyxis could not be told.
        """
        request, folders = component.request, (str(self.run), str(self.folder))
        words = list(request.srun)
        if request.by_pyxis:
            for folder in folders:
                if set(folder) & set(",:"):
                    raise LaunchError(f"{folder!r}: pyxis takes no folder with , or : in its name; choose another")
            mounts = (mount if ":" in mount else f"{mount}:{mount}" for mount in (*folders, *request.mounts))
            words += [f"--container-image={request.container}", f"--container-mounts={','.join(mounts)}"]
            words.append(f"--container-workdir={self.folder}")
        return "".join(f" {shlex.quote(word)}" for word in words)


@dataclass(frozen=True)
class SlurmOptions:
    """Requests of a batch script in addition to its nodes."""

    mpi: str = "pmi2"
    """The interface between srun and the MPI library."""
    time: str | None = None
    retries: int = 3
    """How many times a run is started again after a rank failed."""
    shared_nodes: bool = False
    requeues: bool = True
    """Whether the script puts its own job back into the queue; else it is one of a chain."""


def mpirun_script(start: Start, implementation: str, has_hosts: bool) -> str:
    """Return a script that starts all components with mpirun; without hosts on this one. Raises LaunchError."""
    for component in start.components:
        if component.request.by_pyxis:
            raise LaunchError(
                f"launch.container = {component.request.container!r}: srun starts such images, by pyxis; for mpirun"
                " give a file .sif, which ranks start by Apptainer"
            )
    own = Path(sys.executable).with_name("mpirun")  # a wheel's, which needs no module
    return render(
        "mpirun",
        start=start,
        components=start.components,
        shell_options="uo",
        or_end=f" || exit {JobError.exit_code}",
        program=own if own.exists() else "mpirun",
        hosts=HOST_FILE_OPTIONS[implementation] if has_hosts else "",
        after_host=HOST_FORMATS[implementation].format(host="", count="*") if has_hosts else "",
        answer_seconds=ANSWER_SECONDS,
        asked_hosts=ASKED_HOSTS,
        end_seconds=END_SECONDS,
    )


def host_lines(start: Start, hosts: Sequence[str], implementation: str) -> str:
    """Return a file of hosts: the hosts in the order of the cluster's nodes, each with its number of ranks.

    Raises LaunchError where there are more or fewer hosts than nodes, or a name that such a file cannot hold.
    """
    sizes = [component.ranks_per_node for component in start.components for _ in range(component.num_nodes)]
    if len(hosts) != len(sizes):
        raise LaunchError(
            f"{len(hosts)} hosts for {len(sizes)} nodes ({start.describe()}); list a host for each node, in the order"
            " of the cluster file, one a line"
        )
    for host in hosts:
        if _is_ipv6(host):
            if implementation != "openmpi":
                raise LaunchError(
                    f"{host} is an IPv6 address, and mpirun of {implementation} takes its first colon for the end of"
                    " the host; list the host's name"
                )
        elif set(host) & set(" \t:=#") or not host.isprintable():
            raise LaunchError(f"{host!r} is no name of a host; list a name or an address a line, and nothing else")
    pairs = zip(hosts, sizes, strict=True)
    return "".join(HOST_FORMATS[implementation].format(host=host, count=count) + "\n" for host, count in pairs)


def _is_ipv6(host: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


def batch_script(start: Start, options: SlurmOptions) -> str:
    """Return a batch script; that of a heterogeneous job where there are several components."""
    can_name = BATCH_WORD.fullmatch(str(start.run)) and "%" not in str(start.run)  # Slurm has no quotes for it
    return render(
        "batch",
        start=start,
        components=start.components,
        options=options,
        is_mixed=len(start.components) > 1,
        job_name=job_name(start.name),
        output=start.run / OUTPUT if can_name else OUTPUT,
        signal_seconds=SIGNAL_SECONDS,
        after_host="",
        answer_seconds=ANSWER_SECONDS,
        asked_hosts=ASKED_HOSTS,
        shell_options="uo",
        or_end=f" || exit {JobError.exit_code}",
    )


def chain_script(batch_path: Path, run: Path, length: int) -> str:
    """Return a script that submits the batch script `length` times, each job after the one before was interrupted."""
    return render("chain", batch_path=batch_path, ended=run / "launch" / "ended", length=length)


def job_name(text: str) -> str:
    """Return a name that Slurm and its tools show without quotes: other characters become `-`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")[:LONGEST_NAME] or "hpctrain"
