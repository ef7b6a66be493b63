"""Backward passes that are split: the bits of those in one, whatever the schedule; the bubbles of the literature."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import hypothesis.strategies as st
import pytest

import hpctrain.engine.step.pipeline as pipeline
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.plan.checks import check_plan
from hpctrain.plan.schedule import Action, one_f_one_b, schedule_of
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.sharding.grid import TensorGrid
from tests import clusters
from tests.examples import costly
from tests.ranks.given_on_ranks import given_on_ranks
from tests.ranks.punctual import MOST_STEPS, TOO_LATE, punctual_step
from tests.ranks.small_runs import (
    curve_and_weights,
    curve_of_one_rank,
    go_on,
    largest_relative_difference,
    make_job,
    make_trainer,
    parametrize_by_turns,
    rehearsed_world,
)
from tests.tilings import tilings

STEPS = 3
LAYOUTS = {
    2: [{"pipeline": 2}, {"pipeline": 2, "recompute": "full"}],
    4: [
        {"pipeline": 4},
        {"pipeline": 2, "tensor": {"y": 2}, "recompute": "full"},
        {"pipeline": 2, "tensor": {"x": 2}},
        {"pipeline": 2, "data": 2},
        {"pipeline": 2, "data": 2, "zero": 2},
        {"pipeline": 2, "data": 2, "zero": 3},
    ],
    8: [{"pipeline": 8}, {"pipeline": 2, "tensor": {"z": 2}, "data": 2}],
}


def pytest_generate_tests(metafunc):
    parametrize_by_turns(metafunc, "model", ("gpt2", "llama"), LAYOUTS)


def shape_of(num_ranks: int) -> dict[str, int]:
    """Return the shape of a model with a block for each stage of the longest pipeline."""
    return {"num_layers": max(4, num_ranks), "hidden_size": 16, "num_heads": 4}


def overlapped(job, on: bool):
    return job.model_copy(update={"overlap": Overlap(bucket_bytes=3000, tensor=on, data=on)})


def check(world, tokens, model: str, plan: Plan, monkeypatch) -> None:
    """Compare a plan's schedules with backward passes in one, and with one rank."""
    job = make_job(tokens, model, shape=shape_of(world.size), global_batch=plan.rows * plan.microbatches)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "schedule_of", one_f_one_b)
        expected = curve_and_weights(world, overlapped(job, False), plan, STEPS)
    one = curve_of_one_rank(world, tokens, model, plan.rows, plan.microbatches, STEPS, **shape_of(world.size))
    assert largest_relative_difference(expected[0], one) < 1e-5
    for schedule, on in (("1f1b", False), ("zb-h1", True)):
        changed = replace(plan, schedule=schedule)
        check_plan(job, changed, "drawn")
        check_schedules(changed, reduce_early=on)
        assert curve_and_weights(world, overlapped(job, on), changed, STEPS) == expected, (schedule, on, plan)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_schedules_are_bit_equal_and_give_the_losses_of_one_rank(world, tokens, model, layout, monkeypatch):
    job = make_job(tokens, model, {"microbatch": 2, "schedule": "zb-h1", **layout}, shape=shape_of(world.size))
    plan = resolve_plan(job, world.size).plan
    assert plan.schedule == "zb-h1"
    split = [any(s.action is Action.BACKWARD_WEIGHT for s in schedule_of(plan, tile)) for tile in plan.tiles]
    assert split == [bool(plan.upstream(tile)) for tile in plan.tiles]
    check(world, tokens, model, plan, monkeypatch)


def split_tilings(tokens, model: str, size: int):
    drawn = tilings(make_job(tokens, model, shape=shape_of(size)).model, size, 5, 3)
    if size > 1:
        drawn = drawn.filter(lambda plan: any(plan.upstream(tile) for tile in plan.tiles))
    return drawn.map(lambda plan: (model, plan))


@pytest.mark.ranks(4, 8)
@pytest.mark.timeout(300)
def test_random_tilings_are_bit_equal(world, tokens, monkeypatch):
    """Different depths, grids, recomputing and row_chunks side by side."""
    drawn = st.one_of(*(split_tilings(tokens, model, world.size) for model in ("gpt2", "llama")))

    @given_on_ranks(drawn, max_examples=costly(16))
    def every(world, drawn):
        check(world, tokens, *drawn, monkeypatch)

    every(world)


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_interrupted_and_resumed_by_another_schedule_is_uninterrupted_bit_for_bit(world, tokens, folder):
    job = make_job(tokens, "llama", {"pipeline": world.size, "microbatch": 2}, shape=shape_of(world.size))
    plan = resolve_plan(job, world.size).plan

    def run(steps: int, schedule: str, resume: bool = False) -> list[float]:
        return go_on(world, job, replace(plan, schedule=schedule), folder, steps, resume)

    uninterrupted = run(4, "zb-h1")
    for schedule in ("zb-h1", "1f1b"):
        assert run(2, "zb-h1") + run(2, schedule, resume=True) == uninterrupted


# ---- time ------------------------------------------------------------------------------------------------------------

MEMORY = {"memory_bytes": 200_000_000, "memory_bytes_per_second": 4e10}
FLOPS = {"fp32": 2e9}
EQUAL = parse_cluster(
    clusters.family("equal", kind="cuda", origin="datasheet", peak_flops_per_second=FLOPS, **MEMORY)
    + clusters.nodes({"equal": 4}, None, origin="datasheet"),
    "a test",
)
DEVICE = PretendDevice(flops_per_second=FLOPS, **MEMORY)
MICROBATCHES = 8
PASSES = ("forward", "backward", "backward_input", "backward_weight")


def measured(world, job, plan: Plan) -> tuple[float, dict[str, float], float]:
    """Return the pretended seconds of a step; of each pass over a tile of the slowest rank, and of overlaps; overrun.

    Steps are taken until one is punctual.
    """
    _, training, _ = open_datasets(job.data, job.train.seed)
    device, noted = world.accelerator, defaultdict(list)
    with world.freeing():
        trainer = make_trainer(world, job, plan, accelerator=device)
        trainer.initialise()

        def noting(name: str, run):
            def noted_run(*args):
                before = device.busy_seconds
                result = run(*args)
                noted[name].append(device.busy_seconds - before)
                return result

            return noted_run

        for stage in trainer.layout.stages:
            for name in PASSES:
                setattr(stage, name, noting(name, getattr(stage, name)))

        def begin() -> None:
            noted.clear()
            device.start_anew()

        seconds, overrun = punctual_step(world, trainer, training, begin)
        concurrent = device.busy_seconds - sum(map(sum, noted.values()))
        own = {name: mean(noted[name]) if noted[name] else 0.0 for name in PASSES} | {"overlapped": concurrent}
    every = world.all_objects(own)
    return seconds, {name: max(each[name] for each in every) for name in own}, overrun


def check_formulas(world, result: dict[str, tuple[float, float]], overruns: Sequence[float]) -> None:
    """Compare by name the seconds of a step with those of a formula, where the machine was punctual enough for it."""
    if world.rank == 0:
        for name, (seconds, formula) in result.items():
            print(f"{name:12} {seconds:.4f} s, formula {formula:.4f} s ({seconds / formula - 1:+.1%})")
        print(f"overrun {max(overruns):.2%}")
    if max(overruns) > TOO_LATE:
        pytest.skip(f"this machine is too busy: after {MOST_STEPS} steps ranks are still late by {max(overruns):.1%}")
    for seconds, formula in result.values():
        assert seconds == pytest.approx(formula, rel=0.05)


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_rehearsed_steps_of_equal_stages_take_what_the_literature_says(world, tokens, monkeypatch):
    shape = {"num_layers": 4, "hidden_size": 128, "ffn_size": 512}
    job = make_job(tokens, "llama", shape=shape, global_batch=4 * MICROBATCHES)
    plan = even_plan(job.model.num_items, TensorGrid(), 4, 1, MICROBATCHES, 4, schedule="zb-h1", family="equal")
    with rehearsed_world(world, EQUAL, Truth(time_scale=3.0, devices={"equal": DEVICE})) as own:
        delayed, passes, *late = measured(own, job, plan)
        split, _, *later = measured(own, job, replace(plan, schedule="1f1b"))
        monkeypatch.setattr(pipeline, "schedule_of", one_f_one_b)
        whole, _, *latest = measured(own, job, replace(plan, schedule="1f1b"))
    forward, back, weight = (passes[name] for name in ("forward", "backward_input", "backward_weight"))
    busy, hops = MICROBATCHES * (forward + back + weight) + passes["overlapped"], len(plan.tiles) - 1
    formulas = {
        "1f1b in one": (whole, busy + hops * (forward + back + weight)),
        "1f1b": (split, busy + hops * (forward + back)),
        "zb-h1": (delayed, busy + hops * max(forward + back - weight, forward, back)),
    }
    check_formulas(world, formulas, late + later + latest)
    assert delayed < split < whole
