"""Measures the paths between ranks: here as far as the choice of algorithms needs them, in `comm.probe` all of them."""

import time

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.world import World
from hpctrain.job import Link, Links
from hpctrain.links import overhead_of

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
    links = Links(inside=inside, across=across, overhead_seconds=overhead_of(across))
    told = f"{across.latency_seconds * 1e6:.0f} us and {across.bandwidth_bytes_per_second / 1e9:.2f} GB/s"
    return links, f"between hosts {told}, measured between ranks 0 and {other_host}"


def _measure(world: World, peer: int) -> Link:
    """Return the link between rank 0 and `peer`, by round trips. All ranks must call and get the same."""
    found = None
    if world.rank in (0, peer):
        comm = world.group([0, peer])
        token, message = torch.zeros(1, dtype=torch.uint8), torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        # What others do on the machine only adds: so the shortest of several.
        latency = min(round_trip(comm, 0, 1, token, token) for _ in range(SMALL_REPEATS)) / 2
        seconds = min(round_trip(comm, 0, 1, message, token) for _ in range(LARGE_REPEATS))
        speed = bandwidth(LARGE_BYTES, seconds - latency, latency)
        found = Link(latency_seconds=latency, bandwidth_bytes_per_second=speed)
    return world.broadcast_object(found)


def bandwidth(num_bytes: int, seconds: float, latency_seconds: float) -> float:
    """Return the bytes per second of a message that takes `seconds` to its end, and its first byte the latency.

    Both were measured, and a machine has other things to do: so at least half of the time counts.
    """
    return num_bytes / max(seconds - latency_seconds, seconds / 2)


def round_trip(
    comm: Communicator, source: int, target: int, message: torch.Tensor, answer: torch.Tensor, repeats: int = 1
) -> float:
    """Return the mean seconds of a message and the answer to it. Both positions of the group must call, nobody else.

    An answer of one byte comes back after a latency: what is left is the time of the message, one way.
    """
    start = time.perf_counter()
    for _ in range(repeats):
        if comm.rank == source:
            comm.send(message, target)
            comm.receive(answer, target)
        else:
            comm.receive(message, source)
            comm.send(answer, source)
    return (time.perf_counter() - start) / repeats
