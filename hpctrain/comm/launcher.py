"""What can be known before MPI is started: the launcher's promise, by the environment it left, and this host."""

import os
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
END_VARIABLES = ("HPCTRAIN_END_TIME", "SLURM_JOB_END_TIME")
"""When the batch job ends, in seconds since 1970. The first is for batch systems that leave no such variable."""
EXIT_FILE_VARIABLE = "HPCTRAIN_EXIT_FILE"
"""A file for the exit code of the first rank that fails. Launchers that end the others report the code of a signal."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE")
"""Of torchrun, which starts no MPI. One of them alone is of something else."""
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def record_exit(code: int) -> None:
    """Write an exit code to the file that the environment names, unless another rank was first."""
    if path := os.environ.get(EXIT_FILE_VARIABLE):
        with suppress(OSError), open(path, "x") as file:
            file.write(f"{code}\n")


def machine_name() -> str:
    """Return a name that no other machine has, even where all are called `localhost`: with the number of its boot."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}".strip()


def host_memory_bytes() -> int:
    """Return the physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def promised_rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher."""
    return _first_number(RANK_VARIABLES, TORCHRUN_VARIABLES[0], 0)[0]


def promised_size() -> tuple[int, str]:
    """Return how many ranks the launcher promised and the variable that says so; (1, "") without a launcher."""
    return _first_number(SIZE_VARIABLES, TORCHRUN_VARIABLES[1], 1)


def _first_number(variables: tuple[str, ...], of_torchrun: str, otherwise: int) -> tuple[int, str]:
    """Return the number that the first of some variables has, and which that is."""
    if all(variable in os.environ for variable in TORCHRUN_VARIABLES):
        variables = (*variables, of_torchrun)
    return next(((int(os.environ[v]), v) for v in variables if v in os.environ), (otherwise, ""))


def end_of_batch_job() -> float | None:
    """Return when the batch job of this process ends, in seconds since 1970; None where nothing says so."""
    for variable in END_VARIABLES:
        with suppress(KeyError, ValueError):
            return float(os.environ[variable])
    if job := os.environ.get("SLURM_JOB_ID"):
        asked = ("squeue", "--noheader", "--jobs", job, "--format", "%L")
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split()
            return time.time() + parse_slurm_seconds(answer[0]) if answer else None
    return None


def parse_slurm_seconds(text: str) -> float:
    """Return the seconds of a time as Slurm writes it: [days-][[hours:]minutes:]seconds. Raises ValueError."""
    days, _, clock = text.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return 86400 * int(days or 0) + seconds
