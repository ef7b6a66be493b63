"""Training on pretended devices whose library launches collectives in one order; its calls return when all have come.

A library that blocks the host is the hardest rule: a rank whose launches have another order would never come back.
"""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from hpctrain.comm import waiting
from hpctrain.comm.accelerators import launches
from hpctrain.comm.groups import group as groups
from hpctrain.comm.progress import operation as operations
from hpctrain.comm.progress.operation import Operation
from hpctrain.data.order import open_datasets
from tests.ranks.small_runs import largest_relative_difference, losses, losses_of_one_rank, make_job, make_trainer
from tests.ranks.test_staged import Pretended

PLANS = [
    {"tensor": {"z": 2}, "data": 2},
    {"tensor": {"z": 2}, "data": 2, "zero": 3},
    {"data": 4, "zero": 2},
    {"tensor": {"y": 2}, "pipeline": 2, "microbatch": 2},
    {"tensor": {"y": 2}, "data": 2, "sequence_parallel": True},
    {"pipeline": 2, "data": 2, "virtual_stages": 2, "microbatch": 1},
    {"tensor": {"y": 2}, "pipeline": 2, "microbatch": 2, "sequence_parallel": True}
    | {"schedule": "zb-h1", "offload": "optimizer"},
    {"tensor": {"x": 2, "y": 2}, "sequence_parallel": True, "recompute": "selective", "offload": "optimizer"},
]


def small(plan: dict) -> dict:
    """Return the sizes of a job of few blocks and rows, which has all operations of a plan in every order."""
    layers = 2 * plan.get("virtual_stages", 1)
    return {"shape": {"num_layers": layers}, "global_batch": 8, "validation_sequences": 8}


def job_of(tokens, plan: dict, on: bool, model: str = "gpt2", **train):
    job = make_job(tokens, model, plan, **train)
    switches = {"tensor": on, "data": on, "z": on, "tensor_parts": 2, "bucket_bytes": 1}
    return job.model_copy(update={"overlap": job.overlap.model_copy(update=switches)})


LAUNCH, FINISH = launches.LaunchOrder._launch, Operation.finish


@contextmanager
def counted_waits(device):
    """List what the host waits for of its device."""
    waits: list[str] = []

    def counting(ready, what, *rest):
        if "the device" in what():
            waits.append(what())
        return wait_until(ready, what, *rest)

    wait_until, synchronize = waiting.wait_until, device.synchronize
    with (
        patch.object(waiting, "wait_until", counting),
        patch.object(groups, "wait_until", counting),
        patch.object(operations, "wait_until", counting),
        patch.object(launches, "wait_until", counting),
        patch.object(device, "synchronize", lambda: (waits.append("synchronize"), synchronize())),
    ):
        yield waits


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_training_with_all_overlaps_gives_the_bits_of_training_without(world, tokens, plan):
    sizes = small(plan)
    alone = losses_of_one_rank(world, tokens, "gpt2", 3, **sizes)
    results = []
    for on in (True, False):
        pretended = Pretended(world, "aaaa", native=True)
        results.append(losses(pretended, job_of(tokens, plan, on, **sizes), 3, pretended.device))
        pretended.close()
    assert results[0] == results[1]
    assert largest_relative_difference(results[0], alone) < 1e-5


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[1], PLANS[4]], ids=str)
def test_the_host_waits_for_its_device_once_a_step(world, tokens, plan):
    def waits_of_a_step() -> list[str]:
        pretended = Pretended(world, "aaaa", native=True)
        job = job_of(tokens, plan | {"microbatch": 2}, True, **small(plan))
        _, training, _ = open_datasets(job.data, job.train.seed)
        trainer = make_trainer(pretended, job, accelerator=pretended.device)
        trainer.initialise()
        with patch.object(pretended.device, "step_stopwatch", lambda step: lambda: 1.0):  # as that of a real device
            trainer.step(training)
            with counted_waits(pretended.device) as waits:
                trainer.step(training)
        pretended.close()
        return waits

    def wait_on_host(operation) -> None:
        if operation.is_launched:
            waiting.complete(iter([waiting.Condition(lambda: operation.ended, "the device")]), "a test", world.patience)
        FINISH(operation)

    assert waits_of_a_step() == ["the device"]
    with patch.object(Operation, "finish", wait_on_host):
        assert len(waits_of_a_step()) > 20, "this is what is counted"


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("families", "plan"), [("aaaa", PLANS[0]), ("aaaa", PLANS[3]), ("aaab", PLANS[4])], ids=str)
def test_in_the_first_step_each_operation_has_ended_before_the_next(world, tokens, families, plan):
    """Kernels are loaded then, which may wait for what is in flight. The bits are those of a step with all overlaps."""
    in_flight: list[list[int]] = []

    def launch(order, *rest):
        in_flight[-1].append(len(order._in_flight))
        return LAUNCH(order, *rest)

    def trained() -> list[dict]:
        pretended = Pretended(world, families, native=True)
        job = job_of(tokens, plan | {"microbatch": 2}, True, **small(plan))
        _, training, _ = open_datasets(job.data, job.train.seed)
        trainer = make_trainer(pretended, job, accelerator=pretended.device)
        trainer.initialise()
        result = []
        for _ in range(2):
            in_flight.append([])
            result.append(trainer.step(training)[0])
        pretended.close()
        return [{key: each[key] for key in ("loss", "grad_norm")} for each in result]

    with patch.object(launches.LaunchOrder, "_launch", launch):
        first = trained()
        blocking, overlapped = in_flight
        if families[world.rank] == "a":
            assert blocking and not any(blocking)
            assert any(overlapped) or families != "aaaa"
        never = property(lambda order: False, lambda order, value: None)
        with patch.object(launches.LaunchOrder, "blocks", never, create=True):
            assert trained() == first
        if families == "aaaa":
            assert any(in_flight[-2]), "this is what is counted"


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
def test_sums_of_several_families_are_sound_where_a_job_asks_for_their_overlap(world, tokens):
    """Parts of them are launched as messages come: the next launch waits for that."""
    alone = losses_of_one_rank(world, tokens, "llama", 3)
    for plan in ({"data": 4}, {"tensor": {"y": 2}, "data": 2}):
        pretended = Pretended(world, "aaab", native=True)
        result = losses(pretended, job_of(tokens, plan, True, "llama"), 3, pretended.device)
        assert largest_relative_difference(result, alone) < 1e-5
        pretended.close()


@pytest.mark.timeout(60)
def test_a_lane_shares_the_connections_of_its_group(world):
    """Blocking and overlapped operations are launched in the order in which they are asked for."""
    pretended = Pretended(world, "a" * world.size, native=True)
    assert pretended.library is not None, "it has a library"
    group = pretended.group(range(world.size), overlapped=True)
    connected = len(pretended.library.calls)
    tensors = [pretended.later(torch.full((100,), float(world.rank + i))) for i in range(4)]
    started = [group.start_all_reduce(tensors[0]), group.start_all_reduce(tensors[1])]
    group.all_reduce(tensors[2])
    started.append(group.start_all_reduce(tensors[3]))
    assert pretended.library.calls[connected:] == ["allreduce"] * 4, "all were launched before any was waited for"
    for work in started:
        work.wait()
    pretended.device.synchronize()
    for i, tensor in enumerate(tensors):
        assert (tensor == sum(range(world.size)) + i * world.size).all()
    assert all(work.ended for work in started)
    assert sum(group.bytes_sent) == 0, "no messages of MPI"
    for _ in range(2):
        group.close()
    pretended.close()
