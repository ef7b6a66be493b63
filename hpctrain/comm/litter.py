"""Removes shared memory that MPI of killed runs left: after SIGKILL nobody else does."""

import os
import re
import time
from pathlib import Path

from hpctrain.comm.window import SHARED_MEMORY

SEGMENTS = re.compile(r"mpich_shm_\w+|(vader|sm)_segment\.[\w.-]+")
"""What MPICH and Open MPI call their segments."""
SETTLED_SECONDS = 10.0
"""Until then ranks that are just starting may have yet to open a segment by its name."""


def remove_dead_segments(folder: Path = Path(SHARED_MEMORY), settled_seconds: float = SETTLED_SECONDS) -> list[Path]:
    """Remove segments of this user that no process has mapped or open; return their paths.

    Processes that are not visible from here, as of another container, keep what they have mapped: only the name goes.
    """
    old = [path for path in _segments(folder) if _is_settled(path, settled_seconds)]
    if not old:
        return []
    used, removed = _used_paths(), []
    for path in old:
        if str(path) not in used:
            try:
                path.unlink()
                removed.append(path)
            except OSError:  # somebody else was faster
                continue
    return removed


def _segments(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if SEGMENTS.fullmatch(path.name)]
    except OSError:
        return []


def _is_settled(path: Path, seconds: float) -> bool:
    try:
        about = path.lstat()
    except OSError:
        return False
    return about.st_uid == os.geteuid() and time.time() - max(about.st_ctime, about.st_mtime) > seconds


def _used_paths() -> set[str]:
    """Return the files that processes have mapped or open, as far as they can be seen."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text(errors="replace").splitlines():
                fields = line.split(None, 5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    used.add(fields[5])
            used.update(os.readlink(each) for each in (process / "fd").iterdir())
        except OSError:  # it has ended, or is of another user
            continue
    return used
