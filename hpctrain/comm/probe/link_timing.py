"""Measures messages between ranks: for each class of pairs, by size and by number of concurrent messages."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.groups.group import Group
from hpctrain.comm.probe.device_timing import TimeBudget
from hpctrain.comm.topology import Place
from hpctrain.comm.world import World

SIZES = tuple(1 << power for power in range(10, 25, 2))  # 1 KiB to 16 MiB
ALWAYS_MEASURED = 1 << 18
"""Size in bytes up to which messages are always measured. Larger ones are left out where they would take more than
`LARGEST_PART` of the time that is left."""
LARGEST_PART = 0.25
MOST_FLOWS = 8
ROUNDS, MOST_REPEATS = 3, 1000
CALLS = ROUNDS + 1
ACROSS = "backbone"
"""Name of the connection between nodes on different fabrics."""


@dataclass(frozen=True)
class PairClass:
    """Pairs of ranks with the same kind of link."""

    families: tuple[str, str]
    """Families of the senders and of the receivers, in alphabetical order."""
    fabric: str | None
    """Name of the fabric between them; None: they are on one host."""
    pairs: tuple[tuple[int, int], ...]
    """Senders and receivers, no rank twice. All senders are on one host, and all receivers too; they may be fewer than
    all ranks there."""

    @property
    def flows(self) -> list[int]:
        """The numbers of pairs that send at once: one, two, four and so on, and all."""
        doubled = [1 << power for power in range(len(self.pairs).bit_length())]
        return sorted({*doubled, len(self.pairs)})


@dataclass(frozen=True)
class MeasuredLinks:
    """The times of messages between one class of pairs."""

    pairs: PairClass
    latency_seconds: float
    """Seconds of an empty message."""
    seconds: dict[tuple[int, int], float]
    """Seconds of a message, by number of flows and bytes of each message."""
    route: str | None = None
    """The route between devices of one host, and its reason."""

    def bytes_per_second(self, flows: int) -> float:
        """Return the bandwidth that all flows together reach with the largest messages, once they are in flight."""
        size = max(size for f, size in self.seconds if f == flows)
        return flows * bandwidth(size, self.seconds[flows, size], self.latency_seconds)


def pair_classes(places: Sequence[Place], fabrics: Sequence[str]) -> list[PairClass]:
    """Return the classes of pairs, each with as many pairs as a host, or two, have. Pure.

    `fabrics` are by rank. Of equal hosts two are measured, however many there are.
    """
    result: dict[tuple, PairClass] = {}
    for pair_class in _candidates(places, fabrics):
        key = (pair_class.fabric, pair_class.families)
        if key not in result or len(pair_class.pairs) > len(result[key].pairs):
            result[key] = pair_class
    return [result[key] for key in sorted(result, key=lambda key: (key[0] is not None, key[0] or "", key[1]))]


def _candidates(places: Sequence[Place], fabrics: Sequence[str]) -> Iterator[PairClass]:
    hosts: dict[str, dict[str, list[int]]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, {}).setdefault(place.family, []).append(rank)
    fabric_of = {place.host: fabrics[rank] for rank, place in reversed(list(enumerate(places)))}
    equivalent: dict[tuple, list[str]] = {}
    for host, families in hosts.items():
        counts = tuple(sorted((family, len(ranks)) for family, ranks in families.items()))
        equivalent.setdefault((fabric_of[host], counts), []).append(host)
    some = [host for kind in equivalent.values() for host in kind[:2]]
    for host in some:
        for one, other in combinations_with_replacement(sorted(hosts[host]), 2):
            ranks = hosts[host]
            halves = (ranks[one][::2], ranks[one][1::2]) if one == other else (ranks[one], ranks[other])
            if pairs := tuple(zip(*halves, strict=False))[:MOST_FLOWS]:
                yield PairClass((one, other), None, pairs)
    for here in some:
        for there in some:
            if here == there:
                continue
            fabric = fabric_of[here] if fabric_of[here] == fabric_of[there] else ACROSS
            for one in hosts[here]:
                for other in hosts[there]:
                    if one <= other:
                        pairs = tuple(zip(hosts[here][one], hosts[there][other], strict=False))[:MOST_FLOWS]
                        yield PairClass((one, other), fabric, pairs)


def measure_messages(
    world: World, comm: Group, accelerator: Accelerator, classes: Sequence[PairClass], seconds: float
) -> list[MeasuredLinks]:
    """Measure classes of pairs for about so many seconds; complete on rank 0. All ranks must call, with equal classes.

    `comm` is of all ranks. Those that do not take part sleep until the others have ended.
    """
    budget = TimeBudget(seconds, sum(len(c.flows) * len(SIZES) + 1 for c in classes))
    meter = _Meter(world, comm, accelerator, budget)
    measured = []
    for pair_class in classes:
        with world.freeing():
            route = meter.connect(pair_class)
            trips = {(1, 1): meter.seconds_of(pair_class.pairs[:1], 1)}
            for flows in pair_class.flows:
                for size in meter.affordable_sizes(trips, flows):
                    trips[flows, size] = meter.seconds_of(pair_class.pairs[:flows], size)
            measured.append(replace(one_direction(pair_class, trips), route=route))
    return measured


def one_direction(pair_class: PairClass, trips: Mapping[tuple[int, int], float]) -> MeasuredLinks:
    """Return the one-way times of messages from round trips with an answer of one byte, by flows and bytes. Pure.

    The answer takes the latency, and never more than the message: a message takes at least half a round trip.
    """
    latency = min(seconds for (flows, _), seconds in trips.items() if flows == 1) / 2
    taken = {key: max(seconds - latency, seconds / 2) for key, seconds in trips.items() if key[1] in SIZES}
    return MeasuredLinks(pair_class, latency, taken)


class _Meter:
    """Times messages, and answers of one byte, between pairs of ranks that all send at once."""

    def __init__(self, world: World, comm: Group, accelerator: Accelerator, budget: TimeBudget):
        self._world, self._comm, self._accelerator, self._budget = world, comm, accelerator, budget
        self._memory = torch.zeros(SIZES[-1], dtype=torch.uint8, device=accelerator.device)
        self._answer = torch.zeros(1, dtype=torch.uint8, device=accelerator.device)
        self._pair: Group | None = None
        """The group of this rank and its partner, if it is in a pair."""

    def connect(self, pair_class: PairClass) -> str | None:
        """Connect the ranks of each pair; return the route of devices, on rank 0. All ranks must call.

        Devices send as stages of a pipeline do: they may copy from each other's memory, or MPI may move it.
        """
        pair = next((pair for pair in pair_class.pairs if self._comm.rank in pair), None)
        self._pair = self._world.pair(pair) if pair else None
        places = self._world.topology.places
        if any(places[rank].kind == "cpu" for rank in pair_class.pairs[0]):
            return None
        routes = self._world.gather_objects(f"{self._pair.route_name} ({self._pair.reason})" if self._pair else None)
        return next((route for route in routes if route is not None), None)

    def affordable_sizes(self, trips: Mapping[tuple[int, int], float], flows: int) -> Iterator[int]:
        """Yield sizes while time is left, judged by rank 0's `trips` so far. All ranks must call."""
        for smaller, size in zip((1, *SIZES), SIZES, strict=False):
            if size > ALWAYS_MEASURED:
                expected = CALLS * trips[flows, smaller] * size / smaller
                if self._world.broadcast_object(expected > LARGEST_PART * self._budget.seconds_left()):
                    return
            yield size

    def seconds_of(self, pairs: Sequence[tuple[int, int]], num_bytes: int) -> float:
        """Return the seconds of the slowest pair in the best round, since other programs only add. All ranks must call.

        Only rank 0's result is that of all pairs.
        """
        pair = next((pair for pair in pairs if self._comm.rank in pair), None)
        share = self._budget.next_share() / CALLS
        once = self._round(pair is not None, num_bytes, 1)
        self._comm.barrier()  # the other ranks wait here, and leave the cores to those that measure
        repeats = int(self._world.smallest(share / once if pair else MOST_REPEATS))
        repeats = max(1, min(repeats, MOST_REPEATS))
        rounds = [self._round(pair is not None, num_bytes, repeats) for _ in range(ROUNDS)]
        self._comm.barrier()
        gathered = self._world.gather_objects(rounds) or [rounds]
        return min(max(of_ranks) for of_ranks in zip(*gathered, strict=True))

    def _round(self, takes_part: bool, num_bytes: int, repeats: int) -> float:
        """Return the mean seconds of a message of this rank's pair; 0 if it takes no part."""
        self._comm.barrier()
        if not takes_part or self._pair is None:
            return 0.0
        seconds = round_trip(self._pair, self._memory[:num_bytes], self._answer, repeats)
        self._accelerator.synchronize()
        return seconds


def bandwidth(num_bytes: int, seconds: float, latency_seconds: float) -> float:
    """Return the bytes per second of a message that takes `seconds` in all, and `latency_seconds` to its first byte.

    Both are measured on a machine with other work, so at least half of the time counts as transfer.
    """
    return num_bytes / max(seconds - latency_seconds, seconds / 2)


def round_trip(pair: Group, message: torch.Tensor, answer: torch.Tensor, repeats: int) -> float:
    """Return the mean seconds of a message of the first rank and the answer to it. Both ranks must call.

    An answer of one byte comes back after a latency: what is left is the time of the message, in one direction.
    """
    start = time.perf_counter()
    for _ in range(repeats):
        if pair.rank == 0:
            pair.send(message)
            pair.receive(answer)
        else:
            pair.receive(message)
            pair.send(answer)
    return (time.perf_counter() - start) / repeats
