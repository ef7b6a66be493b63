"""The cluster files that come with hpctrain: each is whole, of real size, and scaled to a consistent miniature."""

from pathlib import Path

import pytest

from hpctrain.architectures.description import inner_of
from hpctrain.config.clusters.cluster_file import load_cluster, locate_cluster, read_cluster_file, ready_clusters
from hpctrain.config.errors import TopologyError
from hpctrain.jobs.common import ready_miniature
from hpctrain.rehearsal.fabric import PretendedNetwork
from hpctrain.rehearsal.miniature import is_finished

DEVICES = {
    "a100-80-40": [4, 4],
    "a800-v100s": [4, 4],
    "four-families": [2, 2, 2, 2],
    "ib-roce": [4, 4],
    "six-two": [6, 2],
    "three-vendors": [4, 2, 2],
    "v100-t4": [4, 4],
}
# Figures for a hidden size of 64 that represents 4,096, as docs/benchmarks.md measured them: memory (for memory_scale
# 4), its bandwidth, peak, what a probe measures, what large products reach, rows of half speed.
FIGURES = {
    "a100-80": (78_125_000, 8.463e8, 1.19e9, 9.922e8, 1.012e9, 5.0),
    "a100-40": (39_062_500, 6.454e8, 1.19e9, 9.922e8, 1.012e9, 5.0),
    "a800-80": (78_125_000, 8.463e8, 1.19e9, 9.922e8, 1.012e9, 5.0),
    "v100-16": (15_625_000, 3.735e8, 4.768e8, 3.771e8, 3.815e8, 3.0),
    "v100s-32": (31_250_000, 4.707e8, 4.959e8, 3.676e8, 3.719e8, 3.0),
    "t4-16": (15_625_000, 1.328e8, 2.48e8, 1.233e8, 1.24e8, 1.5),
    "mi250x-gcd": (62_500_000, 6.798e8, 7.305e8, 4.997e8, 5.114e8, 6.0),
    "ascend-910": (31_250_000, 4.98e8, 9.766e8, 6.629e8, 6.836e8, 8.0),
}
LINKS = {300e9: 1.465e8, 200e9: 9.766e7, 150e9: 7.324e7, 12e9: 5.859e6, 50e9: 2.441e7, 30e9: 1.465e7}
NICS = {25e9: 1.221e7, 12.5e9: 6.104e6, 3.125e9: 1.526e6}
# Set by hand so that all plans of `benchmarks.families` are late by less than 1 % on two cores.
TIME_SCALES = {
    "a100-80-40": 5.0,
    "a800-v100s": 2.5,
    "four-families": 3.0,
    "ib-roce": 3.0,
    "six-two": 2.0,
    "three-vendors": 4.0,
    "v100-t4": 0.9,
}


def test_these_are_ready():
    assert list(ready_clusters()) == sorted(DEVICES)


@pytest.mark.parametrize("name", DEVICES)
def test_a_ready_cluster_is_whole_and_of_real_size(name):
    path = locate_cluster(name)
    cluster, truth, _ = read_cluster_file(path)
    assert [cluster.num_of(family) for family in cluster.families] == DEVICES[name]
    assert set(truth.devices) == set(cluster.families)
    assert not is_finished(cluster, truth) and is_finished(ready_miniature(name).cluster, None)
    network = PretendedNetwork(cluster, truth.time_scale)
    assert network.num_ranks == cluster.num_devices == sum(DEVICES[name])
    assert all(len(path.ports) == 2 for i, path in enumerate(network.paths) if i % (network.num_ranks + 1))


@pytest.mark.parametrize("name", DEVICES)
def test_its_miniature_has_the_figures_of_a_model_64_times_narrower(name):
    real, made = load_cluster(locate_cluster(name)), ready_miniature(name)
    fewer = 4 if name == "a100-80-40" else 1
    for family, (memory, bandwidth, peak, probed, speed, half) in FIGURES.items():
        if family not in real.families:
            continue
        result, device = made.cluster.families[family], made.truth.devices[family]
        for each in (result, device):
            assert each.memory_bytes == pytest.approx(memory / fewer, rel=0.01)
            assert each.memory_bytes_per_second == pytest.approx(bandwidth, rel=0.01)
            assert each.overlap_slowdown == real.families[family].overlap_slowdown
        assert result.peak_flops_per_second == pytest.approx({"fp32": peak}, rel=0.01)
        assert result.sustained_flops_per_second == pytest.approx({"fp32": probed}, rel=0.01)
        assert device.flops_per_second == pytest.approx({"fp32": speed}, rel=0.01)
        assert (device.tile, device.half_speed_rows) == ((2, 2), half)
    for there, here in zip(real.nodes, made.cluster.nodes, strict=True):
        assert here.link_bytes_per_second == pytest.approx(LINKS[there.link_bytes_per_second], rel=0.01)
        assert here.link_latency_seconds == there.link_latency_seconds
        for each, nic in zip(there.nics, here.nics, strict=True):
            assert nic.send_bytes_per_second == pytest.approx(NICS[each.send_bytes_per_second], rel=0.01)
            assert nic.receive_bytes_per_second == nic.send_bytes_per_second
    assert made.cluster.fabrics == real.fabrics
    model = made.job.model
    sizes = model.hidden_size, inner_of(model), model.vocab_size, made.job.data.sequence_length, model.num_heads
    assert sizes == (64, 176, 512, 32, 32)


@pytest.mark.parametrize("name", DEVICES)
def test_time_scales_are_near_those_that_were_set_by_hand(name):
    assert 0.8 <= ready_miniature(name).truth.time_scale / TIME_SCALES[name] <= 3.0


@pytest.mark.parametrize("name", DEVICES)
def test_what_is_measured_follows_from_the_truth(name):
    """A probe of the rehearsal would measure the speeds and the memory that the miniature has."""
    made = ready_miniature(name)
    for family, device in made.truth.devices.items():
        given = made.cluster.families[family]
        assert given.memory_bytes == device.memory_bytes
        seconds = device.product_seconds("fp32", 256, 256, 256)
        assert given.sustained_flops_per_second["fp32"] == pytest.approx(2 * 256**3 / seconds, rel=1e-3)
        assert device.flops_per_second["fp32"] < given.peak_flops_per_second["fp32"]


def test_a_name_that_is_none_is_reported_with_a_likely_one(tmp_path):
    with pytest.raises(TopologyError, match="v100-t5: no such cluster file, nor a ready one .* did you mean 'v100-t4'"):
        locate_cluster("v100-t5")
    assert locate_cluster("missing.toml") == Path("missing.toml"), "reported by who reads it"
