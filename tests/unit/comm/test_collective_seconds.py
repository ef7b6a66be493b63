"""What collectives are predicted to take: as long as the very steps that ranks take, on a network in virtual time."""

import itertools

import pytest
import torch

from hpctrain.comm.collectives.flat import FlatCollectives
from hpctrain.comm.collectives.hierarchical import HierarchicalCollectives
from hpctrain.comm.groups.group import Group
from hpctrain.comm.operations import OPERATIONS as TABLE
from hpctrain.comm.operations import row_of
from hpctrain.comm.topology import MOST_DOUBLED_BYTES, SEGMENT_BYTES
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.config.errors import CommError
from hpctrain.jobs.common import ready_miniature
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.rehearsal.fabric import PretendedNetwork
from hpctrain.sharding.intervals import cut_evenly
from tests import clusters
from tests.pretended import CLUSTER as PRETENDED
from tests.unit.small_searches import cluster_of
from tests.virtual_ranks import VirtualRanks, VirtualTransports

NUM_ELEMENTS = 240_000
OPERATIONS = ("reduce_scatter", "all_gather", "all_to_all", "all_reduce")


def taken(cluster, groups, operation: str) -> float:
    """Return the seconds of a collective of some groups at once, which are of domains, by the steps of their ranks."""
    virtual, steps = VirtualRanks(PretendedNetwork(cluster)), []
    for domains in groups:
        ranks = [rank for domain in domains for rank in domain]
        everyone, cuts = VirtualTransports(virtual, ranks), cut_evenly(NUM_ELEMENTS, len(ranks))
        places = [tuple(map(ranks.index, domain)) for domain in domains]
        for domain in domains:
            inside = VirtualTransports(virtual, domain)
            for place, rank in enumerate(domain):
                at = ranks.index(rank)
                flat = [FlatCollectives(transport, lambda _: "domains") for transport in (inside[place], everyone[at])]
                collectives = HierarchicalCollectives(*flat, places)
                steps.append(steps_of(collectives, operation, cuts, at))
    return virtual.run(steps)


def steps_of(collectives, operation: str, cuts, at: int):
    tensor = torch.ones(NUM_ELEMENTS)
    match operation:
        case "reduce_scatter":
            return collectives.reduce_scatter(tensor, cuts, torch.empty(cuts[at].size), "sum")
        case "all_gather":
            return collectives.all_gather(tensor, cuts)
        case "all_to_all":
            return collectives.all_to_all(tensor, cuts, torch.empty(NUM_ELEMENTS), cuts)
        case _:
            return collectives.all_reduce(tensor, "sum")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("link", [1e9, 2e7, 4e6], ids=["fast inside", "as fast inside", "slow inside"])
@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_domains_reduce_inside_while_they_send_across(num_nodes, link, operation):
    families = [(family, 1, 2) for family in "abcd"[:num_nodes]]
    cluster = cluster_of(families, speeds=dict.fromkeys("abcd", 1e9), link=link, nic=2e7)
    domains = [(2 * node, 2 * node + 1) for node in range(num_nodes)]
    predicted = ClusterNetwork(cluster).group_seconds(operation, 4 * NUM_ELEMENTS, range(cluster.num_devices))
    result = taken(cluster, [domains], operation)
    assert predicted == pytest.approx(result, rel=1e-3)


@pytest.mark.parametrize(
    ("num_nodes", "operation"), [*((1, each) for each in OPERATIONS), *((2, each) for each in OPERATIONS[:3])]
)
def test_fully_connected_devices_send_to_all_others_of_their_node_at_once(num_nodes, operation):
    def cluster(**more):
        node = clusters.nodes({"a": 4}, 1e9, count=num_nodes, link_bytes_per_second=1e6, **more)
        return parse_cluster(clusters.family("a") + clusters.fabric() + node, "a test")

    own, ranks = cluster(fully_connected=True), range(4 * num_nodes)
    if num_nodes == 1:
        virtual, cuts = VirtualRanks(PretendedNetwork(own)), cut_evenly(NUM_ELEMENTS, 4)
        transports = VirtualTransports(virtual, ranks)
        flat = (FlatCollectives(transports[rank], lambda _: "exchange") for rank in ranks)
        result = virtual.run([steps_of(each, operation, cuts, at) for at, each in enumerate(flat)])
    else:
        result = taken(own, [[(0, 1, 2, 3), (4, 5, 6, 7)]], operation)
    predicted = ClusterNetwork(own).group_seconds(operation, 4 * NUM_ELEMENTS, ranks)
    assert predicted == pytest.approx(result, rel=0.01)
    one_link = ClusterNetwork(cluster()).group_seconds(operation, 4 * NUM_ELEMENTS, ranks)
    assert one_link == pytest.approx(3 * predicted, rel=0.1)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("sizes", [(3, 1), (6, 2), (5, 2, 1)], ids=str)
def test_domains_of_unlike_sizes_own_unlike_regions_and_send_to_each_rank_of_the_others(sizes, operation):
    families = list(zip("abc", [1] * len(sizes), sizes, strict=False))
    cluster = cluster_of(families, speeds=dict.fromkeys("abc", 1e9), nic=2e7)
    ranks = iter(range(cluster.num_devices))
    domains = [tuple(itertools.islice(ranks, size)) for size in sizes]
    predicted = ClusterNetwork(cluster).group_seconds(operation, 4 * NUM_ELEMENTS, range(cluster.num_devices))
    assert predicted == pytest.approx(taken(cluster, [domains], operation), rel=0.02)


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_to_all"])
def test_groups_side_by_side_share_what_leads_to_other_domains(operation):
    """On nodes that have a NIC for each device inside a family, and one for all of them between families."""
    cluster = ready_miniature("ib-roce").cluster
    groups = [[(place, 2 + place), (4 + place, 6 + place)] for place in (0, 1)]
    network, ranks = ClusterNetwork(cluster), [rank for domain in groups[0] for rank in domain]
    concurrent, alone = (
        network.group_seconds(operation, 4 * NUM_ELEMENTS, ranks, others)
        for others in (network.concurrent(tuple(range(8))), None)
    )
    assert alone == pytest.approx(taken(cluster, groups[:1], operation), rel=1e-3)
    assert concurrent == pytest.approx(taken(cluster, groups, operation), rel=1e-3) and concurrent > 1.7 * alone


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_to_all"])
def test_hosts_of_two_fabrics_send_by_both_at_once(operation):
    """To one host by their own, to two by that between."""
    text = dump_cluster(ready_miniature("ib-roce").cluster)
    cluster = parse_cluster(text.replace("a800-80 = 2", "a100-80 = 2"), "a test")
    domains = [(2 * node, 2 * node + 1) for node in range(4)]
    network = ClusterNetwork(cluster)
    predicted = network.group_seconds(operation, 4 * NUM_ELEMENTS, range(8), network.concurrent(tuple(range(8))))
    assert predicted == pytest.approx(taken(cluster, [domains], operation), rel=0.02)


LAID_OUT = {
    "equal": ([("a", 1, 4), ("b", 1, 4)], [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]),
    "on more nodes": ([("a", 1, 4), ("b", 2, 2)], [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]),
    "on a node each": ([("a", 1, 3), ("b", 3, 1)], [[(0,), (3,)], [(1,), (4,)], [(2,), (5,)]]),
    "more than in groups": ([("a", 1, 4), ("b", 1, 2)], [[(0, 1), (4, 5)]]),
}


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "all_to_all"])
@pytest.mark.parametrize("name", LAID_OUT)
def test_ranks_of_all_groups_share_their_nodes_nics(name, operation):
    tables, groups = LAID_OUT[name]
    cluster = cluster_of(tables, link=1e9, nic=2e7)
    ranks, concurrent = ([r for domains in some for domain in domains for r in domain] for some in (groups[:1], groups))
    network = ClusterNetwork(cluster)
    predicted = network.group_seconds(operation, 4 * NUM_ELEMENTS, ranks, network.concurrent(tuple(concurrent)))
    assert predicted == pytest.approx(taken(cluster, groups, operation), rel=1e-3)


def all_reduce_seconds(cluster, algorithm: str, num_bytes: int) -> float:
    """Return what an all-reduce of all devices takes by the steps of their ranks, which send no other messages."""
    virtual, ranks = VirtualRanks(PretendedNetwork(cluster)), range(cluster.num_devices)
    transports = VirtualTransports(virtual, ranks)
    flat = [FlatCollectives(transports[rank], lambda _: algorithm) for rank in ranks]
    return virtual.run([each.all_reduce(torch.ones(num_bytes // 4), "sum") for each in flat])


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
@pytest.mark.parametrize("num_bytes", [1 << 12, 1 << 19])
def test_the_algorithm_that_is_selected_is_the_fastest_and_takes_what_is_predicted(num_nodes, num_bytes):
    cluster = cluster_of([("a", num_nodes, 1)], nic=1e8, latency=2e-3)
    network, ranks = ClusterNetwork(cluster), range(num_nodes)
    taken = {each: all_reduce_seconds(cluster, each, num_bytes) for each in ("exchange", "doubling")}
    resolved = network.algorithm("all_reduce", num_bytes, ranks)
    assert taken[resolved] <= 1.01 * min(taken.values())
    assert network.group_seconds("all_reduce", num_bytes, ranks) == pytest.approx(taken[resolved], rel=0.02)


def test_small_all_reduces_double_and_large_ones_need_no_memory_for_it():
    network = ClusterNetwork(cluster_of([("a", 2, 1)]))
    assert network.algorithm("all_reduce", MOST_DOUBLED_BYTES, (0, 1)) == "doubling"
    assert network.algorithm("all_reduce", MOST_DOUBLED_BYTES + 4, (0, 1)) == "exchange"


def test_all_reduces_with_no_part_for_each_rank_are_not_those_of_domains():
    network, everybody = ClusterNetwork(cluster_of([("a", 1, 4), ("b", 1, 4)], link=1e9)), range(8)
    assert network.algorithm("all_reduce", 56, everybody) in ("exchange", "doubling")
    assert network.algorithm("all_reduce", MOST_DOUBLED_BYTES, everybody) == "domains"
    assert network.algorithm("all_reduce", MOST_DOUBLED_BYTES, everybody, by_domains=False) == "exchange"


def test_concurrent_communication_changes_what_a_group_takes_and_not_what_it_chooses():
    """Its ranks do not know of other groups: four groups of a rank of each node here, which share its NIC."""
    network, ranks = ClusterNetwork(cluster_of([("a", 4, 4)], nic=1e9)), (0, 4, 8, 12)
    assert network.algorithm("all_reduce", 40_000, ranks) == "doubling"
    doubling, exchange = 2 * (1e-5 + 40_000 / 0.25e9), 2 * (1e-5 + 2 * 1e-5 + 30_000 / 0.25e9)
    concurrent = network.group_seconds("all_reduce", 40_000, ranks, network.concurrent(tuple(range(16))))
    assert concurrent == pytest.approx(doubling) and exchange < doubling


@pytest.mark.parametrize(
    ("ranks", "rank", "share"),
    [
        ((0, 1), 0, 1 / 2),  # an exchange on one node
        ((0, 1, 2, 3), 0, 2 / 4 + 1 / 2 + 2 / 4 / 2),  # two domains of two
        ((0, 1, 2), 2, 2 / 3 + 1 + 0),  # the domain of one sums nothing, and has all of it
        ((0, 1, 2), 0, 2 / 3 + 1 / 2 + 2 / 3 / 2),
        ((0, 2, 1, 3), 0, 1 + 2 / 4 + 1 / 2 + 2 / 4 / 2),  # copied in the order of domains
    ],
)
def test_what_a_sum_takes_in_addition_to_a_large_tensor(ranks, rank, share):
    """As counted in rehearsals, see tests/ranks/test_memory.py."""
    network, num_bytes = ClusterNetwork(PRETENDED), 1_200_000
    assert network.scratch_bytes("reduce_scatter", num_bytes, ranks, rank) == pytest.approx(share * num_bytes, rel=1e-6)
    assert network.scratch_bytes("reduce_scatter", num_bytes, (rank,), rank) == 0
    large = network.scratch_bytes("reduce_scatter", 10**9, (0, 1), 0)
    assert large == SEGMENT_BYTES, "of large parts a segment from each peer is there at once"


def test_ranks_of_as_many_families_as_they_are_sum_by_hosts():
    """A host's domain has several families then; each of its ranks is in it."""
    text = clusters.fabric("ib", 1e-4)
    text += "".join(clusters.family(name) for name in "abc")
    text += clusters.nodes({"a": 1, "b": 1}, 1e8, "ib", link_latency_seconds=1e-5, link_bytes_per_second=1e9)
    network = ClusterNetwork(parse_cluster(text + clusters.nodes({"c": 1}, 1e8, "ib"), "a test"))
    shares = [network.scratch_bytes("reduce_scatter", 12_000, (0, 1, 2), rank) / 12_000 for rank in range(3)]
    assert shares == pytest.approx([2 / 3 + 1 / 2 + 1 / 3, 2 / 3 + 1 / 2 + 1 / 3, 2 / 3 + 1])


@pytest.mark.parametrize("families", [[("a", 1, 4)], [("a", 1, 2), ("b", 1, 2)]], ids=["flat", "by domains"])
def test_an_operation_that_no_group_has_is_neither_priced_nor_given_memory(families):
    network = ClusterNetwork(cluster_of(families))
    message = (
        "no operation 'shift'; groups have all_reduce, reduce_scatter, all_gather, all_to_all, barrier, send, receive"
    )
    for ranks, num_bytes in ((range(4), 40_000), (range(4), 0), (range(1), 40_000)):
        with pytest.raises(CommError, match=message):
            network.group_seconds("shift", num_bytes, ranks)
        with pytest.raises(CommError, match=message):
            network.scratch_bytes("shift", num_bytes, ranks, 0)
    with pytest.raises(CommError, match=message):
        network.algorithm("shift", 40_000, range(4))
    assert (
        network.scratch_bytes("all_gather", 40_000, range(4), 0)
        == 0
        < network.scratch_bytes("reduce_scatter", 40_000, range(4), 0)
    )


def test_the_table_has_what_groups_have():
    """Each operation of the table is a method of groups, and sums in it are those that reduce."""
    assert all(callable(getattr(Group, name)) for name in TABLE)
    assert [name for name, row in TABLE.items() if row.is_sum] == ["all_reduce", "reduce_scatter"]
    assert row_of("all_reduce").transfers == sum(row_of(phase).transfers for phase in row_of("all_reduce").phases)
