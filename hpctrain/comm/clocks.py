"""How far the clocks of hosts are apart."""

import time
from collections.abc import Sequence

EXCHANGES = 20


def offset_to_first(comm, hosts: Sequence[str]) -> float:
    """Return what to add to this rank's `time.monotonic` to get rank 0's, in seconds. All ranks of `comm` must call.

    Ranks of a host share a clock, so one of each host asks rank 0. The error is at most half of the quickest answer
    (Cristian 1989).
    """
    firsts = {host: hosts.index(host) for host in hosts}
    own = 0.0
    for first in firsts.values():
        if first == 0:
            continue
        if comm.rank == 0:
            for _ in range(EXCHANGES):
                comm.recv(source=first)
                comm.send(time.monotonic(), dest=first)
        elif comm.rank == first:
            own = min(_ask(comm) for _ in range(EXCHANGES))[1]
    return comm.allgather(own)[firsts[hosts[comm.rank]]]


def _ask(comm) -> tuple[float, float]:
    """Return how long an answer took, and how far off the clock is by it."""
    asked = time.monotonic()
    comm.send(None, dest=0)
    theirs = comm.recv(source=0)
    answered = time.monotonic()
    return answered - asked, theirs - (asked + answered) / 2
