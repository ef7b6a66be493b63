"""Clusters of which only the network matters."""

from collections.abc import Sequence

from hpctrain.config.clusters.cluster import Cluster, Fabric, Family, Nic, Nodes
from hpctrain.rehearsal.fabric import PretendedNetwork

CPU = Family(
    origin="assumed", kind="cpu", memory_bytes=10**9, memory_bytes_per_second=1e9, peak_flops_per_second={"fp32": 1e9}
)


def make_nic(fabric: str, send: float, receive: float) -> Nic:
    return Nic(origin="assumed", fabric=fabric, send_bytes_per_second=send, receive_bytes_per_second=receive)


def make_network(
    nodes: Sequence[tuple[int, Sequence[Nic]]],
    fabrics: dict[str, float],
    link: tuple[float, float],
    dilation: float = 1.0,
) -> PretendedNetwork:
    """Return the network of nodes, each with its number of devices and its NICs.

    `fabrics` are the latencies by name; `link` is the bandwidth and the latency between two devices of a node.
    """
    tables = tuple(
        Nodes(
            origin="assumed", devices={"cpu": count}, nics=tuple(nics),
            link_bytes_per_second=link[0], link_latency_seconds=link[1],
        )
        for count, nics in nodes
    )  # fmt: skip
    described = {name: Fabric(origin="assumed", latency_seconds=latency) for name, latency in fabrics.items()}
    return PretendedNetwork(Cluster(families={"cpu": CPU}, fabrics=described, nodes=tables), dilation)
