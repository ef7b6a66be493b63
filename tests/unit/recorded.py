"""Flight records of several ranks, made in one process."""

import time

from hpctrain.comm.watchdog.diagnosis import Evidence
from hpctrain.comm.watchdog.recorder import Recorder


def make_recorders(num_ranks: int, folder=None, attempt: int = 0) -> list[Recorder]:
    return [Recorder(folder, rank, num_ranks, "ab"[rank % 2], "cpu", attempt) for rank in range(num_ranks)]


def evidence_of(recorders, **more) -> Evidence:
    return Evidence({r.rank: r.snapshot() for r in recorders}, len(recorders), time.time(), **more)


def everywhere(recorders, name: str) -> int:
    """Add a lane over all ranks, with the same number everywhere."""
    numbers = {recorder.add_group(name, range(len(recorders))) for recorder in recorders}
    assert len(numbers) == 1
    return numbers.pop()
