"""Removes segments of shared memory that MPI libraries, or hpctrain, left behind when their processes were killed.

They take memory of the host until it is started again. What is worse, MPICH names them by the job step: a job that goes
back into Slurm's queue gets the same names again, opens what its dead ranks left, and fails while MPI starts.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""Where POSIX shared memory lives on Linux."""
PREFIX = "hpctrain-"
"""Of the names of our own memory (`hpctrain.comm.transports.window`), which has one only until all ranks have opened
it."""
PREFIXES = (PREFIX, "mpich_shm_", "vader_segment.", "sm_segment.", "ucx_shm_posix_")
"""The others are of the names that MPICH and its relatives, Open MPI and UCX give."""


def remove_dead_segments(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove segments that are this user's, older than this process, and open in no process; return their names.

    Each rank calls it before it starts MPI: a segment of this start is younger, or open. Never raises: a
    segment that cannot be removed stays.
    """
    begun = process_start()
    candidates: dict[tuple[int, int], Path] = {}
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                facts = path.stat()
                if path.name.startswith(PREFIXES) and facts.st_uid == os.geteuid() and facts.st_mtime < begun:
                    candidates[facts.st_dev, facts.st_ino] = path
    removed = []
    for key in _open_files() if candidates else ():
        candidates.pop(key, None)
    for path in candidates.values():
        with suppress(OSError):
            path.unlink()
            removed.append(path.name)
    return sorted(removed)


def process_start() -> float:
    """Return when this process began, in seconds since 1970; now where the system does not say it."""
    with suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    return time.time()


def _open_files() -> Iterator[tuple[int, int]]:
    """Yield device and inode of what processes of this user have open or mapped."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid != os.geteuid():
                continue
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    facts = link.stat()
                    yield facts.st_dev, facts.st_ino
            for line in (process / "maps").read_text(errors="replace").splitlines():
                fields = line.split()
                if len(fields) > 5 and fields[4] != "0":
                    major, minor = (int(number, 16) for number in fields[3].split(":"))
                    yield os.makedev(major, minor), int(fields[4])
