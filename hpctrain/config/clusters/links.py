"""The link between two devices of a cluster, and the seconds of a message on it. Pure; no pairs are enumerated."""

import itertools
import math
from bisect import bisect_left
from typing import Literal, NamedTuple

from hpctrain.config.clusters.cluster import Cluster, MessageTiming, Nic
from hpctrain.config.errors import TopologyError

COMPARED_BYTES = 1 << 20
"""The slowest of several links is the one on which a message of this size takes longest."""
HOST_OVERHEAD_SECONDS = 10e-6
"""What each further message costs that a CPU rank sends and receives at the same time. Measured: 9 to 13 us for each of
2 to 32 messages of 64 bytes between two ranks of a host, by `hpctrain.comm.transports.transport`."""
DEVICE_OVERHEAD_SECONDS = 1e-6
"""The same between accelerators, whose library starts a collective at once. Assumed: the order of magnitude of
measured LogGP parameters of InfiniBand."""


class PairLink(NamedTuple):
    """The link between two devices."""

    between: Literal["device", "node", "fabric", "across"]
    """`device`: a device and itself; `node`: two of one node; `fabric`: two nodes by the fastest fabric of both;
    `across`: two nodes that must take a slower one."""
    fabric: str | None
    latency_seconds: float
    bytes_per_second: float
    """The bandwidth of a single message."""
    shared_bytes_per_second: float
    """The bandwidth that all messages of the sender's NIC share; infinite where there is no NIC."""
    times: tuple[MessageTiming, ...] = ()
    """The measured times of messages, where there are some."""
    is_measured: bool = False
    """Whether the cluster says that its bandwidth was measured."""
    overhead_seconds: float = 0.0
    """The sender's cost of each further message in flight: part of its latency."""
    fully_connected: bool = False
    """Whether its ends have such a link to each other device of their node too."""
    is_infinity_fabric: bool = False
    """Whether AMD's protocol is on it, of fully connected devices."""

    @property
    def message_bytes_per_second(self) -> float:
        """The bandwidth of a message that has the sender's NIC for itself."""
        return min(self.bytes_per_second, self.shared_bytes_per_second)


def nic_of(cluster: Cluster, rank: int, fabric: str) -> tuple[int, Nic] | None:
    """Return the NIC by which a device enters a fabric, and its number among its node's of that fabric."""
    device = cluster.devices[rank]
    nics = cluster.nodes[device.table].nics_by_fabric.get(fabric, ())
    return (device.index % len(nics), nics[device.index % len(nics)]) if nics else None


def link_between(cluster: Cluster, source: int, target: int) -> PairLink:
    """Return the link that a message from one rank's device to another's takes.

    Between nodes it takes the pair of NICs with the most bandwidth; among equals, the least latency.
    """
    here, there = cluster.devices[source], cluster.devices[target]
    nodes, kinds = cluster.nodes[here.table], {cluster.families[each.family].kind for each in (here, there)}
    if source == target:
        copy = cluster.families[here.family].memory_bytes_per_second / 2
        return PairLink("device", None, 0.0, copy, math.inf)
    if here.node == there.node:
        assert nodes.link_latency_seconds is not None and nodes.link_bytes_per_second is not None
        is_measured = nodes.origin_of("link_bytes_per_second") == "measured"
        figures = nodes.link_latency_seconds, nodes.link_bytes_per_second, math.inf
        result = PairLink("node", None, *figures, is_measured=is_measured)
        if nodes.fully_connected:
            result = result._replace(fully_connected=True, is_infinity_fabric=kinds == {"rocm"})
    else:
        result = _across_nodes(cluster, source, target)
    described = cluster.links_by_key.get((result.fabric, tuple(sorted((here.family, there.family)))))
    if described:
        result = result._replace(
            latency_seconds=described.latency_seconds,
            bytes_per_second=described.bytes_per_second,
            times=described.times,
            is_measured=described.origin_of("bytes_per_second") == "measured",
        )
    overhead = HOST_OVERHEAD_SECONDS if "cpu" in kinds else DEVICE_OVERHEAD_SECONDS
    return result._replace(overhead_seconds=min(overhead, result.latency_seconds))


def _across_nodes(cluster: Cluster, source: int, target: int) -> PairLink:
    candidates = []
    for name, fabric in cluster.fabrics.items():
        out, into = nic_of(cluster, source, name), nic_of(cluster, target, name)
        if out and into:
            bandwidth, origin = min(
                (out[1].send_bytes_per_second, out[1].origin_of("send_bytes_per_second")),
                (into[1].receive_bytes_per_second, into[1].origin_of("receive_bytes_per_second")),
                (fabric.bytes_per_second or math.inf, fabric.origin_of("bytes_per_second")),
                key=lambda pair: pair[0],
            )
            candidates.append((-bandwidth, fabric.latency_seconds, name, origin == "measured"))
    if not candidates:  # a `Cluster` is never like this
        raise TopologyError(f"ranks {source} and {target} are on nodes without a fabric in common")
    negative, latency, name, is_measured = min(candidates)
    equivalent = name in _fastest_fabrics(cluster, source) and name in _fastest_fabrics(cluster, target)
    return PairLink("fabric" if equivalent else "across", name, latency, -negative, -negative, is_measured=is_measured)


def _fastest_fabrics(cluster: Cluster, rank: int) -> list[str]:
    """Return the fabrics by which a rank's node sends fastest, whoever else is on them."""
    nics = [nic_of(cluster, rank, fabric) for fabric in cluster.fabrics]
    speeds = [nic[1].send_bytes_per_second if nic else 0.0 for nic in nics]
    return [fabric for fabric, speed in zip(cluster.fabrics, speeds, strict=True) if speed == max(speeds)]


def message_seconds(link: PairLink, num_bytes: int, flows: float = 1, link_share: float = 1.0) -> float:
    """Return the seconds of a message while `flows` equal ones are in flight: as measured, else by its bandwidth.

    `link_share` is what the software reaches of a data sheet's bandwidth, which is discounted here and nowhere else.
    Between measurements it interpolates linearly, in bytes and in flows. More flows than were measured share the
    bandwidth of the most that were.
    """
    if not link.times:
        bandwidth = min(link.bytes_per_second, link.shared_bytes_per_second / flows)
        return link.latency_seconds + num_bytes / (bandwidth * (1.0 if link.is_measured else link_share))
    counts = sorted({time.flows for time in link.times})
    below = max((count for count in counts if count <= flows), default=counts[0])
    above = min((count for count in counts if count >= flows), default=below)
    low = _on_curve(link, below, num_bytes)
    if above > below:
        return low + (_on_curve(link, above, num_bytes) - low) * (flows - below) / (above - below)
    in_flight = max(low - link.latency_seconds, 0.0)
    return low + in_flight * max(flows / below - 1, 0)


def _on_curve(link: PairLink, flows: int, num_bytes: int) -> float:
    """Return the seconds of a message by the times that were measured with one number of flows."""
    points = sorted((time.message_bytes, time.seconds) for time in link.times if time.flows == flows)
    points.insert(0, (0, min(link.latency_seconds, points[0][1])))
    right = min(max(bisect_left([size for size, _ in points], num_bytes), 1), len(points) - 1)
    (size, seconds), (larger, longer) = points[right - 1], points[right]
    slope = (longer - seconds) / (larger - size)
    if num_bytes > larger:
        return longer + (num_bytes - larger) * max(slope, 0.0)
    return seconds + (num_bytes - size) * slope


def slowest_links(cluster: Cluster, of_groups: bool = False) -> dict[str, PairLink]:
    """Return the slowest link `inside` nodes and the slowest `across` them, as far as there are such pairs.

    With `of_groups` all links of a device to the others of its node count as one, with the bandwidth of all.
    """
    # Every class of pairs occurs among two devices of each family on two nodes of each table.
    nodes: dict[int, set[int]] = {}
    ranks: dict[tuple[int, str], list[int]] = {}
    for device in cluster.devices:
        first_nodes = nodes.setdefault(device.table, set())
        if len(first_nodes) < 2:
            first_nodes.add(device.node)
        if device.node in first_nodes:
            ranks.setdefault((device.node, device.family), []).append(device.rank)
    representatives = [rank for of_family in ranks.values() for rank in of_family[:2]]
    slowest: dict[str, tuple[float, PairLink]] = {}
    for source, target in itertools.permutations(representatives, 2):
        link = link_between(cluster, source, target)
        if of_groups and link.fully_connected:
            num_links = cluster.nodes[cluster.devices[source].table].num_devices - 1
            link = link._replace(bytes_per_second=link.bytes_per_second * num_links, times=())
        where = "inside" if link.between == "node" else "across"
        timed = message_seconds(link, COMPARED_BYTES), link
        slowest[where] = max(slowest.get(where, timed), timed, key=lambda pair: pair[0])
    return {where: link for where, (_, link) in slowest.items()}
