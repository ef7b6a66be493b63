"""All features in one run: sequence parallelism, z, uneven tilings, products in parts, offload, selective recompute,
fused kernels, ZeRO, interleaving and zero bubble. The losses of one rank, and the same bits after a resume."""

import functools
import itertools

import pytest

from hpctrain.config.kernels import KernelChoice
from hpctrain.config.parallelism import Overlap
from hpctrain.plan.checks import check_plan
from hpctrain.plan.launch_order import check_launch_order
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, go_on, largest_relative_difference, make_job, whole_if_resumed_exactly

INTERRUPTED = 2
ROWS, MICROBATCHES, BLOCKS = 4, 2, 4
LAST = 2 * BLOCKS + 2
SHAPE = {"num_layers": BLOCKS, "hidden_size": 16, "num_heads": 4}
SIZES = {"shape": SHAPE, "global_batch": ROWS * MICROBATCHES, "learning_rate": 1e-2}
FUSED = "fused"
CUT, SHARDED = TensorGrid(y=2, sequence_parallel=True), TensorGrid(z=2)
OVERLAP = Overlap(tensor=True, data=True, z=True, tensor_parts=2, bucket_bytes=3000)
FUSING = 4
"""On so many ranks some have fused kernels: to compile takes longer than all else, and is the same on others."""


def tile(items, rows, first_rank: int, grid: TensorGrid, **options) -> Tile:
    ranks = tuple(range(first_rank, first_rank + grid.size))
    family = FUSED if grid == CUT else "cpu"  # to compile for all of them takes longer than to train
    options = {"offload": "optimizer", "recompute": "selective", "family": family, **options}
    return Tile(Interval(*items), Interval(*rows), ranks, grid, **options)


def in_turn(cuts, *stages) -> tuple[Tile, ...]:
    """Return tiles by which the stages, each of (rows, first rank, grid, options), alternate over the cuts."""
    tiles = []
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        for rows, first_rank, grid, options in stages[number % len(stages)]:
            tiles.append(tile((start, stop), rows, first_rank, grid, **options))
    return tuple(tiles)


WHOLE = (0, ROWS)
PLANS = {
    4: {
        "interleaved": in_turn((0, 3, 5, 7, LAST), [(WHOLE, 0, CUT, {})], [(WHOLE, 2, SHARDED, {})]),
        "zero bubble": in_turn(
            (0, 5, LAST),
            [((0, 1), 0, TensorGrid(), {"zero": 2}), ((1, ROWS), 1, TensorGrid(), {"zero": 2, "state_share": 2})],
            [(WHOLE, 2, CUT, {"zero": 3})],
        ),
    },
    8: {
        "interleaved": in_turn(
            (0, 3, 5, 7, LAST),
            [((0, 2), 0, CUT, {}), ((2, ROWS), 2, SHARDED, {})],
            [(WHOLE, 4, TensorGrid(y=2, z=2, sequence_parallel=True), {})],
        ),
    },
}


def pytest_generate_tests(metafunc):
    from mpi4py import MPI

    metafunc.parametrize("name", PLANS.get(MPI.COMM_WORLD.size, ()))


@functools.cache
def one_rank(world, tokens, folder, steps: int) -> list[float]:
    """Return losses and norms of rank 0 alone, with none of the features."""
    job = make_job(tokens, "gpt2", **SIZES)
    whole = Plan((Tile(Interval(0, LAST), Interval(0, ROWS), (0,)),), MICROBATCHES, ROWS)
    return world.on_first_rank(lambda: go_on(Alone(), job, whole, folder, steps, resume=False))


@pytest.mark.ranks(4, 8)
@pytest.mark.timeout(240)
def test_all_features_at_once_train_as_one_rank_and_resume_bit_for_bit(
    world, tokens, folder, shared_tmp_path, name, steps, request
):
    if fuses := world.size == FUSING:
        request.getfixturevalue("compiler")
    plan = Plan(PLANS[world.size][name], MICROBATCHES, ROWS, "zb-h1" if name == "zero bubble" else "1f1b")
    job = make_job(tokens, "gpt2", **SIZES)
    job = job.model_copy(
        update={"overlap": OVERLAP, "kernels": KernelChoice(fused=False, fused_by_family={FUSED: fuses})}
    )
    check_plan(job, plan, name)
    check_schedules(plan, reduce_early=True)
    check_launch_order(plan)
    uninterrupted = whole_if_resumed_exactly(world, job, plan, folder, INTERRUPTED, steps - INTERRUPTED)
    expected = one_rank(world, tokens, shared_tmp_path / "one", steps)
    assert expected[2 * (steps - 1)] < 0.995 * expected[0], "the reference learns"
    assert largest_relative_difference(uninterrupted[::2], expected[::2]) < 1e-5
