"""What a world knows of its ranks before they have said anything to each other."""

from dataclasses import dataclass

import pytest

from hpctrain.comm.mpi_communicators import gather_places
from hpctrain.comm.topology import Place


@dataclass
class FakeComm:
    """COMM_WORLD of one of several ranks, whose shared memory ends where `domains` says, by rank."""

    rank: int
    domains: tuple[int, ...]
    places: tuple[Place, ...]

    def Split_type(self, kind):  # noqa: N802 (as in mpi4py)
        return self

    def bcast(self, value):
        return self.domains.index(self.domains[self.rank])

    def Free(self):  # noqa: N802
        pass

    def allgather(self, value):
        return [(place, self.domains.index(domain), 0) for place, domain in zip(self.places, self.domains, strict=True)]


class FakeMPI:
    COMM_TYPE_SHARED = 1

    def __init__(self, comm: FakeComm):
        self.COMM_WORLD = comm


@pytest.mark.parametrize(
    ("hosts", "domains", "expected"),
    [
        (("a", "a", "b", "b"), (0, 0, 1, 1), ("a", "a", "b", "b")),
        (("a", "a", "a", "a"), (0, 0, 1, 1), ("a", "a", "a:2", "a:2")),
        (("a", "b", "a", "b"), (0, 0, 0, 0), ("a", "b", "a", "b")),
        (("a", "a", "b", "a"), (0, 1, 2, 1), ("a", "a:1", "b", "a:1")),
    ],
)
def test_ranks_of_one_host_share_memory(hosts, domains, expected):
    """One name over several domains is several hosts; several names in one domain are what the ranks say."""
    places = tuple(Place(host, "cpu") for host in hosts)
    result = gather_places(FakeMPI(FakeComm(0, domains, places)), places[0])
    assert [place.host for place in result] == list(expected)
