"""A job that starts on fewer nodes runs on a part of its cluster."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.clusters.cluster_file import dump_cluster, load_cluster, parse_cluster, ready_clusters
from hpctrain.config.clusters.cluster_part import part_of


def ranks_of(cluster, nodes: list[int]) -> tuple[list[str], list[str]]:
    """Return families and hosts of the ranks on some nodes of a cluster."""
    devices = [device for node in nodes for device in cluster.devices if device.node == node]
    return [device.family for device in devices], [f"host{device.node}" for device in devices]


@given(data=st.data())
def test_any_whole_nodes_are_a_part(data):
    name = data.draw(st.sampled_from(sorted(ready_clusters())))
    cluster = load_cluster(ready_clusters()[name])
    nodes = data.draw(st.lists(st.integers(0, cluster.num_nodes - 1), min_size=1, unique=True).map(sorted))
    families, hosts = ranks_of(cluster, nodes)
    part = part_of(cluster, families, hosts)
    assert part is not None
    assert [device.family for device in part.devices] == families
    assert part.num_nodes == len(nodes)
    assert set(part.families) == set(families)
    assert parse_cluster(dump_cluster(part), "part") == part
    if len(nodes) == cluster.num_nodes:
        assert part.nodes == cluster.nodes


def test_half_a_node_or_another_order_is_no_part():
    cluster = load_cluster(ready_clusters()["four-families"])
    families, hosts = ranks_of(cluster, [0, 1])
    assert part_of(cluster, families[1:], hosts[1:]) is None
    assert part_of(cluster, families[::-1], hosts[::-1]) is None
    assert part_of(cluster, [*families, families[0]], [*hosts, "x"]) is None
