"""Same job, same numbers: any layout gives the losses of one rank."""

import functools
import itertools
from dataclasses import replace

import pytest

from hpctrain.comm.topology import Place, Topology
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, largest_relative_difference, losses, losses_of_one_rank, make_job

TOLERANCE = 1e-5
AXES = ("x", "y", "z", "pipeline", "data")


def job_of(tokens, model: str, plan: dict | None = None, blocks: int = 2, **train):
    return make_job(tokens, model, plan, {"num_layers": blocks}, **train)


def factorisations(size: int, axes=AXES):
    if len(axes) == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in factorisations(size // first, axes[1:]))


# Where all are too many: each axis alone, each pair that interacts, and shared key/value heads (y = 4 over 2 heads).
SELECTION = {
    2: list(factorisations(2)),
    4: [(1, 4, 1, 1, 1), (2, 2, 1, 1, 1), (1, 2, 2, 1, 1), (2, 1, 1, 2, 1), (1, 2, 1, 1, 2), (1, 1, 2, 1, 2)]
    + [(1, 1, 1, 2, 2), (1, 1, 1, 4, 1), (1, 1, 4, 1, 1)],
    8: [(2, 2, 2, 1, 1), (1, 2, 1, 2, 2), (1, 1, 1, 8, 1)],
}


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        from mpi4py import MPI

        size, models = MPI.COMM_WORLD.size, ("llama", "gpt2")
        if metafunc.config.getoption("--thorough"):
            resolved = list(itertools.product(models, factorisations(size)))
        else:  # each with one of the models
            layouts = SELECTION.get(size, [])
            resolved = [(models[i % 2], layout) for i, layout in enumerate(layouts)]
        metafunc.parametrize(("model", "layout"), resolved, ids=lambda each: each if each in models else name_of(each))


def name_of(layout) -> str:
    return "x".join(map(str, layout))


@functools.cache
def reference(world, tokens, model: str, steps: int, blocks: int = 2) -> list[float]:
    """The losses of one rank, computed once, by rank 0."""
    job = job_of(tokens, model, blocks=blocks)
    return world.broadcast_object(losses(Alone(), job, steps) if world.rank == 0 else None)


def plan_of(layout) -> dict:
    x, y, z, pipeline, data = layout
    return {"tensor": {"x": x, "y": y, "z": z}, "pipeline": pipeline, "data": data}


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_losses_are_those_of_one_rank(world, tokens, steps, model, layout):
    blocks = max(2, layout[AXES.index("pipeline")])
    expected = reference(world, tokens, model, steps, blocks)
    result = losses(world, job_of(tokens, model, plan_of(layout), blocks), steps)
    difference = largest_relative_difference(result, expected)
    if world.rank == 0:
        print(f"{model} {dict(zip(AXES, layout, strict=True))}: {difference:.2e}")
    assert expected[steps - 1] < 0.98 * expected[0], "the reference learns"
    assert difference < TOLERANCE


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("option", [{"recompute": "full"}, {"zero": 0}, {"microbatch": 2}])
def test_options_do_not_change_losses(world, tokens, steps, option):
    job = job_of(tokens, "gpt2", {"tensor": {"z": 2}, "pipeline": 1, "data": 2, **option})
    expected = reference(world, tokens, "gpt2", steps)
    assert largest_relative_difference(losses(world, job, steps), expected) < TOLERANCE


LION = {"optimizer": "lion", "beta2": 0.99, "learning_rate": 3e-4}
OF_ONE_MOMENT = {
    "y": {"tensor": {"y": 4}},
    "x and y": {"tensor": {"x": 2, "y": 2}},
    "y and z": {"tensor": {"y": 2, "z": 2}},
    "x, pipeline": {"tensor": {"x": 2}, "pipeline": 2},
    "z, data, ZeRO 3": {"tensor": {"z": 2}, "data": 2, "zero": 3},
    "data, ZeRO 0": {"data": 4, "zero": 0},
    "pipeline, data, ZeRO 2": {"pipeline": 2, "data": 2, "zero": 2},
    "pipeline": {"pipeline": 4},
}


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", OF_ONE_MOMENT)
def test_losses_by_an_optimizer_of_one_moment_are_those_of_one_rank(world, tokens, steps, name):
    """Its direction is a sign, which rounding may turn where a sum is nearly zero."""
    expected = losses_of_one_rank(world, tokens, "llama", steps, **LION)
    result = losses(world, make_job(tokens, "llama", OF_ONE_MOMENT[name], **LION), steps)
    difference = largest_relative_difference(result, expected)
    if world.rank == 0:
        print(f"lion, {name}: {difference:.2e}")
    assert expected[steps - 1] < 0.995 * expected[0], "the reference learns"
    assert difference < TOLERANCE


UNEVEN = {
    # 3 + 5 rows feed 8 rows that z splits; blocks cut 0.5 : 1.5
    "different data degrees": [((0, 2), (0, 3), (0,), (1, 1, 1)), ((0, 2), (3, 8), (1,), (1, 1, 1))]
    + [((2, 6), (0, 8), (2, 3), (1, 1, 2))],
    # y hands over to x: features are exchanged by intersection
    "different grids": [((0, 4), (0, 8), (0, 1), (1, 2, 1)), ((4, 6), (0, 8), (2, 3), (2, 1, 1))],
    # two pipelines side by side, of different depth
    "different depths": [((0, 2), (0, 3), (0,), (1, 1, 1)), ((2, 4), (0, 3), (1,), (1, 1, 1))]
    + [((4, 6), (0, 3), (2,), (1, 1, 1)), ((0, 6), (3, 8), (3,), (1, 1, 1))],
}


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_ranks_on_several_hosts_give_the_same_losses(world, tokens, steps, monkeypatch):
    """Two ranks on each of two hosts, by name: tensor groups by shared memory, the pipeline by MPI messages."""
    monkeypatch.setattr(
        world, "settings", replace(world.settings, topology=Topology(tuple(Place(host, "cpu") for host in "aabb")))
    )
    for plan in ({"tensor": {"y": 2}, "pipeline": 2}, {"tensor": {"z": 2}, "data": 2}):
        result = losses(world, job_of(tokens, "gpt2", plan), steps)
        assert largest_relative_difference(result, reference(world, tokens, "gpt2", steps)) < TOLERANCE


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_tilings_give_the_same_losses(world, tokens, steps, shared_tmp_path, name):
    tiles = [
        Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(*grid)) for items, rows, ranks, grid in UNEVEN[name]
    ]
    path = shared_tmp_path / f"{name}.toml"
    if world.rank == 0:
        path.write_text(dump_plan(Plan(tuple(tiles), microbatches=2, rows=8)))
    world.agree(None)
    expected = reference(world, tokens, "llama", steps)
    result = losses(world, job_of(tokens, "llama", {"file": path}), steps)
    assert largest_relative_difference(result, expected) < TOLERANCE


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_the_same_plan_twice_is_bit_equal(world, tokens):
    job = job_of(tokens, "llama", {"tensor": {"y": 2}, "pipeline": 2})
    assert losses(world, job, 5) == losses(world, job, 5)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_bf16_follows_fp32_and_is_bit_equal(world, tokens, steps):
    job = job_of(tokens, "llama", {"tensor": {"x": 2}, "data": 2}, dtype="bf16")
    result = losses(world, job, steps)
    assert largest_relative_difference(result[:steps], reference(world, tokens, "llama", steps)[:steps]) < 0.02
    assert result == losses(world, job, steps)
