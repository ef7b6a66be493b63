"""Prices a collective of NCCL, or of a library like it, on a link whose data sheet is known. Pure.

A wire gives its collectives a share of its bandwidth; an operation takes a start and a while for each step of its ring;
small tensors go by a protocol that starts sooner and carries less, large ones by one that fills pipelines first (NCCL
src/graph/tuning.cc, `baseLat` and `hwLat`). Shares and starts are those of published runs of nccl-tests:

8 A100 by NVLink: all-reduce on the bus 48, 138, 191, 221, 232 GB/s of 1 MiB, 16 MiB, 64 MiB, 512 MiB, 4 GiB. 8 H100:
67, 237, 362, 437, 477, as their switches sum (NVIDIA/dgxc-benchmarking, nccl/README.md); what is not summed 370 of 450
(NVIDIA/nccl-tests, issue 212). 8 MI300X, each two by a link of their own: 65, 196, 272, 310, 315 (hisohara/ai-scripts,
training/01_rccl-smoketest). PCIe 3 12 of 15.75 GB/s (NCCL src/graph/topo.h). Ports of RDMA 41.5 of 50 GB/s at 32 MiB
(nccl-tests, issue 232), 600 of 800 Gb/s (nccl, issue 495). TCP at most 60 % of 32 Gb/s, 4 to 6 GB/s of 100 Gb/s (nccl,
issues 209 and 450), nearly all of 10 Gb/s.
"""

import math
from typing import NamedTuple

from hpctrain.comm.operations import row_of
from hpctrain.comm.topology import Topology, places_of
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.links import PairLink
from hpctrain.planner.prices.network import ClusterNetwork, GroupShape

NVLINK_BYTES_PER_SECOND = 40e9
"""From which on a link inside a node is no PCIe: x16 of its fourth generation has 32e9."""
SUMMING_BYTES_PER_SECOND = 400e9
"""From which on switches between devices sum what passes: NVLink 4 and later."""
SUMMING_TIMES = 1.33
SOCKET_SECONDS = 20e-6
"""Latency from which on a fabric is one of sockets, whose bytes go through memory of the hosts."""


class Protocol(NamedTuple):
    start_seconds: float
    step_seconds: float
    share: float
    """Of what the wire gives."""


class NcclWire(NamedTuple):
    share: float
    """Of the link's bandwidth."""
    protocols: tuple[Protocol, ...]


# Start of what fills pipelines: 512 KiB in each of some 24 channels, at the A100's speed.
NVLINK = NcclWire(0.80, (Protocol(7e-6, 0.6e-6, 0.25), Protocol(14e-6, 1.9e-6, 0.85), Protocol(110e-6, 3.4e-6, 1.0)))
# Of a link of Infinity Fabric after its protocol, by RCCL (hisohara/ai-scripts at 0780bb3, training/01_rccl-smoketest).
XGMI = NcclWire(0.94, NVLINK.protocols)
PCIE = NcclWire(0.75, (Protocol(7e-6, 1.0e-6, 0.25), Protocol(8e-6, 5.7e-6, 1.0)))
RDMA = NcclWire(0.85, (Protocol(7e-6, 2.7e-6, 0.25), Protocol(8e-6, 14e-6, 1.0)))
# Omni-Path leaves the protocol to the hosts' cores (PSM2), as TCP does.
ONLOADED = NcclWire(0.45, (Protocol(7e-6, 2.7e-6, 0.25), Protocol(8e-6, 14e-6, 1.0)))
ONLOADED_FABRICS = ("OPA",)
# What any software reaches at the least of wires whose bytes devices and NICs move themselves: fitted to steps of
# Megatron-Core and FSDP. Tensor 8 of Megatron-DeepSpeed has 205 to 262 GB/s of NVLink from 48 MiB on, and tensor 16 90
# of 100 GB/s of a node's ports (vTrain).
MOVED_SHARES = {NVLINK: 0.9, XGMI: 0.9, RDMA: 1.0}
PLUGGED_FABRICS = "Slingshot", "EFA"
"""To which NCCL talks by a plugin for libfabric, with threads of the host that must keep up."""
# Copies through the hosts' memory end at about so many bytes a second of a NIC, however fast that is.
SOCKETS_BYTES_PER_SECOND = 3.2e9
SOCKETS = NcclWire(0.85, (Protocol(8e-6, 14e-6, 1.0),))


def targets(num_parts: int, copies: int) -> float:
    """Return to how many of some parts of the ranks a token goes that is needed in so many places, each of any part."""
    return num_parts * (1 - (1 - 1 / num_parts) ** copies)


def wire_of(link: PairLink) -> NcclWire:
    if link.is_infinity_fabric:
        return XGMI
    if link.between == "node":
        return NVLINK if link.bytes_per_second >= NVLINK_BYTES_PER_SECOND else PCIE
    if link.fabric and link.fabric.startswith(ONLOADED_FABRICS):
        return ONLOADED
    if link.latency_seconds < SOCKET_SECONDS:
        return RDMA
    return SOCKETS._replace(share=min(SOCKETS.share, SOCKETS_BYTES_PER_SECOND / link.bytes_per_second))


def collective_seconds(
    operation: str,
    num_bytes: float,
    num_ranks: int,
    link: PairLink,
    bandwidth: float,
    sums: bool = True,
    inside: PairLink | None = None,
    num_domains: int = 0,
) -> float:
    """Return what a collective of `num_bytes` (the whole tensor's) takes; `bandwidth` is what the wire gives a rank.

    `sums` says whether switches may sum what passes. Where a ring goes through `num_domains` nodes, its other steps are
    of a link `inside` them.
    """
    wire, passes = wire_of(link), 2 if operation == "all_reduce" else 1
    is_fast = link.between == "node" and link.bytes_per_second >= SUMMING_BYTES_PER_SECOND
    if sums and passes == 2 and is_fast and num_ranks > 2:
        bandwidth *= SUMMING_TIMES
    moving = passes * num_bytes * (num_ranks - 1) / num_ranks / bandwidth
    # A tree sums and spreads in twice its depth.
    steps = min(num_ranks - 1, math.log2(num_ranks) if passes == 2 and link.between != "node" else math.inf)
    far = steps if inside is None else min(steps, num_domains - 1)
    step = link.latency_seconds if link.between != "node" else 0.0
    near = wire_of(inside).protocols if inside else wire.protocols
    result = math.inf
    for protocol in wire.protocols:
        in_node = near[0 if protocol.share < 1 else -1].step_seconds
        waited = far * (protocol.step_seconds + step) + (steps - far) * in_node
        result = min(result, protocol.start_seconds + passes * waited + moving / protocol.share)
    return result


class NcclNetwork(ClusterNetwork):
    """A cluster's links with the collectives of NCCL. A measured link gives all that was measured."""

    def __init__(
        self, cluster: Cluster, link_share: float = 1.0, socket_share: float = 1.0, sums: bool = True, copies: int = 0
    ):
        """`socket_share` is what software reaches of what sockets give, and `link_share` what it reaches of others.

        `sums` says whether switches may sum what passes. They do not with sequence parallelism, whose all-reduces are a
        gather and a scatter. An all-to-all that sends each token of so many `copies` to a node once sends fewer.
        """
        super().__init__(cluster, link_share)
        self._copies = copies
        self._socket_share, self._sums = socket_share, sums
        places = (place._replace(family="") for place in places_of(cluster))  # to NCCL all devices are equal
        self._topology = Topology(tuple(places), shares_memory=False)

    def share_of(self, link: PairLink) -> float:
        wire, share = wire_of(link), super().share_of(link)
        if wire.protocols is SOCKETS.protocols:  # whose hosts copy: the wire's share has that
            return wire.share * self._socket_share
        is_plugged = link.fabric is not None and link.fabric.startswith(PLUGGED_FABRICS)
        return wire.share * (share if is_plugged else max(share, MOVED_SHARES.get(wire, 0.0)))

    def flat_seconds(
        self, algorithm: str, operation: str, num_bytes: int, num_ranks: int, link: PairLink, bandwidth: float
    ) -> float:
        if link.is_measured:
            return super().flat_seconds(algorithm, operation, num_bytes, num_ranks, link, bandwidth)
        return collective_seconds(operation, num_bytes, num_ranks, link, bandwidth, self._sums)

    def _by_domains(self, operation: str, num_bytes: int, shape: GroupShape) -> float:
        """Return what a group on several nodes takes: a ring through all of them, by the NICs of all its ranks.

        It is as fast as the slowest part of the ring, in a node or between two.
        """
        part = num_bytes // shape.size + 1
        across = [(size, number, flows) for size, links in shape.across for number, _, flows in links]
        lines = [(size, *self._slowest((number,), part, flows)) for size, number, flows in across]
        if any(link.is_measured for _, link, _ in lines):
            return super()._by_domains(operation, num_bytes, shape)
        far = lines[0][1]
        inside = [(1, *self._slowest(d.links, part, d.flows, d.size - 1)) for d in shape.domains if d.links]
        if row_of(operation).is_pairwise:  # each rank sends by its own NIC what is for other nodes
            by_nic, in_node = (min(each for _, _, each in some) if some else math.inf for some in (lines, inside))
            own = shape.size // shape.num_domains
            away = (shape.size - own) / shape.size
            if self._copies:
                nodes = targets(shape.num_domains, self._copies) * (1 - 1 / shape.num_domains)
                away = nodes / targets(shape.size, self._copies)
            moved = (shape.size - 1) / shape.size
            bandwidth = min(by_nic * moved / away, in_node * moved * shape.size / max(1, own - 1))
        else:
            bandwidth = min(size * each for size, _, each in lines + inside)
        near = inside[0][1] if inside else None
        return collective_seconds(operation, num_bytes, shape.size, far, bandwidth, False, near, shape.num_domains)
