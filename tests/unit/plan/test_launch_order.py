"""Devices that do one collective at a time come to the end of a step, whatever the tiling: what the engine launches."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import PlanError
from hpctrain.config.job import Job, Model
from hpctrain.model.storage import shard
from hpctrain.plan.holdings import check_zero
from hpctrain.plan.launch_order import Bridge, LaunchOrderRun, check_launch_order, check_messages, shortened
from hpctrain.plan.schedule import Action, Instruction, schedule_of
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.examples import costly
from tests.tilings import stages_of_different_degree, tilings
from tests.unit.slot_devices import POSITIONS, launched_steps, run

MODEL = Model(
    architecture="gpt2", num_layers=4, hidden_size=8, num_heads=4, vocab_size=16, tie_head=True, max_positions=POSITIONS
)
SEEDS = range(5)


def job_of(model: Model = MODEL, **overlap) -> Job:
    switches = {"tensor": True, "data": True, "z": True, "bucket_bytes": 1}
    values = {
        "name": "test",
        "model": model,
        "data": {"tokens": "none", "sequence_length": POSITIONS},
        "train": {"dtype": "fp32"},
    }
    return Job.model_validate(values | {"overlap": switches | overlap})


def assert_ordered(plan: Plan, **overlap):
    logs = launched_steps(job_of(**overlap), plan)
    assert any(logs.values())
    for seed in SEEDS:
        for blocks in (True, False):
            assert not run(logs, seed, one_stream=True, blocks=blocks), f"seed {seed}, blocks {blocks}"


@pytest.mark.timeout(300)
@settings(max_examples=costly(25), deadline=None)
@given(st.data(), st.integers(0, 1), st.integers(1, 2))
def test_what_any_tiling_launches_has_one_order(data, keep_gathered, tensor_parts):
    plan = data.draw(tilings(MODEL, 5, 6, 2, exchanging=True))
    try:
        check_zero(plan, "drawn")
    except PlanError:
        return
    check_launch_order(plan)
    assert_ordered(plan, keep_gathered=keep_gathered, tensor_parts=tensor_parts)


ZERO_3 = even_plan(MODEL.num_items, TensorGrid(z=2), 1, 2, 2, 4, zero=3)
PIPELINE = even_plan(MODEL.num_items, TensorGrid(y=2), 2, 2, 2, 4)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "plan",
    [
        ZERO_3,
        PIPELINE,
        even_plan(MODEL.num_items, TensorGrid(z=2), 2, 2, 3, 4, virtual_stages=2),
        even_plan(MODEL.num_items, TensorGrid(), 2, 2, 3, 2, schedule="zb-h1"),
        even_plan(MODEL.num_items, TensorGrid(z=2), 2, 2, 2, 4, zero=2, virtual_stages=2),
    ],
)
def test_what_even_plans_launch_has_one_order(plan):
    check_launch_order(plan)
    assert_ordered(plan)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", [ZERO_3, PIPELINE])
def test_devices_that_begin_with_any_group_wait_for_each_other(plan):
    """With a stream for each group, as lanes have them, a device takes what comes first."""
    logs = launched_steps(job_of(), plan)
    assert any(run(logs, seed, one_stream=False, blocks=False) for seed in SEEDS)


@pytest.mark.timeout(120)
def test_a_tied_embedding_is_not_summed_before_the_stages_between():
    """The last stage is through with it first, and the first stage last: neither can wait there."""
    plan, make_shard = even_plan(MODEL.num_items, TensorGrid(y=2), 2, 1, 2, 2), shard.make_shard

    def early(*args):
        return replace(make_shard(*args), starts_early=True)

    assert_ordered(plan)
    with patch("hpctrain.engine.step.optimizer.make_shard", early):
        assert run(launched_steps(job_of(), plan), 0, one_stream=True, blocks=True) == [0, 1, 2, 3]


@settings(max_examples=costly(200), deadline=None)
@given(tilings(MODEL, 8, 6, 3), st.sampled_from(["1f1b", "zb-h1"]))
def test_sums_of_any_tiling_may_start_early(plan, schedule):
    check_launch_order(replace(plan, schedule=schedule))


@settings(max_examples=costly(60), deadline=None)
@given(tilings(MODEL, 8, 6, 3), st.sampled_from(["1f1b", "zb-h1"]), st.integers(30, 90))
def test_a_shortened_plan_begins_and_ends_as_the_whole_one(plan, schedule, microbatches):
    plan = replace(plan, schedule=schedule, microbatches=microbatches)
    fewer = shortened(plan)
    assert vars(fewer)["_downstream"] is vars(plan)["_downstream"], "what follows from the tiles is shared"
    gone = plan.microbatches - fewer.microbatches
    assert gone > 0
    for tile in plan.first_tiles:
        whole, short = (schedule_of(each, tile, reduce_early=True) for each in (plan, fewer))
        half = len(short) // 2
        moved = (replace(each, microbatch=each.microbatch + gone * (each.microbatch >= 0)) for each in short[half:])
        assert whole[:half] == short[:half] and whole[len(whole) - len(short) + half :] == tuple(moved)


def test_interleaved_pipelines_beside_others_may_start_early():
    check_launch_order(stages_of_different_degree())
    stages = [Interval(0, 2), Interval(2, 5), Interval(5, 7), Interval(7, MODEL.num_items)]
    interleaved = [Tile(items, Interval(0, 1), (number % 2,)) for number, items in enumerate(stages)]
    whole = Tile(Interval(0, MODEL.num_items), Interval(1, 2), (2, 3), TensorGrid(z=2))
    check_launch_order(Plan((*interleaved, replace(whole, rows=Interval(1, 3))), 4, 3))


def of_families(plan: Plan, families: Sequence[str]) -> Plan:
    """Return the plan with the family of each tile."""
    tiles = (replace(tile, family=family) for tile, family in zip(plan.tiles, families, strict=True))
    return replace(plan, tiles=tuple(tiles))


def is_proven(plan: Plan, launching: str = "ab", early: bool = True, is_tied: bool = True) -> bool:
    try:
        check_messages(plan, Bridge(frozenset("ab"), frozenset(launching), is_tied), early, overlaps_z=True)
    except PlanError as error:
        assert "deadlocks" in str(error)
        return False
    return True


def stuck(plan: Plan, logs: dict, seed: int, blocks: bool) -> list[int]:
    """Return the ranks that do not come to an end where messages between families need both devices."""
    family = {rank: tile.family for tile in plan.tiles for rank in tile.ranks}
    return run(logs, seed, True, blocks, lambda sender, receiver: family[sender] != family[receiver])


@pytest.mark.timeout(300)
@settings(max_examples=costly(25), deadline=None)
@given(st.data())
def test_messages_of_device_memory_that_are_proven_come_to_an_end(data):
    """Of any tiling, by what the engine launches, with tiles of two families."""
    plan = data.draw(tilings(MODEL, 5, 6, 2))
    plan = of_families(plan, [data.draw(st.sampled_from("ab")) for _ in plan.tiles])
    early = data.draw(st.booleans())
    if is_proven(plan, early=early):
        logs = launched_steps(job_of(data=early), plan)
        for seed in SEEDS:
            for blocks in (True, False):
                assert not stuck(plan, logs, seed, blocks), f"seed {seed}, blocks {blocks}"


TWO_TILES = even_plan(MODEL.num_items, TensorGrid(y=2), 2, 1, 4, 2)
SINGLE = even_plan(MODEL.num_items, TensorGrid(), 2, 2, 4, 4)


def test_messages_that_cross_between_two_tensor_grids_are_refused():
    """A rank of each waits in a sum over y for the other one, which waits for a message: it happens, too."""
    plan = of_families(TWO_TILES, "ab")
    assert not is_proven(plan, is_tied=False)
    logs = launched_steps(job_of(), plan)
    assert any(stuck(plan, logs, seed, blocks) for seed in range(20) for blocks in (True, False))
    assert is_proven(plan, launching="a", is_tied=False), "the other family never waits in an operation"
    assert is_proven(plan, launching="", is_tied=False)
    assert is_proven(of_families(TWO_TILES, "aa"), is_tied=False), "no message is of device memory"
    several = even_plan(MODEL.num_items, TensorGrid(y=2), 2, 1, 1, 2)
    assert is_proven(of_families(several, "ab"), is_tied=False), "one microbatch: nothing crosses"


def test_stages_of_one_rank_each_are_proven_but_for_a_tied_embedding():
    """Which the last stage sums while the first waits for its gradient."""
    plan = of_families(SINGLE, "aabb")
    assert is_proven(plan, is_tied=False) and is_proven(plan, early=False, is_tied=False)
    assert not is_proven(plan)
    logs = launched_steps(job_of(), plan)
    assert any(stuck(plan, logs, seed, blocks) for seed in range(20) for blocks in (True, False))


def chunks_in_two_orders() -> tuple[Plan, dict]:
    """Two ranks, each with both halves of the model, of which they finish different ones first."""
    halves = Interval(0, 5), Interval(5, MODEL.num_items)
    tiles = [Tile(items, Interval(rank, rank + 1), (rank,)) for items in halves for rank in (0, 1)]
    plan = Plan(tuple(tiles), 1, 2)
    schedules = {tile: list(schedule_of(plan, tile, reduce_early=True)) for tile in plan.first_tiles}
    return plan, schedules


def test_tiles_that_sum_their_items_in_different_orders_are_refused():
    plan, schedules = chunks_in_two_orders()
    LaunchOrderRun(plan, schedules, overlaps_z=False).run()
    steps = schedules[plan.first_tiles[1]]
    first, second = (i for i, step in enumerate(steps) if step.starts_reducing)
    assert steps[first].virtual_stage == 1
    steps[first], steps[second] = replace(steps[first], starts_reducing=False), replace(steps[second], virtual_stage=0)
    steps.insert(second + 1, Instruction(Action.BACKWARD, 0, starts_reducing=True, virtual_stage=1))
    with pytest.raises(PlanError, match=r"deadlocks: tile items .* waits at 'backward 0"):
        LaunchOrderRun(plan, schedules, overlaps_z=False).run()


def test_the_order_of_thousands_of_ranks_is_proven_within_a_second():
    import time

    plan, start = even_plan(82, TensorGrid(y=8), 8, 64, 64, 64), time.thread_time()
    check_launch_order(plan)
    assert len(plan.ranks) == 4096 and time.thread_time() - start < 1
    stages = [("a" if tile.items.start < 40 else "b") for tile in plan.tiles]
    start = time.thread_time()
    assert is_proven(of_families(plan, stages), launching="b", is_tied=False)
    assert time.thread_time() - start < 3
