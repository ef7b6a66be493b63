"""Asks, without starting MPI here, for the MPI library of this environment and the interfaces of srun."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from subprocess import PIPE, STDOUT
from typing import NamedTuple

from hpctrain.config.errors import LaunchError

LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",  # MPICH's and Intel's mpirun
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MVP_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
"""A process' number among the ranks of its host, the first that is set. Those of batch systems come last: the ranks of
an mpirun inside of a job all have the number of the job's own script."""
SECONDS = 60
VERSION_SCRIPT = """\
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""
MPI_OF_SRUN = {
    "mpich": ("pmi2", "pmix"),
    "intel": ("pmi2", "pmix"),
    "openmpi": ("pmix", "pmix_v5", "pmix_v4", "pmix_v3"),
    "cray": ("cray_shasta", "pmi2"),
}
"""The values of srun's --mpi by which a library's ranks can connect, the best first."""
WORDS = {"openmpi": "open mpi", "intel": "intel", "cray": "cray"}


class MpiLibrary(NamedTuple):
    kind: str
    """One of the keys of `MPI_OF_SRUN`."""
    text: str
    """The first line of its version."""

    def usable_interfaces(self, offered: Sequence[str]) -> list[str]:
        """Return which of a Slurm's values of --mpi this library can use, the best first."""
        return [kind for kind in MPI_OF_SRUN[self.kind] if kind in offered]


def kind_of(version: str) -> str:
    """Return which library says this of itself; relatives of MPICH are `mpich`."""
    return next((kind for kind, word in WORDS.items() if word in version.lower()), "mpich")


def mpi_library(python: str = sys.executable) -> MpiLibrary:
    """Ask a child process for the library that mpi4py uses. Raises LaunchError where there is none."""
    try:
        done = subprocess.run([python, "-c", VERSION_SCRIPT], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{python}: cannot be asked for its MPI library: {error}") from None
    if done.returncode or not done.stdout.strip():
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise LaunchError(
            f"{python} has no MPI library: {why}; load your site's MPI module, or pip install 'hpctrain[mpi]'"
        )
    text = " ".join(done.stdout.splitlines()[0].split())
    return MpiLibrary(kind_of(done.stdout), text)


def output_of(*words: str) -> str:
    """Return all that a program prints; nothing where it cannot be started."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, stdout=PIPE, stderr=STDOUT, text=True, timeout=SECONDS).stdout
    return ""


def srun_interfaces() -> list[str]:
    """Return the values that this Slurm takes for `srun --mpi`; none where it cannot be asked."""
    words = output_of("srun", "--mpi=list").replace(",", " ").replace(":", " ").split()
    return [word for word in words if word == "none" or word.startswith(("pmi", "cray"))]


def srun_interface() -> str:
    """Return the value of srun's --mpi that fits this environment's MPI library. Raises LaunchError."""
    library, offered = mpi_library(), srun_interfaces()
    kinds = MPI_OF_SRUN[library.kind]
    if not offered:
        return kinds[0]
    if usable := library.usable_interfaces(offered):
        return usable[0]
    raise LaunchError(
        f"{library.text} needs srun --mpi={' or '.join(kinds)}, and this Slurm has {', '.join(offered)};"
        " install the missing plugin, or name another interface with --mpi"
    )
