"""Products that are cut by rows, so that their collectives are overlapped: the losses of one rank, the same bits again,
the same bytes."""

import pytest

from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from tests.pretended import equal_nodes
from tests.ranks.punctual import Measurement, punctual_step
from tests.ranks.small_runs import by, bytes_of_a_step, go_on, largest_relative_difference, make_job, rehearsed_world
from tests.ranks.test_sequence_parallel import LAST, MICROBATCHES, ROWS, TOLERANCE, curve, cut, job_of, one_rank, tile

WHOLE, ROW_BY_ROW = (0, LAST), {"row_chunks": ROWS}
TWO, FOUR, EIGHT = (0, 1), (0, 1, 2, 3), tuple(range(8))
TILINGS = {
    2: {
        "y": (3, tile(WHOLE, (0, 5), TWO, (1, 2, 1))),
        "x, of a row at a time": (4, tile(WHOLE, (0, 5), TWO, (2, 1, 1), recompute="full", **ROW_BY_ROW)),
        "positions": (3, tile(WHOLE, (0, 5), TWO, cut(1, 2, 1), recompute="selective")),
        "positions, in more parts than rows": (64, tile(WHOLE, (0, 5), TWO, cut(1, 2, 1), recompute="full")),
        "positions of a row at a time": (3, tile(WHOLE, (0, 5), TWO, cut(1, 2, 1), **ROW_BY_ROW)),
        "and recomputed": (3, tile(WHOLE, (0, 5), TWO, cut(1, 2, 1), recompute="full", **ROW_BY_ROW)),
    },
    4: {
        "x and y": (2, tile(WHOLE, (0, 5), FOUR, (2, 2, 1))),
        "positions, x and y": (2, tile(WHOLE, (0, 5), FOUR, cut(2, 2, 1))),
        "positions of a row at a time, x and y": (2, tile(WHOLE, (0, 5), FOUR, cut(2, 2, 1), **ROW_BY_ROW)),
        "another grid behind": (
            3,
            tile((0, 2), (0, 5), (0, 1), cut(1, 2, 1)),
            tile((2, LAST), (0, 3), (2,), row_chunks=2),
            tile((2, LAST), (3, 5), (3,)),
        ),
        "replicas of different grids": (
            2,
            tile(WHOLE, (0, 3), (0, 1), cut(1, 2, 1), recompute="full"),
            tile(WHOLE, (3, 5), (3, 2), (2, 1, 1)),
        ),
    },
    8: {
        "x, y and z": (2, tile(WHOLE, (0, 5), EIGHT, cut(2, 2, 2))),
        "uneven": (
            4,
            tile((0, 3), (0, 5), (0, 1, 2, 3), cut(1, 4, 1)),
            tile((3, LAST), (0, 2), (4, 5), cut(1, 2, 1), zero=0),
            tile((3, LAST), (2, 5), (6, 7), (2, 1, 1), zero=0, row_chunks=3),
        ),
    },
}


def pytest_generate_tests(metafunc):
    if "tiling" in metafunc.fixturenames:
        from mpi4py import MPI

        names = TILINGS.get(MPI.COMM_WORLD.size, {})
        models = ("llama", "gpt2")
        metafunc.parametrize(("model", "tiling"), [(models[i % 2], name) for i, name in enumerate(names)])


def plan_and_overlap(world, name: str, tensor: bool = True) -> tuple[Plan, Overlap]:
    parts, *tiles = TILINGS[world.size][name]
    return Plan(tuple(tiles), MICROBATCHES, ROWS), Overlap(tensor=tensor, data=False, z=False, tensor_parts=parts)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(180)
def test_losses_are_those_of_one_rank(world, tokens, steps, model, tiling):
    plan, overlap = plan_and_overlap(world, tiling)
    expected = one_rank(world, tokens, model, steps)
    result = curve(world, job_of(tokens, model, overlap=overlap), plan, steps)
    difference = largest_relative_difference(result, expected)
    if world.rank == 0:
        print(f"{model}, {tiling}: {difference:.1e}")
    assert expected[steps - 1] < 0.98 * expected[0], "the reference learns"
    assert difference < TOLERANCE


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(180)
def test_interrupted_and_resumed_is_uninterrupted_and_exposed_bit_for_bit(world, tokens, model, tiling, folder):
    plan, overlap = plan_and_overlap(world, tiling)
    job = job_of(tokens, model, overlap=overlap)
    uninterrupted = go_on(world, job, plan, folder, 2, resume=False)
    if world.size > 2:
        halves = [go_on(world, job, plan, folder, 1, resume) for resume in (False, True)]
        assert halves[0] + halves[1] == uninterrupted
    _, exposed = plan_and_overlap(world, tiling, tensor=False)
    assert go_on(world, job_of(tokens, model, overlap=exposed), plan, folder, 2, resume=False) == uninterrupted


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("microbatch", "recompute", "sequence_parallel", "tensor"),
    [  # each value of one with each of any other
        (1, "full", False, {"y": 4}),
        (1, "full", True, {"x": 2, "y": 2}),
        (8, "none", True, {"y": 4}),
        (8, "none", False, {"x": 2, "y": 2}),
        (8, "full", False, {"y": 4}),
        (8, "full", True, {"x": 2, "y": 2}),
    ],
    ids=str,
)
def test_parts_move_the_bytes_of_the_whole(
    world, tokens, microbatch, recompute, sequence_parallel, tensor, monkeypatch
):
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    plan = {"tensor": tensor, "microbatch": microbatch, "recompute": recompute, "sequence_parallel": sequence_parallel}
    job = make_job(tokens, "llama", plan, shape={"num_kv_heads": 8, "vocab_size": 64}, global_batch=microbatch)
    whole, in_parts = (
        bytes_of_a_step(
            world,
            job.model_copy(update={"overlap": Overlap(tensor=True, data=False, z=False, tensor_parts=parts)}),
            lambda layout: [layout.axes.x, layout.axes.y],
        )
        for parts in (1, 4)
    )
    assert whole == in_parts > 0


DEVICE = PretendDevice(memory_bytes=200_000_000, memory_bytes_per_second=2e9, flops_per_second={"fp32": 5e8})
APART = equal_nodes(DEVICE, count=2, nic_bytes_per_second=1e7)


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("rows", "row_chunks"), [(8, 1), (2, 2)], ids=["by rows", "by positions of a row"])
@pytest.mark.parametrize("grid", [TensorGrid(y=2), TensorGrid(y=2, sequence_parallel=True)], ids=str)
def test_a_rehearsed_step_is_as_much_shorter_as_predicted(world, tokens, grid, rows, row_chunks):
    """On two nodes a message takes about as long as a product. Steps are taken until they are punctual."""
    shape = {"num_layers": 4, "hidden_size": 128, "ffn_size": 512, "max_positions": 64}
    job = make_job(tokens, "llama", shape=shape, global_batch=rows)
    job = job.model_copy(update={"data": job.data.model_copy(update={"sequence_length": 64})})
    plan = even_plan(10, grid, 1, 1, 1, rows, family="equal", row_chunks=row_chunks)
    _, training, _ = open_datasets(job.data, job.train.seed)
    jobs = [
        job.model_copy(update={"overlap": Overlap(tensor=True, data=False, z=False, tensor_parts=parts)})
        for parts in (1, 4)
    ]
    predicted = [predict(Setup.of_job(each), plan, APART).step_seconds for each in jobs]
    measurement, result, latest = Measurement(world), [], 0.0
    with rehearsed_world(world, APART, Truth(time_scale=2.0, devices={"equal": DEVICE})) as own:
        own.configure(network=ClusterNetwork(APART))
        for each in jobs:
            trainer = Trainer(own, own.accelerator, each, plan)
            trainer.initialise()
            seconds, overrun = punctual_step(own, trainer, training)
            result.append(seconds)
            latest = max(latest, overrun)
            del trainer
    if world.rank == 0:
        print(f"{grid}, {rows} rows: {result} s, {predicted} predicted; overrun {latest:.2%}")
    assert predicted[1] < 0.97 * predicted[0]
    with measurement.checking(latest):
        assert result[1] < 0.98 * result[0]
        assert result == pytest.approx(predicted, rel=0.05)
