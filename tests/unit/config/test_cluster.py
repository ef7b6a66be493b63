"""Clusters as frozen data: who is where, and what is between two devices, for thousands of them too."""

import math
import time

import pytest

from hpctrain.config.clusters.cluster import Cluster, Fabric, Family, Nic, Nodes, assumed_figures
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.clusters.links import link_between, message_seconds, nic_of, slowest_links
from hpctrain.planner.prices.network import ClusterNetwork
from tests.unit.described import FAMILY, NODE, TEXT


@pytest.fixture
def cluster() -> Cluster:
    return parse_cluster(TEXT, "cluster.toml")


def test_a_changed_copy_has_devices_of_its_own(cluster):
    assert len(cluster.devices) == 32 and cluster.describe() and cluster.nodes[0].nics_by_fabric
    fewer = cluster.model_copy(update={"nodes": cluster.nodes[:1]})
    assert fewer.num_devices == len(fewer.devices) == 16 and "mi250x" not in fewer.describe()
    without = cluster.nodes[0].model_copy(update={"nics": ()})
    assert without.nics_by_fabric == {} and cluster.nodes[0].nics_by_fabric
    assert cluster.model_copy() == cluster and len(cluster.devices) == 32


def test_devices_are_numbered_node_by_node(cluster):
    assert cluster.num_devices == len(cluster.devices) == 32
    assert cluster.devices[0] == (0, 0, 0, "a100", 0)
    assert cluster.devices[13] == (13, 0, 1, "a100", 5)
    assert cluster.devices[31] == (31, 1, 3, "mi250x", 7)
    assert cluster.num_of("a100") == 16
    assert cluster.describe() == "16 a100 and 16 mi250x on 4 nodes, by ib, sling, ethernet"


def test_ranks_may_be_given_and_mixed_nodes_list_theirs_family_by_family():
    text = FAMILY + FAMILY.replace("mi250x", "t4") + "[fabrics.ib]\norigin = 'assumed'\nlatency_seconds = 1e-6\n"
    node = (
        "[[nodes]]\ncount = 2\ndevices = {mi250x = 1, t4 = 1}\nranks = [0, 2, 1, 3]\norigin = 'assumed'\n"
        "link_latency_seconds = 1e-6\nlink_bytes_per_second = 1e9\nnics = [{fabric = 'ib', origin = 'assumed',"
        "send_bytes_per_second = 1e9, receive_bytes_per_second = 1e9}]\n"
    )
    devices = parse_cluster(text + node, "cluster.toml").devices
    assert [(d.node, d.family, d.index) for d in devices] == [
        (0, "mi250x", 0),
        (1, "mi250x", 0),
        (0, "t4", 1),
        (1, "t4", 1),
    ]


def test_links_follow_from_nodes_nics_and_fabrics(cluster):
    same, node, fabric = (link_between(cluster, 3, rank) for rank in (3, 4, 9))
    assert (same.between, same.bytes_per_second) == ("device", 1e12)
    assert (node.between, node.latency_seconds, node.bytes_per_second) == ("node", 1e-6, 300e9)
    assert (fabric.between, fabric.fabric, fabric.latency_seconds, fabric.bytes_per_second) == (
        "fabric",
        "ib",
        2e-6,
        25e9,
    )
    assert link_between(cluster, 16, 24).fabric == "sling"
    assert [nic_of(cluster, rank, "ib")[0] for rank in range(8)] == [0, 1, 2, 3] * 2
    assert nic_of(cluster, 16, "ib") is None


def test_a_described_class_of_pairs_goes_before_what_follows_from_nics(cluster):
    for pair in ((3, 20), (20, 3)):
        across = link_between(cluster, *pair)
        assert (across.between, across.fabric) == ("across", "ethernet")
        assert (across.latency_seconds, across.bytes_per_second, across.shared_bytes_per_second) == (40e-6, 1e9, 2e9)
        assert len(across.times) == 4


def test_a_message_takes_what_was_measured_and_lines_between(cluster):
    link = link_between(cluster, 3, 20)
    assert message_seconds(link, 1_000) == pytest.approx(41e-6)
    assert message_seconds(link, 500_500) == pytest.approx(540.5e-6)
    assert message_seconds(link, 2_000_000) == pytest.approx(2040e-6)
    assert message_seconds(link, 0) == pytest.approx(40e-6)
    assert message_seconds(link, 1_000_000, flows=2) == pytest.approx((2 * 1040e-6 + 2040e-6) / 3)
    assert message_seconds(link, 1_000_000, flows=8) == pytest.approx(4040e-6)
    described = link_between(cluster, 0, 8)
    assert message_seconds(described, 25_000_000) == pytest.approx(1.002e-3)
    assert message_seconds(described, 25_000_000, flows=4) == pytest.approx(4.002e-3)


def test_the_slowest_links_of_a_cluster_are_listed(cluster):
    links = slowest_links(cluster)
    assert {where: (link.latency_seconds, link.message_bytes_per_second) for where, link in links.items()} == {
        "inside": (2e-6, 50e9),
        "across": (40e-6, 1e9),
    }
    assert slowest_links(parse_cluster(FAMILY + NODE, "cluster.toml")) == {}


IB = '{origin = "datasheet", fabric = "ib", count = 4, send'
MEASURABLE = {
    "a node's link": ((0, 1), 'devices = {a100 = 8}\norigin = "datasheet"'),
    "NICs": ((0, 8), IB),
    "pairs across": ((0, 8), '[[links]]\nfamilies = ["a100", "a100"]\nfabric = "ib"\norigin = "datasheet"'),
    "pairs of a node": ((0, 1), '[[links]]\nfamilies = ["a100", "a100"]\norigin = "datasheet"'),
}


@pytest.mark.parametrize("what", MEASURABLE)
def test_a_measured_link_is_never_discounted(what):
    """Only a data sheet's bandwidth is: by the software's share, in messages and in collectives."""
    pair, table = MEASURABLE[what]
    text = TEXT if table in TEXT else f"{TEXT}{table}\nlatency_seconds = 1e-6\nbytes_per_second = 10e9\n"
    num_bytes = 1 << 24
    for origin, times in (("datasheet", 2.0), ("measured", 1.0)):
        cluster = parse_cluster(text.replace(table, table.replace("datasheet", origin)), "cluster.toml")
        link = link_between(cluster, *pair)
        networks = [ClusterNetwork(cluster, link_share) for link_share in (1.0, 0.5)]
        for taken in (
            [message_seconds(link, num_bytes, 8, link_share) for link_share in (1.0, 0.5)],
            [network.seconds(*pair, num_bytes) for network in networks],
            [network.group_seconds("all_gather", num_bytes, pair) for network in networks],
        ):
            full, shared = (seconds - link.latency_seconds for seconds in taken)
            assert shared == pytest.approx(times * full)


def test_times_that_were_measured_are_never_discounted(cluster):
    link = link_between(cluster, 3, 20)
    assert link.times and message_seconds(link, 10**6, 2, 0.5) == message_seconds(link, 10**6, 2)


def test_what_was_assumed_is_listed(cluster):
    assert assumed_figures(cluster) == [
        "families.a100.host_copy_bytes_per_second",
        "fabrics.ethernet.latency_seconds",
        "fabrics.ethernet.bytes_per_second",
    ]


def test_4096_devices_answer_at_once():
    """No pairs are enumerated: an order of magnitude more than is allowed would take minutes."""
    start = time.process_time()
    family = Family(
        origin="assumed",
        kind="cuda",
        memory_bytes=1 << 30,
        memory_bytes_per_second=1e12,
        peak_flops_per_second={"bf16": 1e14},
    )
    fabrics = {name: Fabric(origin="assumed", latency_seconds=1e-6) for name in ("ib", "roce", "ethernet")}

    def nodes(family: str, fabric: str) -> Nodes:
        nics = [
            Nic(
                origin="assumed",
                fabric=name,
                count=4,
                send_bytes_per_second=speed,
                receive_bytes_per_second=speed,
            )
            for name, speed in ((fabric, 25e9), ("ethernet", 1e9))
        ]
        return Nodes(
            count=128,
            devices={family: 8},
            origin="assumed",
            link_latency_seconds=1e-6,
            link_bytes_per_second=1e11,
            nics=nics,
        )

    families = ("a", "b", "c", "d")
    cluster = Cluster(
        families=dict.fromkeys(families, family),
        fabrics=fabrics,
        nodes=[nodes(name, "ib" if i % 2 else "roce") for i, name in enumerate(families)],
    )
    kinds = [link_between(cluster, 2077, rank).between for rank in range(4096)]
    assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == {
        "across": 2048, "device": 1, "fabric": 2048 - 8, "node": 7
    }  # fmt: skip
    assert slowest_links(cluster)["across"].message_bytes_per_second == 1e9
    assert time.process_time() - start < 1.0


def test_the_device_itself_has_no_limit_but_its_memory(cluster):
    assert link_between(cluster, 0, 0).shared_bytes_per_second == math.inf
