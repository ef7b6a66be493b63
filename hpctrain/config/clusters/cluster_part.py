"""The part of a cluster on which a run has its ranks."""

import itertools
from collections.abc import Sequence

from hpctrain.config.clusters.cluster import Cluster


def part_of(cluster: Cluster, families: Sequence[str], hosts: Sequence[str]) -> Cluster | None:
    """Return the part of a cluster that has exactly the devices of these ranks, in their order; None without one.

    `families` and `hosts` have an entry for each rank. The ranks of a host follow each other.
    """
    if any(nodes.ranks is not None for nodes in cluster.nodes):
        return None
    places = zip(hosts, families, strict=True)
    given = [tuple(family for _, family in group) for _, group in itertools.groupby(places, lambda place: place[0])]
    kinds = [tuple(name for name, n in nodes.devices.items() for _ in range(n)) for nodes in cluster.nodes]
    counts = [0] * len(kinds)
    table = 0
    for node in given:
        while table < len(kinds) and (counts[table] == cluster.nodes[table].count or kinds[table] != node):
            table += 1
        if table == len(kinds):
            return None
        counts[table] += 1
    tables = zip(cluster.nodes, counts, strict=True)
    nodes = [nodes.model_copy(update={"count": count}) for nodes, count in tables if count]
    kept = {name for table in nodes for name in table.devices}
    return Cluster(
        families={name: family for name, family in cluster.families.items() if name in kept},
        fabrics=cluster.fabrics,
        nodes=tuple(nodes),
        links=tuple(link for link in cluster.links if kept.issuperset(link.families)),
        profiles=tuple(profile for profile in cluster.profiles if profile.family in kept),
    )
