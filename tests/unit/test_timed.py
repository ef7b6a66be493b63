"""Plans timed by the simulator with measured speeds: what the slow network costs is seen, which estimates leave out."""

from dataclasses import replace

import pytest

from hpctrain.jobs.common import ready_miniature
from hpctrain.planner.alone import searched_candidates
from hpctrain.planner.estimate import Work
from hpctrain.planner.proportional import EVEN, even_candidates, parties_of, proportional_candidates
from hpctrain.planner.timed import timed

JOB = ready_miniature("v100-t4").job
WORK = Work(JOB.model, JOB.data.sequence_length, JOB.train.global_batch)


def candidates(name: str):
    cluster = ready_miniature(name).cluster
    parties = parties_of(cluster, "fp32")
    speeds = {party.family: party.speed / WORK.flops for party in parties}
    return cluster, speeds, [*proportional_candidates(WORK, parties, 8), *even_candidates(WORK, parties)]


def test_communication_is_added_to_what_the_estimate_has():
    cluster, speeds, listed = candidates("v100-t4")
    estimated = {candidate.plan: candidate.seconds for candidate in listed if candidate.kind != EVEN}
    for found in timed(listed[:10], JOB, cluster, speeds, beside=False):
        assert found.seconds > estimated[found.plan] / max(speeds.values()) * 0.5
    alone = {family: speed * 4 for family, speed in speeds.items()}
    least = WORK.global_batch * sum(WORK.costs) / sum(alone.values())
    assert timed(listed, JOB, cluster, speeds, beside=True)[0].seconds > least


def test_no_plan_is_faster_than_its_devices():
    """Of whatever tensor grid."""
    cluster, speeds, _ = candidates("a800-v100s")
    overlap = JOB.overlap.model_copy(update={"tensor": True, "data": True, "z": True})
    listed = searched_candidates(JOB.model_copy(update={"overlap": overlap}), cluster, list(speeds))
    assert {tile.tensor.z for candidate in listed for tile in candidate.plan.tiles} > {1}
    least = WORK.global_batch * sum(WORK.costs) / sum(speed * cluster.num_of(name) for name, speed in speeds.items())
    assert all(found.seconds > least for found in timed(listed, JOB, cluster, speeds, beside=True))


def test_where_two_fabrics_meet_over_a_slow_one_the_pipeline_crosses_it():
    """Holmes (arXiv 2312.03549): sums of gradients stay inside a fabric, activations go between them.

    Beside computation the slow network has time enough here, with all rows in one microbatch.
    """
    cluster, speeds, listed = candidates("ib-roce")
    listed = [replace(c, seconds=0.0) for c in listed]  # in no order
    best = timed(listed, JOB, cluster, speeds, beside=False)[0].plan
    fabric_of = {device.rank: device.table for device in cluster.devices}
    for item in range(JOB.model.num_items):
        tables = {fabric_of[rank] for tile in best.tiles if tile.holds(item) for rank in tile.ranks}
        assert len(tables) == 1, best.describe()


@pytest.mark.parametrize("beside", [False, True])
def test_the_fastest_is_first(beside):
    cluster, speeds, listed = candidates("four-families")
    seconds = [candidate.seconds for candidate in timed(listed, JOB, cluster, speeds, beside)]
    assert seconds == sorted(seconds) and len(seconds) > 10
