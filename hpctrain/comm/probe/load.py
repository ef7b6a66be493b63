"""Detects whether other programs used the processors, or ranks disagreed, during a measurement."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpctrain.comm.world import World

BUSY_SHARE = 0.2
"""Share of the processors of a host's ranks. If other programs took more, its timings are those of a busy host."""
MOST_SPREAD = 2.0
"""Largest ratio of figures between equal devices. Where half of the figures differ by more, one device was
disturbed."""
IGNORE_VARIABLE = "HPCTRAIN_IGNORE_LOAD"
"""Set to 1, it ignores other programs; for tests, and for machines that are never quiet."""
STAT = "/proc/stat"


class HostUse(NamedTuple):
    """The use of a host's processors as one rank saw it."""

    host: str
    threads: int
    """Computing threads of the rank."""
    seconds: float
    own_seconds: float
    """Processor seconds that the rank's process took."""
    busy_seconds: Mapping[int, float]
    """Busy seconds of each processor that the rank may use, from all processes and the hypervisor. Empty where the
    system does not report them."""


class LoadWatch:
    """Watches the processor time that other programs take on this rank's host, from now on."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, dict[int, float]]:
        return time.monotonic(), time.process_time(), busy_seconds(os.sched_getaffinity(0))

    def disturbance(self, world: World) -> str:
        """Return the host that other programs disturbed most since the watch began, in words; empty: none.

        All ranks must call, and get the same.
        """
        import torch

        (seconds, own, busy), (wall, process, before) = self._now(), self._start
        since = {core: taken - before[core] for core, taken in busy.items() if core in before}
        use = HostUse(world.place.host, torch.get_num_threads(), seconds - wall, own - process, since)
        gathered = world.gather_objects(use)
        return world.broadcast_object(describe_disturbance(gathered) if gathered and looks_at_load() else "")


def looks_at_load(environment: Mapping[str, str] = os.environ) -> bool:
    """Say whether timings of a busy machine are distinguished from those of a quiet one."""
    return environment.get(IGNORE_VARIABLE) != "1"


def busy_seconds(cores: set[int], path: str = STAT) -> dict[int, float]:
    """Return each processor's busy seconds since the host started; empty where the system does not report them."""
    result = {}
    try:
        tick = 1.0 / os.sysconf("SC_CLK_TCK")
        with open(path) as lines:
            for line in lines:
                name, *fields = line.split()
                core = name.removeprefix("cpu")
                if name != core and core.isdigit() and int(core) in cores:
                    user, nice, system, _idle, _waiting, *others = map(int, fields[:8])
                    result[int(core)] = (user + nice + system + sum(others)) * tick
    except (OSError, ValueError):
        return {}
    return result


def describe_disturbance(uses: Sequence[HostUse]) -> str:
    """Return which host other programs disturbed, by the reports of all ranks; empty: none. Pure."""
    worst, result = BUSY_SHARE, ""
    for host in dict.fromkeys(use.host for use in uses):
        here = [use for use in uses if use.host == host]
        busy = {core: seconds for use in here for core, seconds in use.busy_seconds.items()}
        wall = max(use.seconds for use in here)
        if not busy or wall <= 0:
            continue
        taken = max(0.0, sum(busy.values()) - sum(use.own_seconds for use in here)) / wall
        needed = min(len(busy), sum(use.threads for use in here))
        lacking = 1 - (len(busy) - taken) / needed
        if lacking > worst:
            worst = lacking
            result = f"other programs took {taken:.1f} of the {len(busy)} processors of host {host}"
    return result
