"""What is overlapped with computation: the same bits, the same bytes, in less time."""

import functools
from types import SimpleNamespace

import pytest
import torch

from benchmarks.overlap_variants import VARIANTS, compare, compare_pairs, measure
from hpctrain.architectures.description import inner_of
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.engine.start.facts import MachineDescription, Prepared
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.uniform import resolve_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER
from tests.ranks.punctual import Measurement
from tests.ranks.small_runs import (
    Alone,
    by,
    bytes_of_a_step,
    largest_relative_difference,
    make_job,
    make_trainer,
    parametrize_by_turns,
    rehearsed_world,
    world_of,
)
from tests.unit.small_searches import cluster_of

STEPS = 3
SMALL = 3000  # bytes of a bucket: a block is in two or more of them
LAYOUTS = {
    2: [{"tensor": {"y": 2}}, {"tensor": {"x": 2}}, {"data": 2}, {"data": 2, "zero": 0}],
    4: [
        {"tensor": {"x": 2, "y": 2}, "recompute": "full"},
        {"tensor": {"y": 2}, "data": 2},
        {"tensor": {"y": 4}},
        {"tensor": {"z": 2}, "data": 2, "zero": 2},
        {"pipeline": 2, "data": 2, "microbatch": 2},
    ],
    8: [{"tensor": {"x": 2, "y": 2}, "data": 2}, {"tensor": {"y": 2}, "pipeline": 2, "data": 2, "microbatch": 2}],
}


def pytest_generate_tests(metafunc):
    parametrize_by_turns(metafunc, "route", ("auto", "messages"), LAYOUTS)


def plan_of(tiles, rows: int) -> Plan:
    made = (Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(*grid)) for items, rows, ranks, grid in tiles)
    return Plan(tuple(made), microbatches=1, rows=rows)


def overlapped(job, **switches):
    return job.model_copy(update={"overlap": Overlap(bucket_bytes=SMALL, **switches)})


def curve(world, job, plan: Plan | None = None) -> list[float]:
    """Losses and norms of gradients."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.initialise()
        result = [trainer.step(training)[0] for _ in range(STEPS)]
    return [m[key] for m in result for key in ("loss", "grad_norm")]


@functools.cache
def one_rank(world, tokens, model: str) -> list[float]:
    return world.broadcast_object(curve(Alone(), make_job(tokens, model)) if world.rank == 0 else None)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_on_and_off_are_bit_equal_and_those_of_one_rank(world, tokens, layout, route, monkeypatch):
    monkeypatch.setattr(world, "settings", by(route, world.settings))
    model = "llama" if route == "auto" else "gpt2"
    job = make_job(tokens, model, layout)
    exposed = curve(world, overlapped(job, tensor=False, data=False, z=False))
    assert largest_relative_difference(exposed, one_rank(world, tokens, model)) < 1e-5
    assert curve(world, overlapped(job, tensor=True, data=True, z=True)) == exposed


MIXED = (((0, 10), (0, 6), (0, 1), (1, 2, 1)), ((0, 10), (6, 16), (3, 2), (1, 1, 2)))
DEEP = (((0, 4), (0, 6), (0,), (1, 1, 1)), ((4, 10), (0, 6), (1,), (1, 1, 1)), ((0, 10), (6, 16), (3, 2), (1, 2, 1)))


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tiles", [MIXED, DEEP], ids=["different grids", "different depths"])
def test_uneven_tilings_are_bit_equal_on_and_off(world, tokens, tiles):
    plan, job = plan_of(tiles, 16), make_job(tokens, "gpt2")
    exposed = curve(world, overlapped(job, tensor=False, data=False, z=False), plan)
    assert largest_relative_difference(exposed, one_rank(world, tokens, "gpt2")) < 1e-5
    assert curve(world, overlapped(job, tensor=True, data=True, z=True), plan) == exposed


@pytest.mark.ranks(4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_axis_moves_the_bytes_of_its_formula(world, tokens, on, recompute, monkeypatch):
    """fp32; n ranks of an axis send together 2 (n - 1) times what they all-reduce, (n - 1) times what they gather.

    What is recomputed is summed again. Of z see tests/ranks/test_traffic.py.
    """
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    n, microbatches = world.size, 2

    def job_of(**plan):
        shape, plan = {"num_kv_heads": 8, "vocab_size": 64}, {"microbatch": 8, "recompute": recompute, **plan}
        return overlapped(make_job(tokens, "llama", plan, shape=shape), tensor=on, data=on, z=on)

    model = job_of().model
    h, f, blocks, vocabulary = model.hidden_size, inner_of(model), model.num_layers, model.vocab_size
    parameters = 2 * vocabulary * h + h + blocks * (4 * h * h + 3 * h * f + 2 * h)
    numbers = 16 * 16  # tokens of a step: rows x positions
    pairs = 4 * (n - 1)
    forward = 2 if recompute == "full" else 1

    # data: reduce-scatter of gradients and all-gather of weights, 2 (n - 1) / n of the shard a rank
    job = job_of(data=n, microbatch=16 // n // microbatches or 1)
    assert bytes_of_a_step(world, job, lambda layout: layout.groups) == 2 * pairs * parameters
    # y: of each block the sums of o and down forward, of the inputs of qkv and up backward; embedding and head; loss
    summed = (forward + 1) * (2 * blocks + 1) * numbers * h + forward * 3 * numbers
    assert bytes_of_a_step(world, job_of(tensor={"y": n}), lambda layout: [layout.axes.y]) == 2 * pairs * summed
    # x: of each block the sums of qkv and up forward, of the inputs of o and down backward; the logits; norms
    norms = (2 * blocks + 1) * numbers
    summed = forward * (blocks * numbers * (3 * h + 2 * f) + numbers * vocabulary + norms)
    summed += blocks * numbers * (h + f) + norms
    assert bytes_of_a_step(world, job_of(tensor={"x": n}), lambda layout: [layout.axes.x]) == 2 * pairs * summed


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_pairs_of_steps_have_a_ratio_its_interval_and_the_same_bits(world, tokens, monkeypatch):
    own = world_of(world)
    job = make_job(tokens, "llama", {"tensor": {"y": 2}})
    plan = resolve_plan(job, 2).plan
    reasons = {"overlap.tensor": "off: a reason"}
    described = MachineDescription(cluster_of([("a", 1, 2)]), "a test")
    data = open_datasets(job.data, job.train.seed)
    prepared = Prepared(own, overlapped(job, data=True), *data, None, False, described, plan, reasons)
    started = []
    trained = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, *args: started.append(self) or trained(self, *args))
    summary = compare_pairs(own, prepared, 4)
    assert list(summary["overlaps"]) == ["nothing", "tensor", "parts"], "there are no replicas and there is no z"
    assert summary["same_bits"]
    for each in summary["overlaps"].values():
        ratio = each["ratio"]
        assert 0 < ratio["low"] <= ratio["middle"] <= ratio["high"]
    asked = {"data": "on", "z": "off", "tensor_parts": "1"}
    asked = {key: f"{value}: asked for" for key, value in asked.items()}
    assert summary["auto"] == {"tensor": "off: a reason"} | asked
    of_one = started[: 2 * (2 + 4)]
    exposed, other = of_one[1], of_one[0]
    assert of_one == [other, exposed, exposed, other] * 3, "alternating, and who is first changes"
    concurrent = [trainer.layout.axes.y.is_overlapped for trainer in dict.fromkeys(started)]
    assert concurrent == [False, False, True, False, True, False]
    own.close()


DEVICE = PretendDevice(memory_bytes=50_000_000, memory_bytes_per_second=2e9, flops_per_second={"fp32": 5e8})
TRUTH = Truth(devices={"fast": DEVICE, "slow": DEVICE})


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(60)
def test_what_is_started_takes_the_longer_of_computing_and_communicating(world):
    measurement = Measurement(world)
    with rehearsed_world(world, CLUSTER, TRUTH) as own:
        concurrent, blocking = own.group(range(4), "a", overlapped=True), own.group(range(4), "b")
        device, a, tensor = own.accelerator, torch.ones(256, 256), torch.ones(100_000)

        def seconds(comm, computing: bool) -> float:
            result = []
            for _ in range(7):
                blocking.barrier()
                taken = device.stopwatch()
                with device.running():
                    work = comm.start_all_reduce(tensor)
                    if computing:
                        a @ a
                    work.wait()
                result.append(taken())
            return own.smallest(min(result))  # a rank that gets no core is late

        computing = 2 * 256**3 / DEVICE.flops_per_second["fp32"]
        alone, exposed, hidden = seconds(blocking, False), seconds(blocking, True), seconds(concurrent, True)
        overrun = device.overrun
    if world.rank == 0:
        print(f"computing {computing:.4f} communicating {alone:.4f} exposed {exposed:.4f} hidden {hidden:.4f}")
    with measurement.checking(overrun):
        assert exposed == pytest.approx(computing + alone, rel=0.1)
        assert hidden == pytest.approx(max(computing, alone), rel=0.1)


# Where what is to be hidden goes through the NICs.
ACROSS = {
    "z": (((0, 10), (0, 4), (0, 2), (1, 1, 2)), ((0, 10), (4, 8), (1, 3), (1, 1, 2))),
    "tensor": (((0, 10), (0, 4), (0, 2), (1, 2, 1)), ((0, 10), (4, 8), (1, 3), (1, 2, 1))),
    "data": tuple(((0, 10), (2 * rank, 2 * rank + 2), (rank,), (1, 1, 1)) for rank in range(4)),
}


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ACROSS)
def test_a_rehearsed_step_is_shorter_by_what_can_be_hidden(world, tokens, name):
    job = make_job(tokens, "llama", shape={"num_layers": 4, "hidden_size": 128}, global_batch=8)
    plan = plan_of(ACROSS[name], 8)
    _, training, _ = open_datasets(job.data, job.train.seed)
    measurement = Measurement(world)
    with rehearsed_world(world, CLUSTER, TRUTH.model_copy(update={"time_scale": 2.0})) as own:
        prepared = SimpleNamespace(job=overlapped(job), plan=plan, training=training)
        summary = compare(own, {each: measure(own, prepared, VARIANTS[each], 4) for each in ("exposed", name)})
        overrun = own.accelerator.overrun
    if world.rank == 0:
        print(summary)
    assert summary["same_bits"]
    with measurement.checking(overrun):  # what one operation takes is tested above
        assert summary["step_seconds"][name] < summary["step_seconds"]["exposed"]
        assert 0.4 < summary["hidden_share"][name] < 1.6
