"""Measures the offsets between the clocks of hosts."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpctrain.comm.transports.members import Members

if TYPE_CHECKING:
    from hpctrain.comm.world import World

EXCHANGES = 20
OPERATION = "align clocks"


def clock_offset(world: "World") -> float:
    """Return the offset to add to this rank's `time.monotonic` to get rank 0's, in seconds. All ranks must call."""
    with world.recorded(OPERATION):
        return offset_to_first(world.everybody, world.hosts)


def offset_to_first(members: Members, hosts: Sequence[str]) -> float:
    """Return the offset to add to this rank's `time.monotonic` to get the first member's. All of them must call.

    It is in seconds. Ranks of a host share a clock, so one of each host asks. The error is at most half of the quickest
    answer (Cristian 1989).
    """
    firsts = {host: hosts.index(host) for host in hosts}
    own = 0.0
    for first in firsts.values():
        if first == 0:
            continue
        if members.rank == 0:
            for _ in range(EXCHANGES):
                members.receive(first, OPERATION)
                members.send(time.monotonic(), first, OPERATION)
        elif members.rank == first:
            exchanges = []
            for _ in range(EXCHANGES):
                asked = time.monotonic()
                members.send(None, 0, OPERATION)
                theirs, answered = members.receive(0, OPERATION), time.monotonic()
                exchanges.append((answered - asked, theirs - (asked + answered) / 2))
            own = min(exchanges)[1]  # of the fastest answer
    return members.allgather(own, OPERATION)[firsts[hosts[members.rank]]]
