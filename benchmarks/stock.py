"""Stock PyTorch on one fixed Llama shape and several layouts: what hpctrain is measured against.

    python benchmarks/stock.py ddp --steps 3 --warmup 1

starts the ranks of the layout on this machine (gloo, one thread a rank, fp32), trains on random tokens, and prints one
JSON line last. Everything here is public PyTorch, written as its own users write it: eager, fused AdamW, gradients
synchronised once a step. Nothing of hpctrain is imported. Every layout starts from the same weights and takes the same
tokens, so that their losses agree. Any failing rank makes the exit code non-zero.

Shape suffixes: B sequences of a microbatch, S positions, H heads on this rank, D head size, E hidden size.
"""

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY, SEQUENCE = 256, 8, 8, 1024, 512, 256
GLOBAL_BATCH, MICROBATCH = 16, 2
SEED = 1
SP = os.environ.get("SP", "0") == "1"
LP = os.environ.get("LP", "0") == "1"
DP = os.environ.get("DP", "fsdp")


def rope_table() -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles (Su et al., 2104.09864), each (S, D), halves repeated."""
    size = HIDDEN // HEADS
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(SEQUENCE), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    first, second = x_BHSD.chunk(2, dim=-1)
    return x_BHSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the projections, which may be split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        q, k, v = (
            p(x_BSE).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
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
    """The whole model, or, with a part set to None or blocks removed, a pipeline stage of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        cos, sin = rope_table()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Replica:
    """What one rank trains."""

    parameters: Iterable[nn.Parameter]
    run: Callable[[Tensor, Tensor], Tensor]
    """Forward and backward of (inputs, labels), both (rows, S); leaves gradients, returns the mean loss."""
    index: int = 0
    """Which of the data replicas this rank belongs to."""
    count: int = 1
    """Number of data replicas."""


def accumulate(model: nn.Module, no_sync: Callable[[bool], object] = lambda last: nullcontext()):
    """Return a `run` that accumulates gradients over microbatches; `no_sync(last)` surrounds each of them."""

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        pieces = list(zip(inputs.split(MICROBATCH), labels.split(MICROBATCH), strict=True))
        total = torch.zeros(())
        for number, (x, y) in enumerate(pieces, start=1):
            with no_sync(number == len(pieces)):
                loss = loss_of(model(x), y) / len(pieces)
                loss.backward()
            total += loss.detach()
        return total

    return run


def data_parallel(model: nn.Module, mesh: DeviceMesh | None = None) -> DistributedDataParallel:
    group = mesh.get_group() if mesh else None
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, broadcast_buffers=False)


def sharded(model: Llama, mesh: DeviceMesh) -> Callable[[bool], object]:
    """Apply FSDP2 to blocks and root in place; return the `no_sync` that reduces gradients once a step."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def no_sync(last: bool):
        model.set_requires_gradient_sync(last)
        if os.environ.get("RAB"):
            model.set_reshard_after_backward(last)
            model.set_is_last_backward(last)
        return nullcontext()

    return no_sync


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    if SP:
        parallelize_module(model, mesh, {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        })
        plan = {
            "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        parallelize_module(model, mesh, {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        } if not os.environ.get("REP") else {})
        plan = {
            "attention": PrepareModuleInput(input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)),
            "attention.out": RowwiseParallel(),
            "ffn": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
            "ffn.down": RowwiseParallel(),
        }
    plan |= {f"attention.{n}": ColwiseParallel() for n in "qkv"} | {f"ffn.{n}": ColwiseParallel() for n in ("gate", "up")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def one(model: Llama) -> Replica:
    return Replica(model.parameters(), accumulate(model))


def ddp(model: Llama) -> Replica:
    wrapped = data_parallel(model)
    run = accumulate(wrapped, lambda last: nullcontext() if last else wrapped.no_sync())
    return Replica(model.parameters(), run, dist.get_rank(), dist.get_world_size())


def fsdp(model: Llama) -> Replica:
    no_sync = sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Replica(model.parameters(), accumulate(model, no_sync), dist.get_rank(), dist.get_world_size())


def tensor(model: Llama) -> Replica:
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Replica(model.parameters(), accumulate(model))


def tensor_data(model: Llama) -> Replica:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    if DP == "fsdp":
        run = accumulate(model, sharded(model, mesh["data"]))
        parameters = model.parameters()
    elif DP == "ddp":
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
        _pre_dp_module_transform(model)
        wrapped = data_parallel(model, mesh["data"])
        run = accumulate(wrapped, lambda last: nullcontext() if last else wrapped.no_sync())
        parameters = model.parameters()
    else:
        inner = accumulate(model)
        group = mesh["data"].get_group()
        parameters = list(model.parameters())
        def run(i, l):
            loss = inner(i, l)
            grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
            flat = torch._utils._flatten_dense_tensors(grads)
            dist.all_reduce(flat, group=group)
            flat /= 2
            for g, f in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
                g.copy_(f)
            return loss
    return Replica(parameters, run, mesh["data"].get_local_rank(), 2)


def pipeline_data(model: Llama) -> Replica:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline") if not os.environ.get("PD") else ("pipeline", "data"))
    stage = mesh["pipeline"].get_local_rank()
    model.blocks = model.blocks[: LAYERS // 2] if stage == 0 else model.blocks[LAYERS // 2 :]
    if stage == 0:
        model.norm = model.head = None
    else:
        model.embedding = None
    wrapped = data_parallel(model, mesh["data"])
    part = PipelineStage(wrapped, stage, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())
    schedule = Schedule1F1B(part, GLOBAL_BATCH // 2 // MICROBATCH, loss_fn=loss_of)

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        if stage == 0:
            schedule.step(inputs)
            return torch.zeros(())
        losses: list[Tensor] = []
        schedule.step(target=labels, losses=losses, return_outputs=False)
        return 2 * torch.stack(losses).mean().detach()  # the average over ranks counts the first stage as 0

    return Replica(model.parameters(), run, mesh["data"].get_local_rank(), 2)


LAYOUTS: dict[str, tuple[int, Callable[[Llama], Replica]]] = {
    "one": (1, one),
    "ddp": (4, ddp),
    "fsdp": (4, fsdp),
    "tensor4": (4, tensor),
    "tensor2_data2": (4, tensor_data),
    "pipeline2_data2": (4, pipeline_data),
}


def train(rank: int, layout: str, steps: int, warmup: int, results) -> None:
    """Train on one rank; rank 0 puts (seconds of the measured steps, loss of the last one) into `results`."""
    torch.set_num_threads(1)
    ranks, build = LAYOUTS[layout]
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(SEED)
    replica = build(Llama())
    parameters = list(replica.parameters)
    groups = [[p for p in parameters if isinstance(p, DTensor)and p.device_mesh.ndim==2], [p for p in parameters if isinstance(p, DTensor) and p.device_mesh.ndim==1], [p for p in parameters if not isinstance(p, DTensor)]]
    optimizer = torch.optim.AdamW([{"params": g} for g in groups if g], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=not os.environ.get("NOFUSE"))
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
        dist.all_reduce(loss)
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        results.put((seconds[warmup:], loss.item() / ranks))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    ranks, _ = LAYOUTS[options.layout]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(train, (options.layout, options.steps, options.warmup, results), nprocs=ranks)
    seconds, loss = results.get()
    print(json.dumps({"layout": options.layout, "ranks": ranks,
        "tokens_per_second": GLOBAL_BATCH * SEQUENCE / statistics.median(seconds), "step_seconds": seconds, "loss": loss}))


if __name__ == "__main__":
    main()
