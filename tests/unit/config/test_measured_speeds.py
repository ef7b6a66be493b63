"""A cluster by measured speeds is a valid one, whose devices have the same ranks."""

import pytest

from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.config.clusters.measured_speeds import names_by_speed, with_speeds
from hpctrain.jobs.common import load_described
from hpctrain.planner.prices.curves import describe_training
from tests.unit.planner.test_profiled import JOB

READY = "a800-v100s"


def cluster_of(name: str = READY):
    return load_described(name).cluster


@pytest.mark.parametrize("factors", [{}, {1: 1.4}, {0: 1.4, 2: 0.8, 6: 1.4}], ids=str)
@pytest.mark.parametrize("num_ranks", [3, 7, 8])
def test_devices_keep_their_ranks_and_their_speeds_follow(factors, num_ranks):
    before = cluster_of()
    names = names_by_speed(before, factors, num_ranks)
    result = with_speeds(before, names)
    assert [device.rank for device in result.devices] == list(range(num_ranks))
    for old, new, name in zip(before.devices, result.devices, names, strict=False):
        assert new.family == name and new.node == old.node
        factor, slow, whole = factors.get(old.rank, 1.0), result.families[name], before.families[old.family]
        assert slow.memory_bytes == whole.memory_bytes
        assert slow.memory_bytes_per_second == pytest.approx(whole.memory_bytes_per_second / factor)
        for dtype, speed in whole.peak_flops_per_second.items():
            assert slow.peak_flops_per_second[dtype] == pytest.approx(speed / factor)
    assert parse_cluster(dump_cluster(result), "again") == result


def test_links_and_profiles_are_those_of_the_family():
    text = dump_cluster(cluster_of())
    family = next(iter(cluster_of().families))
    text += f"""
[[links]]
families = ["{family}", "{family}"]
latency_seconds = 1e-6
bytes_per_second = 1e9

[[profiles]]
family = "{family}"
work = "a job"
zero = 1
replicas = 1
update_seconds = 1.0
times = [{{rows = 1, embedding_seconds = [1.0, 2.0], block_seconds = [3.0, 4.0], head_seconds = [5.0, 6.0]}}]
"""
    before = parse_cluster(text, "a test")
    result = with_speeds(before, names_by_speed(before, {0: 2.0}, before.num_devices))
    slow = f"{family}-x2.00"
    assert {link.families for link in result.links} == {(slow, slow), (slow, family), (family, family)} or {
        link.families for link in result.links
    } == {(slow, slow), (family, slow), (family, family)}
    (profile,) = [each for each in result.profiles if each.family == slow]
    assert profile.times[0].block_seconds == (6.0, 8.0) and profile.update_seconds == 2.0


def test_profiles_hold_for_the_work_of_devices_with_a_speed_of_their_own():
    names = names_by_speed(cluster_of(), {0: 1.4, 7: 0.8}, 8)
    families = {device.family for device in cluster_of().devices}
    of_families, of_all = (
        describe_training(JOB.model, 128, "bf16", [(name, "fp16") for name in sorted(each)])
        for each in (families, families | {*names})
    )
    assert len({*names} - families) == 2 and of_all == of_families and "v100" in of_all
