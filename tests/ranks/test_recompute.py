"""Selective recomputing of tiles: the bits of tiles that keep all, on any grid and by any schedule, also resumed."""

from dataclasses import replace

import pytest

from hpctrain.config.parallelism import Overlap
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import (
    bytes_of_a_step,
    curve_and_weights,
    curve_of_one_rank,
    go_on,
    largest_relative_difference,
    make_job,
)

TOLERANCE, STEPS = 1e-5, 3
ROWS, MICROBATCHES, BLOCKS = 4, 3, 4
SHAPE = {"num_layers": BLOCKS, "hidden_size": 16, "num_heads": 4}
LAST = 2 * BLOCKS + 2


def tile(items, rows, ranks, grid=(1, 1, 1, 1, False), **options) -> Tile:
    return Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(*grid), **{"recompute": "selective", **options})


TILINGS = {
    2: {
        "stages": (tile((0, 4), (0, ROWS), (0,)), tile((4, LAST), (0, ROWS), (1,), row_chunks=2)),
        "zero-bubble": (tile((0, 4), (0, ROWS), (0,)), tile((4, LAST), (0, ROWS), (1,))),
        "y, sequence parallel": (tile((0, LAST), (0, ROWS), (0, 1), (1, 2, 1, 1, True)),),
    },
    4: {
        "x and y, sequence parallel": (tile((0, LAST), (0, ROWS), (0, 1, 2, 3), (2, 2, 1, 1, True)),),
        "z and ZeRO 3": (
            tile((0, LAST), (0, 2), (0, 1), (1, 1, 2, 1, False), zero=3),
            tile((0, LAST), (2, 4), (2, 3), (1, 1, 2, 1, False), zero=3, state_share=2),
        ),
    },
    8: {
        "some select, some keep, some recompute all, zero-bubble": (
            tile((0, 4), (0, ROWS), (0, 1, 2, 3), (1, 2, 2, 1, True)),
            tile((4, 7), (0, 3), (4,), recompute="none"),
            tile((4, 7), (3, ROWS), (5,), recompute="full"),
            tile((7, LAST), (0, ROWS), (6, 7), (2, 1, 1, 1, False)),
        ),
    },
}


def plan_of(name: str, size: int) -> Plan:
    return Plan(TILINGS[size][name], MICROBATCHES, ROWS, "zb-h1" if "zero-bubble" in name else "1f1b")


def keeping_all(plan: Plan) -> Plan:
    return replace(plan, tiles=tuple(replace(tile, recompute="none") for tile in plan.tiles))


def job_of(tokens, model: str, is_overlapped: bool):
    job = make_job(tokens, model, shape=SHAPE, global_batch=ROWS * MICROBATCHES)
    on = Overlap(tensor=True, tensor_parts=2, z=True, data=True, bucket_bytes=3000)
    return job.model_copy(update={"overlap": on if is_overlapped else Overlap()})


def pytest_generate_tests(metafunc):
    if "model" in metafunc.fixturenames:
        from mpi4py import MPI

        names = TILINGS.get(MPI.COMM_WORLD.size, {})
        metafunc.parametrize(("model", "tiling"), [(("llama", "gpt2")[i % 2], name) for i, name in enumerate(names)])


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_losses_and_weights_are_the_bits_of_tiles_that_keep_all(world, tokens, model, tiling):
    plan = plan_of(tiling, world.size)
    expected = curve_and_weights(world, job_of(tokens, model, False), keeping_all(plan), STEPS)
    for is_overlapped in (False, True):
        result = curve_and_weights(world, job_of(tokens, model, is_overlapped), plan, STEPS)
        assert result == expected, (tiling, is_overlapped)
    one = curve_of_one_rank(world, tokens, model, ROWS, MICROBATCHES, STEPS, **SHAPE)
    assert largest_relative_difference(expected[0], one) < TOLERANCE


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(world, tokens, folder):
    job, plan = job_of(tokens, "llama", True), plan_of("x and y, sequence parallel", world.size)
    uninterrupted = go_on(world, job, plan, folder / "once", 4, False)
    before, after = (plan, False), (keeping_all(plan), True)
    first, second = (go_on(world, job, each, folder, 2, resume) for each, resume in (before, after))
    assert first + second == uninterrupted


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tiling", ["x and y, sequence parallel", "z and ZeRO 3"])
def test_no_axis_moves_a_byte_more(world, tokens, tiling):
    """What is computed again needs nothing of other ranks: statistics of norms are kept."""
    job, plan = job_of(tokens, "llama", False), plan_of(tiling, world.size)
    for axis in "xyz":
        of = lambda layout, axis=axis: [getattr(layout.axes, axis)]  # noqa: E731
        sent = [bytes_of_a_step(world, job, of, each) for each in (plan, keeping_all(plan))]
        assert sent[0] == sent[1], axis
