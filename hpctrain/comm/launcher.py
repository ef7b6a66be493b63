"""What can be known before MPI is started: the launcher's promise, by the environment it left, and this host."""

import os

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def host_memory_bytes() -> int:
    """Return the physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def promised_rank() -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher."""
    return next((int(os.environ[v]) for v in RANK_VARIABLES if v in os.environ), 0)


def promised_size() -> tuple[int, str]:
    """Return how many ranks the launcher promised and the variable that says so; (1, "") without a launcher."""
    return next(((int(os.environ[v]), v) for v in SIZE_VARIABLES if v in os.environ), (1, ""))
