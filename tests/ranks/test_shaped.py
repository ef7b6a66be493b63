"""Shaped routes: messages arrive when the described network says. `-s` shows the figures."""

import time

import pytest
import torch

from hpctrain.comm.collectives.flat import FlatCollectives
from hpctrain.comm.collectives.hierarchical import HierarchicalCollectives
from hpctrain.comm.waiting import complete, until_all
from hpctrain.config.errors import CommError, TopologyError
from hpctrain.rehearsal.clock import DeviceQueue
from tests.ranks.shaped_networks import (
    LATENCY_SECONDS,
    LINK_LATENCY_SECONDS,
    REPEATS,
    Figure,
    Shaped,
    assert_in_time,
    everywhere,
    report,
    shaped,
    together,
    two_nodes,
    until_all_arrived,
    wait,
)
from tests.virtual_ranks import VirtualRanks, VirtualTransports

# What is measured to a tenth of a millisecond has the cores for itself: a rank that yields its core gets it back after
# a tick, even from a program of the lowest priority.
pytestmark = pytest.mark.measured

# Of a collective: what ranks compute and copy is no part of the fluid.
COLLECTIVE_TOLERANCE = 0.10


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("bandwidth", "size"),
    [(50e6, 64_000), (50e6, 1_000_000), (500e6, 64_000), (500e6, 1_000_000), (500e6, 16_000_000)],
)
def test_a_message_takes_latency_and_bytes_over_bandwidth(world, bandwidth, size):
    source, target = 0, world.size - 1
    with shaped(world, two_nodes(world.size, bandwidth)) as made:
        transport, starts = made.transport(range(world.size)), made.note_starts()
        tensor = torch.zeros(size, dtype=torch.uint8)

        def measure() -> list[Figure]:
            arrive, leave = [], []
            for repeat in range(REPEATS):
                world.agree(None)
                times = []
                if world.rank == source:
                    ready = transport.send(target, tensor.fill_(repeat))
                    times = [starts[-1], wait(world, ready)]
                elif world.rank == target:
                    ready = transport.receive(source, tensor)
                    times = [wait(world, ready), ready.due]
                    assert (tensor == repeat).all()
                every = everywhere(world, times)
                assert every[target][1] - every[source][0] == pytest.approx(
                    LATENCY_SECONDS + size / bandwidth, abs=1e-6
                )
                arrive.append(every[target][0] - every[source][0])
                leave.append(every[source][1] - every[source][0])
            what, seconds = f"{size} bytes at {bandwidth / 1e6:.0f} MB/s", size / bandwidth
            return [
                Figure(f"{what} arrive", [LATENCY_SECONDS + seconds] * REPEATS, arrive),
                Figure(f"{what} leave", [seconds] * REPEATS, leave),
            ]

        assert_in_time(world, measure)


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_flows_that_share_a_nic_share_its_bandwidth(world):
    half, num_bytes, bandwidth = world.size // 2, 1_000_000, 100e6
    flows = [(i, half + i) for i in range(half)]

    def measure() -> list[Figure]:
        result = together(world, two_nodes(world.size, bandwidth), flows, num_bytes, [0.0] * half)
        for times in result:
            busy_until = 0.0  # one NIC: it carries all bytes without a pause
            for start in sorted(times.started):
                busy_until = max(busy_until, start) + num_bytes / bandwidth
            assert max(times.predicted) == pytest.approx(busy_until + LATENCY_SECONDS, rel=0, abs=1e-6)
        return [until_all_arrived(f"{half} flows through one NIC", result)]

    assert_in_time(world, measure)


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_flows_that_start_at_different_times_share_while_they_overlap(world):
    half = world.size // 2
    flows = [(i, half + i) for i in range(half)]
    delays = [0.006 * i for i in range(half)]

    def measure() -> list[Figure]:
        result = together(world, two_nodes(world.size, 100e6), flows, 1_000_000, delays)
        figures = []
        for i, delay in enumerate(delays):
            predicted = [times.predicted[i] - times.started[i] for times in result]
            arrived = [times.arrived[i] - times.started[i] for times in result]
            figures.append(Figure(f"flow {i} of {half}, {delay * 1e3:.0f} ms after the first", predicted, arrived))
        return figures

    assert_in_time(world, measure)


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_both_directions_are_used_at_once(world):
    flows = [(0, world.size - 1), (world.size - 1, 0)]

    def measure() -> list[Figure]:
        result = together(world, two_nodes(world.size, 200e6), flows, 2_000_000, [0.0, 0.0])
        for start, end in ((t.started[i], t.predicted[i]) for t in result for i in range(2)):
            assert end - start == pytest.approx(0.011)
        return [until_all_arrived("both directions", result)]

    assert_in_time(world, measure)


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_dilated_times_are_all_longer(world):
    def measure() -> list[Figure]:
        result = together(world, two_nodes(world.size, 1e9, dilation=10.0), [(0, world.size - 1)], 1_000_000, [0.0])
        assert result[0].predicted[0] - result[0].started[0] == pytest.approx(10 * (LATENCY_SECONDS + 1e-3))
        return [until_all_arrived("10 times slower", result)]

    assert_in_time(world, measure)


@pytest.mark.timeout(60)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("looking", [True, False])
def test_messages_of_a_pair_leave_one_after_the_other_whoever_looks(world, looking):
    count, size, bandwidth = 4, 500_000, 50e6
    source, target = 0, world.size - 1
    with shaped(world, two_nodes(world.size, bandwidth)) as made:
        transport, starts = made.transport(range(world.size)), made.note_starts()
        tensors = [torch.full((size,), i, dtype=torch.uint8) for i in range(count)]
        result = []
        world.agree(None)
        if world.rank == source:
            ready = [transport.send(target, tensor) for tensor in tensors]
        elif world.rank == target:
            received = [torch.empty_like(tensor) for tensor in tensors]
            ready = [transport.receive(source, tensor) for tensor in received]
        if world.rank in (source, target):
            if not looking:
                complete(until_all([r._inner for r in ready], "the bytes"), "the test", world.patience)
                time.sleep(2 * count * size / bandwidth)
            result = [(wait(world, r), r.due) for r in ready]
        if world.rank == target:
            assert all(torch.equal(a, b) for a, b in zip(received, tensors, strict=True))
        start, *_ = everywhere(world, starts[:1])[source]
        result = everywhere(world, result)[target]
        due = [at - start for _, at in result]
        assert due == pytest.approx([LATENCY_SECONDS + (i + 1) * size / bandwidth for i in range(count)], abs=1e-6)
        arrived = ", ".join(f"{(at - start) * 1e3:.2f}" for at, _ in result)
        report(world, f"{count} messages of 10 ms, {looking=}: {arrived} ms")


@pytest.mark.timeout(60)
@pytest.mark.ranks(4)
def test_a_message_that_starts_late_makes_what_waits_for_it_late(world):
    """Rank 0 comes to its message after ranks 2 and 3 have done what ends 50 ms later in pretended time."""
    bandwidth, size = 1e8, 5_000_000
    for long, short in ((size, 1000), (1000, size)):  # in reverse order rank 0 is in time
        with shaped(world, two_nodes(4, 1e9, link=bandwidth)) as made:
            stream = DeviceQueue()
            transport = made.transport(range(4), stream)
            begin = world.broadcast_object(time.monotonic() + 0.01)
            stream.reach(begin)
            time.sleep(max(0.0, begin - time.monotonic()))
            if world.rank >= 2:
                tensor = torch.zeros(long, dtype=torch.uint8)
                wait(world, transport.send(3, tensor) if world.rank == 2 else transport.receive(2, tensor))
            world.agree(None)
            if world.rank < 2:
                tensor = torch.zeros(short, dtype=torch.uint8)
                wait(world, transport.send(1, tensor) if world.rank == 0 else transport.receive(0, tensor))
            behind, seconds = long / bandwidth, short / bandwidth + LINK_LATENCY_SECONDS
            if world.rank == 1:
                assert stream.done_at - begin == pytest.approx(behind + seconds, abs=1e-6)
            late = {0: behind, 1: behind, 2: 0.0, 3: 0.0}[world.rank]
            assert stream.late == pytest.approx(late, abs=1e-6)
            waits_too = DeviceQueue()  # for another that comes at the same time, and is not late
            waits_too.reach(stream.done_at)
            waits_too.reach(stream.done_at, stream.late)
            assert waits_too.late == 0.0


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_a_hierarchical_all_reduce_takes_what_the_fluid_predicts(world):
    num_elements, network = 1_000_000, two_nodes(4, 25e6, 100e6)
    domains = [(0, 1), (2, 3)]

    def collectives(inner, across):
        flat = [FlatCollectives(transport, lambda _: "domains") for transport in (inner, across)]
        return HierarchicalCollectives(*flat, domains)

    def contribution(rank: int) -> torch.Tensor:
        return torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))

    virtual = VirtualRanks(network)
    groups = [VirtualTransports(virtual, domain) for domain in domains]
    across = VirtualTransports(virtual, range(4))
    tensors = [contribution(rank) for rank in range(4)]
    simulated = [collectives(groups[rank // 2][rank % 2], across[rank]) for rank in range(4)]
    predicted = virtual.run([c.all_reduce(tensor, "sum") for c, tensor in zip(simulated, tensors, strict=True)])

    crossing = 2 * num_elements * 4 / 2 / 25e6  # half of the tensor, twice, by each node's NIC
    assert crossing < predicted < 1.5 * crossing

    with shaped(world, network) as made:
        real = collectives(made.transport(domains[world.rank // 2]), made.transport(range(4)))

        def measure() -> list[Figure]:
            result = []
            for _ in range(REPEATS):
                tensor = contribution(world.rank)
                world.agree(None)
                begun = time.monotonic()
                complete(real.all_reduce(tensor, "sum"), "all_reduce", world.patience)
                every = everywhere(world, (begun, time.monotonic()))
                # From the first that begins: what it sends before the others begin is no time gained.
                result.append(max(end for _, end in every) - min(begin for begin, _ in every))
                assert torch.equal(tensor, tensors[world.rank])
            return [Figure("hierarchical all-reduce", [predicted] * REPEATS, result, COLLECTIVE_TOLERANCE)]

        assert_in_time(world, measure)


@pytest.mark.timeout(60)
def test_too_many_messages_are_refused_with_numbers(world):
    with shaped(world, two_nodes(world.size, 1e9), slots_per_rank=4) as made:
        transport = made.transport(range(world.size))
        peer = world.rank ^ 1
        tensor, token = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        for _ in range(10):  # slots are used again
            received, sent = transport.receive(peer, token), transport.send(peer, tensor)
            wait(world, received)
            wait(world, sent)
        world.agree(None)
        in_flight = [transport.send(peer, tensor) for _ in range(4)]
        with pytest.raises(CommError, match=rf"rank {world.rank} has 4 messages in flight .* holds 4 of each rank"):
            transport.send(peer, tensor)
        world.agree(None)
        for ready in [transport.receive(peer, token) for _ in range(4)] + in_flight:
            wait(world, ready)


@pytest.mark.timeout(60)
def test_a_network_of_another_number_of_devices_is_refused(world):
    with pytest.raises(
        TopologyError, match=rf"of {world.size + 2} devices is rehearsed by as many ranks, not {world.size}"
    ):
        Shaped(world, two_nodes(world.size + 2, 1e9))
