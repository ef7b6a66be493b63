"""How busy other programs kept the cores: a figure that was measured on a busy machine proves nothing."""

import os
import resource
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

TOO_BUSY = 0.1
"""Share of the cores' time that others used, above which a late figure is no failure."""


def own_seconds(and_running: bool = True) -> float:
    """Return the processor time of this process and of those that it started and that have ended.

    `and_running`: of those that run, too, with all that they have waited for. The server of warm starts is one.
    """
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used) + (_seconds_of_running_children() if and_running else 0)


def _seconds_of_running_children() -> float:
    stats = (_parent_and_seconds(path) for path in Path("/proc").glob("[0-9]*/stat"))
    return sum(seconds for parent, seconds in stats if parent == os.getpid())


def _parent_and_seconds(stat: Path) -> tuple[int, float]:
    """Return the parent of a process, and its processor time with that of the children that it waited for."""
    try:
        _state, parent, *rest = stat.read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0, 0.0
    return int(parent), sum(map(int, rest[9:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


def seconds_of(pid: int) -> float:
    """Return the processor time of a process that was not waited for, and of the children that it waited for."""
    return _parent_and_seconds(Path(f"/proc/{pid}/stat"))[1]


class OtherPrograms:
    """Measures from when it is made what others than the tests used of all cores of this machine."""

    def __init__(self):
        self._own, self._all, self._begun = own_seconds(), _all_seconds(), time.monotonic()

    def own_seconds(self) -> float:
        return own_seconds() - self._own

    def share(self, own: float) -> float:
        """Return the share of the cores' time, without the `own` seconds of the test's processes."""
        cores = os.cpu_count() or 1
        available = max(1e-9, cores * (time.monotonic() - self._begun))
        return max(0.0, _all_seconds() - self._all - own) / available


def _all_seconds() -> float:
    """Return the seconds in which cores were in use, or were taken away from this virtual machine.

    Programs of low priority do not count: they give way.
    """
    with open("/proc/stat") as file:
        user, _nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    return (user + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@contextmanager
def unless_busy(others: OtherPrograms):
    """Enclose assertions on times of programs that have ended; where one fails on a busy machine, skip with the reason.

    `others` was made before the programs were started.
    """
    try:
        yield
    except AssertionError as error:
        if (share := others.share(others.own_seconds())) <= TOO_BUSY:
            raise
        text = str(error).strip().splitlines()[0]
        pytest.skip(f"not measured: other programs used {share:.0%} of the cores; measured {text}")
