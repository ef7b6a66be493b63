"""One rank of a plan, alone on a pretended device that counts each storage that is alive: for tests of memory.

Sums and gathers are silent (`hpctrain.comm.groups.offline_world`), and what other tiles would send is noise. So no
other rank is started, and nothing depends on how busy the machine is.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from hpctrain.comm.groups.offline_world import OfflineWorld
from hpctrain.config.clusters.truth import PretendDevice
from hpctrain.config.job import Job
from hpctrain.data.order import Batch, open_datasets
from hpctrain.engine.step.layout import make_layout
from hpctrain.engine.step.optimizer import Optimizer
from hpctrain.engine.step.pipeline import Pipeline
from hpctrain.model.operators.attention import Documents
from hpctrain.model.stage import initialise
from hpctrain.plan.tiling import Plan
from hpctrain.rehearsal.accelerator import RehearsedAccelerator
from hpctrain.rehearsal.clock import Clock
from tests.ranks.small_runs import make_job

DEVICE = PretendDevice(memory_bytes=10**15, memory_bytes_per_second=1e18, flops_per_second={"fp32": 1e18, "bf16": 1e18})
"""Has room for all."""
SHAPE = {"num_layers": 6, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 176, "vocab_size": 509}
FAMILIES = {
    "llama": {},
    "gpt2": {"num_kv_heads": None, "tie_head": True},
    "qwen3": {},
    "gemma2": {"window": 16, "global_every": 2, "score_cap": 50.0, "logit_cap": 30.0, "score_divisor": 8.0},
    "qwen2": {},
    "gemma3": {"window": 16, "global_every": 3, "score_divisor": 8.0, "tie_head": True},
}
"""With the keys that give them all their parts. Together they have each part of a `Description`."""


class CountingAccelerator(RehearsedAccelerator):
    """Counts memory alone: what nobody waits for is not timed."""

    def __init__(self, family: str):
        super().__init__(family, DEVICE, Clock(), 1.0, 0)

    def charge(self, func, args, outputs) -> None: ...


class NoiseChannel:
    """A channel to a rank that is not there. As in a run, the message that was sent last is in flight."""

    def __init__(self):
        self._in_flight = torch.empty(0)

    def expect(self, tensor: torch.Tensor) -> None: ...

    def receive(self, tensor: torch.Tensor) -> None:
        tensor.normal_()

    def send(self, tensor: torch.Tensor) -> None:
        self._in_flight = tensor.clone()


class RankAlone(OfflineWorld):
    def channel(self, peer: int, num_bytes: int, depth: int, name: str = "") -> NoiseChannel:
        return NoiseChannel()


class Alive(NamedTuple):
    """Bytes of activations."""

    kept: int
    """After a forward pass."""
    deferred: int
    """After a backward pass without gradients of weights."""
    computing: int
    """At the peak of both passes, in addition to what is kept between them."""


def job_of(family: str, tokens: Path = Path("tokens.bin"), plan: dict | None = None, **keys) -> Job:
    """Return a job of a family; `keys` are of the model, the data and the training."""
    length, documents = keys.pop("positions", 64), keys.pop("documents", False)
    train = {"steps": 2, "global_batch": 16} | {
        name: keys.pop(name) for name in ("dtype", "optimizer", "global_batch") if name in keys
    }
    kernels = {name: keys.pop(name) for name in ("logits_mib",) if name in keys}
    shape = SHAPE | FAMILIES[family] | {"architecture": family, "max_positions": length} | keys
    job = make_job(tokens, "llama", plan, shape=shape, **train)
    data = job.data.model_copy(update={"sequence_length": length, "mask_documents": documents})
    return job.model_copy(update={"data": data, "kernels": job.kernels.model_copy(update=kernels)})


def run_passes(job: Job, plan: Plan, rank: int, splits: bool) -> Alive:
    """Run both passes of a microbatch of a rank's only tile, twice: what a process makes once is there then."""
    accelerator = CountingAccelerator("cpu")
    with accelerator.running():
        layout = make_layout(RankAlone(rank, len(plan.ranks)), job, plan, accelerator)
        initialise(layout.store, job.model, 0)
        layout.store.refresh()
        (tile,), (stage,), part = layout.tiles, layout.stages, layout.holding.part
        rows, positions = tile.rank_rows, part.positions(job.data.sequence_length)
        tokens = torch.randint(job.model.vocab_size, (rows, job.data.sequence_length + 1))
        starts = torch.zeros_like(tokens[:, 1:])
        documents = Documents(starts, starts.numpy()) if job.data.mask_documents else None
        hidden = rows, sum(each.size for each in positions), job.model.hidden_size // tile.tensor.x
        for _ in range(2):
            accelerator.start_anew()
            before = accelerator.memory().used
            given = tokens[:, :-1].clone() if stage.is_first else torch.randn(hidden, dtype=layout.dtype)
            value, saved = stage.forward(given, tokens[:, 1:] if stage.is_last else None, True, documents)
            del given
            peak = accelerator.memory().peak
            gradient = torch.ones(()) if stage.is_last else torch.randn_like(value)
            received = gradient.nbytes
            del value
            kept = accelerator.memory().used - before - received
            accelerator.start_anew()
            gradient = (stage.backward_input if splits else stage.backward)(saved, gradient)
            peak = max(peak, accelerator.memory().peak - received)
            del gradient
            deferred = accelerator.memory().used - before
            del saved
    return Alive(kept, deferred, peak - before - kept)


def train(job: Job, plan: Plan, ranks: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Train two steps on each of these ranks in turn; return the peaks of their memory, and of their host's."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    result = {}
    for rank in ranks:
        accelerator = CountingAccelerator(plan.tile_of(rank).family)
        with accelerator.running():
            layout = make_layout(RankAlone(rank, len(plan.ranks)), job, plan, accelerator)
            optimizer = Optimizer(layout, job.train)
            pipeline = Pipeline(layout, optimizer)
            initialise(layout.store, job.model, 0)
            optimizer.load_masters()
            layout.store.refresh()
            rows = job.train.global_batch
            for step in range(2):
                pipeline.train(Batch.of_step(training, step, rows), step, rows * job.data.sequence_length)
        result[rank] = accelerator.memory().peak, accelerator.host_peak_bytes
    return result
