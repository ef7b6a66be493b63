"""MPI's communicators: one for each accelerator family, bridged into one over all ranks, and one for alarms.

All of them are made here, once for a world; nothing else splits or duplicates. Each has a name that MPI's own tools and
tracers show:

| name                     | ranks               | what is sent on it                             |
|--------------------------|---------------------|------------------------------------------------|
| `hpctrain family FAMILY` | those of one family | messages of groups inside the family           |
| `hpctrain bridge`        | all                 | messages of groups of several families         |
| `hpctrain alarms`        | all                 | questions and answers of watchdogs, failures   |

A group is its ranks and a tag on one of the first two (`hpctrain.comm.transports.members`). One communicator for each
group would be more to make at the start, and more to revoke where ranks are lost. MPI also has a limited number of
them.
"""

import time
from collections.abc import Sequence
from typing import Any

from hpctrain.comm.topology import DOMAIN, Place, split_families


class FamilyCommunicators:
    """MPI's communicators of one world, as this rank sees them. The code that makes them closes them."""

    def __init__(self, mpi, families: Sequence[str]):
        """All ranks must call, with the family of each rank."""
        parent, self.mpi, self.families = mpi.COMM_WORLD, mpi, tuple(families)
        self.rank: int = parent.rank
        own = self.families[self.rank]
        self.family = self._named(parent.Split(self.families.index(own), self.rank), f"hpctrain family {own}")
        self.bridge = self._named(parent.Dup(), "hpctrain bridge")
        self.alarms = self._named(parent.Dup(), "hpctrain alarms")
        self.made_at: int = parent.bcast(time.time_ns())
        """Time at which rank 0 made them, in ns: the same on all ranks, and different for each start."""
        members = [rank for rank, family in enumerate(self.families) if family == own]
        self._positions = {rank: position for position, rank in enumerate(members)}
        self.kept: list[object] = []
        """Objects that live as long as the communicators: MPI may still write into tensors of abandoned operations."""

    def _named(self, comm, name: str):
        comm.Set_name(name[: self.mpi.MAX_OBJECT_NAME - 1])
        return comm

    def route(self, ranks: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
        """Return the communicator of a group that contains this rank, and the numbers of the group's ranks there."""
        own = self.families[self.rank]
        if any(self.families[rank] != own for rank in ranks):
            return self.bridge, tuple(ranks)
        return self.family, tuple(self._positions[rank] for rank in ranks)

    def describe(self) -> list[tuple[str, int]]:
        """Return the name and the number of ranks of each communicator of this rank, as MPI has them."""
        return [(comm.Get_name(), comm.size) for comm in (self.family, self.bridge, self.alarms)]

    def close(self) -> None:
        """Free them. All ranks must call."""
        for comm in (self.family, self.bridge, self.alarms):
            comm.Free()


def gather_places(mpi, own: Place, memory_bytes: int = 0) -> list[Place]:
    """Return the places of all ranks. All ranks must call, each with its device's memory (for `split_families`).

    A host is a set of ranks that share memory as MPI sees it. That may be less than all ranks with the same host name:
    to MPICH each node of Slurm is a host, and so is each container. A further host with the same name has the number of
    its first rank appended.
    """
    comm = mpi.COMM_WORLD
    sharing = comm.Split_type(mpi.COMM_TYPE_SHARED)
    leader = sharing.bcast(comm.rank)
    sharing.Free()
    gathered = comm.allgather((own, leader, memory_bytes))
    first: dict[str, int] = {}
    for place, leader, _ in gathered:
        first.setdefault(place.host, leader)
    places = [
        place if first[place.host] == leader else place._replace(host=f"{place.host}{DOMAIN}{leader}")
        for place, leader, _ in gathered
    ]
    return split_families(places, [size for _, _, size in gathered])
