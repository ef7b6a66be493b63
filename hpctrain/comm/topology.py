"""The places of ranks, and the routes by which groups of them communicate: pure functions, no MPI needed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.comm.operations import row_of
from hpctrain.config.clusters.cluster import Cluster

MOST_DOUBLED_BYTES = 1 << 20
"""Largest tensor for recursive doubling. It needs two more copies of the tensor, other algorithms memory for a part.
For larger tensors the cost of rounds is small."""
LEAST_PART_BYTES = 8
"""Fewest bytes of a tensor for each rank. A tensor with less has no part for each of them, and is not reduced by
domains."""
SEGMENT_BYTES = 4 << 20
"""Bytes received from each peer at once before they are reduced; bounds the memory."""
SAME_MEMORY = 1.1
"""Largest memory ratio of devices with one name in one family: drivers and ECC take a few percent."""
GIB = 1 << 30


DOMAIN = ":"
"""Separates the name of a host and the number of one of its domains of shared memory."""


class Place(NamedTuple):
    """The host and the family of a rank."""

    host: str
    family: str
    kind: str = "cpu"
    """Kind of its device: cpu, cuda, rocm and so on. MPI may not touch tensors in memory of other kinds than cpu."""

    @property
    def host_name(self) -> str:
        """The name of the host, which MPI may split into several (`hpctrain.comm.mpi_communicators.gather_places`)."""
        return self.host.partition(DOMAIN)[0]


def split_families(places: Sequence[Place], memory_bytes: Sequence[int]) -> list[Place]:
    """Return the places, where devices with one name and different memory are in different families. Pure.

    A100s of 40 and of 80 GB become `a100-40` and `a100-80`; those of one size stay `a100`. A rank whose memory is not
    known keeps its family.
    """
    names: dict[tuple[str, int], str] = {}
    for family in dict.fromkeys(place.family for place in places):
        sizes = sorted(
            {size for place, size in zip(places, memory_bytes, strict=True) if place.family == family and size}
        )
        least = [size for before, size in zip([0, *sizes], sizes, strict=False) if size > SAME_MEMORY * before]
        for size in sizes if len(least) > 1 else ():
            names[family, size] = f"{family}-{math.ceil(max(each for each in least if each <= size) / GIB)}"
    return [
        place._replace(family=names.get((place.family, size), place.family))
        for place, size in zip(places, memory_bytes, strict=True)
    ]


def places_of(cluster: Cluster) -> tuple[Place, ...]:
    """Return where the devices of a described cluster are, by rank."""
    return tuple(Place(f"node{device.node}", device.family) for device in cluster.devices)


def segments_in_flight(bytes_under_way: int) -> int:
    """Return how many segments of a sum are in flight to each peer, of which so many bytes fill the link.

    One and what is under way. A quarter of a segment more is not worth its scratch: without it a link is 80 % full.
    """
    return 1 + (bytes_under_way + SEGMENT_BYTES * 3 // 4) // SEGMENT_BYTES


def candidates(operation: str, num_bytes: int, num_ranks: int, by_domains: bool) -> list[str]:
    """Return the algorithms from which a group may choose; the first one where its links are not known.

    `by_domains` says whether it has domains. There is no ring: it sends the same bytes as an exchange, and takes one
    more latency for each rank. Raises CommError for an unknown operation.
    """
    if not row_of(operation).doubles:
        return ["domains" if by_domains else "exchange"]
    result = ["domains"] if by_domains and num_bytes >= LEAST_PART_BYTES * num_ranks else []
    if not result or num_bytes <= MOST_DOUBLED_BYTES:
        result.append("exchange")
    return result + (["doubling"] if num_bytes <= MOST_DOUBLED_BYTES else [])


@dataclass(frozen=True)
class Route:
    """The kind of medium that a group communicates through, and its domains."""

    kind: str
    """alone, shared (memory of one host), messages or hierarchical."""
    reason: str
    domains: tuple[tuple[int, ...], ...] = ()
    """Domains of a hierarchical route: positions in the group of ranks that are near each other."""


@dataclass(frozen=True)
class Topology:
    """The places of all ranks. Immutable, made once."""

    places: tuple[Place, ...]
    shares_memory: bool = True
    """Whether ranks of one host communicate through its memory; false where their hosts are pretended."""

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.family for place in self.places))

    @property
    def has_devices(self) -> bool:
        """Say whether some rank computes on something else than its host."""
        return any(place.kind != "cpu" for place in self.places)

    def ranks_of(self, family: str) -> tuple[int, ...]:
        return tuple(rank for rank, place in enumerate(self.places) if place.family == family)

    def ranks_on_host(self, rank: int) -> int:
        """Return the number of ranks on this rank's host, by its name: an MPI may not let all of them share memory."""
        return sum(place.host_name == self.places[rank].host_name for place in self.places)

    def are_together(self, one: int, other: int) -> bool:
        """Say whether two ranks are on one host."""
        return self.places[one].host == self.places[other].host

    def domains(self, ranks: Sequence[int], by: str) -> tuple[tuple[int, ...], ...]:
        """Return the domains of `ranks`: positions that agree in `by` (family or host), in order of first
        appearance."""
        result: dict[str, list[int]] = {}
        for position, rank in enumerate(ranks):
            result.setdefault(getattr(self.places[rank], by), []).append(position)
        return tuple(tuple(positions) for positions in result.values())

    def route(self, ranks: Sequence[int]) -> Route:
        """Return the route of a group.

        | route        | who                                            | summed by                          |
        |--------------|------------------------------------------------|------------------------------------|
        | alone        | one rank                                       |                                    |
        | shared       | all on one host                                | everybody a part, in order of rank |
        | hierarchical | several families, or hosts with several ranks  | inside the domains, then across    |
        | messages     | on different hosts, or pretended               | by algorithm, see `collectives`    |

        Waiting ranks yield the core, then sleep, on every route.
        """
        if len(ranks) == 1:
            return Route("alone", "a single rank")
        hosts, families = self.domains(ranks, "host"), self.domains(ranks, "family")
        if len(hosts) == 1 and self.shares_memory:
            return Route("shared", f"all on host {self.places[ranks[0]].host}")
        if 1 < len(families) < len(ranks):
            names = ", ".join(f"{len(d)} {self.places[ranks[d[0]]].family}" for d in families)
            return Route("hierarchical", f"several families: {names}", families)
        if 1 < len(hosts) < len(ranks):
            return Route("hierarchical", f"{len(hosts)} hosts with several ranks", hosts)
        if len(hosts) > 1:
            return Route("messages", f"on {len(hosts)} hosts, one rank each")
        return Route("messages", f"all on host {self.places[ranks[0]].host}, which is pretended")
