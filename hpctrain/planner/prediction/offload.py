"""Prices the copies between a device and host memory, where tiles offload, and what hosts must hold. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from hpctrain.config.clusters.cluster import HOST_COPY_SHARE, Cluster
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.memory import StageMemory
from hpctrain.planner.prices.cost import update_seconds
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.host_buckets import SLOTS, bucket_elements

MIB, GIB = 2**20, 2**30


def offloaded_update_seconds(setup: Setup, device: DeviceModel, num_elements: int) -> float:
    """Return what an update takes that moves its state through the device.

    As `engine/step/host_state.py` does it: copies in, updates and copies out each follow each other, and a bucket
    comes in when one has left that was `SLOTS` before it. Copies overlap the update itself; the norm and the clipping
    come before.
    """
    if not num_elements:
        return 0.0
    bucket = min(num_elements, bucket_elements(num_elements))
    copy = bucket * setup.state_bytes() / device.host_copy_bytes_per_second
    share = setup.update_bytes / (setup.engine.clipping_bytes + setup.update_bytes)
    each = share * update_seconds(setup, device, bucket)
    next_after = max(copy, each, (2 * copy + each) / SLOTS)
    all_buckets = 2 * copy + each + (num_elements / bucket - 1) * next_after
    return all_buckets + (1 - share) * update_seconds(setup, device, num_elements)


def host_shortage(plan: Plan, cluster: Cluster, memory: Mapping[Tile, StageMemory]) -> str:
    """Say which host has too little memory for what its ranks offload, with the numbers; nothing where all have enough,
    or their memory is not known. `memory` is by the first tile of ranks."""
    needed: dict[int, int] = {}
    for tile, stage in memory.items():
        if stage.memory.on_host:
            for rank in tile.ranks:
                node = cluster.devices[rank].node
                needed[node] = needed.get(node, 0) + stage.memory.on_host
    tables = {device.node: device.table for device in cluster.devices}
    for node, num_bytes in needed.items():
        there = cluster.nodes[tables[node]].host_memory_bytes
        if there is not None and num_bytes > there:
            return (
                f"ranks of node {node} offload {num_bytes / GIB:,.3f} GiB, and its host has {there / GIB:,.3f} GiB"
                f" (nodes.{tables[node]}.host_memory_bytes)"
            )
    return ""


def format_shortage(memory: Iterable[StageMemory], of_hosts: str) -> str:
    """Say what a plan lacks that does not fit, with the numbers: memory of a host, by `host_shortage`, or else of the
    rank that lacks the most."""
    if of_hosts:
        return of_hosts
    stage = max(memory, key=lambda each: each.memory.total - each.available_bytes)
    needed, available = stage.memory.total / MIB, stage.available_bytes / MIB
    return (
        f"a rank with items {list(stage.tile.items)} on '{stage.tile.family}' needs {needed:,.1f} MiB and has"
        f" {available:,.1f} MiB: {needed - available:,.1f} MiB too few"
    )


def host_share(cluster: Cluster, nodes: Iterable[Sequence[int]]) -> float:
    """Return what each of some ranks, node by node, may fill of its host's memory: an even share of all devices of the
    node; nothing where a host's memory is not known."""
    hosts = [cluster.nodes[table] for table in {cluster.devices[ranks[0]].table for ranks in nodes}]
    return min(((host.host_memory_bytes or 0) / host.num_devices for host in hosts), default=0.0)


def unknown_hosts(cluster: Cluster) -> str:
    """Say which keys would allow a search to offload; nothing where all hosts of devices have them."""
    keys = [
        f"nodes.{table}.host_memory_bytes"
        for table, nodes in enumerate(cluster.nodes)
        if nodes.host_memory_bytes is None and any(cluster.families[name].kind != "cpu" for name in nodes.devices)
    ]
    return f"no plan offloads to hosts of unknown memory: set {', '.join(keys)} in the cluster file" if keys else ""


def offload_guesses(plan: Plan, cluster: Cluster, families: Mapping[Tile, Sequence[str]]) -> list[str]:
    """Return the inputs of a plan's offload that nobody gave; `families` are those of each tile's ranks."""
    offloading = [tile for tile in plan.tiles if tile.offload != "none"]
    used = dict.fromkeys(family for tile in offloading for family in families[tile])
    result = [
        f"families.{name}.host_copy_bytes_per_second: {HOST_COPY_SHARE:.1%} of its memory's"
        for name in used
        if cluster.families[name].host_copy_bytes_per_second is None
    ]
    tables = sorted({cluster.devices[rank].table for tile in offloading for rank in tile.ranks})
    return result + [
        f"nodes.{table}.host_memory_bytes: enough for what is offloaded"
        for table in tables
        if cluster.nodes[table].host_memory_bytes is None
    ]
