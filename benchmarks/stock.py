"""Stock PyTorch on one fixed Llama shape and several layouts: what hpctrain is measured against.

    python -m benchmarks.stock ddp --steps 3 --warmup 1

starts the ranks of the layout on this machine (gloo, fp32, one thread a rank), trains on random tokens, and prints one
JSON line last. Public PyTorch alone, written as its own users write it: eager, fused AdamW, gradients synchronised once
a step; where PyTorch offers several ways, the one that was fastest on gloo. All layouts start from the same weights and
take the same tokens, so their losses agree. If a rank fails, its traceback is shown and the exit code is not 0.

Shapes: B sequences of a microbatch, S positions, E hidden size, H heads on this rank, D head size.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY, SEQUENCE = 256, 8, 8, 1024, 512, 256
GLOBAL_BATCH, MICROBATCH = 16, 2
HEAD_SIZE, SEED, HOST = HIDDEN // HEADS, 1, "127.0.0.1"


def rotate(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2104.09864)."""
    first, second = x_BHSD.chunk(2, dim=-1)
    return x_BHSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


class Attention(nn.Module):
    """Causal self-attention; how many heads follows from the projections, which may be split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q, k, v = (p(x_BSE).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos_SD, sin_SD), rotate(k, cos_SD, sin_SD)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2002.05202)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSE)) * self.up(x_BSE))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attention(self.attention_norm(x_BSE), cos_SD, sin_SD)
        return x_BSE + self.ffn(self.ffn_norm(x_BSE))


class Llama(nn.Module):
    """The whole model; with `embedding`, or `norm` and `head`, set to None, the stage of a pipeline without them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        angles_SD = torch.outer(torch.arange(SEQUENCE), frequencies).repeat(1, 2)
        self.register_buffer("cos_SD", angles_SD.cos(), persistent=False)
        self.register_buffer("sin_SD", angles_SD.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, S), or (B, S, E) from the stage before, to logits (B, S, V), or (B, S, E) for the next."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos_SD, self.sin_SD)
        return x if self.head is None else self.head(self.norm(x))


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Replica:
    """What one rank trains, and which share of the batch its data replica takes."""

    run: Callable[[Tensor, Tensor], Tensor]
    """Forward and backward of inputs and labels, both (rows, S). Leaves the gradients, summed over data replicas where
    there are several; returns a loss whose mean over all ranks is the loss of the global batch."""
    index: int = 0
    count: int = 1


def accumulate(model: nn.Module, around: Callable[[bool], AbstractContextManager] = nullcontext) -> Callable:
    """Return a `Replica.run` that accumulates gradients; `around(last)` is the context of each microbatch."""

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        microbatches = list(zip(inputs.split(MICROBATCH), labels.split(MICROBATCH), strict=True))
        total = torch.zeros(())
        for number, (x, y) in enumerate(microbatches, start=1):
            with around(number == len(microbatches)):
                loss = mean_loss(model(x), y) / len(microbatches)
                loss.backward()
            total += loss.detach()
        return total

    return run


def data_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """Wrap in DDP; the buffers are constants and need no broadcast in each forward."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, forward_sync_buffers=False)


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Split every block Megatron's way (1909.08053), in place.

    Norms, embedding and head stay whole on each rank: with 512 token ids the head is a sixtieth of the work, and
    gathering its logits took longer, as did SequenceParallel norms on gloo.
    PrepareModuleInput makes the input a DTensor once, so that its gradient is reduced once and not for each projection.
    """
    whole = (Replicate(), None, None)
    plan = {
        "attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "ffn": PrepareModuleInput(input_layouts=whole[:1], desired_input_layouts=whole[:1]),
        **{name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")},
        **{name: RowwiseParallel() for name in ("attention.out", "ffn.down")},
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def ddp(model: Llama) -> Replica:
    wrapped = data_parallel(model)
    run = accumulate(wrapped, lambda last: nullcontext() if last else wrapped.no_sync())
    return Replica(run, dist.get_rank(), dist.get_world_size())


def fsdp(model: Llama) -> Replica:
    """FSDP2 (ZeRO-3); gradients are reduced once a step, weights stay gathered between backward and next forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)

    def around(last: bool) -> AbstractContextManager:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        return nullcontext()

    return Replica(accumulate(model, around), dist.get_rank(), dist.get_world_size())


def tensor(model: Llama) -> Replica:
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Replica(accumulate(model))


def tensor_data(model: Llama) -> Replica:
    """Tensor 2 x data 2, gradients averaged in one flat all-reduce: on gloo a fifth faster than FSDP2 over `data`.

    DDP takes DTensor parameters only through a private hook, and was no faster.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    data = mesh["data"].get_group()
    backward = accumulate(model)

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = backward(inputs, labels)
        gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        average(gradients, data)
        return loss

    return Replica(run, data.rank(), data.size())


def average(gradients: list[Tensor], data: dist.ProcessGroup) -> None:
    """Average gradients over data replicas in one flat all-reduce, in place."""
    flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(data.size())
    dist.all_reduce(flat, group=data)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def pipeline_data(model: Llama, virtual_stages: int = 1) -> Replica:
    """1F1B over two ranks, each with one or several stages of the model.

    One stage is in DDP, which PipelineStage lets reduce after the last microbatch only. Of several stages gradients are
    averaged at the end: with interleaved 1F1B, DDP fails in its second step.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    data, pipeline = mesh["data"].get_group(), mesh["pipeline"].get_group()
    first, num_stages = pipeline.rank() == 0, 2 * virtual_stages
    cpu, numbers = torch.device("cpu"), range(pipeline.rank(), num_stages, 2)
    parts = [stage_of(model, number, num_stages) for number in numbers]
    modules = [data_parallel(parts[0], data)] if virtual_stages == 1 else parts
    stages = [
        PipelineStage(module, number, num_stages, cpu, group=pipeline)
        for module, number in zip(modules, numbers, strict=True)
    ]
    num_microbatches = GLOBAL_BATCH // data.size() // MICROBATCH
    if virtual_stages == 1:
        schedule = Schedule1F1B(stages[0], num_microbatches, loss_fn=mean_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=mean_loss)
    model.embedding = model.blocks = model.norm = model.head = None
    model.stages = nn.ModuleList(modules)

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        losses = [torch.zeros(())] if first else []
        schedule.step(*([inputs] if first else []), target=labels, losses=losses, return_outputs=False)
        if virtual_stages > 1:
            average([p.grad for p in model.parameters() if p.grad is not None], data)
        return 2 * torch.stack(losses).detach().mean()  # twice: the first rank counts as 0 in the mean over ranks

    return Replica(run, data.rank(), data.size())


def stage_of(model: Llama, number: int, num_stages: int) -> Llama:
    """Return a copy of one of the equal stages of a model."""
    stage = deepcopy(model)
    each = LAYERS // num_stages
    stage.blocks = stage.blocks[number * each : (number + 1) * each]
    if number > 0:
        stage.embedding = None
    if number < num_stages - 1:
        stage.norm = stage.head = None
    return stage


LAYOUTS: dict[str, tuple[int, Callable[[Llama], Replica]]] = {
    "one": (1, lambda model: Replica(accumulate(model))),
    "ddp": (4, ddp),
    "fsdp": (4, fsdp),
    "tensor4": (4, tensor),
    "tensor2_data2": (4, tensor_data),
    "pipeline2_data2": (4, pipeline_data),
    "interleaved2_data2": (4, lambda model: pipeline_data(model, virtual_stages=2)),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW; DTensors and plain tensors in groups of their own, as the fused update takes no mixture."""
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
    groups = [{"params": parameters} for parameters in kinds if parameters]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train(rank: int, layout: str, steps: int, warmup: int, port: int, results: SimpleQueue) -> None:
    """Train on one rank, met at `port`; rank 0 puts (seconds of each measured step, last loss) into `results`."""
    torch.set_num_threads(1)
    num_ranks, build = LAYOUTS[layout]
    dist.init_process_group("gloo", store=dist.TCPStore(HOST, port), rank=rank, world_size=num_ranks)
    torch.manual_seed(SEED)
    model = Llama()
    replica = build(model)
    optimizer = adamw(model)
    generator = torch.Generator().manual_seed(SEED)
    seconds = []
    for _ in range(warmup + steps):
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
        rows = tokens.chunk(replica.count)[replica.index]
        dist.barrier()
        started = time.perf_counter()
        loss = replica.run(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)  # last, so that the step is over on every rank
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        results.put((seconds[warmup:], loss.item() / num_ranks))
    dist.barrier()
    os._exit(0)  # not a return: freeing DDP joins gloo's thread, which may wait for the GIL (seen to hang)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default 3)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (default 1)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps} measures nothing; set it to 1 or more")
    num_ranks = LAYOUTS[options.layout][0]
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # port 0: a free one, held from now on
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train, (options.layout, options.steps, options.warmup, store.port, results), nprocs=num_ranks)
    seconds, loss = results.get()
    speed = round(GLOBAL_BATCH * SEQUENCE / statistics.median(seconds), 1)
    report = {"layout": options.layout, "ranks": num_ranks, "tokens_per_second": speed}
    print(json.dumps(report | {"step_seconds": [round(value, 4) for value in seconds], "loss": loss}))


if __name__ == "__main__":
    main()
