"""Collectives of NCCL against published runs of nccl-tests, and what is physics in them."""

import math

import pytest

from hpctrain.config.clusters.cluster import Cluster, Fabric, Family, Nic, Nodes
from hpctrain.config.clusters.device_catalogue import ACCELERATORS
from hpctrain.config.clusters.links import PairLink
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.software.nccl import NcclNetwork, collective_seconds, wire_of
from hpctrain.software.run import DescribedRun

MIB = 1 << 20
A100, H100 = (PairLink("node", None, 10e-6, speed, math.inf) for speed in (300e9, 450e9))
MI300X = A100._replace(
    bytes_per_second=ACCELERATORS["MI300X"].link_bytes_per_second, fully_connected=True, is_infinity_fabric=True
)


def bus(link: PairLink) -> float:
    return link.bytes_per_second * wire_of(link).share * (7 if link.fully_connected else 1)


# Microseconds of all_reduce_perf on one node of eight: A100 of a blog's node, H100 of NVIDIA/dgxc-benchmarking, nccl/,
# MI300X of hisohara/ai-scripts, training/01_rccl-smoketest.
@pytest.mark.parametrize(
    ("link", "mebibytes", "microseconds"),
    [
        (A100, 4, 81.7),
        (A100, 16, 213.3),
        (A100, 64, 615.7),
        (A100, 256, 2218.2),
        (A100, 1024, 8244.5),
        (H100, 1, 27.4),
        (H100, 4, 54.2),
        (H100, 16, 123.8),
        (H100, 64, 324.7),
        (H100, 256, 1112.5),
        (H100, 4096, 15749.0),
        (MI300X, 16, 149.9),
        (MI300X, 64, 432.5),
        (MI300X, 256, 1540.4),
        (MI300X, 1024, 5990.7),
        (MI300X, 8192, 47617.0),
    ],
)
def test_an_all_reduce_takes_about_what_was_published(link, mebibytes, microseconds):
    result = collective_seconds("all_reduce", mebibytes * MIB, 8, link, bus(link))
    assert result == pytest.approx(microseconds * 1e-6, rel=0.15)


@pytest.mark.parametrize("speed", [12e9, 300e9, 450e9])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_more_bytes_take_longer_and_use_the_wire_better(operation, speed):
    link = PairLink("node", None, 10e-6, speed, math.inf)
    sizes = [2**n for n in range(10, 33)]
    seconds = [collective_seconds(operation, size, 8, link, bus(link)) for size in sizes]
    speeds = [size / each for size, each in zip(sizes, seconds, strict=True)]
    assert seconds == sorted(seconds)
    assert speeds == sorted(speeds)


def test_switches_that_sum_make_only_sums_faster():
    gather = collective_seconds("all_gather", 4096 * MIB, 8, H100, bus(H100))
    assert 7 / 8 * 4096 * MIB / gather == pytest.approx(370e9, rel=0.05)
    assert collective_seconds("all_reduce", 4096 * MIB, 8, H100, bus(H100)) < 1.6 * gather


def cluster(origin: str, latency: float = 3e-6) -> Cluster:
    family = Family(
        origin="datasheet",
        kind="cuda",
        memory_bytes=80e9,
        memory_bytes_per_second=2e12,
        peak_flops_per_second={"bf16": 3e14},
    )
    nic = Nic(origin=origin, fabric="f", send_bytes_per_second=25e9, receive_bytes_per_second=25e9)
    nodes = Nodes(
        origin=origin,
        count=2,
        devices={"a": 2},
        link_latency_seconds=1e-5,
        link_bytes_per_second=300e9,
        nics=(nic, nic),
    )
    return Cluster(
        families={"a": family}, fabrics={"f": Fabric(origin=origin, latency_seconds=latency)}, nodes=(nodes,)
    )


def test_a_measured_link_is_never_discounted():
    ours = ClusterNetwork(cluster("measured"))
    theirs = NcclNetwork(cluster("measured"), link_share=0.5)
    for ranks in ((0, 1), (0, 2), (0, 1, 2, 3)):
        assert theirs.group_seconds("all_reduce", 1e9, ranks) == ours.group_seconds("all_reduce", 1e9, ranks)
    assert theirs.seconds(0, 2, 1e9) == ours.seconds(0, 2, 1e9)


def test_sockets_give_less_of_their_wire_than_rdma_and_nvlink_most_of_its():
    rdma, sockets = (NcclNetwork(cluster("datasheet", latency)) for latency in (3e-6, 30e-6))
    assert rdma.group_seconds("all_reduce", 1e9, (0, 2)) == pytest.approx(1e9 / 25e9 / 0.85, rel=0.01)
    assert sockets.group_seconds("all_reduce", 1e9, (0, 2)) == pytest.approx(1e9 / 3.2e9, rel=0.01)
    assert rdma.group_seconds("all_reduce", 1e9, (0, 1)) == pytest.approx(1e9 / 300e9 / 0.8, rel=0.05)


def test_a_group_of_fully_connected_devices_has_a_link_for_each_pair():
    """RCCL counts 144 GB/s for four MI300X, of 48 GB/s each link (ROCm/rccl, issue 1210)."""
    run = DescribedRun(
        hidden=64, layers=2, heads=1, positions=8, tensor=8, pipeline=1, data=1, microbatch=1, global_batch=1,
        accelerator="MI300X",
    )  # fmt: skip
    network = NcclNetwork(run.cluster)
    assert network.group_seconds("all_reduce", 8 << 30, range(8)) == pytest.approx(47617e-6, rel=0.02)
    for size, links in ((2, 1), (4, 3)):
        moved = (size - 1) / size * 1e10
        seconds = network.group_seconds("all_gather", 1e10, range(size))
        assert seconds == pytest.approx(moved / (links * 48e9 * 0.94), rel=0.02)
    assert network.seconds(0, 1, 1e10) == pytest.approx(1e10 / (48e9 * 0.94), rel=0.01)


@pytest.mark.parametrize(
    ("model", "sheet", "share"),
    [
        ("MI300A", 128e9, 0.75 * 0.94),
        ("MI325X", 64e9, 0.75 * 0.94),
        ("MI355X", 76.8e9, 0.75 * 0.94),
        ("Gaudi-2", 37.5e9, 0.75),
        ("Gaudi-3", 75e9, 0.80),
        ("910B", 28e9, 0.75),
    ],
)
def test_amds_protocol_is_deducted_from_all_of_its_links_and_from_no_others(model, sheet, share):
    run = DescribedRun(
        hidden=64, layers=2, heads=1, positions=8, tensor=8, pipeline=1, data=1, microbatch=1, global_batch=1,
        accelerator=model,
    )  # fmt: skip
    assert run.cluster.nodes[0].fully_connected
    network = NcclNetwork(run.cluster)
    assert network.seconds(0, 1, 1e10) == pytest.approx(1e10 / (sheet * share), rel=0.01)
    assert network.group_seconds("all_gather", 1e10, range(8)) == pytest.approx(1e10 / 8 / (sheet * share), rel=0.02)


def test_a_group_on_several_nodes_is_one_ring_by_the_nics_of_all_its_ranks():
    network = NcclNetwork(cluster("datasheet"))
    ring = 2 * 3 / 4 * 1e9 / (2 * 25e9 * 0.85)
    assert network.group_seconds("all_reduce", 1e9, (0, 1, 2, 3)) == pytest.approx(ring, rel=0.02)


def test_only_the_steps_of_a_ring_between_nodes_take_as_long_as_a_message_between_nodes():
    """Of 128 ranks on 16 nodes 15 steps leave a node (NCCL src/graph/tuning.cc, `nInterSteps`)."""
    link = PairLink("fabric", "HDR", 3e-6, 25e9, 25e9)
    arguments = "all_gather", 1024 * MIB, 128, link, 8 * bus(link)
    alone, in_nodes = collective_seconds(*arguments), collective_seconds(*arguments, inside=A100, num_domains=16)
    assert alone - in_nodes == pytest.approx(112 * (14e-6 + 3e-6 - 3.4e-6), rel=1e-6)


def test_what_devices_and_nics_move_themselves_depends_little_on_the_software():
    near, far = (
        NcclNetwork(cluster("datasheet"), share).group_seconds("all_reduce", 1e9, (0, 1)) for share in (1, 0.5)
    )
    assert near == pytest.approx(0.9 * far, rel=0.02)
    slow = (
        NcclNetwork(cluster("datasheet", 30e-6), *shares).group_seconds("all_reduce", 1e9, (0, 2))
        for shares in ((1, 1), (0.5, 1), (1, 0.5))
    )
    whole, once, by_sockets = slow
    assert whole == once, "sockets are discounted once"
    assert by_sockets == pytest.approx(2 * whole, rel=0.02)
