"""Clusters for tests of rehearsals: two nodes of two devices, one family twice as fast as the other."""

from hpctrain.config.cluster_file import parse_cluster

NIC_BYTES_PER_SECOND = 5e7


def cluster_with(nic_bytes_per_second: float):
    """Return the cluster with NICs of that bandwidth."""
    return parse_cluster(TEXT.replace("SPEED", str(nic_bytes_per_second)), "a test")


TEXT = """
    [families.fast]
    origin = "datasheet"
    kind = "cuda"
    memory_bytes = 50_000_000
    memory_bytes_per_second = 2e9
    peak_flops_per_second = {fp32 = 2e9}

    [families.slow]
    origin = "datasheet"
    kind = "rocm"
    memory_bytes = 25_000_000
    memory_bytes_per_second = 1e9
    peak_flops_per_second = {fp32 = 1e9}

    [fabrics.ib]
    origin = "datasheet"
    latency_seconds = 1e-3

    [[nodes]]
    origin = "datasheet"
    devices = {fast = 2}
    link_latency_seconds = 1e-4
    link_bytes_per_second = 1e9
    nics = [{fabric = "ib", send_bytes_per_second = SPEED, receive_bytes_per_second = SPEED, origin = "datasheet"}]

    [[nodes]]
    origin = "datasheet"
    devices = {slow = 2}
    link_latency_seconds = 1e-4
    link_bytes_per_second = 1e9
    nics = [{fabric = "ib", send_bytes_per_second = SPEED, receive_bytes_per_second = SPEED, origin = "datasheet"}]
    """
CLUSTER = cluster_with(NIC_BYTES_PER_SECOND)
PAIR = parse_cluster(TEXT.replace("SPEED", str(NIC_BYTES_PER_SECOND)).replace(" = 2}", " = 1}"), "a test")
"""One device of each family."""
