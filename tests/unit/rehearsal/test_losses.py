"""Losses of a rehearsal: what they leave for fewer ranks, which events are left, and what is no event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.clusters.cluster_file import parse_cluster_file
from hpctrain.config.clusters.truth import DeviceEvent, Truth, after_losses
from hpctrain.config.errors import TopologyError
from tests.unit.small_searches import cluster_of

CLUSTER = cluster_of([("a", 2, 2), ("b", 1, 2)])


def event(step: int, **keys) -> DeviceEvent:
    return DeviceEvent(step=step, **keys)


TRUTH = Truth(
    events=(
        event(9, node=2, lost="silent"),
        event(3, rank=1, lost="killed"),
        event(5, rank=3, slower=2.0),
        event(1, rank=1, slower=1.5),
    )
)


def test_as_many_losses_as_ranks_are_missing_have_happened():
    assert after_losses(CLUSTER, TRUTH, 6) == (CLUSTER, TRUTH)
    left, truth = after_losses(CLUSTER, TRUTH, 5)
    assert [device.family for device in left.devices] == ["a", "a", "a", "b", "b"]
    assert [device.node for device in left.devices] == [0, 1, 1, 2, 2]
    assert [(each.step, each.rank, each.lost) for each in truth.events] == [
        (9, 3, "silent"), (9, 4, "silent"), (5, 2, None)
    ]  # fmt: skip
    left, truth = after_losses(CLUSTER, TRUTH, 3)
    assert {device.family for device in left.devices} == {"a"} and [each.rank for each in truth.events] == [2]


@given(st.integers(1, 8))
def test_other_numbers_of_ranks_change_nothing(num_ranks):
    left, _ = after_losses(CLUSTER, TRUTH, num_ranks)
    assert left.num_devices == (num_ranks if num_ranks in (3, 5) else 6)
    assert after_losses(CLUSTER, Truth(), num_ranks) == (CLUSTER, Truth())


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("rank = 1", "slower or lost"),
        ("slower = 2.0", "a rank or a node"),
        ('rank = 1\nnode = 0\nlost = "killed"', "a rank or a node"),
        ('rank = 1\nslower = 2.0\nlost = "killed"', "slower or lost"),
        ("node = 1\nslower = 2.0", "a node is lost as a whole"),
        ('rank = 1\nlost = "away"', "killed"),
    ],
)
def test_what_is_no_event_is_refused(keys, says):
    from hpctrain.config.clusters.cluster_file import dump_cluster

    with pytest.raises(TopologyError, match=says):
        parse_cluster_file(dump_cluster(CLUSTER) + f"\n[truth]\n[[truth.events]]\nstep = 1\n{keys}\n", "a test")
