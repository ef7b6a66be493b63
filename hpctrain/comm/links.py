"""Measures the paths between ranks, as far as the choice of algorithms needs them."""

import time

import torch

from hpctrain.comm.world import World
from hpctrain.job import Link, Links

SMALL_REPEATS, LARGE_REPEATS, LARGE_BYTES = 30, 4, 1 << 20


def measure_links(world: World) -> tuple[Links, str]:
    """Return the links between ranks and the reason for these values. All ranks must call; takes some 10 ms.

    Only what messages are used for is measured, between the first pair of ranks of each class: hosts of their own.
    """
    places = world.topology.places
    other_host = next((rank for rank, place in enumerate(places) if place.host != places[0].host), None)
    if other_host is None:
        return Links(), "the usual ones: all ranks share one host's memory"
    neighbour = next((rank for rank, place in enumerate(places) if rank and place.host == places[0].host), None)
    defaults = Links()
    inside = defaults.inside if neighbour is None else _measure(world, neighbour)
    across = _measure(world, other_host)
    # Half of a short message's time is spent by the processors of its ends, as is usual for TCP on host memory.
    links = Links(inside=inside, across=across, overhead_seconds=across.latency_seconds / 2)
    told = f"{across.latency_seconds * 1e6:.0f} us and {across.bandwidth_bytes_per_second / 1e9:.2f} GB/s"
    return links, f"between hosts {told}, measured between ranks 0 and {other_host}"


def _measure(world: World, peer: int) -> Link:
    """Return the link between rank 0 and `peer`, by round trips. All ranks must call and get the same."""
    found = None
    if world.rank in (0, peer):
        comm = world.group([0, peer])
        latency = _round_trip(comm, torch.zeros(1, dtype=torch.uint8), SMALL_REPEATS) / 2
        seconds = _round_trip(comm, torch.zeros(LARGE_BYTES, dtype=torch.uint8), LARGE_REPEATS) / 2
        bandwidth = LARGE_BYTES / max(seconds - latency, 1e-9)
        found = Link(latency_seconds=latency, bandwidth_bytes_per_second=bandwidth)
    return world.broadcast_object(found)


def _round_trip(comm, tensor: torch.Tensor, repeats: int) -> float:
    """Return the shortest of some round trips, in seconds: what others do on the machine only adds."""
    shortest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        if comm.rank == 0:
            comm.send(tensor, 1)
            comm.receive(tensor, 1)
        else:
            comm.receive(tensor, 0)
            comm.send(tensor, 0)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest
