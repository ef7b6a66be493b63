"""Finds out whether this MPI moves memory of devices: by trying it, in a process that may die of it.

What an MPI says of itself is no proof, and one that cannot do it usually ends with a segmentation fault. The child is
an MPI job of its own, of one rank, which sends to itself; it knows nothing of the launcher of this one.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.comm.routes.abilities import Ability

CHILD = Path(__file__).with_name("cuda_aware_child.py")
# Loading torch from a busy file system and starting a device take most of it.
TIMEOUT_SECONDS = 90.0
# Variables by which launchers configure MPI libraries. Settings (OMPI_MCA_pml, MPICH_GPU_SUPPORT_ENABLED,
# UCX_TLS) stay: the answer is to hold for this job.
LAUNCHER_PREFIXES = (
    "PMI_",
    "PMI2_",
    "PMIX_",
    "PALS_",
    "ALPS_",
    "HYDI_",
    "HYDRA_",
    "MPI_LOCAL",
    "MPIEXEC_",
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "OMPI_APP_",
    "OMPI_FIRST_",
    "OMPI_NUM_APP_",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "OMPI_MCA_prte",
    "PRTE_",
    "SLURM_",
    "FLUX_",
)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that nobody's launcher started. Pure."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER_PREFIXES)}


def probe_direct(
    kind: str, index: int = 0, timeout_seconds: float = TIMEOUT_SECONDS, command: Sequence[str] | None = None
) -> Ability:
    """Say whether MPI can be given pointers to memory of a device (`kind` cpu: of the host), and how that is known.

    One rank of a host calls. The child is killed, with all that it started, after the timeout. `command` replaces it.
    """
    command = list(command or (sys.executable, str(CHILD), kind, str(index)))
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=without_launcher(os.environ),
        start_new_session=True,
    ) as child:
        try:
            out, errors = child.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Ability(False, f"a probe that sent it was not done after {timeout_seconds:g} s")
    return judge(child.returncode, out, errors)


def judge(code: int, out: str, errors: str) -> Ability:
    """Return what the end of the child means. Pure."""
    said = out.strip().splitlines()
    if code == 0 and said:
        return Ability(True, said[-1])
    died = -code if code < 0 else code - 128  # a shell, or a library's handler, reports a signal so
    if died in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        name = signal.Signals(died).name
        return Ability(False, f"a probe that sent it died of {name}: this MPI takes host memory only")
    complaint = (errors.strip().splitlines() or said or ["it said nothing"])[-1]
    return Ability(False, f"a probe that sent it failed (exit code {code}): {complaint[:200]}")
