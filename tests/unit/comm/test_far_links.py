"""Messages and sums keep a link full whose bytes are long under way: what is in flight follows bandwidth x latency."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from hpctrain.comm import topology
from hpctrain.comm.accelerators.base import BufferPool
from hpctrain.comm.accelerators.cpu import DONE
from hpctrain.comm.collectives import flat
from hpctrain.comm.collectives.flat import FlatCollectives
from hpctrain.comm.topology import segments_in_flight
from hpctrain.comm.transports.messages import Message, staged_message
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.planner.prices.network import LATENCIES_IN_FLIGHT, MOST_UNDER_WAY_BYTES, ClusterNetwork
from hpctrain.sharding.intervals import cut_evenly
from tests import clusters

MESSAGE_BYTES, MESSAGES = 16 << 20, 4
FAR_LINKS = [(0.01, 1e9), (0.05, 1e9), (0.01, 0.1e9), (0.05, 0.1e9)]


class FarLink:
    """One direction between two sites, as MPI uses it: the sender asks, the receiver answers, bytes move.

    Its clock is its own: `wait` sets it to the next time at which anything happens.
    """

    def __init__(self, latency_seconds: float, bytes_per_second: float, clock: SimpleNamespace):
        self.latency, self.bandwidth, self.clock, self.free_at = latency_seconds, bytes_per_second, clock, 0.0
        self.posted: dict[str, list] = {"sent": [], "received": []}
        self.ends: dict[str, list[float]] = {"sent": [], "received": []}

    def post(self, end: str, part: torch.Tensor) -> SimpleNamespace:
        number = len(self.posted[end])
        self.posted[end].append((self.clock.now, part))
        while len(self.ends["sent"]) < min(map(len, self.posted.values())):
            (sent, source), (expected, target) = (self.posted[e][len(self.ends["sent"])] for e in self.posted)
            answered = max(sent + self.latency, expected) + self.latency
            self.free_at = max(answered, self.free_at) + source.numel() * source.element_size() / self.bandwidth
            target.copy_(source)
            self.ends["received"].append(self.free_at + self.latency)
            self.ends["sent"].append(self.free_at + 2 * self.latency)
        return SimpleNamespace(Test=lambda: self.seconds(end, number) <= self.clock.now)

    def seconds(self, end: str, number: int) -> float:
        return self.ends[end][number] if number < len(self.ends[end]) else math.inf


def wait(clock: SimpleNamespace, links: list[FarLink]) -> None:
    times = [at for link in links for at in (*link.ends["sent"], *link.ends["received"]) if at > clock.now]
    clock.now = min(times)


def staged_seconds(latency: float, bandwidth: float, bytes_under_way: int) -> float:
    """Return what messages take that are sent one after the other through host buffers."""
    clock = SimpleNamespace(now=0.0)
    link = FarLink(latency, bandwidth, clock)
    pool = BufferPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    device = SimpleNamespace(staging=pool, copy=lambda into, out: into.copy_(out) is None or DONE)
    values = torch.arange(MESSAGE_BYTES, dtype=torch.int64).to(torch.uint8)
    arrived = [torch.zeros_like(values) for _ in range(MESSAGES)]

    def messages(tensors, end: str) -> list[Message]:
        return [
            staged_message(
                lambda part: link.post(end, part), list(t.split(4 << 20)), DONE, device, end == "sent", bytes_under_way
            )
            for t in tensors
        ]

    ends = messages([values] * MESSAGES, "sent"), messages(arrived, "received")
    while not all(message.done for of_end in ends for message in of_end):
        for of_end in ends:
            for message in of_end:
                message.move()
                if not message.posted:
                    break
        if not all(message.done for of_end in ends for message in of_end):
            wait(clock, [link])
    assert all(torch.equal(tensor, values) for tensor in arrived)
    return clock.now


@pytest.mark.parametrize(("latency", "bandwidth"), FAR_LINKS)
def test_staged_messages_take_the_time_of_their_bytes_however_far_the_peer_is(latency, bandwidth):
    bytes_under_way = int(LATENCIES_IN_FLIGHT * latency * bandwidth)
    expected = MESSAGES * MESSAGE_BYTES / bandwidth + 4 * latency
    seconds = staged_seconds(latency, bandwidth, bytes_under_way)
    print(f"{latency * 1e3:g} ms, {bandwidth / 1e9:g} GB/s: {seconds:.3f} s, {expected:.3f} expected")
    assert seconds == pytest.approx(expected, rel=0.03)
    if latency * bandwidth > 1e7:  # two chunks of 4 MiB do not fill it
        assert staged_seconds(latency, bandwidth, 0) > 1.5 * expected


class FarTransport:
    """One of two ranks at the ends of a far link."""

    name, size = "far", 2

    def __init__(self, rank: int, leaves: FarLink, enters: FarLink):
        self.rank, self._leaves, self._enters = rank, leaves, enters

    def send(self, peer: int, tensor: torch.Tensor):
        return self._leaves.post("sent", tensor).Test

    def receive(self, peer: int, tensor: torch.Tensor):
        return self._enters.post("received", tensor).Test


def take_steps(steps: list[Iterator], clock: SimpleNamespace, links: list[FarLink]) -> None:
    """Take the steps of all ranks until they have ended."""
    awaited = {number: next(each, None) for number, each in enumerate(steps)}
    while any(condition is not None for condition in awaited.values()):
        ready = [number for number, condition in awaited.items() if condition is not None and condition.ready()]
        for number in ready:
            awaited[number] = next(steps[number], None)
        if not ready:
            wait(clock, links)


def summed_seconds(bytes_under_way: int, latency: float, bandwidth: float, num_elements: int) -> float:
    clock = SimpleNamespace(now=0.0)
    there, back = (FarLink(latency, bandwidth, clock) for _ in range(2))
    tensors = [torch.arange(num_elements, dtype=torch.float32) * (rank + 1) for rank in range(2)]
    cuts = cut_evenly(num_elements, 2)
    transports = FarTransport(0, there, back), FarTransport(1, back, there)
    outs = [torch.empty(cut.size) for cut in cuts]
    steps = [
        FlatCollectives(transport, lambda _: "exchange", bytes_under_way).reduce_scatter(tensor, cuts, out, "sum")
        for transport, tensor, out in zip(transports, tensors, outs, strict=True)
    ]
    take_steps(steps, clock, [there, back])
    assert torch.equal(torch.cat(outs), torch.arange(num_elements, dtype=torch.float32) * 3)
    return clock.now


@pytest.mark.parametrize("num_elements", [1, 1024, 50_001])
def test_segments_of_a_sum_follow_each_other_without_a_wait_for_the_other_site(num_elements):
    """A segment of 4 KiB takes 41 us of the wire here, and 10 ms to the other site."""
    latency, bandwidth = 0.01, 1e8
    with patch.object(flat, "SEGMENT_BYTES", 4096), patch.object(topology, "SEGMENT_BYTES", 4096):
        seconds = summed_seconds(int(LATENCIES_IN_FLIGHT * latency * bandwidth), latency, bandwidth, num_elements)
        waiting = summed_seconds(0, latency, bandwidth, num_elements)
    expected = 4 * latency + 2 * num_elements / bandwidth
    print(f"{num_elements:,} elements: {seconds:.4f} s, {expected:.4f} expected, {waiting:.4f} one after the other")
    assert seconds == pytest.approx(expected, rel=0.03)
    assert waiting > 5 * expected or num_elements <= 2048


def hosts(num_hosts: int, latency: float, bandwidth: float, per_host: int = 1) -> ClusterNetwork:
    text = clusters.fabric("wan", latency) + clusters.family("a")
    text += clusters.nodes({"a": per_host}, bandwidth, "wan", count=num_hosts)
    return ClusterNetwork(parse_cluster(text, "a test"))


def test_all_peers_of_a_rank_share_what_its_link_has_under_way():
    """What is posted is pinned, in both directions: with 16 hosts it would otherwise be 6 GB a rank."""
    network = hosts(16, 0.05, 1e9)
    alone = network.bytes_under_way((0, 1))
    assert alone == pytest.approx(LATENCIES_IN_FLIGHT * 0.05 * 1e9, rel=0.01)
    to_each = network.bytes_under_way(range(16))
    assert 0 <= alone - 15 * to_each < 15
    assert network.scratch_bytes("reduce_scatter", 10**9, tuple(range(16)), 0) <= alone + 15 * 2 * (4 << 20)
    assert hosts(2, 0.1, 10e9).bytes_under_way((0, 1)) == MOST_UNDER_WAY_BYTES
    by_hosts = hosts(4, 0.05, 1e9, per_host=2)
    assert by_hosts.bytes_under_way(range(8)) == alone // 3, "one peer on each other host"


@pytest.mark.parametrize("latency", [1e-3, 0.5])
def test_peers_with_links_of_their_own_share_nothing_but_the_memory(latency):
    figures = {"link_latency_seconds": latency, "link_bytes_per_second": 1e9, "fully_connected": True}
    text = clusters.family("a") + clusters.nodes({"a": 8}, None, **figures)
    network = ClusterNetwork(parse_cluster(text, "a test"))
    full = int(LATENCIES_IN_FLIGHT * latency * 1e9)
    assert network.bytes_under_way((0, 1)) == min(full, MOST_UNDER_WAY_BYTES)
    assert network.bytes_under_way(range(8)) == min(full, MOST_UNDER_WAY_BYTES // 7)


def test_a_near_link_has_two_chunks_and_one_segment_in_flight():
    bytes_under_way = int(LATENCIES_IN_FLIGHT * 5e-6 * 25e9)
    pool = BufferPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    device = SimpleNamespace(staging=pool, copy=lambda into, out: into.copy_(out) is None or DONE)
    parts = list(torch.zeros(32 << 20, dtype=torch.uint8).split(4 << 20))
    never = SimpleNamespace(Test=lambda: False)
    staged_message(lambda part: never, parts, DONE, device, True, bytes_under_way).move()
    assert pool.num_bytes == 2 * (4 << 20)
    assert segments_in_flight(bytes_under_way) == 1 and segments_in_flight(2 << 20) == 2
