"""Facts known before MPI starts: the launcher's promise, from its environment variables, and this host's resources."""

import math
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.config.errors import LaunchError

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
END_VARIABLES = ("HPCTRAIN_END_TIME", "SLURM_JOB_END_TIME")
"""Variables with the end of the batch job, in seconds since 1970. The first is for batch systems that set none."""
EXIT_FILE_VARIABLE = "HPCTRAIN_EXIT_FILE"
"""Variable that names a file for the exit code of the first rank that fails, or 0 where the run has succeeded. A
launcher that ends the others reports the code of a signal, and some report 0 where a host was lost."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE")
"""Variables of torchrun, which starts no MPI. One of them alone belongs to another program."""
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
HOST_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
STEP_VARIABLE = "SLURM_STEP_TASKS_PER_NODE"
"""Slurm's variable with the ranks of each host of the step, such as `4(x2),3`."""

THREADS_VARIABLE = "OMP_NUM_THREADS"
MOST_THREADS = 4096
MOST_DIGITS = 9
"""Most digits of a number in a launcher's variables."""
LEAST_DEVICE_CORES = 4
"""Fewest cores of a rank with a device: for its main thread, its lanes, its watchdog, and the device's driver."""
MORE_CORES = "mpirun --bind-to none, or srun --cpus-per-task=8"


def record_exit(code: int) -> None:
    """Write an exit code to the file that the environment names, unless another rank has written one."""
    if path := os.environ.get(EXIT_FILE_VARIABLE):
        with suppress(OSError), open(path, "x") as file:
            file.write(f"{code}\n")


def few_cores(ranks: Sequence[tuple[str, int]]) -> str:
    """Return which ranks with a device may use too few cores; empty where none does. Pure.

    `ranks` are pairs of device kind and number of cores. By default Open MPI binds two ranks to a core each, and Slurm
    gives a task one core.
    """
    few = [cores for kind, cores in ranks if kind != "cpu" and cores < LEAST_DEVICE_CORES]
    if not few:
        return ""
    least = f"{min(few)} core{'s' * (min(few) > 1)}"
    return f"{len(few)} of {len(ranks)} ranks have a device and {least}, and threads that need {LEAST_DEVICE_CORES}"


def host_memory_bytes() -> int:
    """Return the physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_host_bytes(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of this host's memory that this job may still fill.

    It is the least of the memory that the host has available, and the limits of its cgroups and of Slurm. Limits that
    cannot be read are none.
    """
    mebibytes, _ = number_in(("SLURM_MEM_PER_NODE",), environment)
    each, _ = number_in(("SLURM_MEM_PER_CPU",), environment)
    cores, _ = number_in(("SLURM_CPUS_ON_NODE",), environment)
    available = re.search(r"MemAvailable:\s*(\d+) kB", _text_of(root / "proc/meminfo"))
    left = [int(available[1]) << 10 if available else host_memory_bytes()]
    left += [number << 20 for number in (mebibytes, each and cores and each * cores) if number]
    for line in _text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            folder = root / "sys/fs/cgroup" / controllers / group.lstrip("/")
            for each_folder in (folder, *folder.parents):
                most, used = (_text_of(each_folder / name).strip() for name in names)
                left += [max(0, int(most) - int(used))] if most.isdigit() and used.isdigit() else []
    return min(left)


def _text_of(file: Path) -> str:
    """Return the text of a file; empty where it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text()
    return ""


def promised_rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher."""
    return number_in((*RANK_VARIABLES, *_of_torchrun(0)))[0] or 0


def promised_size() -> tuple[int, str]:
    """Return how many ranks the launcher promised and the variable that says so; (1, "") without a launcher."""
    number, variable = number_in((*SIZE_VARIABLES, *_of_torchrun(1)))
    return (1, "") if number is None else (number, variable)


def ranks_on_host() -> int:
    """Return the most ranks that the launcher can have started on this host; 1 where it does not say."""
    of_hosts = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get(STEP_VARIABLE, ""))
    return number_in(HOST_SIZE_VARIABLES)[0] or max(map(int, of_hosts), default=1)


def _of_torchrun(place: int) -> Sequence[str]:
    """Return torchrun's variable with this index, if torchrun has set both."""
    return TORCHRUN_VARIABLES[place : place + 1] if all(os.environ.get(name) for name in TORCHRUN_VARIABLES) else ()


def number_in(variables: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[int | None, str]:
    """Return the number in the first of a launcher's variables that is not empty, and its name; (None, "") without any.

    Raises LaunchError where it is no number.
    """
    for variable in variables:
        if text := environment.get(variable, "").strip():
            if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
                raise LaunchError(
                    f"{variable} = {text!r:.40}: is no whole number, and a launcher sets it to one; start the ranks"
                    f" with mpirun or srun, or unset {variable}"
                )
            return int(text), variable
    return None, ""


def asked_threads() -> int | None:
    """Return the number of threads that the user requests for a rank; None where no variable says it.

    OpenMP's variable may have a number for each level of nested parallelism; the first one counts.

    Raises LaunchError.
    """
    if not (text := os.environ.get(THREADS_VARIABLE, "").strip()):
        return None
    first = text.partition(",")[0].strip()
    number = int(first) if first.isascii() and first.isdigit() and len(first) <= MOST_DIGITS else 0
    if not 1 <= number <= MOST_THREADS:
        raise LaunchError(
            f"{THREADS_VARIABLE} = {text!r:.40}: is no number of threads from 1 to {MOST_THREADS:,}; set it to the"
            " cores of a rank, or unset it"
        )
    return number


def end_of_batch_job() -> float | None:
    """Return when the batch job of this process ends, in seconds since 1970; None where no variable says it."""
    for variable in END_VARIABLES:
        with suppress(KeyError, ValueError):
            if math.isfinite(end := float(os.environ[variable])):
                return end
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
