"""Fused kernels on tensor grids: the loss curve of one rank without them, and the same bits interrupted or not."""

from dataclasses import replace

import pytest

from hpctrain.config.job import Job
from hpctrain.config.kernels import KernelChoice
from hpctrain.plan.tiling import Plan
from hpctrain.plan.uniform import resolve_plan
from tests.ranks.small_runs import Alone, largest_relative_difference, losses, make_job, whole_if_resumed_exactly

STEPS, FUSED = 4, "fused"
LAYOUTS = {
    "grid": ("llama", {"tensor": {"x": 2, "y": 2}, "microbatch": 8}),
    "grid of layer norms": ("gpt2", {"tensor": {"x": 2}, "pipeline": 2, "microbatch": 8, "schedule": "zb-h1"}),
    "positions": ("qwen3", {"tensor": {"y": 2}, "sequence_parallel": True, "data": 2, "recompute": "selective"}),
}
SHAPES = {"qwen3": {"architecture": "qwen3", "num_kv_heads": 2, "ffn_size": 64}}


pytestmark = pytest.mark.usefixtures("compiler")


def fused_job(tokens, layout: str, **train) -> tuple[Job, Job, Plan]:
    """Return a job for one rank, the same with a plan, of which a tile has fused kernels, and the plan.

    To compile for all ranks takes longer than to train.
    """
    name, plan = LAYOUTS[layout]
    train = {"validation_sequences": 16} | train  # as many as in a step: for others kernels would be compiled again
    model = name if name not in SHAPES else "llama"
    alone = make_job(tokens, model, shape=SHAPES.get(name), **train)
    job = make_job(tokens, model, plan, SHAPES.get(name), **train)
    job = job.model_copy(update={"kernels": KernelChoice(fused=False, fused_by_family={FUSED: True})})
    plan = resolve_plan(job, 4).plan
    tiles = tuple(replace(tile, family=FUSED) if 0 in tile.ranks else tile for tile in plan.tiles)
    return alone, job, replace(plan, tiles=tiles)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_rank_without_them(world, tokens, layout):
    alone, job, plan = fused_job(tokens, layout)
    expected = world.on_first_rank(lambda: losses(Alone(), alone, STEPS))
    with world.freeing():
        result = losses(world, job, STEPS, plan=plan)
    assert result != expected, "they have other last bits, or were not used"
    assert largest_relative_difference(result, expected) < 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_interrupted_run_has_the_same_bits(world, tokens, layout, folder):
    _, job, plan = fused_job(tokens, layout, steps=4)
    whole_if_resumed_exactly(world, job, plan, folder)
