"""The network of a described cluster as its rehearsal sees it: by which ports a message goes, how wide they are."""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpctrain.config.cluster import Cluster
from hpctrain.config.links import nic_of


class Path(NamedTuple):
    """What a message from one rank to another passes."""

    ports: tuple[int, ...]
    latency_seconds: float


@dataclass(frozen=True)
class PretendedNetwork:
    """The links, NICs and fabrics of a rehearsal's ranks. The inside of a fabric is never a bottleneck.

    Devices are numbered by rank, then NICs node by node. Port 2 n leads out of number n, port 2 n + 1 into it.
    """

    cluster: Cluster
    dilation: float = 1.0
    """All times are this many times as long as described."""

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_devices

    @cached_property
    def _nics(self) -> dict[tuple[int, str, int], int]:
        """The number of each NIC, by node, fabric, and place among the node's NICs of that fabric."""
        keys = [
            (node, fabric, place)
            for node, table in sorted(self._tables.items())
            for fabric, nics in self.cluster.nodes[table].nics_by_fabric.items()
            for place in range(len(nics))
        ]
        return {key: self.num_ranks + number for number, key in enumerate(keys)}

    @cached_property
    def _tables(self) -> dict[int, int]:
        return {device.node: device.table for device in self.cluster.devices}

    @cached_property
    def bandwidths(self) -> tuple[float, ...]:
        """The ports' bandwidths in bytes per second of this rehearsal, dilated."""
        cluster, result = self.cluster, []
        for device in cluster.devices:
            result += 2 * [cluster.nodes[device.table].link_bytes_per_second or 1.0]  # a single device has no link
        for node, fabric, place in self._nics:
            nic = cluster.nodes[self._tables[node]].nics_by_fabric[fabric][place]
            most = cluster.fabrics[fabric].bytes_per_second or math.inf
            result += [min(nic.send_bytes_per_second, most), min(nic.receive_bytes_per_second, most)]
        return tuple(value / self.dilation for value in result)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """By `source * num_ranks + target`."""
        return tuple(self._path(*pair) for pair in itertools.product(range(self.num_ranks), repeat=2))

    def _path(self, source: int, target: int) -> Path:
        """Return the path through the pair of NICs with the most bandwidth; among equals, the least latency."""
        here, there = self.cluster.devices[source], self.cluster.devices[target]
        if here.node == there.node:
            ports = () if source == target else (2 * source, 2 * target + 1)
            return Path(ports, (self.cluster.nodes[here.table].link_latency_seconds or 0.0) * self.dilation)
        result = []
        for name, fabric in self.cluster.fabrics.items():
            out, into = self._number(source, name), self._number(target, name)
            if out is not None and into is not None:
                ports = (2 * out, 2 * into + 1)
                narrowest = min(self.bandwidths[port] for port in ports)
                result.append((-narrowest, fabric.latency_seconds * self.dilation, ports))
        _, latency, ports = min(result)  # nodes of a cluster have a fabric in common
        return Path(ports, latency)

    def _number(self, rank: int, fabric: str) -> int | None:
        """Return the number of the NIC by which a rank enters a fabric."""
        nic = nic_of(self.cluster, rank, fabric)
        return self._nics[self.cluster.devices[rank].node, fabric, nic[0]] if nic else None
