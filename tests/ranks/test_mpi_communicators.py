"""What is sent on which of MPI's communicators: of two families on two hosts, real ones and rehearsed ones."""

import re
from collections import Counter

import pytest
import torch

from hpctrain.comm import world as worlds
from hpctrain.comm.accelerators.kinds import FAMILY_VARIABLE
from hpctrain.comm.mpi_communicators import FamilyCommunicators
from hpctrain.comm.probe.clocks import clock_offset
from hpctrain.comm.topology import places_of
from hpctrain.comm.transports.members import FIRST_TAG, GroupMessages
from hpctrain.comm.world import HOST_VARIABLE, World
from hpctrain.config.errors import PlanError
from hpctrain.data.order import open_datasets
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.rehearsal.shaped import rehearse
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER
from tests.ranks.small_runs import make_job, make_trainer
from tests.ranks.test_rehearsal import TRUTH

NUMBERS = 1000
BYTES = 4 * NUMBERS
FAMILY, BRIDGE = "family", "bridge"
REFUSED = re.compile("(?i)bcast|gather|scatter|reduce|barrier|alltoall|scan|split|dup|create")


class Counted:
    """One of MPI's communicators, which counts what groups send on it; not what their members agree on.

    It refuses collectives, and to make further communicators.
    """

    def __init__(self, comm):
        self._comm, self.messages, self.bytes = comm, 0, 0

    def Isend(self, buffer, dest, tag):  # noqa: N802 (as in mpi4py)
        if tag >= FIRST_TAG:
            self.messages += 1
            self.bytes += memoryview(buffer).nbytes
        return self._comm.Isend(buffer, dest=dest, tag=tag)

    def __getattr__(self, name: str):
        assert not REFUSED.search(name), f"{name} of MPI was asked for after the start"
        return getattr(self._comm, name)


class CountedCommunicators(FamilyCommunicators):
    """MPI's communicators of a world, which count from the start."""

    def __init__(self, mpi, families):
        super().__init__(mpi, families)
        self.family, self.bridge, self.alarms = Counted(self.family), Counted(self.bridge), Counted(self.alarms)


@pytest.fixture(params=["on two hosts", "rehearsed"])
def own(world, request, monkeypatch):
    """A world of two families with two ranks each, whose communicators count."""
    is_rehearsed = request.param == "rehearsed"
    if not is_rehearsed:  # both families on both hosts, so that MPI carries what a family sends
        monkeypatch.setenv(FAMILY_VARIABLE, ("fast", "slow")[world.rank % 2])
        monkeypatch.setenv(HOST_VARIABLE, ("one", "two")[world.rank // 2])
    monkeypatch.setattr(worlds, "FamilyCommunicators", CountedCommunicators)
    own = World.start(60.0, watched=False, rehearsed=places_of(CLUSTER) if is_rehearsed else None)
    if is_rehearsed:
        rehearse(own, CLUSTER, TRUTH)
    yield own
    own.close()


def counted(own) -> dict[str, tuple[int, int]]:
    """Return how many messages and bytes this rank has sent on each communicator, and count anew."""
    result = {}
    for name in (FAMILY, BRIDGE):
        comm = getattr(own.communicators, name)
        result[name] = comm.messages, comm.bytes
        comm.messages = comm.bytes = 0
    return result


def sum_over(own, ranks) -> dict[str, tuple[int, int]]:
    """Sum numbers over a group with this rank, and return what that took on each communicator."""
    group = own.group(ranks, "test")
    counted(own)
    tensor = torch.full((NUMBERS,), float(own.rank))
    group.all_reduce(tensor)
    assert tensor.tolist() == [float(sum(ranks))] * NUMBERS
    return counted(own)


@pytest.mark.ranks(4)
@pytest.mark.timeout(60)
def test_each_communicator_carries_its_groups_and_has_a_name(own):
    families = own.topology.families
    assert families == ("fast", "slow")
    mine = own.topology.ranks_of(own.place.family)
    theirs = own.topology.ranks_of(next(name for name in families if name != own.place.family))
    names = [(f"hpctrain family {own.place.family}", 2), ("hpctrain bridge", 4), ("hpctrain alarms", 4)]
    assert own.communicators.describe() == names

    halves = 2, BYTES  # half of the tensor to the other, to be summed, and half of the sum
    assert sum_over(own, mine) == {FAMILY: halves, BRIDGE: (0, 0)}
    # The first one of each family makes a group with the second one of the other, on another host: on the bridge.
    of_both = sorted((own.rank, theirs[1 - mine.index(own.rank)]), reverse=True)
    assert sum_over(own, of_both) == {FAMILY: (0, 0), BRIDGE: halves}
    # Inside the family, of what each of the two families owns: a quarter of the tensor to be summed, and a quarter of
    # the sum. Across: a quarter that the other family owns, and the quarter of the sum that this rank owns.
    assert sum_over(own, range(4)) == {FAMILY: (4, BYTES), BRIDGE: (2, BYTES // 2)}


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_a_training_step_sends_sums_of_a_tile_inside_its_family_and_activations_on_the_bridge(own, tokens, monkeypatch):
    families = [own.topology.places[rank].family for rank in range(4)]
    sent: Counter[str] = Counter()

    def send(messages, buffer, peer):
        ranks = messages.members.ranks
        sent[FAMILY if len({families[rank] for rank in ranks}) == 1 else BRIDGE] += memoryview(buffer).nbytes
        return original(messages, buffer, peer)

    original = GroupMessages.send
    monkeypatch.setattr(GroupMessages, "send", send)
    job = make_job(tokens, "llama")
    items, grid = job.model.num_items, TensorGrid(y=2)
    fast, slow = own.topology.ranks_of("fast"), own.topology.ranks_of("slow")[::-1]  # neighbours on different hosts
    tiles = (
        Tile(Interval(0, items // 2), Interval(0, 16), fast, grid, "fast"),
        Tile(Interval(items // 2, items), Interval(0, 16), slow, grid, "slow"),
    )
    trainer = make_trainer(own, job, Plan(tiles, microbatches=1, rows=16), own.accelerator)
    trainer.initialise()
    counted(own)
    sent.clear()
    trainer.step(open_datasets(job.data, job.train.seed)[1])
    result = counted(own)
    assert {name: num_bytes for name, (_, num_bytes) in result.items()} == dict(sent)
    assert min(sent[FAMILY], sent[BRIDGE]) > 10_000


@pytest.mark.ranks(4)
@pytest.mark.timeout(60)
def test_what_all_ranks_agree_on_needs_no_collective_of_mpi(own):
    first = own.gather_numbers([own.rank, 0.5])
    second = own.gather_numbers([-own.rank, 1.5])  # while the first is in flight
    assert own.all_objects(own.rank**2) == [0, 1, 4, 9]
    assert own.broadcast_object({"a": own.rank}) == {"a": 0}
    assert own.gather_objects(str(own.rank)) == (["0", "1", "2", "3"] if own.rank == 0 else [])
    assert (own.smallest(own.rank - 1.0), own.largest(own.rank)) == (-1.0, 3)
    assert own.on_first_rank(lambda: own.rank) == 0
    with pytest.raises(PlanError, match="rank 1 failed"):  # the error of the lowest rank
        own.agree(PlanError(f"rank {own.rank} failed") if own.rank in (1, 3) else None)
    assert clock_offset(own) == pytest.approx(0.0, abs=0.05)  # the same clock, read on one machine
    assert second.wait().tolist() == ([[-rank, 1.5] for rank in range(4)] if own.rank == 0 else [])
    assert first.done() and first.wait().tolist() == ([[rank, 0.5] for rank in range(4)] if own.rank == 0 else [])
