"""Routes for memory of devices, on devices that are not there, against the same reference as those of the host."""

import itertools
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.collectives.native import open_store
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.groups.channel import make_channel
from hpctrain.comm.groups.group import Backend, Group
from hpctrain.comm.groups.maker import RouteMaker
from hpctrain.comm.groups.settings import Settings
from hpctrain.comm.progress.lanes import ProgressEngine
from hpctrain.comm.topology import Place, Topology
from hpctrain.comm.transports import messages
from hpctrain.comm.transports.abilities import Devices, FamilyAbilities
from hpctrain.sharding.intervals import Interval
from tests.examples import costly
from tests.ranks.fake_devices import FakeAccelerator, FakeLibrary
from tests.ranks.given_on_ranks import given_on_ranks
from tests.ranks.small_runs import largest_relative_difference, losses, losses_of_one_rank, make_job
from tests.ranks.test_collectives import (
    DTYPES,
    INTEGERS,
    NETWORKS,
    assert_close,
    check_all_to_all,
    contribution,
    reduced,
)

CHUNK_BYTES = 256  # in these tests, so that messages have several
FAMILIES = {"c": "cpu", "a": "cuda", "b": "cuda"}
PROVEN = Ability(True, "proven")
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1025]))


@contextmanager
def small_chunks():
    with patch.multiple(messages, SMALLEST_CHUNK_BYTES=64, LARGEST_CHUNK_BYTES=CHUNK_BYTES):
        yield


@cache
def store_of(world, host: str):
    """Return the store of all ranks. All must call, the first time."""
    return open_store(world.space.members(range(world.size)), host)


class Pretended:
    """Families and hosts of all ranks, some with devices, as one rank sees them."""

    def __init__(
        self,
        world,
        families,
        hosts=None,
        algorithm="exchange",
        native=False,
        direct="",
        device=None,
        exports=False,
        library=None,
        bridge=PROVEN,
    ):
        """`direct`: the families whose memory MPI is given. If it `exports`, devices open each other's memory. With a
        real `device` its libraries are real too, unless a fake `library` of collectives is given. `bridge` is of
        `Devices`."""
        hosts = hosts or [world.place.host] * world.size
        places = [Place(h, f, FAMILIES[f]) for h, f in zip(hosts, families, strict=True)]
        own = places[world.rank]
        self.device = device or (
            FakeAccelerator(own.family, exports=exports) if own.kind != "cpu" else CpuAccelerator(own.family)
        )
        known = {
            name: FamilyAbilities(name, kind, Ability(native, "a fake"), Ability(name in direct, "asked for"))
            for name, kind in FAMILIES.items()
        }
        mpi = world.raw_mpi
        self.library = library or (None if device else FakeLibrary(mpi, lambda: self.device._stream))
        self.patience, self.rank = world.patience, world.rank
        self.progress, self._world = ProgressEngine(world.has_threads, self.device.use), world
        self._made: list[Group] = []
        store = store_of(world, own.host) if native else None
        devices = Devices(self.device, known, bridge, store)
        self.place, self.topology = own, Topology(tuple(places))
        settings = Settings(self.topology, NETWORKS[algorithm], devices=devices)
        self.routes = RouteMaker(world.space, settings, groups=self.library)

    def group(self, ranks, name: str = "", overlapped: bool = False, on_host: bool = False) -> Group:
        backend = self.backend(ranks, on_host)
        lane = self.progress.add_lane() if backend and overlapped else None
        made = Group(ranks, backend, self.patience, lane=lane)
        self._made.append(made)
        return made

    def pair(self, ranks) -> Group:
        made = Group(ranks, self.routes.message_backend(ranks), self.patience)
        self._made.append(made)
        return made

    def close(self) -> None:
        """Close all groups, and end all threads. All ranks must call."""
        for made in reversed(self._made):
            made.close()
        self.progress.close()

    def backend(self, ranks, on_host: bool = False) -> Backend | None:
        made = self.routes.backend(ranks, on_host)
        if made and self.library and isinstance(made.collectives, StreamedCollectives):
            self.library.moves(made.collectives.stream, made.transport.poll)
        return made

    def channel(self, peer: int, num_bytes: int, depth: int, name: str = ""):
        return make_channel(self.routes, self.progress, peer, num_bytes, depth, self.patience)

    def __getattr__(self, name: str):
        """All else is the world's."""
        return getattr(self._world, name)

    def later(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that has its values late, where this rank has a device."""
        return self.device.later(values) if isinstance(self.device, FakeAccelerator) else values


@st.composite
def cases(draw):
    """A group in any order, families and hosts, abilities, a size, a dtype, uneven counts, a seed."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    ranks = draw(st.permutations(range(size)))[: draw(st.integers(2, size))]
    return {
        "families": draw(st.lists(st.sampled_from("abc"), min_size=size, max_size=size)),
        "native": draw(st.booleans()),
        "direct": draw(st.sampled_from(["", "a", "ab"])),
        "algorithm": draw(st.sampled_from(sorted(NETWORKS))),
        "two_hosts": draw(st.booleans()),
        "ranks": ranks,
        "size": draw(SIZES),
        "dtype": draw(st.sampled_from(sorted(DTYPES | INTEGERS))),
        "op": draw(st.sampled_from(["sum", "max", "min"])),
        "counts": draw(st.lists(st.integers(0, 300), min_size=len(ranks), max_size=len(ranks))),
        "seed": draw(st.integers(0, 2**31)),
    }


def check_collectives(comm: Group, case: dict, put):
    """Compare all operations of a communicator with the reference. `put` brings values to where tensors are."""
    me, size = comm.rank, case["size"]
    tensor = put(contribution(case, me, size))
    comm.all_reduce(tensor, case["op"])
    assert_close(case, tensor.cpu(), reduced(case, size), case["op"])
    everywhere = tensor.clone()
    comm.all_reduce(everywhere, "max")
    assert torch.equal(everywhere, tensor), "the result is the same bits on every rank"

    bounds = np.cumsum([0, *case["counts"]]).tolist()
    uneven = [Interval(a, b) for a, b in itertools.pairwise(bounds)]
    even = [Interval(i * size, (i + 1) * size) for i in range(comm.size)]
    for cuts in (uneven, even):
        total, own = cuts[-1].stop, slice(*cuts[me])
        out = put(torch.empty(cuts[me].size, dtype=tensor.dtype))
        comm.reduce_scatter(put(contribution(case, me, total)), out, cuts)
        assert_close(case, out.cpu(), reduced(case | {"op": "sum"}, total)[own], "sum")
        values = torch.zeros(total, dtype=tensor.dtype)
        values[own] = contribution(case, me, total)[own]
        gathered = put(values)
        comm.all_gather(gathered, cuts)
        expected = torch.cat([contribution(case, i, total)[slice(*cut)] for i, cut in enumerate(cuts)])
        assert torch.equal(gathered.cpu(), expected)

    check_all_to_all(comm, case, put)
    if comm.size == 2 and me:
        received = put(torch.zeros(size, dtype=tensor.dtype))
        comm.receive(received)
        assert torch.equal(received.cpu(), contribution(case, 0, size))
    elif comm.size == 2:
        comm.send(put(contribution(case, me, size)))
    comm.barrier()


@pytest.mark.ranks(4, 8)
@pytest.mark.timeout(60)
@given_on_ranks(cases(), max_examples=costly(100))
def test_collectives_with_devices_agree_with_a_reference(world, case):
    hosts = [f"h{i % 2}" if case["two_hosts"] else world.place.host for i in range(world.size)]
    if case["two_hosts"]:  # memory that is shared is that of one host
        case = case | {"families": [f if f != "c" else "a" for f in case["families"]]}
    settings = {name: case[name] for name in ("algorithm", "native", "direct")}
    pretended = Pretended(world, case["families"], hosts, **settings)
    if world.rank not in case["ranks"]:
        return
    with small_chunks():
        comm = pretended.group(case["ranks"])
        check_collectives(comm, case, pretended.later)
        comm.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("direct", ["", "a"])
def test_messages_keep_their_order_and_move_while_others_are_waited_for(world, direct):
    """Each rank queues all its sends first, and then looks only at what it receives."""
    pretended = Pretended(world, "a" * world.size, direct=direct)
    sizes = [0, 1, 63, 64, 65, 5 * CHUNK_BYTES + 1, 2, 3 * CHUNK_BYTES]
    with small_chunks():
        backend = pretended.routes.message_backend(range(world.size))
        transport = backend.transport
        others = [i for i in range(world.size) if i != world.rank]

        def values(sender, receiver, number, size):
            generator = torch.Generator().manual_seed(1000 * sender + 10 * receiver + number)
            return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)

        sending = [
            transport.send(peer, pretended.later(values(world.rank, peer, i, size)))
            for peer in others
            for i, size in enumerate(sizes)
        ]
        arriving = []
        for peer in others:
            for i, size in enumerate(sizes):
                tensor = pretended.later(torch.zeros(size, dtype=torch.uint8))
                arriving.append((transport.receive(peer, tensor), tensor, values(peer, world.rank, i, size)))
        for ready, tensor, expected in arriving:
            while not ready():
                pass
            assert torch.equal(tensor, expected)
        while not all([ready() for ready in sending]):
            pass
        assert transport.bytes_sent[others[0]] == sum(sizes)
    assert pretended.device.staging.num_bytes <= 4 * len(others) * 2 * CHUNK_BYTES, "buffers are used again"
    backend.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int64"])
def test_native_routes_inside_a_family_and_across(world, dtype):
    ranks = list(range(world.size))
    case = {"ranks": ranks, "size": 100, "dtype": dtype, "op": "sum", "counts": [3 * (i + 1) for i in ranks]}
    for families in ("a" * world.size, "ab" * (world.size // 2)):
        pretended = Pretended(world, families, native=True)
        comm = pretended.group(ranks)
        check_collectives(comm, case | {"seed": 1}, pretended.later)
        assert comm.route_name.startswith("NCCL") == (families == "a" * world.size or world.size > 2)
        if families == "a" * world.size:
            used = {"allgather", "_allgather_base", "allreduce", "alltoall"}
            sums = set() if dtype == "bf16" else {"reduce_scatter", "_reduce_scatter_base"}
            assert set(pretended.library.calls) == used | sums
            # Of one size, but neither packed nor in order.
            cuts = [Interval(10 * i, 10 * i + 5) for i in reversed(ranks)]
            out = torch.empty(5, dtype=DTYPES.get(dtype, torch.int64))
            comm.reduce_scatter(torch.arange(10 * world.size).to(out.dtype), out, cuts)
            expected = torch.arange(10 * world.size)[slice(*cuts[comm.rank])] * world.size
            assert torch.equal(out, expected.to(out.dtype))
        comm.close()


@pytest.mark.ranks(4, 8)
@pytest.mark.timeout(60)
def test_messages_across_move_while_a_rank_is_inside_its_family(world):
    """Parts so uneven that a rank has all that it waits for, and continues inside, while others still wait."""
    half = world.size // 2
    pretended = Pretended(world, "a" * half + "b" * half, native=True)
    of_family = [3, 1] if half == 2 else [4, 2, 1, 0]
    bounds = np.cumsum([0, *(3000 * i for i in of_family + of_family[::-1])]).tolist()
    cuts = [Interval(a, b) for a, b in itertools.pairwise(bounds)]
    with small_chunks():
        comm = pretended.group(list(range(world.size)))
        expected = torch.arange(bounds[-1], dtype=torch.float32)
        own = slice(*cuts[world.rank])
        values = torch.zeros_like(expected)
        values[own] = expected[own]
        gathered = pretended.later(values)
        comm.all_gather(gathered, cuts)
        assert torch.equal(gathered, expected)
        comm.close()


@pytest.mark.timeout(60)
def test_half_precision_on_native_routes_is_summed_in_fp32(world):
    pretended = Pretended(world, "a" * world.size, native=True)
    comm = pretended.group(range(world.size))
    assert comm.route_name == "NCCL"
    for size in (1, 8, 20_000):
        tensor = pretended.later(torch.full((size,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16))
        comm.all_reduce(tensor)
        assert (tensor == torch.tensor(256.0 + (comm.size - 1)).bfloat16()).all()
    assert pretended.library.calls.count("allreduce") == 1, "the library would round at every addition"
    comm.close()


@pytest.mark.timeout(60)
def test_lanes_and_channels_of_devices_continue_while_the_rank_computes(world):
    pretended = Pretended(world, ["a", "b"] * (world.size // 2))  # of the fake library even lanes would block
    ranks = list(range(world.size))
    with small_chunks():
        groups = [pretended.group(ranks, overlapped=True) for _ in range(2)]
        tensors = [pretended.later(torch.full((500,), float(world.rank + i))) for i in range(6)]
        works = [groups[i % 2].start_all_reduce(tensor) for i, tensor in enumerate(tensors)]
        for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait()
            assert (tensor == sum(ranks) + i * world.size).all()
        peer = world.rank ^ 1
        channel = pretended.channel(peer, 4000, 3)
        for size in (1, 1000, 17):
            channel.send(torch.full((size,), world.rank * 1000.0 + size))
        for size in (1, 1000, 17):
            received = pretended.later(torch.empty(size))
            channel.receive(received)
            assert (received == peer * 1000.0 + size).all()
        channel.close()
    pretended.close()


@pytest.mark.timeout(60)
def test_a_group_of_hosts_alone_is_not_changed_by_devices_elsewhere(world):
    pretended = Pretended(world, ["c", "c", *"a" * (world.size - 2)])
    if world.rank < 2:
        comm = pretended.group([0, 1])
        assert comm.route_name == "shared memory"
        comm.close()


@pytest.mark.timeout(60)
def test_a_group_for_tensors_of_the_host_connects_no_library(world):
    pretended = Pretended(world, "a" * world.size, native=True)
    comm = pretended.group(range(world.size), on_host=True)
    assert comm.route_name == "shared memory" and not pretended.library.calls
    total = comm.all_reduce(torch.full((3,), 1.0 + world.rank, dtype=torch.float64))
    assert total.tolist() == [world.size * (world.size + 1) / 2] * 3
    comm.close()


@pytest.mark.ranks(4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("families", ["aabb", "aacc"])
def test_training_over_families_of_devices_gives_the_losses_of_one_rank(world, tokens, families):
    """Tensor groups inside a family, pipeline or data across; the weights' groups allocate on the device."""
    expected = losses_of_one_rank(world, tokens, "llama", 3)
    for plan in ({"tensor": {"y": 2}, "pipeline": 2}, {"tensor": {"z": 2}, "data": 2}):
        pretended = Pretended(world, families, native=families == "aabb")
        result = losses(pretended, make_job(tokens, "llama", plan), 3, pretended.device)
        assert largest_relative_difference(result, expected) < 1e-5
        pretended.close()
