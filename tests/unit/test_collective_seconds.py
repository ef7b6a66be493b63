"""What collectives are predicted to take: as long as the very steps that ranks take, on a network in virtual time."""

import pytest
import torch

from hpctrain.comm.costs import MOST_DOUBLED_BYTES, cheapest_flat
from hpctrain.comm.flat import FlatCollectives
from hpctrain.comm.hierarchy import HierarchicalCollectives
from hpctrain.comm.rehearsal.network import network_of
from hpctrain.intervals import cut_evenly
from hpctrain.job import Link
from hpctrain.planner.network import ClusterNetwork
from tests.unit.small_searches import cluster_of
from tests.virtual_ranks import VirtualRanks, VirtualTransports

NUM_ELEMENTS = 240_000
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")


def taken(cluster, domains, operation: str) -> float:
    """Return the seconds of a collective over all devices, by the steps of its ranks."""
    virtual, ranks = VirtualRanks(network_of(cluster)), range(cluster.num_devices)
    groups = [VirtualTransports(virtual, domain) for domain in domains]
    inside = {rank: g[place] for g, domain in zip(groups, domains, strict=True) for place, rank in enumerate(domain)}
    everyone, steps, cuts = VirtualTransports(virtual, ranks), [], cut_evenly(NUM_ELEMENTS, len(ranks))
    for rank in ranks:
        flat = [FlatCollectives(transport, lambda *_: "exchange") for transport in (inside[rank], everyone[rank])]
        collectives, tensor = HierarchicalCollectives(*flat, everyone[rank], domains), torch.ones(NUM_ELEMENTS)
        match operation:
            case "reduce_scatter":
                steps.append(collectives.reduce_scatter(tensor, cuts, torch.empty(cuts[rank].size), "sum"))
            case "all_gather":
                steps.append(collectives.all_gather(tensor, cuts))
            case _:
                steps.append(collectives.all_reduce(tensor, "sum"))
    return virtual.run(steps)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("link", [1e9, 2e7, 4e6], ids=["fast inside", "as fast inside", "slow inside"])
@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_domains_reduce_inside_while_they_send_across(num_nodes, link, operation):
    families = [(family, 1, 2) for family in "abcd"[:num_nodes]]
    cluster = cluster_of(families, speeds=dict.fromkeys("abcd", 1e9), link=link, nic=2e7)
    domains = [(2 * node, 2 * node + 1) for node in range(num_nodes)]
    predicted = ClusterNetwork(cluster).group_seconds(operation, 4 * NUM_ELEMENTS, range(cluster.num_devices))
    found = taken(cluster, domains, operation)
    assert predicted == pytest.approx(found, rel=1e-3)


def test_small_all_reduces_double_and_large_ones_need_no_room_for_it():
    link = Link(latency_seconds=1e-5, bandwidth_bytes_per_second=1e9)
    assert cheapest_flat("all_reduce", MOST_DOUBLED_BYTES, 2, link, 0.0) == "doubling"
    assert cheapest_flat("all_reduce", MOST_DOUBLED_BYTES + 1, 2, link, 0.0) != "doubling"
