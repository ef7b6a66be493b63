"""The probe detects the networks that the hosts really have."""

import shlex

import pytest

from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.clusters.links import link_between
from tests.busy import OtherPrograms, unless_busy


@pytest.mark.timeout(90)
def test_the_probe_detects_fast_clusters_and_the_slow_link_between_them(network, warm_start, tmp_path):
    probe = shlex.join([*warm_start, "probe", "--out", f"{tmp_path}/cluster.toml", "--seconds", "10"])
    command = ["sh", "-c", f"HPCTRAIN_FABRIC=$HPCTRAIN_FAMILY exec {probe}"]
    others = OtherPrograms()
    done = network.run(command, timeout_seconds=80)
    assert done.code == 0, done.out + done.err
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert cluster.describe() == "2 alpha and 2 beta on 4 nodes, by alpha, backbone, beta"
    inside, across = link_between(cluster, 0, 1), link_between(cluster, 1, 2)
    assert (inside.between, inside.fabric, across.between, across.fabric) == ("fabric", "alpha", "across", "backbone")
    described = network.site.bits_per_second / 8
    print(f"inside {inside.bytes_per_second:.4g} B/s, across {across.bytes_per_second:.4g} of {described:.4g}")
    with unless_busy(others):
        assert across.bytes_per_second == pytest.approx(described, rel=0.2)
    assert inside.bytes_per_second > 2 * across.bytes_per_second
