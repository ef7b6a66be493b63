"""The yardstick's baseline: all plans of a family alone, whoever finds them."""

import itertools
from dataclasses import replace

import pytest

from hpctrain.errors import PlanError
from hpctrain.job import load_job
from hpctrain.jobs.common import Described, ready_miniature
from hpctrain.jobs.stand import Held, Room
from hpctrain.jobs.yardstick import tell_yardstick, yardstick
from hpctrain.plan import TensorGrid, even_plan
from hpctrain.planner.alone import EVERY_PLAN, alone_candidates, search_families
from hpctrain.planner.cost import Setup
from hpctrain.planner.estimate import Work
from hpctrain.planner.even import check_plan
from hpctrain.planner.predict import predict
from hpctrain.planner.proportional import SEARCHED, SIDE_BY_SIDE, parties_of
from hpctrain.planner.stack import HPCTRAIN
from tests.tilings import grids_of

MINIATURE = ready_miniature("a100-80-40", load_job("mixed", ["train.global_batch=24"]))
JOB, CLUSTER = MINIATURE.job, MINIATURE.cluster
WORK = Work(JOB.model, JOB.data.sequence_length, JOB.train.global_batch)
RUN_ON = Described(CLUSTER, "a100-80-40", is_rehearsed=True)
FAMILY = "a100-40"


def every_even_plan():
    """All grids, stages, replicas, microbatches and ZeRO stages of the four devices of the family."""
    ranks = [device.rank for device in CLUSTER.devices if device.family == FAMILY]
    for size, depth, recompute, zero in itertools.product((1, 2, 4), (1, 2, 4), ("none", "full"), (1, 3)):
        replicas = len(ranks) // size // depth
        for grid in grids_of(JOB.model, size) if replicas else ():
            for microbatches in (1, 3, 6, 12, 24):
                rows = JOB.train.global_batch // microbatches
                if rows % replicas or rows // replicas < grid.z:
                    continue
                options = {"family": FAMILY, "recompute": recompute, "zero": zero}
                plan = even_plan(JOB.model.num_items, grid, depth, replicas, microbatches, rows, **options)
                tiles = tuple(replace(t, ranks=tuple(ranks[r] for r in t.ranks)) for t in plan.tiles)
                yield replace(plan, tiles=tiles, unused=tuple(sorted(set(range(CLUSTER.num_devices)) - set(ranks))))


def test_no_even_plan_of_a_family_is_faster_than_what_is_found():
    setup = Setup(JOB.model, JOB.data.sequence_length, "fp32", HPCTRAIN)
    found = search_families(JOB, CLUSTER, [FAMILY], EVERY_PLAN)
    predicted = [predict(setup, plan, CLUSTER) for plan in every_even_plan()]
    fitting = [each.step_seconds for each in predicted if each.fits]
    assert len(fitting) > 50
    assert found.best.seconds <= min(fitting) * 1.001


def test_plans_of_a_family_alone_leave_the_others_out_and_are_of_many_shapes():
    (party,) = (party for party in parties_of(CLUSTER, "fp32") if party.family == FAMILY)
    made = alone_candidates(JOB, CLUSTER, WORK, party)
    assert {candidate.kind for candidate in made} == {SIDE_BY_SIDE, SEARCHED}
    for candidate in made:
        check_plan(JOB, candidate.plan, candidate.describe)
        assert {rank for tile in candidate.plan.tiles for rank in tile.ranks} <= set(party.ranks)
        assert len(candidate.plan.ranks) == CLUSTER.num_devices
    assert len({candidate.shape for candidate in made}) >= 3


def test_a_family_that_cannot_hold_the_model_is_named():
    large = JOB.model_copy(update={"model": JOB.model.model_copy(update={"num_layers": 90})})
    (party,) = (party for party in parties_of(CLUSTER, "fp32") if party.family == FAMILY)
    work = Work(large.model, large.data.sequence_length, large.train.global_batch)
    with pytest.raises(PlanError, match="fits in memory"):
        alone_candidates(large, CLUSTER, work, party)
    told = yardstick(large, RUN_ON, 1000.0)
    assert told["no_ratio"] == "a100-40 alone cannot hold the model" and "of_sum" not in told
    assert "a100-40 cannot hold the model tokens/s" not in (said := tell_yardstick(told, RUN_ON))
    assert "no ratio: a100-40 alone cannot hold the model" in said
    assert "cut evenly the job does not fit" in said and "of_even" not in told


def test_the_share_is_of_the_sum_of_what_families_are_predicted_to_do():
    told = yardstick(JOB, RUN_ON, 1000.0)
    alone = told["predicted_alone"]
    assert set(alone) == {"a100-80", "a100-40"}
    assert told["of_sum"] == pytest.approx(1000.0 / sum(alone.values()))
    assert told["of_best_family"] == pytest.approx(1000.0 / max(alone.values()))
    said = tell_yardstick(told, RUN_ON)
    assert told["of_even"] == pytest.approx(1000.0 / told["predicted_even"])
    assert 0.7 * sum(alone.values()) < told["predicted_even"] < sum(alone.values()), "they are about as fast"
    assert f", {told['of_even']:.2f} times the job cut evenly;" in said
    assert f"this run is {told['of_sum']:.2f} of their sum" in said and "`hpctrain bench mixed a100-80-40`" in said
    real = Described(CLUSTER, "ours.toml", is_rehearsed=False)
    assert yardstick(JOB, real, 1000.0)["predicted_alone"] == pytest.approx(alone, rel=0.05)
    assert tell_yardstick(told, real).endswith("times the job cut evenly"), "what is real is not rehearsed"


def test_what_took_too_much_forbids_only_what_keeps_as_much():
    memory = CLUSTER.families[FAMILY].memory_bytes

    def plan(grid: TensorGrid, **options):
        return even_plan(JOB.model.num_items, grid, 1, 1, 1, 24, family=FAMILY, **options)

    room, alone = Room(WORK, CLUSTER), TensorGrid()
    room.note(plan(alone), [Held(states=0, peak=2 * memory, total=memory)])
    assert room.forbids(plan(alone))
    assert not room.forbids(plan(alone, recompute="full")), "it keeps less"
    assert not room.forbids(plan(TensorGrid(z=4))), "and so does each rank of a grid"
    room.note(plan(TensorGrid(z=4)), [Held(states=0, peak=2 * memory, total=memory)] * 4)
    assert room.forbids(plan(TensorGrid(z=4)))
