"""Hidden states cut by positions over y: the losses of one rank, the same bits again, the bytes of all-reduces."""

import functools
from dataclasses import replace

import pytest

from hpctrain.architectures.description import inner_of
from hpctrain.comm.topology import Place, Topology
from hpctrain.config import kernels
from hpctrain.config.parallelism import Overlap
from hpctrain.plan.checks import check_plan
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import (
    Alone,
    by,
    bytes_of_a_step,
    largest_relative_difference,
    losses,
    make_job,
    whole_if_resumed_exactly,
)

TOLERANCE = 1e-5
ROWS, MICROBATCHES, BLOCKS = 5, 2, 2
LAST = 2 * BLOCKS + 2


def tile(items, rows, ranks, grid=(1, 1, 1, 1, False), **options) -> Tile:
    return Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(*grid), **options)


def cut(x: int, y: int, z: int) -> tuple[int, int, int, int, bool]:
    return x, y, z, 1, True


TILINGS = {
    2: {
        "y": (tile((0, LAST), (0, 5), (0, 1), cut(1, 2, 1)),),
        "y, recompute in row chunks": (tile((0, LAST), (0, 5), (1, 0), cut(1, 2, 1), recompute="full", row_chunks=2),),
    },
    4: {
        "x and y": (tile((0, LAST), (0, 5), (0, 1, 2, 3), cut(2, 2, 1)),),
        "y and z": (tile((0, LAST), (0, 5), (0, 1, 2, 3), cut(1, 2, 2)),),
        "more y than key/value heads": (tile((0, LAST), (0, 5), (0, 1, 2, 3), cut(1, 4, 1), recompute="full"),),
        "stages": (
            tile((0, 2), (0, 5), (0, 1), cut(1, 2, 1)),
            tile((2, LAST), (0, 5), (3, 2), cut(1, 2, 1), row_chunks=3),
        ),
        "from cut to whole": (
            tile((0, 3), (0, 5), (0, 1), cut(1, 2, 1)),
            tile((3, LAST), (0, 5), (2, 3), (1, 2, 1, 1, False)),
        ),
        "from whole to cut": (tile((0, 3), (0, 5), (0,)), tile((3, LAST), (0, 5), (2, 3), cut(1, 2, 1))),
        "replicas of different grids": (
            tile((0, LAST), (0, 3), (0, 1), cut(1, 2, 1)),
            tile((0, LAST), (3, 5), (2, 3), (1, 2, 1, 1, False)),
        ),
        "replicas that share weights": (
            tile((0, LAST), (0, 3), (0, 1), cut(1, 2, 1), zero=3),
            tile((0, LAST), (3, 5), (2, 3), cut(1, 2, 1), zero=3, state_share=2),
        ),
        "virtual stages": tuple(
            tile(items, (0, 5), ranks, cut(1, 2, 1))
            for items, ranks in (((0, 2), (0, 1)), ((2, 3), (2, 3)), ((3, 4), (0, 1)), ((4, LAST), (2, 3)))
        ),
        "zero-bubble": (
            tile((0, 3), (0, 5), (0, 1), cut(1, 2, 1)),
            tile((3, LAST), (0, 5), (2, 3), cut(1, 2, 1)),
        ),
    },
    8: {
        "x, y and z": (tile((0, LAST), (0, 5), tuple(range(8)), cut(2, 2, 2)),),
        "another y behind": (
            tile((0, 3), (0, 5), (0, 1, 2, 3), cut(1, 4, 1)),
            tile((3, LAST), (0, 2), (4, 5), cut(1, 2, 1), zero=0),
            tile((3, LAST), (2, 5), (6, 7), cut(2, 1, 1)[:3], zero=0),
        ),
    },
}


def plan_of(name: str, size: int) -> Plan:
    tiles = TILINGS[size][name]
    unused = set(range(size)) - {rank for each in tiles for rank in each.ranks}
    schedule = "zb-h1" if name == "zero-bubble" else "1f1b"
    return Plan(tiles, MICROBATCHES, ROWS, schedule, tuple(sorted(unused)))


def pytest_generate_tests(metafunc):
    if "tiling" in metafunc.fixturenames:
        from mpi4py import MPI

        names = TILINGS.get(MPI.COMM_WORLD.size, {})
        models = ("gpt2", "llama")
        metafunc.parametrize(("model", "tiling"), [(models[i % 2], name) for i, name in enumerate(names)])


def job_of(tokens, model: str, **more):
    shape = {"num_layers": BLOCKS, "hidden_size": 16, "num_heads": 4, "vocab_size": 61}
    if model == "llama":
        shape |= {"ffn_size": 24}
    job = make_job(tokens, model, shape=shape, global_batch=ROWS * MICROBATCHES, learning_rate=1e-2)
    return job.model_copy(update=more)


@functools.cache
def one_rank(world, tokens, model: str, steps: int) -> list[float]:
    if world.rank:
        return world.broadcast_object(None)
    whole = Plan((tile((0, LAST), (0, ROWS), (0,)),), MICROBATCHES, ROWS)
    return world.broadcast_object(losses(Alone(), job_of(tokens, model), steps, plan=whole))


def curve(world, job, plan: Plan, steps: int) -> list[float]:
    with world.freeing():
        return losses(world, job, steps, plan=plan)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_losses_are_those_of_one_rank(world, tokens, steps, model, tiling, monkeypatch):
    """Ranks are on two hosts, so that messages between stages go where they would be cut and gathered."""
    places = tuple(Place("a" if rank < world.size // 2 else "b", "cpu") for rank in range(world.size))
    monkeypatch.setattr(world, "settings", replace(world.settings, topology=Topology(places)))
    plan, expected = plan_of(tiling, world.size), one_rank(world, tokens, model, steps)
    check_plan(job_of(tokens, model), plan, "the plan")
    result = curve(world, job_of(tokens, model), plan, steps)
    difference = largest_relative_difference(result, expected)
    if world.rank == 0:
        print(f"{model}, {tiling}: {difference:.1e} {plan.describe()}")
    assert expected[steps - 1] < 0.98 * expected[0], "the reference learns"
    assert difference < TOLERANCE


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["x and y", "stages"])
def test_what_is_overlapped_changes_no_bit(world, tokens, name):
    plan = plan_of(name, 4)
    off, on = (
        curve(world, job_of(tokens, "llama", overlap=Overlap(tensor=on, data=on, z=on)), plan, 4)
        for on in (False, True)
    )
    assert on == off


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_so_does_a_loss_that_goes_through_its_tokens_in_chunks(world, tokens, steps, model, monkeypatch):
    expected = one_rank(world, tokens, model, steps)
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 4 * 31 * 12)  # of twelve tokens, of which each y has 31 ids
    result = curve(world, job_of(tokens, model), plan_of("y", 2), steps)
    assert largest_relative_difference(result, expected) < TOLERANCE


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(world, tokens, folder, dtype):
    name = {2: "y", 4: "replicas that share weights" if dtype == "fp32" else "stages", 8: "x, y and z"}[world.size]
    job, plan = job_of(tokens, "gpt2"), plan_of(name, world.size)
    job = job.model_copy(update={"train": job.train.model_copy(update={"dtype": dtype})})
    whole_if_resumed_exactly(world, job, plan, folder)


@pytest.mark.ranks(4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_y_moves_the_bytes_of_its_formula_and_stages_send_a_part_each(world, tokens, recompute, monkeypatch):
    """fp32; n ranks send together n - 1 times what they gather, and as much of what they scatter.

    Of each block four are gathered or scattered forward, and four backward; the inputs of qkv and up are gathered once
    more for the gradients of their weights, but not of what is computed again. The embedding is scattered forward and
    gathered backward, the head in reverse and gathered once more. Beyond that: the sums of the loss, and once
    a step the gradients of what y does not cut.
    """
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    n, shape = world.size, {"num_kv_heads": 8, "vocab_size": 64}
    plan = {"tensor": {"y": n}, "microbatch": 8, "recompute": recompute, "sequence_parallel": True}
    job = make_job(tokens, "llama", plan, shape=shape)
    h, blocks, numbers = job.model.hidden_size, job.model.num_layers, 16 * 16  # tokens of a step: rows x positions
    assert inner_of(job.model) % n == 0
    forward, again = (2, 0) if recompute == "full" else (1, 1)
    moved = (forward + 1) * (4 * blocks + 2) * numbers * h + again * (2 * blocks + 1) * numbers * h
    summed = forward * 3 * numbers + (2 * blocks + 1) * h
    sent = bytes_of_a_step(world, job, lambda layout: [layout.axes.y])
    assert sent == 4 * (n - 1) * (moved + 2 * summed)
