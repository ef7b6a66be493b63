"""Restricted spaces of the search: even plans, plans by speed, a family alone; and the yardstick made of them."""

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings

from hpctrain.config.errors import PlanError
from hpctrain.config.job import load_job
from hpctrain.jobs.common import check_runs, ready_miniature
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.holdings import check_zero
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.search import ESTIMATE_ERROR, SCORE_ALL, Limits, Search, search
from hpctrain.planner.search.space import Space, by_speed_space, even_space
from hpctrain.planner.yardstick import format_yardstick, keep_families, predict_families, yardstick
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK, EMBEDDING
from tests.examples import costly
from tests.tilings import grids_of
from tests.unit.small_searches import EVERYTHING, FAST_NETWORK, cases, cluster_of, setup_of

MINIATURE = ready_miniature("a100-80-40", load_job("mixed", ["train.global_batch=24"]))
JOB, CLUSTER = MINIATURE.job, MINIATURE.cluster
SETUP = Setup(JOB.model, JOB.data.sequence_length, "fp32", HPCTRAIN)
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


@cache
def searched(space: Space):
    """Return what is planned for the family alone."""
    return search(SETUP, JOB.train.global_batch, CLUSTER, [FAMILY], space, SCORE_ALL)


@cache
def seconds_of_even_plans() -> list[float]:
    predicted = [predict(SETUP, plan, CLUSTER) for plan in every_even_plan()]
    return [each.step_seconds for each in predicted if each.fits]


@pytest.mark.parametrize("space", [Space(), even_space()])
def test_no_even_plan_of_a_family_is_faster_than_the_searched_one(space):
    fitting = seconds_of_even_plans()
    assert len(fitting) > 50
    assert searched(space).best.seconds <= min(fitting) * 1.001


def test_a_family_alone_uses_its_devices_only():
    own = {device.rank for device in CLUSTER.devices if device.family == FAMILY}
    result = searched(Space())
    assert len(result.plans) >= 5
    for simulated in result.plans:
        check_runs(JOB, simulated.plan, "alone")
        assert {rank for tile in simulated.plan.tiles for rank in tile.ranks} <= own
        assert set(range(CLUSTER.num_devices)) - own <= set(simulated.plan.unused)


# ---- even plans ------------------------------------------------------------------------------------------------------


def check_even(plan: Plan, num_blocks: int) -> None:
    """Check that all tiles are equal, and that each of them has as much to do as any other, but for whole blocks."""
    assert not plan.unused
    assert len({tile.tensor for tile in plan.tiles}) == 1
    assert len({tile.rows.size for tile in plan.tiles}) == 1
    depths = {tile.items: plan.depth_to_loss(tile) for tile in plan.tiles}
    stages = sorted(depths, key=lambda items: items.start)
    assert [depths[items] for items in stages] == list(range(len(stages)))[::-1], "every pipeline has the same stages"
    blocks = [items.intersect(Interval(1, 2 * num_blocks + 1)).size / 2 for items in stages]
    assert sum(blocks) == num_blocks and max(blocks) - min(blocks) <= 1
    replicas = [sum(tile.items == items for tile in plan.tiles) for items in stages]
    assert len(set(replicas)) == 1


@settings(max_examples=costly(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_an_even_plan_is_even(case):
    setup, batch, cluster, space = case
    try:
        result = search(setup, batch, cluster, None, replace(even_space(), zero=space.zero), EVERYTHING)
    except PlanError as error:
        assert "no even plan of" in str(error) and "uses all devices" in str(error)
        devices = cluster.num_devices
        assert batch % devices, "replicas alone would do"
        assert setup.model.num_layers < devices, "and so would a pipeline of all devices"
        return
    for simulated in result.plans:
        check_even(simulated.plan, setup.model.num_layers)


@pytest.mark.parametrize("name", ["six-two", "ib-roce", "three-vendors"])
def test_plans_of_a_ready_cluster_can_run_and_restricted_ones_are_not_faster(name):
    made = ready_miniature(name)
    job, cluster, limits = made.job, made.cluster, Limits(scored=400, simulated=8)
    setup = Setup(job.model, job.data.sequence_length, "fp32", HPCTRAIN)
    best, by_speed, even = (
        search(setup, job.train.global_batch, cluster, space=space, limits=limits)
        for space in (Space(), by_speed_space(), even_space())
    )
    for simulated in (*best.plans, *by_speed.plans, *even.plans):
        check_runs(job, simulated.plan, "a plan of the search")
    for simulated in (*by_speed.plans, *even.plans):
        assert not simulated.plan.unused
        assert simulated.prediction.fits
    for simulated in even.plans:
        check_even(simulated.plan, job.model.num_layers)
    assert best.best.seconds <= by_speed.best.seconds
    assert best.best.seconds <= even.best.seconds
    assert by_speed.best.seconds <= even.best.seconds * (1 + ESTIMATE_ERROR)


def test_what_cannot_be_cut_evenly_is_refused_with_the_numbers():
    cluster = cluster_of([("a", 7, 1), ("b", 6, 1)])
    with pytest.raises(
        PlanError, match=r"no even plan of 7 a and 6 b on 13 nodes, by ib for 8 rows of a step and 4 bl"
    ):
        search(setup_of(4), 8, cluster, space=even_space())
    assert search(setup_of(4), 8, cluster).best.prediction.fits


def test_an_even_plan_that_does_not_fit_is_reported_with_the_numbers():
    with pytest.raises(PlanError, match=r"no plan of 2 a and 1 b on 3 nodes, by ib fits in memory; the nearest \("):
        search(setup_of(4), 6, cluster_of([("a", 2, 1), ("b", 1, 1)], memory=120_000), space=even_space())


# ---- plans by speed --------------------------------------------------------------------------------------------------


@settings(max_examples=costly(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_by_speed_no_other_cut_is_done_earlier_by_the_speeds(case):
    """Against every other cut of the same shape, into whole rows of a rank or whole blocks."""
    setup, batch, cluster, space = case
    space = by_speed_space(microbatches=space.microbatches, largest_grid=space.largest_grid, recompute=("none",))
    searching = Search(setup, batch, cluster, None, space, EVERYTHING, lambda: 0.0)
    try:
        searching.run()
    except PlanError as error:
        assert "no by speed plan of" in str(error)
        return
    speed = searching.scorer.speed

    def seconds(pool: int, choice, blocks: int, rows: int, ends) -> float:
        """Return what a stage takes if it computes by one speed of its devices."""
        at_once = math.ceil(math.ceil(rows / choice.replicas) / choice.grid.z)
        at_end = [layer for layer, is_there in zip((EMBEDDING, setup.head), ends, strict=True) if is_there]
        parts = [(BLOCK, blocks), *((layer, 1) for layer in at_end)]
        return sum(times * at_once / speed(pool, layer) for layer, times in parts) / choice.grid.x / choice.grid.y

    for layout in searching.layouts[:20]:
        used = [(len(row), sum(map(len, layout.shape.pipelines))) for row in layout.shape.pipelines]
        assert all(own in (1, whole) for own, whole in used), "in one pipeline, or side by side"
        for rows, stages in zip(layout.rows, layout.stages, strict=True):
            ends = [(i == 0, i == len(stages) - 1) for i in range(len(stages))]

            def slowest(blocks, rows=rows, stages=stages, ends=ends) -> float:
                placed = zip(stages, blocks, ends, strict=True)
                return max(seconds(s.pool, s.choice, count, rows, at) for s, count, at in placed)

            own = [placed.blocks for placed in stages]
            for source, target in itertools.permutations(range(len(own)), 2):
                other = [n - (i == source) + (i == target) for i, n in enumerate(own)]
                if min(other) >= 1:
                    assert slowest(own) <= slowest(other) * (1 + 1e-9)


def test_by_speed_rows_and_blocks_are_in_proportion():
    """Of devices of which one is three times as fast as the other, where networks cost nothing."""
    cluster = cluster_of([("a", 1, 1), ("b", 1, 1)], speeds={"a": 1e9, "b": 3e9}, **FAST_NETWORK)
    setup = setup_of(16, vocabulary=2)
    result = Search(setup, 32, cluster, None, by_speed_space(microbatches=(1, 8), zero=(1,)), EVERYTHING, lambda: 0.0)
    result.run()
    rows = [dict(zip(at.shape.pipelines, at.rows, strict=True)) for at in result.layouts if at.shape.microbatches == 1]
    assert {((0,), 8), ((1,), 24)} == {pair for cut in rows if len(cut) == 2 for pair in cut.items()}
    for layout in result.layouts:
        if len(layout.stages) == 1 and all(c.stages == 1 for row in layout.shape.choices for c in row):
            assert {stage.pool: stage.blocks for stage in layout.all_stages} == {0: 4, 1: 12}


def test_by_speed_memory_is_not_considered_when_cutting():
    """The fast device has no memory for its share: the search gives it less, the plan by speed does not fit."""
    cluster, setup = cluster_of([("a", 1, 1), ("c", 1, 1)]), setup_of(16)
    space = {"largest_grid": 1, "microbatches": (16,), "recompute": ("none",)}
    roomy = search(setup, 16, cluster, space=by_speed_space(**space), limits=EVERYTHING).best
    needed = max(stage.memory.total for stage in roomy.prediction.memory if stage.tile.family == "c")
    small = cluster.families["c"].model_copy(update={"memory_bytes": int(needed * 0.8)})
    cluster = cluster.model_copy(update={"families": cluster.families | {"c": small}})
    result = search(setup, 16, cluster, space=Space(**space), limits=EVERYTHING).best
    assert result.prediction.fits
    try:
        by_speed = search(setup, 16, cluster, space=by_speed_space(**space), limits=EVERYTHING).best.seconds
    except PlanError as error:
        by_speed, summary = float("inf"), str(error)
        assert "fits in memory" in summary
    assert result.seconds < by_speed


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_of_different_families_get_rows_by_speed_in_every_zero_stage(zero):
    """Poplar (arXiv 2408.12596): 1.02 to 3.92 times as fast as even batches. One block cannot be cut."""
    cluster, setup = (
        cluster_of([("a", 1, 1), ("c", 1, 1)], memory=2_000_000, **FAST_NETWORK),
        setup_of(1, vocabulary=512),
    )
    result = search(setup, 48, cluster, space=Space(zero=(zero,)), limits=EVERYTHING).best
    even = search(setup, 48, cluster, space=even_space(zero=(zero,)), limits=EVERYTHING).best
    check_tiling(result.plan, 4)
    check_zero(result.plan, "a plan")
    assert {tile.zero for tile in (*result.plan.tiles, *even.plan.tiles)} == {zero}
    rows = {tile.family: tile.rows.size * result.plan.microbatches for tile in result.plan.tiles}
    assert rows["c"] / rows["a"] == pytest.approx(3.7, rel=0.2)
    assert 1.5 < even.seconds / result.seconds < 3.92
    slower = search(setup, 48, cluster_of([("a", 1, 1), ("c", 1, 1)], nic=2e7), space=Space(zero=(zero,))).best
    assert slower.seconds > 1.01 * result.seconds
    assert slower.layout.seconds == pytest.approx(slower.seconds, rel=0.05), "the estimate knows what they exchange"


def test_where_two_fabrics_are_joined_by_a_slow_one_the_pipeline_crosses_it():
    """Holmes (arXiv 2312.03549): sums of gradients stay inside a fabric, activations go between them.

    Behind computation the slow network would have time enough here, with all rows in one microbatch.
    """
    made = ready_miniature("ib-roce")
    setup = Setup(made.job.model, made.job.data.sequence_length, "fp32", HPCTRAIN, bucket_bytes=None)
    best = search(setup, made.job.train.global_batch, made.cluster, space=by_speed_space()).best.plan
    fabric_of = {device.rank: device.table for device in made.cluster.devices}
    for item in range(setup.model.num_items):
        tables = {fabric_of[rank] for tile in best.tiles if tile.contains(item) for rank in tile.ranks}
        assert len(tables) == 1, best.describe()


# ---- the yardstick ---------------------------------------------------------------------------------------------------


ROOMY_HOSTS = CLUSTER.model_copy(
    update={"nodes": tuple(nodes.model_copy(update={"host_memory_bytes": 10**15}) for nodes in CLUSTER.nodes)}
)
PATIENT = JOB.model_copy(update={"search": JOB.search.model_copy(update={"seconds": 1000.0, "plans": 300})})
"""Searches end by the number of plans, however busy the machine is."""


def test_a_family_that_cannot_hold_the_model_is_named():
    large = PATIENT.model_copy(update={"model": JOB.model.model_copy(update={"num_layers": 180})})
    with pytest.raises(PlanError, match="fits in memory"):
        search(replace(SETUP, model=large.model), 24, ROOMY_HOSTS, [FAMILY], limits=Limits(scored=400, simulated=4))
    summary = yardstick(predict_families(large, ROOMY_HOSTS), 1000.0)
    assert summary["no_ratio"] == "a100-40 alone cannot hold the model" and "fraction_of_sum" not in summary
    assert "a100-40 cannot hold the model tokens/s" not in (said := format_yardstick(summary))
    assert "no ratio: a100-40 alone cannot hold the model" in said
    assert f"{summary['speedup_over_even']:.2f} times the job cut evenly" in said, "over all devices it fits"
    larger = large.model_copy(update={"model": large.model.model_copy(update={"num_layers": 220})})
    summary = yardstick(predict_families(larger, ROOMY_HOSTS), 1000.0)
    assert "cut evenly the job does not fit" in format_yardstick(summary) and "speedup_over_even" not in summary


def test_the_share_is_of_the_sum_of_what_families_are_predicted_to_do():
    summary = yardstick(predict_families(PATIENT, CLUSTER), 1000.0)
    alone = summary["predicted_alone"]
    assert set(alone) == {"a100-80", "a100-40"}
    assert summary["fraction_of_sum"] == pytest.approx(1000.0 / sum(alone.values()))
    assert summary["speedup_over_best_family"] == pytest.approx(1000.0 / max(alone.values()))
    said = format_yardstick(summary)
    assert summary["speedup_over_even"] == pytest.approx(1000.0 / summary["predicted_even"])
    assert 0.7 * sum(alone.values()) < summary["predicted_even"] < sum(alone.values()), "they are about as fast"
    assert said.endswith(f", {summary['speedup_over_even']:.2f} times the job cut evenly")
    assert f"this run is {summary['fraction_of_sum']:.2f} of their sum" in said


def test_all_searches_of_the_yardstick_stay_within_the_limits_of_the_search(monkeypatch, tmp_path):
    now, asked, results = [0.0], [], {}

    def search_slowly(setup, global_batch, cluster, families, space, limits):
        asked.append((tuple(families), limits))
        now[0] += limits.seconds * len(asked) / 3  # the first ones are done early, the last ones late
        key = global_batch, tuple(families), space, limits.scored
        if key not in results:
            results[key] = search(setup, global_batch, cluster, families, space, replace(limits, seconds=None))
        return results[key]

    monkeypatch.setattr("hpctrain.planner.yardstick.search", search_slowly)
    budget = JOB.search.model_copy(update={"plans": 60, "seconds": 6.0})
    job = JOB.model_copy(update={"search": budget})
    predicted = predict_families(job, CLUSTER, lambda: now[0])
    assert [families for families, _ in asked] == [("a100-80",), ("a100-40",), ("a100-80", "a100-40")]
    assert sum(limits.scored for _, limits in asked) <= 60 and now[0] <= 6.0
    assert [limits.seconds for _, limits in asked] == pytest.approx([2.0, (6.0 - 2 / 3) / 2, 6.0 - 2 / 3 - 16 / 9])
    asked.clear()
    now[0] = 0.0
    assert keep_families(tmp_path, job, CLUSTER) == predicted and len(asked) == 3
    assert keep_families(tmp_path, job, CLUSTER) == predicted and len(asked) == 3, "a start that continues reads it"
    other = job.model_copy(update={"train": job.train.model_copy(update={"global_batch": 12})})
    assert keep_families(tmp_path, other, CLUSTER) != predicted and len(asked) == 6, "of another job it is searched for"
    (tmp_path / "yardstick.json").write_text("{")
    assert keep_families(tmp_path, job, CLUSTER) == predicted, "a damaged file is none"
    assert keep_families(tmp_path / "nowhere", job, CLUSTER) == predicted, "nor is a folder that cannot be written"
