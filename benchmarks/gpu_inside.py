"""What `benchmarks.gpu` measures inside one process: kernels, plain PyTorch, the library of collectives, checkpoints.

    python -m benchmarks.gpu_inside plain JOB --microbatch 4

Each prints one JSON line last. On a machine without a GPU they measure the host.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gpu import PARTIAL_VARIABLE
from benchmarks.plain_llama import PlainBlock, PlainLlama
from hpctrain.architectures.description import Attention, Experts
from hpctrain.architectures.registry import presets
from hpctrain.cli import main
from hpctrain.comm.bind import bind_accelerator
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, lookup_accelerator
from hpctrain.config.errors import HpctrainError
from hpctrain.config.job import Job, Model, load_job
from hpctrain.jobs.common import started_world, with_vocabulary
from hpctrain.model.operators.running import run_eagerly

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLASSES = {
    "fused": ("triton_",),
    "attention": ("flash", "attention", "fmha"),
    "products": ("gemm", "cutlass", "nvjet", "aten::mm", "aten::addmm", "aten::bmm", "cublas"),
    "optimizer": ("adam", "foreach", "multi_tensor"),
    "collectives": ("nccl",),
    "copies": ("memcpy", "copy", "memset"),
    "reductions": ("reduce", "softmax", "norm", "sum"),
}
"""Of kernels, by what their names contain: the first that fits. All others are element-wise."""


def keep(result: dict) -> None:
    """Keep the figures of a command that continues, in case its section takes too long."""
    if path := os.environ.get(PARTIAL_VARIABLE):
        Path(path).write_text(json.dumps(result))


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median seconds of a call, after three that warm it up."""
    taken = []
    for number in range(repeats + 3):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        taken += [time.perf_counter() - start] if number >= 3 else []
    return statistics.median(taken)


PRODUCTS = 10
"""In a row, where the speed of products is measured."""


@click.group()
def command():
    """Measure one thing of this process' device."""


@command.command()
@click.argument("job")
@click.option("--microbatch", type=int, default=2)
@click.option("--steps", type=int, default=3)
def plain(job: str, microbatch: int, steps: int):
    """Tokens/s of plain PyTorch: torch.compile, autocast, fused AdamW; two microbatches a step, as the job's batch."""
    given = with_vocabulary(load_job(job))
    model, length, dtype = given.model, given.data.sequence_length, DTYPES[given.train.dtype or "fp32"]
    torch.manual_seed(1)
    with DEVICE:
        network = PlainLlama(model, length)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    if DEVICE.type == "cuda":
        network.compile_parts()
    count = given.train.global_batch // microbatch
    ids = torch.randint(0, model.num_ids, (count, microbatch, length + 1), device=DEVICE)

    def step() -> None:
        for each in ids:
            with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
                loss = network(each[:, :-1], each[:, 1:])
            (loss / count).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    print(json.dumps({"tokens_per_second": ids[:, :, 1:].numel() / seconds_of(step, steps)}))


def flops_per_token(job: Job) -> float:
    """Return operations of a token, forward and backward: 6 a weight of a product, and causal attention."""
    model = job.model
    of = model.description.blocks[0]
    attention, hidden = of.attention, model.hidden_size
    block = hidden * (2 * attention.query_size + 2 * attention.key_size + of.mlp.up_size + of.mlp.inner)
    scores = 2 * job.data.sequence_length * attention.query_size / 2
    return 6 * (model.num_layers * (block + scores) + hidden * model.num_ids)


@command.command()
@click.argument("job")
def peak(job: str):
    """FLOP/s of the fastest large product in the job's dtype, of the data sheet, and what a token of the job takes."""
    given = with_vocabulary(load_job(job))
    name = given.train.dtype or "fp32"
    dtype = DTYPES[name]
    speeds = {}
    for size in (4096, 8192) if DEVICE.type == "cuda" else (256, 512):
        a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))

        def many(a=a, b=b):  # a device that is waited for after each one is idle in between
            for _ in range(PRODUCTS):
                a @ b

        speeds[size] = PRODUCTS * 2 * size**3 / seconds_of(many, 5)
    result = {"peak_flops_per_second": max(speeds.values()), "flops_per_token": flops_per_token(given)}
    model = torch.cuda.get_device_name() if DEVICE.type == "cuda" else ""
    if entry := lookup_accelerator(model):
        result["data_sheet_flops_per_second"] = ACCELERATORS[entry].peak_flops_per_second[name]
    print(json.dumps(result))


@command.command()
@click.argument("job")
@click.option("--microbatch", type=int, default=2)
def kernels(job: str, microbatch: int):
    """Seconds of a step by class of kernel, their number, the share of time that the device is busy, and the host's
    seconds of a block."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = DEVICE.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with started_world() as world:
        trainer, training = _trainer(world, job, f"plan.microbatch={microbatch}")
        for _ in range(2):
            trainer.step(training)
        # Before the profiler, which may slow launches from then on.
        block = {"launched_seconds": seconds_of(_pass_of_block(trainer))} | _host_seconds_of_block(trainer)
        synchronize()
        with profile(activities=activities) as profiled:
            start = time.perf_counter()
            trainer.step(training)
            synchronize()
            wall = time.perf_counter() - start
    seconds, counts = dict.fromkeys((*CLASSES, "element-wise"), 0.0), dict.fromkeys((*CLASSES, "element-wise"), 0)
    for event in of_device(profiled):
        name = event.key.lower()
        kind = next((k for k, parts in CLASSES.items() if any(part in name for part in parts)), "element-wise")
        seconds[kind] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) * 1e-6
        counts[kind] += event.count
    result = {"step_seconds": wall, "seconds": seconds, "counts": counts, "busy": sum(seconds.values()) / wall}
    print(json.dumps(result | {"block": block}))


def of_device(profiled) -> list:
    """Return what the device did, without the calls of its driver, which are listed with it."""
    from torch.autograd import DeviceType

    kind = DeviceType.CUDA if DEVICE.type == "cuda" else DeviceType.CPU
    return [event for event in profiled.key_averages() if event.device_type == kind]


def _trainer(world, reference: str, *overrides: str):
    from hpctrain.engine.start.resolve import prepare_run
    from hpctrain.engine.trainer import Trainer

    prepared = prepare_run(world, load_job(reference, ["plan.microbatch=2", *overrides]))
    trainer = Trainer(world, bind_accelerator(world), prepared.job, prepared.plan)
    trainer.initialise()
    return trainer, prepared.training


CHOICES: dict[str, dict] = {
    "separate": {"fused": False},
    "fused": {"fused": True},
    "any order of sums": {"fused": False, "deterministic": False},
    **{
        f"attention {name}": {"fused": False, "attention": name}
        for name in ("flash", "flash4", "flex", "efficient", "math")
    },
    "attention flash, any order": {"fused": False, "attention": "flash", "deterministic": False},
    "attention cudnn, any order": {"fused": False, "attention": "cudnn", "deterministic": False},
}
"""Kernels of a job, by what the result calls them."""


@command.command()
@click.argument("job")
def fused(job: str):
    """Seconds of operators, kernels of a block and tokens/s, by the kernels that a job may choose.

    Without a GPU tokens/s are by processor time, so that other processes do not count.
    """
    from hpctrain.comm.accelerators.compiling import try_compile
    from hpctrain.config.kernels import KernelChoice
    from hpctrain.engine.start.resolve import prepare_run
    from hpctrain.engine.start.resolve_kernels import try_attention
    from hpctrain.engine.trainer import Trainer

    few = ["model.num_layers=4"] if DEVICE.type == "cuda" else []  # several of them are there at once
    ability = try_compile(DEVICE)
    choices = {name: choice for name, choice in CHOICES.items() if ability.works or not choice["fused"]}
    could_not = {} if ability.works else {"fused": ability.reason}
    with started_world() as world:
        prepared = prepare_run(world, load_job(job, ["plan.microbatch=2", *few]))
        accelerator, trainers = bind_accelerator(world), {}
        for name, choice in choices.items():
            asked = prepared.job.model_copy(update={"kernels": KernelChoice(**choice)})
            accelerator.sum_in_one_order(asked.kernels.deterministic)
            if "attention" in choice and not (has_it := try_attention(accelerator, asked, choice["attention"])).works:
                could_not[name] = has_it.reason
                continue
            trainers[name] = Trainer(world, accelerator, asked, prepared.plan)
            trainers[name].initialise()
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for number in range(7):
            for name, trainer in trainers.items():
                accelerator.sum_in_one_order(trainer.job.kernels.deterministic)
                start = time.process_time()
                wall = trainer.step(prepared.training)[0]["step_seconds"]
                taken = wall if DEVICE.type == "cuda" else time.process_time() - start
                seconds[name] += [taken] if number >= 2 else []  # the first ones compile and allocate
        tokens = next(iter(trainers.values())).tokens_per_step
        middle = {name: statistics.median(each) for name, each in seconds.items()}
        result = {
            "could_not": could_not,
            "tokens_per_second": {name: tokens / each for name, each in middle.items()},
            "to_separate": {name: middle["separate"] / each for name, each in middle.items()},
        }
        keep(result)
        counted = {name: trainer for name, trainer in trainers.items() if "order" not in name}
        result["kernels_of_a_block"] = {name: _kernels_of_block(trainer) for name, trainer in counted.items()}
        accelerator.sum_in_one_order(True)
    keep(result)
    print(json.dumps(result | {"operators": _operator_seconds(prepared.job, ability.works)}))


def _pass_of_block(trainer, rows: int = 2, positions: int = 0) -> Callable[[], None]:
    """Return what computes the first block forward and backward, for two sequences by default."""
    job, block = trainer.job, trainer.layout.stages[0].layers[1]
    shape = rows, positions or job.data.sequence_length, job.model.hidden_size
    hidden = torch.randn(shape, device=DEVICE, dtype=trainer.layout.dtype, requires_grad=True)

    def both() -> None:
        block.forward(hidden).backward(torch.ones_like(hidden))

    return both


def _kernels_of_block(trainer) -> int:
    """Return how many kernels the first block takes forward and backward; on a host how many operations."""
    from torch.profiler import ProfilerActivity, profile

    trainer.accelerator.sum_in_one_order(trainer.job.kernels.deterministic)
    on_gpu, both = DEVICE.type == "cuda", _pass_of_block(trainer)
    both()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        both()
        synchronize()
    operations = ("aten::", "## Call CompiledFxGraph")
    return sum(each.count for each in of_device(profiled) if on_gpu or each.key.startswith(operations))


def _host_seconds_of_block(trainer) -> dict[str, float]:
    """Return what the host takes for a block of 16 tokens, which leaves a device idle; and for one of plain PyTorch."""
    model, dtype = trainer.job.model, trainer.layout.dtype
    plain = PlainBlock(model).to(DEVICE, dtype)
    size = plain.of.head_size
    cos, sin = (torch.ones(16, size, device=DEVICE, dtype=dtype) for _ in range(2))
    hidden = torch.randn(1, 16, model.hidden_size, device=DEVICE, dtype=dtype, requires_grad=True)

    def of_plain() -> None:
        plain(hidden, cos, sin).backward(torch.ones_like(hidden))

    return {"host_seconds": seconds_of(_pass_of_block(trainer, 1, 16)), "plain_host_seconds": seconds_of(of_plain)}


@command.command()
@click.argument("job")
def graph(job: str):
    """Seconds of a block, forward and backward, as one CUDA graph: what graphs could save at the most."""
    with started_world() as world:
        trainer, _ = _trainer(world, job)
        both = _pass_of_block(trainer)
        if DEVICE.type != "cuda":
            result: dict = {"could_not": "a host has no graphs"}
        else:
            stream, recorded = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                both()  # what is allocated at first must not be part of the graph
            synchronize()
            with torch.cuda.graph(recorded, stream=stream):
                both()
            result = {"seconds": seconds_of(recorded.replay)}
        print(json.dumps(result))


def _operator_seconds(job: Job, compiles: bool) -> dict[str, dict[str, float]]:
    """Return what element-wise operators take, forward and backward, separate and fused."""
    from hpctrain.comm.accelerators.compiling import Compiled
    from hpctrain.engine.alignment import Case
    from hpctrain.model.operators.cases import operators
    from hpctrain.model.operators.running import Kernels

    dtype, result = DTYPES[job.train.resolved_dtype], {}
    plain = {operator.name: operator for operator in operators(job.model, 2, job.data.sequence_length)}
    for key, kernels in {"separate": Kernels(), **({"fused": Kernels(Compiled())} if compiles else {})}.items():
        for operator in operators(job.model, 2, job.data.sequence_length, kernels):
            if operator.name in ("norm", "rotary", "activation"):
                case = Case(plain[operator.name])
                inputs, gradient = case.inputs(DEVICE, dtype), case.gradient.to(DEVICE, dtype)
                taken = seconds_of(partial(case.compute, operator, inputs, gradient))
                result.setdefault(operator.name, {})[f"{key}_seconds"] = taken
    return result


SETTINGS = {
    "as it is": (),
    "masks of documents": ("data.mask_documents=true",),
    "offloaded optimizer": ("plan.offload=optimizer",),
    "selective recompute": ("plan.recompute=selective",),
}
"""Keys of a job that cost time, by what the result calls them."""


@command.command()
@click.argument("job")
def settings(job: str):
    """Seconds of a step by keys of the job that cost time, each in its turn."""
    few = ["model.num_layers=4"] if DEVICE.type == "cuda" else []
    result: dict = {"step_seconds": {}, "could_not": {}}
    with started_world() as world:
        for name, keys in SETTINGS.items():
            try:
                trainer, training = _trainer(world, job, *few, *keys)
            except HpctrainError as error:
                result["could_not"][name] = str(error)
                continue
            seconds = [trainer.step(training)[0]["step_seconds"] for _ in range(5)][2:]
            result["step_seconds"][name] = statistics.median(seconds)
            keep(result)
    print(json.dumps(result))


ATTENTION_SHAPES = {"llama-1b": (8, 32, 4, 2048, 64), "llama-8b": (2, 32, 8, 8192, 128)}
"""Rows, heads, key/value heads, positions, size of a head."""
ATTENTION_CHOICES = {
    "torch": True, "flash": True, "flash4": True, "flex": True,
    "torch, any order": False, "flash, any order": False, "cudnn, any order": False, "flash4, any order": False,
}  # fmt: skip
"""Kernels of attention, and whether their sums have one order."""


@command.command()
@click.option("--small", is_flag=True, help="Few positions, in fp32 without a GPU.")
def attention(small: bool):
    """Seconds and FLOP/s of attention by kernel and order of sums, forward and both ways; whether bits are the same."""
    from hpctrain.architectures.description import Norm
    from hpctrain.model.operators.attention import attend

    dtype, result = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32, {}
    for shape, (rows, heads, kv_heads, length, size) in ATTENTION_SHAPES.items():
        rows, length = (1, 128) if small else (rows, length)
        described = Attention(heads=heads, kv_heads=kv_heads, head_size=size, norm=Norm(1e-5))
        inputs = [
            torch.randn(rows, n, length, size, device=DEVICE, dtype=dtype, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        ]
        grad = torch.randn(rows, heads, length, size, device=DEVICE, dtype=dtype)
        flops = 4 * rows * heads * length * length / 2 * size
        for name, in_one_order in ATTENTION_CHOICES.items():
            backend, entry = name.split(",")[0], result.setdefault(shape, {}).setdefault(name, {})
            torch.use_deterministic_algorithms(in_one_order)
            torch.backends.cudnn.deterministic = in_one_order

            def forward(backend=backend, inputs=inputs, described=described):
                return attend(*inputs, described, backend=backend)

            def both(forward=forward, inputs=inputs, grad=grad):
                return torch.autograd.grad(forward(), inputs, grad)

            try:
                start = time.perf_counter()
                first = both()
                synchronize()
                entry["first_seconds"] = time.perf_counter() - start
                entry["same_bits"] = all(all(map(torch.equal, first, both())) for _ in range(3))
                with torch.no_grad():
                    entry["forward_seconds"] = seconds_of(forward, 10)
                entry["seconds"] = seconds_of(both, 10)
                entry["forward_flops_per_second"] = flops / entry["forward_seconds"]
                entry["flops_per_second"] = 3.5 * flops / entry["seconds"]
            except Exception as error:  # whatever a compiler or a package raises
                entry["could_not"] = f"{type(error).__name__}: {error}"[:300]
            keep(result)
    print(json.dumps(result))


EXPERTS = "qwen3-30b-a3b"
"""The preset of which one layer's experts are measured."""
FEW_EXPERTS = {"hidden_size": 64, "num_experts": 8, "experts_per_token": 2, "expert_size": 16}


@command.command()
@click.option("--small", is_flag=True, help="Few experts and tokens, in fp32 without a GPU.")
def experts(small: bool):
    """Seconds of one layer's experts, forward and both ways, and of torch's grouped products alone; whether bits are
    the same twice. Grouped products have inputs that are sorted by expert, and their gradients are not in fp32."""
    from hpctrain.model.operators import experts as operator
    from hpctrain.model.operators.activation import activate
    from hpctrain.model.parallel.axes import Axes
    from hpctrain.model.storage.units import Weight

    model = Model.model_validate(presets()[EXPERTS] | {"vocab_size": 512} | (FEW_EXPERTS if small else {}))
    mixed, hidden = model.description.blocks[0].mlp, model.hidden_size
    assert isinstance(mixed, Experts), "the preset has them in each layer"
    dtype, count = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32, mixed.count
    torch.manual_seed(1)
    x = torch.randn(4, 64 if small else 4096, hidden, device=DEVICE, dtype=dtype, requires_grad=True)
    dy, num_pairs = torch.randn_like(x), x.shape[0] * x.shape[1] * mixed.chosen
    up, down = Weight("up"), Weight("down")
    for weight, outputs, inputs in ((up, mixed.up_size, hidden), (down, hidden, mixed.inner)):
        weight.data = (torch.randn(count * outputs, inputs, device=DEVICE) * inputs**-0.5).to(dtype)
        weight.grad = torch.zeros(count * outputs, inputs, device=DEVICE)
    scores = operator.scores_of(torch.randn(*x.shape[:2], count, device=DEVICE), mixed)
    chosen = operator.choose(scores, mixed)
    weights = operator.weights_of(scores, chosen, mixed).requires_grad_()
    activated = partial(activate, activation=mixed.activation, is_gated=True, run=run_eagerly)
    mixture = operator.ExpertMixture(mixed, [up, down], Axes(), activated)
    places, groups = operator.sort_choices(chosen, mixture.own, count)
    in_order = x.detach().flatten(0, 1)[places // mixed.chosen].requires_grad_()
    up_EOI, down_EOI = (mixture.weight(weight, dtype).detach().requires_grad_() for weight in (up, down))
    d_up = torch.randn(num_pairs, mixed.up_size, device=DEVICE, dtype=dtype)
    d_added = torch.randn(num_pairs, hidden, device=DEVICE, dtype=dtype)

    def both() -> list[torch.Tensor]:
        x.grad = weights.grad = None
        output = mixture(x, weights, chosen)
        output.backward(dy)
        return [output.detach(), *(each.grad for each in (x, weights, up, down) if each.grad is not None)]

    def grouped() -> tuple[torch.Tensor, ...]:
        inner = activated(F.grouped_mm(in_order, up_EOI.transpose(1, 2), offs=groups.ends))
        added = F.grouped_mm(inner, down_EOI.transpose(1, 2), offs=groups.ends)
        return torch.autograd.grad(added, [in_order, up_EOI, down_EOI], d_added)

    results = []
    for _ in range(2):
        up.is_unwritten = down.is_unwritten = True
        results.append([each.clone() for each in both()])
    gradients = {
        "fp32, by expert": partial(
            operator.add_grouped_products, up.grad, d_up, in_order.detach(), groups=groups, overwrite=False
        ),
        "grouped": partial(F.grouped_mm, d_up.t(), in_order.detach(), offs=groups.ends),
    }
    result: dict = {"tokens": x.shape[0] * x.shape[1], "same_bits": all(map(torch.equal, *results))}
    for name, work in (("forward_seconds", partial(mixture, x.detach(), weights.detach(), chosen)), ("seconds", both)):
        result[name] = seconds_of(work)
        keep(result)
    result["flops_per_second"] = 3 * 2 * num_pairs * hidden * (mixed.up_size + mixed.inner) / result["seconds"]
    result["grouped_products_seconds"] = seconds_of(grouped)
    result["to_grouped_products"] = result["seconds"] / result["grouped_products_seconds"]
    keep(result)
    result["seconds_of_gradient_of_up"] = {name: seconds_of(work) for name, work in gradients.items()}
    print(json.dumps(result))


@command.command()
@click.argument("job")
def checkpoints(job: str):
    """Seconds to write a checkpoint and to read it back, and its bytes."""
    few = ["model.num_layers=8"] if DEVICE.type == "cuda" else []  # all of llama-1b are 13 GB
    with started_world() as world, tempfile.TemporaryDirectory(dir=Path(job).parent) as name:
        trainer, training = _trainer(world, job, *few)
        trainer.step(training)
        start = time.perf_counter()
        saved = trainer.save(Path(name), {})
        written = time.perf_counter()
        assert saved is not None, "nothing failed"
        trainer.resume(saved)
        read = time.perf_counter()
        size = sum(each.stat().st_size for each in saved.rglob("*") if each.is_file())
        print(
            json.dumps(
                {
                    "bytes": size,
                    "write_seconds": written - start,
                    "read_seconds": read - written,
                    "write_bytes_per_second": size / (written - start),
                    "read_bytes_per_second": size / (read - written),
                }
            )
        )


if __name__ == "__main__":
    main(command)
