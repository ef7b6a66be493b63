"""Clusters for tests of rehearsals: a node of each of two families, one twice as fast as the other; equal devices."""

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.clusters.truth import PretendDevice
from tests import clusters

NIC_BYTES_PER_SECOND = 5e7
KINDS = {"fast": "cuda", "slow": "rocm"}


def cluster_with(nic_bytes_per_second: float, devices: int = 2):
    """Return the cluster with NICs of that bandwidth and so many devices of each family."""
    text = clusters.fabric("ib", 1e-3, "datasheet")
    for (name, kind), speed in zip(KINDS.items(), (2e9, 1e9), strict=True):
        memory = {"memory_bytes": speed / 40, "memory_bytes_per_second": speed}
        text += clusters.family(name, kind=kind, origin="datasheet", peak_flops_per_second={"fp32": speed}, **memory)
        own = {name: devices}
        text += clusters.nodes(own, nic_bytes_per_second, "ib", origin="datasheet", link_latency_seconds=1e-4)
    return parse_cluster(text, "a test")


CLUSTER = cluster_with(NIC_BYTES_PER_SECOND)
PAIR = cluster_with(NIC_BYTES_PER_SECOND, devices=1)


def equal_nodes(device: PretendDevice, count: int, nic_bytes_per_second: float) -> Cluster:
    """Return so many nodes of one device each, of the family "equal", as a probe would measure them."""
    speeds = {"memory_bytes_per_second": device.memory_bytes_per_second}
    if device.host_copy_bytes_per_second is not None:
        speeds["host_copy_bytes_per_second"] = device.host_copy_bytes_per_second
    flops = device.flops_per_second["fp32"]
    product = {"dtype": "fp32", "shape": [64, 128, 128], "flops_per_second": flops}
    speeds |= {"peak_flops_per_second": {"fp32": flops}, "products": [product]}
    text = clusters.fabric("net", 1e-4, "measured")
    text += clusters.family("equal", kind="cuda", origin="measured", memory_bytes=device.memory_bytes, **speeds)
    text += clusters.nodes({"equal": 1}, nic_bytes_per_second, origin="measured", count=count)
    return parse_cluster(text, "a test")
