"""What a world knows of its ranks before they have said anything to each other."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from hpctrain.comm.mpi_communicators import gather_places
from hpctrain.comm.topology import Place
from hpctrain.comm.waiting import Patience, Phase
from hpctrain.comm.world import World
from hpctrain.config.errors import RankLossError


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


def test_what_a_library_says_of_a_death_before_the_guardian_does_is_not_the_cause():
    noted, patience = [], Patience(Phase("a test", 9.0, "a.key"))

    def abort(code: int):
        raise SystemExit(code)

    watchdog = SimpleNamespace(note_failure=noted.append)
    world = SimpleNamespace(patience=patience, watchdog=watchdog, free=lambda *_, **__: None, _abort=abort)
    loss = RankLossError("rank 1 was killed", is_dead=True)
    threading.Timer(0.1, setattr, (patience, "interruption", loss)).start()
    with pytest.raises(SystemExit, match="84"):
        World.fail(world, RuntimeError("MPI_ERR_PROC_FAILED"))  # pyright: ignore[reportArgumentType]
    assert noted == [loss]
