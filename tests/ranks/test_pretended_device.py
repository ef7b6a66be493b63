"""Whole training runs on a device that finds races, hidden waits, and operations on tensors of two devices."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from hpctrain.architectures.description import Experts
from hpctrain.architectures.registry import families
from hpctrain.comm.accelerators import torch_device
from hpctrain.comm.accelerators.cpu import DONE
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.collectives.streamed import StreamedCollectives
from hpctrain.comm.groups import maker
from hpctrain.comm.groups.channel import make_channel
from hpctrain.comm.probe import device_timing
from hpctrain.comm.probe.survey import probe_cluster
from hpctrain.comm.progress.lanes import ProgressEngine
from hpctrain.comm.progress.operation import Operation
from hpctrain.comm.transports.peer_memory import PeerMemory
from hpctrain.comm.transports.transport import DeviceTransport
from hpctrain.config.errors import TrainingError
from hpctrain.data.order import open_datasets
from hpctrain.engine.routes import message_refusal
from hpctrain.model.operators import experts
from hpctrain.model.operators.experts import ExpertMixture
from hpctrain.model.parallel.gathering import start_scatter
from hpctrain.plan.launch_order import Bridge
from hpctrain.plan.uniform import resolve_plan
from tests.ranks.pretended_device import KIND, MODULE, Clock, PretendedDevice, watched
from tests.ranks.small_runs import (
    Alone,
    largest_relative_difference,
    losses,
    losses_of_one_rank,
    make_job,
    make_trainer,
)
from tests.ranks.test_launches import PLANS, job_of, small
from tests.ranks.test_staged import Pretended
from tests.ranks.watched_library import WatchedLibrary

ROUTES: list[dict] = [{"native": True}, {"exports": False}, {"direct": "a", "exports": False}]
"""By NCCL, with messages that devices copy from each other's memory; by pinned buffers; by MPI on device memory."""
STEPS = 3
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24, "head_size": None}
EXPERTS = {name: {"num_experts": 4, "experts_per_token": 2} for name in ("mixtral", "qwen3_moe", "dots1", "gpt_oss")}
SPARSE = {"shape": {"architecture": "dots1"} | SIZES | EXPERTS["dots1"] | {"expert_size": 24, "shared_experts": 1}}
SPARSE |= {"global_batch": 8, "validation_sequences": 8}
"""Sizes of a job whose two blocks have experts, one of which computes every token."""
DTYPES = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-4}
"""How far losses may be from those of the host, which has another kernel for attention."""


def every_complaint(world) -> list[str]:
    """Return what the devices of all ranks complained of. All ranks must call."""
    return [each for of in world.all_objects(list(MODULE.complaints)) for each in of]


def trained(world, families: str, job, route: dict) -> list[float]:
    """Return the losses of a job on pretended devices. All ranks must call."""
    has_device = families[world.rank] != "c"
    device = PretendedDevice(family=families[world.rank]) if has_device else None
    if device:
        device.exports = route.get("exports", True)
        device.mixes = len(set(families)) > 1 and "bridge" in route and route["bridge"].works
    pretended = Pretended(world, families, device=device, library=WatchedLibrary(world.raw_mpi), **route)
    result = losses(pretended, job, STEPS, pretended.device)
    pretended.close()
    return result


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(families())), ids=list(families()))
def test_every_architecture_has_the_losses_of_a_host_and_waits_once_a_step(world, tokens, number):
    """Each rank alone, in another dtype. With experts it waits for each layer of them and micro-batch, and at the end
    of the step for their load."""
    dtype = list(DTYPES)[(number + world.rank) % len(DTYPES)]
    name = list(families())[number]
    shape = {"architecture": name} | SIZES | EXPERTS.get(name, {})
    job = make_job(tokens, "llama", {"microbatch": 8}, shape, dtype=dtype)
    expected = losses(Alone(), job, STEPS)
    with watched():
        _, training, validation = open_datasets(job.data, job.train.seed)
        trainer = make_trainer(Alone(), job, None, PretendedDevice())
        trainer.initialise()
        first = trainer.step(training)[0]
        MODULE.waits.clear()
        second = trainer.step(training)[0]
        waits = list(MODULE.waits)
        last = trainer.step(training)[0]
        result = [first["loss"], second["loss"], last["loss"], first["grad_norm"], trainer.validate(validation)]
    mixed = sum(isinstance(block.mlp, Experts) for block in job.model.description.blocks)
    most = 2 + mixed * trainer.layout.plan.microbatches if mixed else 1
    assert 1 <= len(waits) <= most, waits
    assert not MODULE.complaints
    assert largest_relative_difference(result, expected) < DTYPES[dtype]


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", range(len(PLANS)), ids=[str(plan) for plan in PLANS])
def test_nothing_races(world, tokens, number):
    """With all overlaps on, by each route in turn."""
    sizes = small(PLANS[number])
    alone = losses_of_one_rank(world, tokens, "gpt2", STEPS, **sizes)
    with watched():
        result = trained(world, "aaaa", job_of(tokens, PLANS[number], True, **sizes), ROUTES[number % len(ROUTES)])
    assert not every_complaint(world)
    assert largest_relative_difference(result, alone) < 1e-5


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
def test_nothing_races_with_experts(world, tokens):
    """Ranks of y have experts, whose results the library sums, and one expert is of every token."""
    plan = {"tensor": {"y": 2}, "data": 2, "sequence_parallel": True}
    alone = losses_of_one_rank(world, tokens, "llama", STEPS, **SPARSE)
    with watched():
        result = trained(world, "aaaa", job_of(tokens, plan, True, "llama", **SPARSE), NCCL)
    assert not every_complaint(world)
    assert largest_relative_difference(result, alone) < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_host_waits_once_for_a_pass_of_experts_that_y_cuts(world, tokens):
    """And twice at the end of a step. Backward passes know the counts of forward ones."""
    job = job_of(tokens, {"tensor": {"y": 2}, "sequence_parallel": True, "microbatch": 4}, True, "llama", **SPARSE)
    with watched():
        _, training, _ = open_datasets(job.data, job.train.seed)
        pretended = Pretended(world, "aa", device=PretendedDevice(), library=WatchedLibrary(world.raw_mpi), **NCCL)
        trainer = make_trainer(pretended, job, None, pretended.device)
        trainer.initialise()
        trainer.step(training)
        MODULE.waits.clear()
        trainer.step(training)
        waits, microbatches = list(MODULE.waits), trainer.layout.plan.microbatches
        trainer.close()
        pretended.close()
    assert len(waits) == 2 + 2 * microbatches, waits
    assert not every_complaint(world)


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("of_ranks", ["aaab", "acac"])
def test_nothing_races_between_families(world, tokens, of_ranks):
    plan = {"tensor": {"y": 2}, "data": 2, "sequence_parallel": True}
    sizes = small(plan)
    alone = losses_of_one_rank(world, tokens, "llama", STEPS, **sizes)
    with watched():
        job = job_of(tokens, plan, True, "llama", **sizes)
        result = trained(world, of_ranks, job, {"native": True})
    assert not every_complaint(world)
    assert largest_relative_difference(result, alone) < 1e-5


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("plan", "is_proven"), [({"pipeline": 2, "data": 2, "microbatch": 1}, True), (PLANS[3], False)], ids=str
)
def test_mpi_has_memory_of_devices_between_families_where_no_operation_waits_for_it(world, tokens, plan, is_proven):
    """Inside a family, whose library is at work, it never has."""
    sizes = small(plan)
    job = job_of(tokens, plan, True, "llama", **sizes)
    bridge = Bridge(frozenset("ab"), frozenset("ab"), job.model.description.tied_head)
    refusal = message_refusal(resolve_plan(job, 4, list("aabb")).plan, bridge, job)
    assert ("HPCTRAIN_DIRECT=1 forces it" in refusal) != is_proven
    alone = losses_of_one_rank(world, tokens, "llama", STEPS, **sizes)
    route = {"native": True, "direct": "ab", "exports": False, "bridge": Ability(is_proven, refusal)}
    for on_ranks, is_given in (("aabb", is_proven), ("aaaa", False)):
        given = []

        def viewed(device, data):
            given.append(device.is_on_device(data))  # noqa: B023
            return VIEW(device, data)

        with watched(), patch.object(PretendedDevice, "view_for_mpi", viewed):
            result = trained(world, on_ranks, job, route)
        assert any(given) == is_given
        assert not every_complaint(world)
        assert largest_relative_difference(result, alone) < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_devices_that_measure_other_dtypes_are_probed_together(world, monkeypatch):
    """A GPU measures products in fp16, a host does not: both must come to the same barriers."""
    monkeypatch.setattr(torch_device, "MEASURED_SIZE", 64)
    monkeypatch.setattr(MODULE, "total", 1 << 28)
    monkeypatch.setattr(device_timing, "SHAPES", device_timing.SHAPES[:2])
    monkeypatch.setattr(device_timing, "PRODUCT_SIZE", 64)
    with watched():
        device = PretendedDevice() if world.rank == 0 else None
        pretended = Pretended(world, "ac", device=device, library=WatchedLibrary(world.raw_mpi))
        described = probe_cluster(pretended, pretended.device, 0.5)
        pretended.close()
    assert not every_complaint(world)
    cluster = world.broadcast_object(described).cluster
    measured = {name: {speed.dtype for speed in family.products} for name, family in cluster.families.items()}
    assert measured == {"a": {"fp32", "bf16", "fp16"}, "c": {"fp32", "bf16"}}


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_the_second_message_of_a_channel_waits_for_no_later_work(world, route):
    """A lane comes to it when the first has moved: its place in the stream is that of the call."""
    with watched() as device:
        pretended = Pretended(world, "aa", device=PretendedDevice(), library=WatchedLibrary(world.raw_mpi), **route)
        pretended.device.exports = route.get("exports", True)
        progress = ProgressEngine(threaded=False)  # nothing moves before somebody waits
        channel = make_channel(pretended.routes, progress, 1 - world.rank, 4000, 2, world.patience)
        places = []

        def message(transport, peer, is_sent, data, after):
            places.append((after or transport.queued(data)).clock)
            return MESSAGE(transport, peer, is_sent, data, after)

        with patch.object(DeviceTransport, "_message", message):
            sent = [torch.full((1000,), 2.0 * world.rank + i, device=pretended.device.device) for i in range(2)]
            received = [torch.empty(1000, device=pretended.device.device) for _ in sent]
            for tensor in sent:
                channel.send(tensor)
            for tensor in received:
                channel.expect(tensor)
            called = Clock(device.current_stream().clock)
            torch.zeros(1000, device=pretended.device.device)
            for tensor in received:
                channel.receive(tensor)
            channel.close()
        got = [tensor.cpu()[0].item() for tensor in received]
        pretended.close()
    assert got == [2.0 * (1 - world.rank), 2.0 * (1 - world.rank) + 1]
    assert len(places) == 4
    assert all(clock.get(stream, 0) <= called.get(stream, 0) for clock in places for stream in clock)
    assert not every_complaint(world)


@pytest.mark.timeout(60)
def test_a_driver_that_refuses_to_pin_memory_is_not_the_error_of_the_next_launch(monkeypatch):
    def refused(*_) -> int:
        MODULE.last_error = "out of memory"
        return 2

    empty = torch.empty
    monkeypatch.setattr(MODULE, "cudart", lambda: SimpleNamespace(cudaHostRegister=refused), raising=False)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    device = PretendedDevice(KIND._replace(pins_memory=True))
    assert device.host_buffer(torch_device.EXACT_BYTES + 4).numel() == torch_device.EXACT_BYTES + 4
    assert torch.ones(3, device=device.device).cpu().sum() == 3


@pytest.mark.timeout(60)
def test_an_overflow_of_a_library_is_reported_like_torchs_own(tokens):
    job = make_job(tokens, "llama", {"microbatch": 8}, {"architecture": "llama"} | SIZES)
    with watched():
        _, training, _ = open_datasets(job.data, job.train.seed)
        trainer = make_trainer(Alone(), job, None, PretendedDevice())
        trainer.initialise()
        MODULE.last_error = "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        with pytest.raises(TrainingError, match="is out of memory in step 1: .* CUBLAS_STATUS_ALLOC_FAILED .*offload"):
            trainer.step(training)


def run_at_once(collectives, steps, queued):
    return RUN(collectives, steps, queued and collectives.stream.record_event())


def forget(operation, *arguments, kept):
    BEGIN(operation, *arguments)


def never_wait(operation):
    if not operation.is_launched:
        FINISH(operation)


def copy_and_forget(device, target, source):
    COPY(device, target, source)
    return DONE


def message_at_once(transport, peer, is_sent, data, after):
    return MESSAGE(transport, peer, is_sent, data, DONE)


def always_direct(one, other, bridge=None):
    return "direct", "a mistake"


def copy_and_count(memory, target, source):
    memory.accelerator.copy(target, source)
    return lambda: True


def counts_too_early(chosen, own, count):
    """Let the host read where the choices of experts end before a copy to its memory has come."""
    places, groups = SORT(chosen, own, count)
    read = torch.zeros(len(groups.ends), dtype=torch.int32)
    MODULE.pinned.append(read)
    read.copy_(groups.ends, non_blocking=True)
    return experts.Sorted(places, experts.Groups(groups.ends, [min(end, len(places)) for end in read.tolist()]))


def product_elsewhere(x, weight, groups):
    with MODULE.stream(MODULE.Stream()):
        return PRODUCT(x, weight, groups)


def sum_read_too_early(mixture, value):
    own, work = start_scatter(value, mixture.y)
    early = own + 0
    work.wait()
    return early


SORT, PRODUCT = experts.sort_choices, experts.grouped_product
MESSAGE = DeviceTransport._message
VIEW = PretendedDevice.view_for_mpi
RUN, COPY = StreamedCollectives._run, PretendedDevice.copy
BEGIN, FINISH = Operation.__init__, Operation.finish
NCCL, STAGED, DIRECT = ROUTES
BESIDE = {"native": True, "direct": "a", "exports": False}
MISTAKES = {
    "a launch does not wait for its operands": (StreamedCollectives, "_run", run_at_once, NCCL, "does not wait for"),
    "nobody waits for a launch": (Operation, "finish", never_wait, NCCL, "does not wait for NCCL's"),
    "operands are not kept": (Operation, "__init__", forget, STAGED, "memory is freed"),
    "a message does not wait": (DeviceTransport, "_message", message_at_once, DIRECT, "a message of MPI does not wait"),
    "a copy is not awaited": (PretendedDevice, "copy", copy_and_forget, STAGED, "other losses"),
    "MPI is used beside a library": (maker, "message_route", always_direct, BESIDE, "on which a library works"),
    "counts of experts are read too early": (experts, "sort_choices", counts_too_early, NCCL, "other losses"),
    "products of experts on another stream": (
        experts,
        "grouped_product",
        product_elsewhere,
        NCCL,
        "another stream",
    ),
    "a sum of experts is read too early": (
        ExpertMixture,
        "summed",
        sum_read_too_early,
        NCCL,
        "does not wait for NCCL's",
    ),
    "a slot is counted too early": (PeerMemory, "_copy", copy_and_count, NCCL, "other losses"),
}
"""What is replaced by what, on which route, and what is complained of then."""


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(world, tokens, mistake):
    of, name, replacement, route, complaint = MISTAKES[mistake]
    plan = {"tensor": {"y": 2}, "sequence_parallel": True}
    if of in (PeerMemory, maker):
        plan = {"pipeline": 2, "microbatch": 2}
    model, sizes = ("llama", SPARSE) if of in (experts, ExpertMixture) else ("gpt2", small(plan))
    alone = losses_of_one_rank(world, tokens, model, STEPS, **sizes)
    with watched() as device, patch.object(of, name, replacement):
        try:
            result = trained(world, "aa", job_of(tokens, plan, True, model, **sizes), route)
        except TrainingError:  # of all ranks: what is poisoned is no number
            result = [float("inf")] * len(alone)
        if largest_relative_difference(result, alone) > 1e-5:
            device.complain("other losses")
    assert any(complaint in each for each in every_complaint(world))
