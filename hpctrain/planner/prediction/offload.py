"""Prices the copies between a device and host memory, where tiles offload, and what hosts must hold. Pure."""

import sys
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
    share = setup.update_bytes / (setup.stack.clipping_bytes + setup.update_bytes)
    each = share * update_seconds(setup, device, bucket)
    next_after = max(copy, each, (2 * copy + each) / SLOTS)
    all_buckets = 2 * copy + each + (num_elements / bucket - 1) * next_after
    return all_buckets + (1 - share) * update_seconds(setup, device, num_elements)


def exposed_copies(
    compute: Sequence[tuple[float, float]], copies: Sequence[float], is_last: bool
) -> tuple[float, float]:
    """Return how much longer a forward and a backward pass take that offload activations.

    `compute` are the seconds of each layer forward and backward, `copies` those of moving what it keeps, 0 where it
    keeps nothing in host memory. A block begins when what the one two before it has kept is in host memory. In the
    backward pass one block comes back while that behind it is computed; the last of the tile is still on the device
    where the backward pass follows at once, as it does in a tile that `is_last`.
    """
    now = sent = before = 0.0
    for (forward, _), copy in zip(compute, copies, strict=True):
        start, now = now, now + forward
        if copy:
            now = max(now, before)
            before = sent = max(max(sent, start) + copy, now)
    longer = now - sum(forward for forward, _ in compute)
    order = list(zip(compute, copies, strict=True))[::-1]
    still_leaving = max(0.0, sent - now)
    now = arrived = 0.0
    is_here = is_last
    fetched: dict[int, float] = {}
    for number, ((_, backward), _) in enumerate(order):
        for place in range(number, min(number + 2, len(order))):
            if order[place][1] and place not in fetched:
                if is_here:
                    fetched[place], is_here = still_leaving, False
                else:
                    arrived = fetched[place] = max(arrived, now) + order[place][1]
        now = max(now, fetched.get(number, 0.0)) + backward
    return longer, now - sum(backward for _, backward in compute)


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
    node; more than there is anywhere where nobody says how much."""
    hosts = [cluster.nodes[table] for table in {cluster.devices[ranks[0]].table for ranks in nodes}]
    known = (host.host_memory_bytes / host.num_devices for host in hosts if host.host_memory_bytes)
    return min(known, default=float(sys.maxsize))


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
