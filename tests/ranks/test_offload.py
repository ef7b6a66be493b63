"""Tiles that keep state in host memory: the bits of tiles that do not, by any grid and schedule, also resumed."""

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.pretended import equal_nodes
from tests.ranks.punctual import MOST_STEPS, Measurement, punctual_step
from tests.ranks.small_runs import curve_and_weights, go_on, make_job, rehearsed_world, whole

STEPS, ROWS, MICROBATCHES, BLOCKS = 3, 4, 3, 4
SHAPE = {"num_layers": BLOCKS, "hidden_size": 16, "num_heads": 4}
LAST = 2 * BLOCKS + 2


def tile(items, rows, ranks, grid=(1, 1, 1, 1, False), **options) -> Tile:
    return Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(*grid), **{"offload": "optimizer", **options})


TILINGS = {
    1: {
        "whole": (tile((0, LAST), (0, ROWS), (0,)),),
        "row chunks": (tile((0, LAST), (0, ROWS), (0,), row_chunks=2, recompute="selective"),),
    },
    2: {
        "stages": (tile((0, 4), (0, ROWS), (0,)), tile((4, LAST), (0, ROWS), (1,), row_chunks=2)),
        "zero-bubble": (tile((0, 4), (0, ROWS), (0,)), tile((4, LAST), (0, ROWS), (1,))),
        "y, sequence parallel": (tile((0, LAST), (0, ROWS), (0, 1), (1, 2, 1, 1, True), recompute="selective"),),
        "ZeRO 0": tuple(tile((0, LAST), rows, (i,), zero=0) for i, rows in enumerate(((0, 1), (1, 4)))),
        "ZeRO 2": tuple(tile((0, LAST), rows, (i,), zero=2) for i, rows in enumerate(((0, 1), (1, 4)))),
    },
    4: {
        "x and y, sequence parallel": (tile((0, LAST), (0, ROWS), (0, 1, 2, 3), (2, 2, 1, 1, True)),),
        "z and ZeRO 3": (
            tile((0, LAST), (0, 2), (0, 1), (1, 1, 2, 1, False), zero=3, recompute="full"),
            tile((0, LAST), (2, 4), (2, 3), (1, 1, 2, 1, False), zero=3, state_share=2),
        ),
        "virtual stages": tuple(
            tile((start, stop), (0, ROWS), (number % 2,))
            for number, (start, stop) in enumerate(((0, 3), (3, 5), (5, 7), (7, LAST)))
        ),
    },
    8: {
        "each its own, zero-bubble": (
            tile((0, 4), (0, ROWS), (0, 1, 2, 3), (1, 2, 2, 1, True)),
            tile((4, 7), (0, 3), (4,)),
            tile((4, 7), (3, ROWS), (5,), recompute="full", offload="none"),
            tile((7, LAST), (0, ROWS), (6, 7), (2, 1, 1, 1, False), recompute="selective"),
        ),
    },
}


def plan_of(name: str, size: int) -> Plan:
    tiles = TILINGS[size][name]
    unused = tuple(sorted(set(range(size)) - {rank for tile in tiles for rank in tile.ranks}))
    return Plan(tiles, MICROBATCHES, ROWS, "zb-h1" if "zero-bubble" in name else "1f1b", unused=unused)


def keeping_all(plan: Plan) -> Plan:
    return replace(plan, tiles=tuple(replace(tile, offload="none") for tile in plan.tiles))


def job_of(tokens, model: str, is_overlapped: bool, dtype: str = "fp32"):
    job = make_job(tokens, model, shape=SHAPE, global_batch=ROWS * MICROBATCHES, dtype=dtype)
    on = Overlap(tensor=True, tensor_parts=2, z=True, data=True, bucket_bytes=3000)
    return job.model_copy(update={"overlap": on if is_overlapped else Overlap()})


WAYS = (False, "fp32"), (True, "bf16")
"""Whether what can be is overlapped, and the dtype: a tiling has one of them, and the next but one the other."""


def pytest_generate_tests(metafunc):
    if "model" in metafunc.fixturenames:
        from mpi4py import MPI

        is_all, cases = metafunc.config.getoption("--thorough"), []
        for i, name in enumerate(TILINGS.get(MPI.COMM_WORLD.size, {})):
            turn = WAYS if is_all else WAYS[i // 2 % 2 :][:1]
            cases += [(("llama", "gpt2")[i % 2], name, *way) for way in turn]
        metafunc.parametrize(("model", "tiling", "is_overlapped", "dtype"), cases)


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.timeout(120)
def test_losses_and_weights_are_the_bits_of_tiles_without_offload(world, tokens, model, tiling, is_overlapped, dtype):
    """In half precision masters are in host memory, too."""
    plan, job = plan_of(tiling, world.size), job_of(tokens, model, is_overlapped, dtype)
    assert curve_and_weights(world, job, plan, STEPS) == curve_and_weights(world, job, keeping_all(plan), STEPS)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tiling", ["x and y, sequence parallel", "z and ZeRO 3"])
def test_a_run_continues_with_and_without_offload_bit_for_bit(world, tokens, folder, tiling):
    """Checkpoints are the same, tensor by tensor."""
    job, plan = job_of(tokens, "llama", True, "bf16"), plan_of(tiling, world.size)
    uninterrupted = go_on(world, job, keeping_all(plan), folder / "once", 4, False)
    first = go_on(world, job, plan, folder, 2, False)
    second = go_on(world, job, keeping_all(plan), folder, 1, True)
    third = go_on(world, job, plan, folder, 1, True)
    assert first + second + third == uninterrupted
    if world.rank == 0:
        expected, tensors = whole(folder / "once"), whole(folder)
        assert all(np.array_equal(tensors[name], expected[name]) for name in expected)


def device_of(memory_bytes: int) -> PretendDevice:
    return PretendDevice(
        memory_bytes=memory_bytes,
        memory_bytes_per_second=2e9,
        flops_per_second={"fp32": 5e8},
        host_copy_bytes_per_second=1e7,
    )


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(180)
def test_a_job_that_fits_with_offload_alone_takes_the_memory_and_the_time_that_are_predicted(world, tokens):
    job = make_job(tokens, "llama", shape={"hidden_size": 128, "ffn_size": 512}, global_batch=32)
    job = job.model_copy(update={"overlap": Overlap(tensor=False, data=False, z=False)})
    setup, plans, peaks = Setup.of_job(job), {}, {}
    for how in ("none", "optimizer"):
        plans[how] = even_plan(10, TensorGrid(), 2, 2, 4, 8, family="equal", offload=how)
    roomy = equal_nodes(device_of(10**9), count=4, nic_bytes_per_second=1e8)
    needed = {how: Predictor(setup, plan, roomy).memory for how, plan in plans.items()}
    most = {how: max(stage.memory.total for stage in stages) for how, stages in needed.items()}
    memory_bytes = (most["none"] + most["optimizer"]) // 2
    device = device_of(memory_bytes)
    cluster = equal_nodes(device, count=4, nic_bytes_per_second=1e8)
    predicted = {how: Predictor(setup, plan, cluster).predict() for how, plan in plans.items()}
    assert [each.fits for each in predicted.values()] == [False, True]
    _, training, _ = open_datasets(job.data, job.train.seed)
    measurement, seconds, overrun = Measurement(world), {}, 0.0
    with rehearsed_world(world, cluster, Truth(time_scale=2.0, devices={"equal": device})) as own:
        for how, plan in plans.items():
            own.accelerator.overcommits = how == "none"
            own.accelerator.start_anew()
            with own.freeing():
                trainer = Trainer(own, own.accelerator, job, plan)
                trainer.initialise()
                most = MOST_STEPS if how == "optimizer" else 1
                seconds[how], overrun = punctual_step(own, trainer, training, own.accelerator.clock.forget, most)
                peaks[how] = own.all_objects(own.accelerator.memory().peak)
                del trainer
    assert max(peaks["none"]) > memory_bytes >= max(peaks["optimizer"])
    for stage in needed["optimizer"]:
        for rank in stage.tile.ranks:
            assert peaks["optimizer"][rank] == pytest.approx(stage.memory.total, rel=0.03)
    if world.rank == 0:
        print({how: (seconds[how], predicted[how].step_seconds) for how in seconds}, overrun)
    with measurement.checking(overrun):
        assert seconds["optimizer"] == pytest.approx(predicted["optimizer"].step_seconds, rel=0.05)
        assert predicted["optimizer"].step_seconds > 1.02 * predicted["none"].step_seconds, "copies are exposed here"
