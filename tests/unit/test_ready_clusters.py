"""The cluster files that come with hpctrain: each is whole, its devices have a truth, its figures are consistent."""

import runpy
from pathlib import Path

import pytest

from hpctrain.cluster_file import find_cluster, load_cluster, load_truth, ready_clusters
from hpctrain.comm.rehearsal.network import network_of
from hpctrain.errors import TopologyError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_clusters.py"
DEVICES = {
    "a100-80-40": [4, 4],
    "a800-v100s": [4, 4],
    "four-families": [2, 2, 2, 2],
    "ib-roce": [4, 4],
    "six-two": [6, 2],
    "three-vendors": [4, 2, 2],
    "v100-t4": [4, 4],
}


def test_these_are_ready():
    assert list(ready_clusters()) == sorted(DEVICES)


@pytest.mark.parametrize("name", DEVICES)
def test_a_ready_cluster_is_whole(name):
    path = find_cluster(name)
    cluster, truth = load_cluster(path), load_truth(path)
    assert [cluster.num_of(family) for family in cluster.families] == DEVICES[name]
    assert set(truth.devices) == set(cluster.families)
    network = network_of(cluster, truth.time_scale)
    assert network.num_ranks == cluster.num_devices == sum(DEVICES[name])
    assert all(len(path.ports) == 2 for i, path in enumerate(network.paths) if i % (network.num_ranks + 1))


@pytest.mark.parametrize("name", DEVICES)
def test_what_is_measured_follows_from_the_truth(name):
    """A probe of the rehearsal would find the speeds and the memory that the file gives."""
    path = find_cluster(name)
    cluster, truth = load_cluster(path), load_truth(path)
    for family, device in truth.devices.items():
        given = cluster.families[family]
        assert given.memory_bytes == device.memory_bytes
        seconds = device.product_seconds("fp32", 256, 256, 256)
        assert given.sustained_flops_per_second["fp32"] == pytest.approx(2 * 256**3 / seconds, rel=1e-3)
        assert device.flops_per_second["fp32"] < given.peak_flops_per_second["fp32"]


def test_the_files_are_what_the_script_writes():
    made = runpy.run_path(str(SCRIPT))
    assert {name: path.read_text() for name, path in ready_clusters().items()} == {
        name: made["cluster_file"](mix) for name, mix in made["MIXES"].items()
    }


def test_a_name_that_is_none_is_told_with_a_likely_one(tmp_path):
    with pytest.raises(TopologyError, match="v100-t5: no such cluster file, nor a ready one .* did you mean 'v100-t4'"):
        find_cluster("v100-t5")
    assert find_cluster("missing.toml") == Path("missing.toml"), "told by who reads it"
