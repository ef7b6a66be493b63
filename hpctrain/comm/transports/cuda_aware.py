"""Detects whether this MPI moves memory of devices: it is tried in a process that may crash.

An MPI's own statement is no proof, and one that cannot do it usually ends with a segmentation fault. The child is an
MPI job of its own, of one rank, which sends to itself. It has no connection to this job's launcher.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.transports.members import GroupMessages

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator

# Set to 0: MPI is never given memory of devices; to 1: it is, without a probe, which a launcher may not allow.
DIRECT_VARIABLE = "HPCTRAIN_DIRECT"
RING_SIZES, RING_SECONDS = (1024, 8 << 20), 60.0
"""Sizes of the test messages between ranks, in bytes: one that MPI copies, and one that it moves in place; and their
timeout."""
CHILD = Path(__file__).with_name("cuda_aware_child.py")
# Most of it is loading torch from a busy file system and starting a device.
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


def asked_direct(environment: Mapping[str, str] = os.environ) -> Ability | None:
    """Return what HPCTRAIN_DIRECT says; None where it leaves the answer to a probe. Pure."""
    value = environment.get(DIRECT_VARIABLE, "auto")
    if value in ("0", "1"):
        return Ability(value == "1", f"{DIRECT_VARIABLE}={value}")
    return None


def exchange_in_ring(
    messages: GroupMessages, accelerator: "Accelerator", timeout_seconds: float = RING_SECONDS
) -> Ability:
    """Send device memory to the next member, receive from the previous one, and say whether it arrived unchanged.

    All members must call, and may not use their `messages` afterwards. Nothing waits longer than the timeout. Messages
    that are then in flight are left there.
    """
    mpi, ranks = messages.space.mpi, messages.members.ranks
    after, before = (messages.rank + 1) % messages.size, (messages.rank - 1) % messages.size
    rank = ranks[messages.rank]
    for size in RING_SIZES:
        sent, received = (_pattern(size, number).to(accelerator.device) for number in (rank, rank + 1))
        expected = _pattern(size, ranks[before])
        accelerator.synchronize()  # the source is complete, and no kernel uses the target any more
        requests = [
            messages.receive(mpi_buffer(mpi, accelerator, received), before),
            messages.send(mpi_buffer(mpi, accelerator, sent), after),
        ]
        deadline = time.monotonic() + timeout_seconds
        while not mpi.Request.Testall(requests):
            if time.monotonic() > deadline:
                requests[0].Cancel()  # MPI must not write there later
                return Ability(False, f"{size} bytes to rank {ranks[after]} were not there after {timeout_seconds:g} s")
            time.sleep(1e-4)
        if not torch.equal(received.cpu(), expected):
            return Ability(False, f"{size} bytes of rank {ranks[before]} arrived changed at rank {rank}")
    messages.close()
    sizes = " and ".join(map(str, RING_SIZES))
    return Ability(True, f"messages of {sizes} bytes between ranks arrived as they were")


def _pattern(size: int, seed: int) -> torch.Tensor:
    period = torch.arange(251, dtype=torch.uint8).roll(-7 * seed)  # a prime: pages do not repeat
    return period.repeat(size // len(period) + 1)[:size]


def mpi_buffer(mpi, accelerator: "Accelerator", part: torch.Tensor):
    """Return what mpi4py accepts for bytes: a CuPy array over the same device memory, or else the address."""
    view = accelerator.view_for_mpi(part)
    if view is None:
        return mpi.buffer.fromaddress(part.data_ptr(), part.numel())
    return [view, part.numel(), mpi.BYTE]


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of launchers. Pure."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER_PREFIXES)}


def probe_direct(
    kind: str, index: int = 0, timeout_seconds: float = TIMEOUT_SECONDS, command: Sequence[str] | None = None
) -> Ability:
    """Say whether MPI accepts pointers to memory of a device (`kind` cpu: of the host), and the evidence.

    One rank of a host calls. The child is killed after the timeout, with all that it started. `command` replaces it.
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
    """Return the ability that follows from how the child ended. Pure."""
    said = out.strip().splitlines()
    if code == 0 and said:
        return Ability(True, said[-1])
    died = -code if code < 0 else code - 128  # a shell, or a library's handler, adds 128 to the signal's number
    if died in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
        name = signal.Signals(died).name
        return Ability(False, f"a probe that sent it died of {name}: this MPI takes host memory only")
    complaint = (errors.strip().splitlines() or said or ["it said nothing"])[-1]
    return Ability(False, f"a probe that sent it failed (exit code {code}): {complaint[:200]}")
