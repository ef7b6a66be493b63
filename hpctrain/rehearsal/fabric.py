"""A described network: nodes, their devices' links, NICs and fabrics; by which ports a message goes. Pure."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpctrain.config.cluster import Cluster
from hpctrain.config.errors import TopologyError, did_you_mean


@dataclass(frozen=True)
class SharedFabric:
    """What connects NICs of nodes: InfiniBand, RoCE, Ethernet. Its inside is never a bottleneck."""

    name: str
    latency_seconds: float
    """From the first byte's departure to its arrival, the software's share included."""


@dataclass(frozen=True)
class SharedNic:
    """A network interface; both directions are used at once."""

    fabric: str
    send_bytes_per_second: float
    receive_bytes_per_second: float


@dataclass(frozen=True)
class Node:
    """A host; its i-th device takes the i-th NIC of each fabric; fewer are shared round-robin."""

    ranks: tuple[int, ...]
    """Who impersonates its devices, in their order."""
    link_bytes_per_second: float
    """Between two devices: of the port that each of them has in each direction."""
    link_latency_seconds: float
    nics: tuple[SharedNic, ...] = ()


class Path(NamedTuple):
    """What a message from one rank to another passes."""

    ports: tuple[int, ...]
    latency_seconds: float


@dataclass(frozen=True)
class SharedNetwork:
    """The network of a rehearsal's ranks. Raises TopologyError where it is not whole."""

    nodes: tuple[Node, ...]
    fabrics: tuple[SharedFabric, ...] = ()
    dilation: float = 1.0
    """All times are this many times as long as described."""

    def __post_init__(self):
        listed, expected = [rank for node in self.nodes for rank in node.ranks], range(self.num_ranks)
        if wrong := [rank for rank in sorted({*listed, *expected}) if listed.count(rank) != (rank in expected)]:
            raise TopologyError(
                f"the nodes of a network of {len(listed)} devices list ranks 0 to {len(listed) - 1} each once;"
                f" wrong are {wrong}"
            )
        known = {fabric.name for fabric in self.fabrics}
        for node, nic in self._nics:
            if nic.fabric not in known:
                hint = did_you_mean(nic.fabric, known)
                raise TopologyError(f"a NIC of the node of ranks {node.ranks} is on fabric '{nic.fabric}'{hint}")
        slow = [value for value in (*self._described_bandwidths, self.dilation) if not 0 < value < math.inf]
        if slow:
            raise TopologyError(f"bandwidths (bytes/s) and the dilation are positive numbers, not {slow[0]}")

    @property
    def num_ranks(self) -> int:
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def _nics(self) -> Iterator[tuple[Node, SharedNic]]:
        return ((node, nic) for node in self.nodes for nic in node.nics)

    @property
    def _described_bandwidths(self) -> list[float]:
        """Outwards and inwards, of each rank's device, then of each NIC."""
        links = {rank: node.link_bytes_per_second for node in self.nodes for rank in node.ranks}
        result = [(links[rank], links[rank]) for rank in sorted(links)]
        result += [(nic.send_bytes_per_second, nic.receive_bytes_per_second) for _, nic in self._nics]
        return list(itertools.chain.from_iterable(result))

    @cached_property
    def bandwidths(self) -> tuple[float, ...]:
        """The ports' bandwidths in bytes per second of this rehearsal, dilated."""
        return tuple(value / self.dilation for value in self._described_bandwidths)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """By `source * num_ranks + target`. Raises TopologyError where two nodes have no fabric in common."""
        return tuple(self._path(*pair) for pair in itertools.product(range(self.num_ranks), repeat=2))

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {rank: index for index, node in enumerate(self.nodes) for rank in node.ranks}

    def _path(self, source: int, target: int) -> Path:
        """Return the path through the pair of NICs with the most bandwidth; among equals, the least latency."""
        here, there = self._node_of[source], self._node_of[target]
        if here == there:
            ports = () if source == target else (2 * source, 2 * target + 1)
            return Path(ports, self.nodes[here].link_latency_seconds * self.dilation)
        result = []
        for fabric in self.fabrics:
            out, into = self._port(here, source, fabric.name), self._port(there, target, fabric.name)
            if out is not None and into is not None:
                ports = (2 * out, 2 * into + 1)
                narrowest = min(self.bandwidths[port] for port in ports)
                result.append((-narrowest, fabric.latency_seconds * self.dilation, ports))
        if not result:
            raise TopologyError(
                f"ranks {source} and {target} are on nodes without a fabric in common"
                f" ({self._fabrics_of(here)}; {self._fabrics_of(there)}): give both a NIC on the same one"
            )
        _, latency, ports = min(result)
        return Path(ports, latency)

    def _port(self, index: int, rank: int, fabric: str) -> int | None:
        """Return the number, of devices and then NICs, of the NIC by which a rank of a node enters a fabric."""
        node = self.nodes[index]
        nics = [i for i, nic in enumerate(node.nics) if nic.fabric == fabric]
        if not nics:
            return None
        before = self.num_ranks + sum(len(other.nics) for other in self.nodes[:index])
        return before + nics[node.ranks.index(rank) % len(nics)]

    def _fabrics_of(self, index: int) -> str:
        return ", ".join(sorted({nic.fabric for nic in self.nodes[index].nics})) or "none"


def network_of(cluster: Cluster, dilation: float = 1.0) -> SharedNetwork:
    """Return the network of a cluster's devices, as its nodes, NICs and fabrics describe it."""
    members: dict[int, list[int]] = {}
    for device in sorted(cluster.devices, key=lambda device: (device.node, device.index)):
        members.setdefault(device.node, []).append(device.rank)
    nodes = []
    for ranks in members.values():
        table = cluster.nodes[cluster.devices[ranks[0]].table]
        nics = tuple(
            SharedNic(
                nic.fabric,
                _capped(cluster, nic.fabric, nic.send_bytes_per_second),
                _capped(cluster, nic.fabric, nic.receive_bytes_per_second),
            )
            for nics in table.nics_by_fabric.values()
            for nic in nics
        )
        # A node of one device has no links.
        bandwidth, latency = table.link_bytes_per_second or 1.0, table.link_latency_seconds or 0.0
        nodes.append(Node(tuple(ranks), bandwidth, latency, nics))
    fabrics = tuple(SharedFabric(name, fabric.latency_seconds) for name, fabric in cluster.fabrics.items())
    return SharedNetwork(tuple(nodes), fabrics, dilation)


def _capped(cluster: Cluster, fabric: str, bytes_per_second: float) -> float:
    return min(bytes_per_second, cluster.fabrics[fabric].bytes_per_second or math.inf)
