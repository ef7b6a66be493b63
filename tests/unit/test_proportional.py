"""Plans by speed: cuts are exact, everything is computed once, and what cannot be is refused with the numbers."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster import Cluster, Profile, RowTimes
from hpctrain.cluster_file import ready_clusters
from hpctrain.errors import PlanError
from hpctrain.intervals import Interval, cut_evenly
from hpctrain.job import Job, load_job
from hpctrain.jobs.common import ready_miniature
from hpctrain.plan import Plan, Tile
from hpctrain.plan_checks import check_tiling
from hpctrain.planner.curves import curves_of, describe_work
from hpctrain.planner.estimate import ROWS_LOST, Work, estimate
from hpctrain.planner.even import check_plan
from hpctrain.planner.proportional import (
    IN_A_ROW,
    SIDE_BY_SIDE,
    Party,
    cut_items,
    cut_rows,
    cut_unlike,
    even_candidates,
    in_a_row,
    needed_bytes,
    parties_of,
    proportional_candidates,
    side_by_side,
    turns_reason,
)
from hpctrain.planner.replicas import exchange_seconds
from hpctrain.planner.simulate import Costs, PassCost, TileCost, simulate
from hpctrain.rows import Rows
from hpctrain.schedule import check_no_deadlock, one_f_one_b

JOB = ready_miniature("v100-t4", load_job("mixed", ["train.global_batch=96"])).job
WORK = Work(JOB.model, JOB.data.sequence_length, JOB.train.global_batch)
FAST, SLOW = Party("fast", (0, 1), 3.0, 1e9), Party("slow", (2, 3), 1.0, 1e9)


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_cut_as_brute_force_would(seed):
    drawn = random.Random(seed)
    speeds = [drawn.choice([0.5, 1.0, 1.7, 3.0]) for _ in range(drawn.randint(1, 4))]
    total = drawn.randint(len(speeds), 9)
    cuts = [cut for cut in itertools.product(range(1, total + 1), repeat=len(speeds)) if sum(cut) == total]
    found = cut_rows(total, speeds)
    assert found in [list(cut) for cut in cuts]
    assert slowest(found, speeds) == min(slowest(cut, speeds) for cut in cuts)


def slowest(rows, speeds) -> float:
    return max(size / speed for size, speed in zip(rows, speeds, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_cut_as_brute_force_would(seed):
    drawn = random.Random(seed)
    speeds = [drawn.choice([0.5, 1.0, 1.7, 3.0]) for _ in range(drawn.randint(1, 4))]
    num_blocks = drawn.randint(len(speeds), 8)
    costs = [drawn.choice([0.0, 0.5]), *[1.0] * num_blocks, drawn.choice([0.1, 0.7, 2.5])]

    def seconds(bounds) -> float:
        stages = zip(itertools.pairwise(bounds), speeds, strict=True)
        return max(sum(costs[start:stop]) / speed for (start, stop), speed in stages)

    every = itertools.combinations(range(2, num_blocks + 1), len(speeds) - 1)
    best = min(seconds((0, *inner, len(costs))) for inner in every)
    found = cut_items(costs, speeds)
    assert seconds((found[0].start, *(items.stop for items in found))) == pytest.approx(best)
    assert all(any(1 <= item <= num_blocks for item in range(*items)) for items in found), "a block for each stage"


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_cost_unlike_on_each_stage_are_cut_as_brute_force_would(seed):
    drawn = random.Random(seed)
    num_stages = drawn.randint(1, 3)
    num_blocks = drawn.randint(num_stages, 7)
    costs = [[drawn.choice([0.1, 1.0, 2.5]) for _ in range(num_blocks + 2)] for _ in range(num_stages)]

    def seconds(cuts) -> float:
        return max(sum(of[slice(*items)]) for of, items in zip(costs, cuts, strict=True))

    every = (
        [Interval(*pair) for pair in itertools.pairwise((0, *inner, num_blocks + 2))]
        for inner in itertools.combinations(range(2, num_blocks + 1), num_stages - 1)
    )
    assert seconds(cut_unlike(costs)) == pytest.approx(min(map(seconds, every)))


def test_fast_devices_get_more_rows_or_more_blocks():
    beside = side_by_side(WORK, [FAST, SLOW], (1, 2), 6)
    check_plan(JOB, beside, "side by side")
    rows = {tile.ranks[0]: tile.rows for tile in beside.tiles}
    assert rows[2] == rows[3], "a pipeline"
    totals = [6 * rows[rank].mean for rank in range(3)]
    assert totals == [37, 37, 22], "speeds 3, 3, and 2 less what the cut of the pipeline loses"
    assert rows[0].sizes == (7, 6, 6, 6, 6, 6), "whole rows would be 6, 6 and 4"
    assert turns_reason(WORK, beside, {"fast": 3.0, "slow": 1.0}) == (
        "by turns, of 16 on the mean 2 x 6.167 on fast, 1 x 3.667 on slow; with whole rows a step would take 7.6%"
        " longer"
    )
    row = in_a_row(WORK, [FAST, SLOW], (1, 1), 12)
    assert turns_reason(WORK, row, {"fast": 3.0, "slow": 1.0}) is None
    assert [list(tile.items) for tile in row.tiles] == [[0, 8], [0, 8], [8, 10], [8, 10]]
    assert [tile.rows.listed() for tile in row.tiles] == [[0, 4], [4, 8]] * 2
    assert [tile.family for tile in row.tiles] == ["fast", "fast", "slow", "slow"]


def test_equal_replicas_of_a_row_have_rows_by_turns_where_they_do_not_divide():
    """Three and three devices, and 32 rows: no number of microbatches fits."""
    work = Work(JOB.model, JOB.data.sequence_length, 32)
    parties = [Party("fast", (0, 1, 2), 3.0), Party("slow", (3, 4, 5), 1.0)]
    plan = in_a_row(work, parties, (1, 1), 8)
    check_tiling(plan, JOB.model.num_items)
    assert [8 * tile.rows.mean for tile in plan.tiles] == [11, 11, 10] * 2
    assert all(plan.downstream(tile, m) == plan.downstream(tile) for tile in plan.tiles for m in range(8)), "3 chains"
    assert turns_reason(work, plan, {"fast": 3.0, "slow": 1.0}) == (
        "by turns, of 4 on the mean 2 x 1.375 on fast and slow, 1 x 1.25 on fast and slow; with whole rows a step would"
        " take 36.5% longer"
    )
    unlike = in_a_row(work, [parties[0], replace(parties[1], ranks=(3, 4))], (1, 1), 8)
    assert unlike.period == 1, "a microbatch waits for all before it goes on"


def test_an_estimate_counts_turns_as_what_they_are_on_the_mean_where_nobody_waits():
    """Side by side; with a stage that both feed, each microbatch waits for the slower one."""
    items = Interval(0, WORK.model.num_items)

    def step(*by_turns: tuple[Interval, ...], stop: int = items.stop) -> float:
        tiles = [Tile(Interval(0, stop), Rows(rows), (rank,), family="fast") for rank, rows in enumerate(by_turns)]
        if stop < items.stop:
            tiles.append(Tile(Interval(stop, items.stop), Interval(0, 11), (2,), family="fast"))
        return estimate(WORK, Plan(tuple(tiles), 8, 11), {"fast": 1.0})

    low, high = (Interval(0, 5), Interval(0, 6)), (Interval(5, 11), Interval(6, 11))
    work = WORK.cost(items)
    assert step(low, high) == pytest.approx(8 * (5.5 + ROWS_LOST) * work)
    assert step(low[:1], high[:1]) == pytest.approx(8 * (6 + ROWS_LOST) * work)
    assert step(low, high, stop=items.stop - 2) == pytest.approx(step(low[:1], high[:1], stop=items.stop - 2))


@given(
    depth=st.integers(1, 5),
    fewest=st.integers(1, 5),
    more=st.lists(st.integers(0, 1), min_size=1, max_size=16),
    blocks=st.lists(st.integers(1, 3), min_size=5, max_size=5),
)
def test_an_estimate_of_a_pipeline_by_turns_is_from_above(depth, fewest, more, blocks):
    """Against the simulation of the same instructions; equal to it where rows change once, between equal stages."""

    def both(sizes: list[int], blocks: list[int]) -> tuple[float, float]:
        bounds = list(itertools.accumulate(blocks, initial=1))
        rows = Rows(tuple(Interval(0, size) for size in sizes))
        tiles = [Tile(Interval(a, b), rows, (a,)) for a, b in itertools.pairwise(bounds)]
        plan = Plan(tuple(tiles), len(sizes), max(sizes))

        def passes(tile: Tile, size: int) -> TileCost:
            each = WORK.cost(tile.items) * (size + ROWS_LOST) / 3
            return TileCost((PassCost(each),), (PassCost(2 * each),))

        costs = {tile: tuple(passes(tile, size) for size in rows.sizes) for tile in tiles}
        messages = {(a, b): (0.0,) for a in tiles for b in tiles}
        simulated = simulate(plan, {t: one_f_one_b(plan, t) for t in tiles}, Costs(costs, messages)).step_seconds
        return simulated, estimate(WORK, plan, {"cpu": 1.0})

    simulated, estimated = both([fewest + one for one in more], blocks[:depth])
    assert simulated <= estimated * (1 + 1e-9)
    simulated, estimated = both([fewest] * depth + [fewest + 1] * max(depth, len(more)), [1] * depth)
    assert simulated == pytest.approx(estimated)


def test_the_head_counts_as_work():
    assert WORK.costs[0] == 0 and WORK.costs[1] == 1 and 0.5 < WORK.costs[-1] < 0.8
    assert sum(WORK.parameters) == 468_032


def test_what_activations_take_counts_too():
    """A microbatch of all rows does not fit at once, where the states do; tiles at the loss go through it in pieces."""
    listed = proportional_candidates(WORK, [Party("fast", (0, 1), 3.0, 2 * 10**7)], 2)
    for candidate in listed:
        assert max(needed_bytes(WORK, candidate.plan).values()) <= 2 * 10**7
    whole = next(c.plan for c in listed if c.plan.microbatches == 1 and c.depths == (1,))
    assert [(tile.rows.most(), tile.substeps) for tile in whole.tiles] == [(48, 6), (48, 6)]


def test_a_family_alone_leaves_the_others_unused():
    listed = proportional_candidates(WORK, [SLOW], 4)
    assert {candidate.kind for candidate in listed} == {SIDE_BY_SIDE}
    for candidate in listed:
        check_plan(JOB, candidate.plan, "a candidate")
        assert candidate.plan.unused == (0, 1) and candidate.plan.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("name", ready_clusters())
def test_every_candidate_of_a_ready_cluster_can_run(name):
    cluster = ready_miniature(name).cluster
    parties = parties_of(cluster, "fp32")
    listed = proportional_candidates(WORK, parties, cluster.num_devices)
    assert {candidate.kind for candidate in listed} == {SIDE_BY_SIDE, IN_A_ROW}
    assert [c.seconds for c in listed] == sorted(c.seconds for c in listed)
    families = {device.rank: device.family for device in cluster.devices}
    for candidate in [*listed[:40], *even_candidates(WORK, parties)[:10]]:
        plan = candidate.plan
        check_plan(JOB, plan, candidate.describe)
        check_no_deadlock(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles})
        assert all(families[rank] == tile.family for tile in plan.tiles for rank in tile.ranks) or (
            candidate.kind == "even"
        )


def test_by_speed_is_estimated_faster_than_evenly_where_speeds_differ():
    listed = proportional_candidates(WORK, [FAST, SLOW], 4)
    even = even_candidates(WORK, [FAST, SLOW])
    check_tiling(even[0].plan, JOB.model.num_items)
    assert listed[0].seconds < 0.6 * even[0].seconds
    assert estimate(WORK, listed[0].plan, {"fast": 3.0, "slow": 1.0}) == listed[0].seconds


def test_what_cannot_be_is_refused_with_the_numbers():
    with pytest.raises(PlanError, match="3 rows of a microbatch are too few for 4 replicas"):
        cut_rows(3, [1.0] * 4)
    with pytest.raises(PlanError, match="5 stages need as many blocks, the model has 4"):
        cut_items([0.0, 1.0, 1.0, 1.0, 1.0, 0.5], [1.0] * 5)
    many = Party("many", tuple(range(97)), 1.0, 1e9)
    with pytest.raises(PlanError, match="no plan of 97 ranks by speed for this job; .* 97 stages need as many blocks"):
        proportional_candidates(WORK, [many], 97)
    small = [Party("fast", (0, 1), 3.0, 2**20), Party("slow", (2, 3), 1.0, 2**20)]
    with pytest.raises(
        PlanError,
        match=r"no plan .* fits in memory: .* need about \d.\d MiB on a device of family '\w+', which has 1.0",
    ):
        proportional_candidates(WORK, small, 4)
    cluster = ready_miniature("v100-t4").cluster
    with pytest.raises(PlanError, match=r"families.v100-16: its speed in bf16 is not known, only in fp32; set train.d"):
        parties_of(cluster, "bf16")


# ---- by curves -------------------------------------------------------------------------------------------------------

LIMITS = {"v100-16": 6, "t4-16": 9}
SPEEDS = {"v100-16": 1.0, "t4-16": 0.25}  # rows of a block in a millisecond


def profiled(job: Job, dtype: str = "fp32", replicas: int = 8, zeros=(1, 2, 3)) -> Cluster:
    """The v100-t4 cluster with made-up profiles: a constant and a time for each row."""
    cluster = ready_miniature("v100-t4").cluster
    assert set(cluster.families) == set(LIMITS)

    def times(speed: float, rows: int) -> RowTimes:
        forward = 1e-3 * (0.5 + rows / speed)
        passes = (forward, 2 * forward)
        return RowTimes(rows=rows, embedding_seconds=(1e-6, 1e-6), block_seconds=passes, head_seconds=passes)

    profiles = tuple(
        Profile(
            origin="measured",
            family=family,
            work=describe_work(job, dtype),
            zero=zero,
            replicas=replicas,
            largest_rows=limit + zero,
            update_seconds=1e-3,
            times=tuple(times(SPEEDS[family], rows) for rows in (1, 2, 4, 8)),
        )
        for family, limit in LIMITS.items()
        for zero in zeros
    )
    return cluster.model_copy(update={"profiles": profiles})


def candidates_by_curve(zero: int, exchanged: float = 0.0):
    cluster = profiled(JOB)
    curves = curves_of(cluster, JOB, "fp32", zero)
    return proportional_candidates(WORK, parties_of(cluster, "fp32", curves=curves), 8, zero, exchanged), curves


def test_curves_are_of_one_job_on_as_many_devices_or_none():
    assert set(curves_of(profiled(JOB), JOB, "fp32", 0)) == set(LIMITS)
    assert curves_of(profiled(JOB), JOB, "bf16", 1) is None
    assert curves_of(profiled(JOB, replicas=4), JOB, "fp32", 1) is None
    assert curves_of(profiled(JOB, zeros=(1, 2)), JOB, "fp32", 1) is None
    longer = JOB.model_copy(update={"data": JOB.data.model_copy(update={"sequence_length": 16})})
    assert curves_of(profiled(JOB), longer, "fp32", 1) is None
    larger = JOB.model_copy(update={"train": JOB.train.model_copy(update={"global_batch": 7, "seed": 9})})
    assert curves_of(profiled(JOB), larger, "fp32", 1) is not None, "a batch is no part of it"


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_by_curve_keep_within_what_fits(zero):
    listed, curves = candidates_by_curve(zero, exchanged=1e-3)
    chosen = [candidate for candidate in listed if candidate.kind == SIDE_BY_SIDE and candidate.depths == (1, 1)]
    assert len(chosen) == 1, "allocated once, not tried by microbatches"
    plan = chosen[0].plan
    check_plan(JOB, plan, "a candidate")
    check_no_deadlock(plan, {tile: one_f_one_b(plan, tile) for tile in plan.tiles})
    assert {tile.zero for tile in plan.tiles} == {zero}
    slowest = 0.0
    for tile in plan.tiles:
        pieces = [piece.size for piece in cut_evenly(tile.rows.most(), tile.substeps)]
        assert max(pieces) <= curves[tile.family].largest_rows == LIMITS[tile.family] + zero
        taken = sum(curves[tile.family].seconds(tile.items, piece) for piece in pieces) * plan.microbatches
        slowest = max(slowest, taken)
    rows = {tile.family: tile.rows.most() for tile in plan.tiles}
    assert rows["v100-16"] > 2 * rows["t4-16"], "four times as fast, but for what each piece costs"
    if zero == 1:
        assert chosen[0].seconds == pytest.approx(slowest + 1e-3)
        assert len(listed) > 50, "pipelines are weighed against them"
    else:
        assert chosen[0].seconds >= slowest, "and what is exchanged"
        assert len({tile.substeps for tile in plan.tiles}) == 1 and len(listed) == 1


def test_all_plans_by_curve_are_in_seconds():
    listed, curves = candidates_by_curve(1)
    assert {candidate.kind for candidate in listed} == {SIDE_BY_SIDE, IN_A_ROW}
    ideal = JOB.train.global_batch * 8 * 3e-3 / (4 * sum(SPEEDS.values()))
    assert all(ideal < candidate.seconds < 50 * ideal for candidate in listed)
    for candidate in listed[:20]:
        check_plan(JOB, candidate.plan, candidate.describe)
        if candidate.depths != (1, 1):
            assert estimate(WORK, candidate.plan, {}, curves) == candidate.seconds


def test_where_no_replica_has_room_there_are_pipelines_or_the_numbers():
    cluster = profiled(JOB)
    none = tuple(profile.model_copy(update={"largest_rows": 0}) for profile in cluster.profiles)
    cluster = cluster.model_copy(update={"profiles": none})
    for zero in (1, 3):
        parties = parties_of(cluster, "fp32", curves=curves_of(cluster, JOB, "fp32", zero))
        if zero == 1:
            assert all(set(c.depths) != {1} or c.kind == IN_A_ROW for c in proportional_candidates(WORK, parties, 8))
        else:
            with pytest.raises(
                PlanError, match=r"replica 0 \(and 7 more\) has no room for the whole model with one row"
            ):
                proportional_candidates(WORK, parties, 8, zero)


def test_the_higher_stages_exchange_more():
    cluster = profiled(JOB)
    none, gradients, weights_too = (exchange_seconds(cluster, JOB.model, range(8), zero, "fp32") for zero in (1, 2, 3))
    assert none == 0.0 < gradients < weights_too < 10 * gradients
    assert exchange_seconds(cluster, JOB.model, range(1), 3, "fp32") == 0.0
