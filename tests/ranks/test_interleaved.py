"""Interleaved pipelines: the numbers of one rank, the same bits whatever overlaps, checkpoints of any other plan."""

from dataclasses import replace

import pytest

import hpctrain.engine.step.pipeline as pipeline
from hpctrain.comm.transports.transport import HostTransport
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.parallelism import Overlap
from hpctrain.plan.checks import check_plan
from hpctrain.plan.schedule import one_f_one_b
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.search import search
from hpctrain.planner.search.space import Space
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import (
    by,
    curve_and_weights,
    curve_of_one_rank,
    go_on,
    largest_relative_difference,
    make_job,
    parametrize_by_turns,
    rehearsed_world,
)
from tests.ranks.test_split_backward import DEVICE, EQUAL, MICROBATCHES, check_formulas, measured
from tests.tilings import stages_of_different_degree
from tests.unit.small_searches import cluster_of

STEPS = 2
SHAPE = {"num_layers": 8, "hidden_size": 16, "num_heads": 4}
LAYOUTS = {
    2: [
        {"pipeline": 2, "virtual_stages": 2},
        {"pipeline": 2, "virtual_stages": 4, "recompute": "full"},
    ],
    4: [
        {"pipeline": 4, "virtual_stages": 2},
        {"pipeline": 2, "virtual_stages": 2, "tensor": {"y": 2}, "recompute": "full"},
        {"pipeline": 2, "virtual_stages": 3, "data": 2},
        {"pipeline": 2, "virtual_stages": 2, "data": 2, "zero": 3},
    ],
    8: [
        {"pipeline": 4, "virtual_stages": 2, "tensor": {"x": 2}},
        {"pipeline": 2, "virtual_stages": 2, "tensor": {"z": 2}, "data": 2, "zero": 2},
    ],
}


def pytest_generate_tests(metafunc):
    parametrize_by_turns(metafunc, "model", ("gpt2", "llama"), LAYOUTS)


def overlapped(job, on: bool):
    return job.model_copy(update={"overlap": Overlap(bucket_bytes=3000, tensor=on, data=on, z=on)})


def check(world, tokens, model: str, plan: Plan) -> tuple[list[float], list[str]]:
    """Compare a plan, whose passes are split and sums are overlapped, with one rank; return its curve."""
    job = make_job(tokens, model, shape=SHAPE, global_batch=plan.rows * plan.microbatches)
    check_plan(job, plan, "a test")
    check_schedules(plan, reduce_early=True)
    result = curve_and_weights(world, overlapped(job, True), plan, STEPS)
    one = curve_of_one_rank(world, tokens, model, plan.rows, plan.microbatches, STEPS, **SHAPE)
    assert largest_relative_difference(result[0], one) < 1e-5
    return result


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_losses_are_those_of_one_rank(world, tokens, model, layout, monkeypatch):
    monkeypatch.setattr(world, "settings", by("messages" if model == "gpt2" else "auto", world.settings))
    monkeypatch.setattr(HostTransport, "polls_freely", True)
    job = make_job(tokens, model, {"microbatch": 2, **layout}, shape=SHAPE)
    plan = resolve_plan(job, world.size).plan
    assert {len(plan.tiles_of(rank)) for rank in range(world.size)} == {layout["virtual_stages"]}
    check(world, tokens, model, plan)


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_what_is_split_and_overlapped_changes_no_bit(world, tokens, monkeypatch):
    plan = even_plan(18, TensorGrid(z=2), 2, 1, 4, 2, virtual_stages=2)
    result = check(world, tokens, "gpt2", plan)
    monkeypatch.setattr(pipeline, "schedule_of", one_f_one_b)
    job = make_job(tokens, "gpt2", shape=SHAPE, global_batch=8)
    assert curve_and_weights(world, overlapped(job, False), plan, STEPS) == result


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_microbatches_need_be_no_multiple_of_the_stages(world, tokens):
    check(world, tokens, "gpt2", even_plan(18, TensorGrid(), 4, 1, 5, 2, virtual_stages=2, row_chunks=2))


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("model", "microbatches", "rows", "options", "wanted"),
    [
        ("gpt2", 4, 1, {"largest_grid": 1}, "TP1 x PP4 (2 virtual stages) x DP1, ZeRO 1"),
        ("llama", 2, 2, {"largest_grid": 1, "zero": (3,)}, "TP1 x PP2 (4 virtual stages) x DP2, ZeRO 3"),
        ("llama", 2, 1, {"largest_grid": 2}, "TP2+SP x PP2 (4 virtual stages) x DP1, ZeRO 1"),
    ],
)
def test_what_a_search_interleaves_trains_as_one_rank(world, tokens, model, microbatches, rows, options, wanted):
    batch = microbatches * rows
    job = make_job(tokens, model, shape=SHAPE, global_batch=batch)
    setup = Setup(job.model, job.data.sequence_length, "fp32", HPCTRAIN)
    cluster = cluster_of([("a", 2, 2)], speeds={"a": 1e7})
    space = Space(microbatches=(microbatches,), **options)
    plan = world.on_first_rank(lambda: search(setup, batch, cluster, space=space).best.plan)
    assert plan.describe().startswith(wanted)
    check(world, tokens, model, replace(plan, tiles=tuple(replace(tile, family="cpu") for tile in plan.tiles)))


@pytest.mark.timeout(120)
@pytest.mark.ranks(2)
def test_tiles_of_one_rank_that_are_neighbours_hand_over_to_each_other(world, tokens):
    tiles = [
        Tile(Interval(*items), Interval(rank, rank + 1), (rank,), recompute=recompute)
        for items, recompute in (((0, 4), "full"), ((4, 7), "none"), ((7, 18), "none"))
        for rank in (0, 1)
    ]
    check(world, tokens, "gpt2", Plan(tuple(tiles), 4, 2))


@pytest.mark.timeout(120)
@pytest.mark.ranks(4)
def test_stages_may_have_different_replicas_and_grids(world, tokens):
    check(world, tokens, "llama", stages_of_different_degree())


@pytest.mark.timeout(120)
@pytest.mark.ranks(2, 4, 8)
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit_and_any_plan_continues(world, tokens, folder):
    job = make_job(tokens, "llama", {"microbatch": 2}, shape=SHAPE)
    pipeline_size = min(world.size, 4)
    plans = {
        virtual_stages: even_plan(
            18, TensorGrid(), pipeline_size, world.size // pipeline_size, 8, 2, virtual_stages=virtual_stages
        )
        for virtual_stages in (1, 2)
    }

    def run(steps: int, virtual_stages: int, resume: bool = False) -> list[float]:
        return go_on(world, job, plans[virtual_stages], folder, steps, resume)

    uninterrupted = run(2, 2)
    other = {2: [(1, 2)], 4: [(2, 1)], 8: []}[world.size]
    for before, after in [(2, 2), *other]:
        result = run(1, before) + run(1, after, resume=True)
        assert largest_relative_difference(result, uninterrupted) < 1e-5
        assert before != after or result == uninterrupted


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_rehearsed_steps_of_equal_stages_take_what_the_literature_says(world, tokens, monkeypatch):
    """A bubble of (p - 1) (f + dX + dW), those of a virtual stage: as many times shorter as a rank has stages."""
    stages, virtual_stages = 4, 2
    shape = {"num_layers": stages * virtual_stages, "hidden_size": 128, "ffn_size": 512}
    job = make_job(tokens, "llama", shape=shape, global_batch=4 * MICROBATCHES)
    plan = even_plan(
        job.model.num_items, TensorGrid(), stages, 1, MICROBATCHES, 4, virtual_stages=virtual_stages, family="equal"
    )
    with rehearsed_world(world, EQUAL, Truth(time_scale=2.0, devices={"equal": DEVICE})) as own:
        split, passes, *late = measured(own, job, plan)
        monkeypatch.setattr(pipeline, "schedule_of", one_f_one_b)
        whole, _, *later = measured(own, job, plan)
    forward, back, weight = (passes[name] for name in ("forward", "backward_input", "backward_weight"))
    busy = MICROBATCHES * virtual_stages * (forward + back + weight) + passes["overlapped"]
    formulas = {
        "in one": (whole, busy + (stages - 1) * (forward + back + weight)),
        "split": (split, busy + (stages - 1) * (forward + back)),
    }
    check_formulas(world, formulas, late + later)
