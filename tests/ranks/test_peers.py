"""Messages between devices of one host that copy from each other's memory, on devices that are not there."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hpctrain.comm.groups.group import Group
from hpctrain.comm.probe.link_timing import measure_messages, pair_classes
from hpctrain.comm.topology import Place, Topology
from hpctrain.comm.transports import peer_memory
from hpctrain.comm.transports.peer_memory import PEER_VARIABLE, SLOTS, PeerMemory
from tests.ranks.small_runs import losses, make_job
from tests.ranks.test_staged import Pretended

SLOT_BYTES = 64


@contextmanager
def small_slots():
    with patch.multiple(peer_memory, SLOT_BYTES=SLOT_BYTES, PROVEN_BYTES=SLOT_BYTES):
        yield


def peer_of(world) -> int | None:
    """Return the rank that a rank sends to: pairs of neighbours."""
    peer = world.rank ^ 1
    return peer if peer < world.size else None


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(240)
def test_messages_of_any_size_arrive_in_order_through_few_slots(world):
    """Each rank sends all it has before it looks at what it receives, more than fits in the slots."""
    pretended = Pretended(world, "a" * world.size, exports=True)
    peer = peer_of(world)
    sizes = [0, 1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOTS * SLOT_BYTES + 5, 2, 7 * SLOT_BYTES]

    def values(sender: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * sender + number)
        return torch.randint(0, 256, (sizes[number],), generator=generator, dtype=torch.uint8)

    with small_slots():
        if peer is not None:
            backend = pretended.routes.message_backend(sorted((world.rank, peer)))
            assert backend.collectives.name == "copies from the other device's memory"
            transport, at = backend.transport, int(peer > world.rank)
            sending = [transport.send(at, pretended.later(values(world.rank, i))) for i in range(len(sizes))]
            for i in range(len(sizes)):
                tensor = pretended.later(torch.zeros(sizes[i], dtype=torch.uint8))
                ready = transport.receive(at, tensor)
                while not ready():
                    pass
                assert torch.equal(tensor, values(peer, i))
            while not all([ready() for ready in sending]):
                pass
            assert pretended.device.open_memory == 2
            backend.close()
            assert pretended.device.open_memory == 0
    pretended.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(240)
def test_who_cannot_open_memory_sends_by_mpi_and_says_why(world, monkeypatch):
    ranks = [0, 1]

    def reason_of(**options) -> str:
        pretended = Pretended(world, "a" * world.size, **options)
        result = ""
        if world.rank in ranks:
            backend = pretended.routes.message_backend(ranks)
            result = f"{backend.collectives.name}; {backend.reason}"
            transport, other = backend.transport, 1 - world.rank
            sent, received = torch.full((9,), float(world.rank)), torch.empty(9)
            ready = transport.send(other, sent), transport.receive(other, received)
            while not all([each() for each in ready]):
                pass
            assert (received == other).all()
            backend.close()
            assert not getattr(pretended.device, "open_memory", 0), "nothing is left open"
        pretended.close()
        return result

    def refused(*_):
        raise RuntimeError("cudaErrorPeerAccessUnsupported")

    without = "the devices do not copy from each other's memory: "
    staged = "MPI through pinned host buffers; MPI is not given memory of a: asked for; no native library: a fake"
    if world.rank in ranks:
        assert reason_of() == f"{staged}; {without}memory of cuda is not opened by other processes"
    with small_slots():
        if world.rank == 0:  # one of both is enough
            monkeypatch.setattr("tests.ranks.fake_devices.FakeAccelerator.import_memory", refused)
        if world.rank in ranks:
            assert reason_of(exports=True) == f"{staged}; {without}RuntimeError: cudaErrorPeerAccessUnsupported"
        monkeypatch.undo()
        if world.rank == 1:
            monkeypatch.setenv(PEER_VARIABLE, "0")
        if world.rank in ranks:
            assert reason_of(exports=True) == f"{staged}; {without}HPCTRAIN_PEER=0"
        monkeypatch.undo()
        if world.rank == 1:
            monkeypatch.setattr(peer_memory, "_pattern", lambda rank: torch.full((SLOT_BYTES,), 5, dtype=torch.uint8))
        if world.rank in ranks:
            assert reason_of(exports=True) == f"{staged}; {without}the other device's bytes arrived changed"
        monkeypatch.undo()
    if world.rank in ranks:
        assert reason_of(exports=True, direct="a").startswith("MPI on device memory; MPI moves memory of a")
        hosts = [f"h{rank}" for rank in range(world.size)]
        assert reason_of(exports=True, hosts=hosts) == staged


class Probed(Pretended):
    """A world whose topology is the pretended one, too."""

    def __init__(self, world, families, **options):
        super().__init__(world, families, **options)
        self.topology = Topology(tuple(Place(world.place.host, family, "cuda") for family in families))
        self.routes_of_pairs: list[str] = []

    def pair(self, ranks) -> Group:
        made = super().pair(ranks)
        self.routes_of_pairs.append(made.route_name)
        return made


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(240)
def test_a_probe_measures_messages_by_the_route_of_pipelines(world):
    probed = Probed(world, "a" * world.size, exports=True)
    everybody = probed.group(range(world.size))
    classes = pair_classes(probed.topology.places, ["ib"] * world.size)
    (links,) = measure_messages(probed, everybody, probed.device, classes, 0.2)
    assert probed.routes_of_pairs == ["copies from the other device's memory"]
    if world.rank == 0:
        assert links.latency_seconds > 0
        assert links.route.startswith("copies from the other device's memory (MPI is not given memory of a: ")
    probed.close()


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("families", ["aaaa", "aabb"])
@pytest.mark.parametrize(
    "plan", [{"pipeline": 4}, {"tensor": {"y": 2}, "pipeline": 2}, {"pipeline": 2, "data": 2, "virtual_stages": 2}]
)
def test_a_pipeline_has_the_bits_of_one_that_sends_by_mpi(world, tokens, plan, families):
    results, made = [], []
    init = PeerMemory.__init__

    def counted(self, *arguments) -> None:
        made.append(self)
        init(self, *arguments)

    with small_slots(), patch.object(PeerMemory, "__init__", counted):
        for exports in (True, False):
            pretended = Pretended(world, families, native=True, exports=exports)
            results.append(losses(pretended, make_job(tokens, "llama", plan), 3, pretended.device))
            pretended.close()
            assert bool(made) == exports
            made.clear()
    assert results[0] == results[1]
