"""Every family on several ranks has the losses of one: x, y, z, pipelines, mixed tiles, heads that several y share."""

import functools

import pytest

from hpctrain.config.job import Job
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, largest_relative_difference, losses, make_job

TOLERANCE, STEPS = 1e-5, 3
GEMMA = {"head_size": 8, "window": 5, "global_every": 2, "score_divisor": 6.0, "tie_head": True}
FAMILIES = {
    "qwen2": {},
    "qwen3": {"head_size": 8},
    "mistral": {"window": 5},
    "starcoder2": {"window": 5, "tie_head": True},
    "gemma2": GEMMA | {"score_cap": 2.0, "logit_cap": 4.0},
    "gemma3": GEMMA | {"rope_local_base": 100.0},
}
LAYOUTS = {
    2: [{"tensor": {"x": 2}}, {"tensor": {"y": 2}}, {"tensor": {"z": 2}}, {"pipeline": 2}],
    4: [{"tensor": {"y": 4}}, {"tensor": {"x": 2, "y": 2}}, {"tensor": {"y": 2}, "pipeline": 2, "recompute": "full"}],
    8: [{"tensor": {"x": 2, "y": 2, "z": 2}}, {"tensor": {"y": 2}, "pipeline": 2, "data": 2, "zero": 3}],
}


def tile(items, rows, ranks, grid, **more) -> Tile:
    return Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(*grid), **more)


MIXED = {  # 4 blocks are 10 items, cut inside of blocks too; y = 4 is more than the 2 key/value heads
    2: [tile((0, 4), (0, 4), (0,), (1, 1, 1)), tile((4, 10), (0, 4), (1,), (1, 1, 1))],
    4: [tile((0, 10), (0, 3), (2, 0), (1, 2, 1)), tile((0, 10), (3, 4), (1,), (1, 1, 1))],
    8: [
        tile((0, 4), (0, 4), (0, 1, 2, 3), (1, 4, 1)),
        tile((4, 10), (0, 2), (4, 5), (2, 1, 1), recompute="full"),
        tile((4, 10), (2, 4), (6, 7), (1, 2, 1)),
    ],
}


def job_of(tokens, family: str, plan: dict | None = None) -> Job:
    return make_job(tokens, "llama", plan, shape={"architecture": family, **FAMILIES[family]})


@functools.cache
def reference(world, tokens, family: str) -> list[float]:
    return world.broadcast_object(losses(Alone(), job_of(tokens, family), STEPS) if world.rank == 0 else None)


def pytest_generate_tests(metafunc):
    if metafunc.function is test_each_layout_has_the_losses_of_one_rank:
        from mpi4py import MPI

        metafunc.parametrize("family", ("gemma2", "qwen3") if MPI.COMM_WORLD.size == 8 else FAMILIES)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(240)
def test_each_layout_has_the_losses_of_one_rank(world, tokens, family):
    expected = reference(world, tokens, family)
    assert expected[STEPS - 1] < expected[0], "the reference learns"
    # Each family with each kind of layout on 2 ranks, and with one of those for 4; each layout for 8 with one family.
    layouts, turn = LAYOUTS[world.size], list(FAMILIES).index(family)
    for layout in layouts if world.size == 2 else [layouts[turn % len(layouts)]]:
        with world.freeing():
            result = losses(world, job_of(tokens, family, layout), STEPS)
        assert largest_relative_difference(result, expected) < TOLERANCE, layout


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_different_tiles_have_the_losses_of_one_rank(world, tokens, family):
    tiles = MIXED[world.size]
    unused = set(range(world.size)) - {rank for each in tiles for rank in each.ranks}
    plan = Plan(tuple(tiles), 4, 4, unused=tuple(sorted(unused)))
    with world.freeing():
        result = losses(world, job_of(tokens, family), STEPS, plan=plan)
    assert largest_relative_difference(result, reference(world, tokens, family)) < TOLERANCE
