"""Small training runs for tests: two model shapes, learnable tokens, and one rank as the reference."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.checkpoint.index import Index
from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.groups.group import Group
from hpctrain.comm.groups.settings import Settings
from hpctrain.comm.mpi_communicators import FamilyCommunicators
from hpctrain.comm.progress.instruments import UNTRACED
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.job import Job, load_job
from hpctrain.config.parallelism import PlanRequest
from hpctrain.config.training.train import Train
from hpctrain.data.order import Batch, open_datasets
from hpctrain.engine.start.facts import with_values
from hpctrain.engine.step.layout import Layout
from hpctrain.engine.trainer import Trainer
from hpctrain.model.parallel.axes import Axis
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.rehearsal.shaped import rehearse
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval

VOCAB = 61  # prime: padded for every y
MODELS = {
    "gpt2": {"architecture": "gpt2", "tie_head": True},
    "llama": {"architecture": "llama", "num_kv_heads": 2, "ffn_size": 64},
}


def by(route: str, settings: Settings) -> Settings:
    """Return settings of groups whose ranks on one host send messages, or share its memory where `route` is auto."""
    return replace(settings, topology=replace(settings.topology, shares_memory=route != "messages"))


def write_tokens(path: Path) -> Path:
    """Write tokens of which each mostly follows from the one before, so that a loss can fall."""
    rng = np.random.default_rng(0)
    tokens = np.zeros(20_000, dtype="<u2")
    for i in range(1, len(tokens)):
        tokens[i] = (3 * tokens[i - 1] + 1 + (rng.random() < 0.2)) % VOCAB
    tokens.tofile(path)
    return path


def make_job(tokens: Path, model: str, plan: dict | None = None, shape: dict | None = None, **train) -> Job:
    common = {"num_layers": 4, "hidden_size": 32, "num_heads": 8, "vocab_size": VOCAB, "max_positions": 16}
    settings = {"steps": 20, "global_batch": 16, "learning_rate": 3e-3, "warmup_steps": 2, "dtype": "fp32"}
    return Job.model_validate(
        {
            "name": "small",
            "model": common | MODELS[model] | (shape or {}),
            "data": {"tokens": tokens, "sequence_length": 16, "validation_fraction": 0.1},
            "train": settings | {"validation_sequences": 21} | train,
            "plan": plan or "auto",
        }
    )


class Alone:
    """A world of one rank, for references."""

    rank, size = 0, 1
    tracer = UNTRACED

    def freeing(self):
        return contextlib.nullcontext()

    def group(self, ranks, name="", overlapped=False, on_host=False):
        return Group(ranks)

    def is_near(self, one, other):
        return True

    def all_or_none(self):
        return contextlib.nullcontext()

    def agree(self, error):
        if error:
            raise error

    def gather_objects(self, value):
        return [value]

    all_objects = gather_objects

    def broadcast_object(self, value):
        return value

    def on_first_rank(self, make):
        return make()


def make_trainer(world, job: Job, plan: Plan | None = None, accelerator: Accelerator | None = None) -> Trainer:
    """Make a trainer by a plan; by default the one that the job asks for."""
    if plan is None and job.plan is None and world.size == 1:  # nothing to search for
        job = job.model_copy(update={"plan": PlanRequest()})
    return Trainer(world, accelerator or CpuAccelerator(), job, plan or resolve_plan(job, world.size).plan)


def world_of(world, families=None, timeout_seconds: float | None = None) -> World:
    """Another world of the same ranks, whose settings and records are its own. All ranks must call."""
    places = world.topology.places
    communicators = FamilyCommunicators(world.raw_mpi, families or [place.family for place in places])
    return World(communicators, places, timeout_seconds or world.patience.phase.seconds)


@contextlib.contextmanager
def rehearsed_world(world, cluster: Cluster, truth: Truth):
    """A world of its own, whose ranks are the devices of a cluster. All ranks must call."""
    own = world_of(world, [device.family for device in cluster.devices])
    rehearse(own, cluster, truth)
    yield own
    own.close()


def losses(
    world, job: Job, steps: int = 20, accelerator: Accelerator | None = None, plan: Plan | None = None
) -> list[float]:
    """Return the losses of `steps` steps from the start, the first norm of the gradient, and the validation loss.

    Later norms are derivatives where weights already differ in last bits: 1e-7 in a loss can be 1e-5 in them.
    """
    _, training, validation = open_datasets(job.data, job.train.seed)
    trainer = make_trainer(world, job, plan, accelerator)
    trainer.initialise()
    result = [trainer.step(training)[0] for _ in range(steps)]
    return [m["loss"] for m in result] + [result[0]["grad_norm"], trainer.validate(validation)]


REFERENCES: dict[str, list[float]] = {}
"""Losses of rank 0 alone, by the job and the number of steps."""


def losses_of_one_rank(world, tokens: Path, model: str, steps: int, **sizes) -> list[float]:
    """Return the losses of rank 0 alone for the arguments of `make_job`, computed once. All ranks must call."""
    job = make_job(tokens, model, **sizes)
    key = f"{steps} {job!r}"
    if key not in REFERENCES:
        REFERENCES[key] = world.on_first_rank(lambda: losses(Alone(), job, steps))
    return REFERENCES[key]


def parametrize_by_turns(metafunc, name: str, values: tuple[str, ...], layouts: dict[int, list[dict]]) -> None:
    """Give a test that asks for a `layout` those of its number of ranks, each with the next of the values."""
    if "layout" in metafunc.fixturenames:
        from mpi4py import MPI

        resolved = layouts.get(MPI.COMM_WORLD.size, [])
        turns = [(values[i % len(values)], layout) for i, layout in enumerate(resolved)]
        metafunc.parametrize((name, "layout"), turns, ids=str)


def curve_and_weights(world, job: Job, plan: Plan, steps: int) -> tuple[list[float], list[str]]:
    """Losses, norms of gradients, the validation loss; of each rank a digest of its weights at the end."""
    _, training, validation = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.initialise()
        result = [trainer.step(training)[0] for _ in range(steps)]
        summary = [m[key] for m in result for key in ("loss", "grad_norm")] + [trainer.validate(validation)]
        weights = [shard.master.numpy().tobytes() for shard in trainer.optimizer.shards]
    return summary, world.all_objects(sha256(b"".join(weights)).hexdigest())


@functools.cache
def curve_of_one_rank(world, tokens: Path, model: str, rows: int, microbatches: int, steps: int, **shape):
    """Return the curve of rank 0 alone. All ranks must call."""
    if world.rank:
        return world.broadcast_object(None)
    job = make_job(tokens, model, shape=shape, global_batch=rows * microbatches)
    whole = even_plan(job.model.num_items, TensorGrid(), 1, 1, microbatches, rows)
    return world.broadcast_object(curve_and_weights(Alone(), job, whole, steps)[0])


def go_on(world, job: Job, plan: Plan, folder: Path, steps: int, resume: bool) -> list[float]:
    """Return losses and norms of gradients of so many steps, from the newest checkpoint or the start; save one."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        if resume:
            trainer.resume(latest_checkpoint(folder))
        else:
            trainer.initialise()
        result = [trainer.step(training)[0] for _ in range(steps)]
        trainer.save(folder, {})
    return [m[key] for m in result for key in ("loss", "grad_norm")]


def whole_if_resumed_exactly(world, job: Job, plan: Plan, folder: Path, before: int = 1, after: int = 2) -> list[float]:
    """Return losses and norms of a whole run, and assert that one that is interrupted and resumed has the same bits."""
    uninterrupted = go_on(world, job, plan, folder / "whole", before + after, resume=False)
    first = go_on(world, job, plan, folder / "parts", before, resume=False)
    assert first + go_on(world, job, plan, folder / "parts", after, resume=True) == uninterrupted
    return uninterrupted


def bytes_of_a_step(world, job: Job, which: Callable[[Layout], Iterable[Axis]], plan: Plan | None = None) -> int:
    """Return what all ranks send in a step that is not the first, in the groups that `which` takes from a layout."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.initialise()
        groups = dict.fromkeys(which(trainer.layout))

        def sent() -> int:
            trainer.step(training)
            trainer.layout.store.await_weights()  # what is gathered for the next step
            return sum(sum(group.bytes_sent) for group in groups)

        before = sent()
        result = sent() - before
    return sum(world.all_objects(result))


def largest_relative_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def whole(folder) -> dict[str, np.ndarray]:
    """Return every parameter and moment of a run folder's newest checkpoint."""
    with Index(latest_checkpoint(folder)) as index:
        index.verify()
        names = [tensor.name for tensor in index.manifest.tensors]
        return {f"{kind}/{name}": index.whole(kind, name) for kind, _, name in (each.rpartition("/") for each in names)}


def losses_from(job_file: Path, folder: Path, steps: int = 5) -> tuple[list[float], list[np.ndarray], Train]:
    """Return the losses of some steps of a job file's model on one rank, the tokens of each, and how it is trained."""
    keys = {"data.tokens": write_tokens(folder / "tokens.bin"), "data.sequence_length": 32, "train.global_batch": 4}
    keys |= {"train.steps": steps, "train.learning_rate": 1e-3, "train.min_learning_rate": 1e-3, "train.dtype": "fp32"}
    job = load_job(str(job_file), [f"{key}={value}" for key, value in keys.items()])
    job = with_values(job, "train", balance_rate=0.0)  # a plain loop balances no experts
    _, training, _ = open_datasets(job.data, job.train.seed)
    trainer = make_trainer(Alone(), job)
    trainer.initialise()
    result = [trainer.step(training)[0]["loss"] for _ in range(steps)]
    return result, [Batch.of_step(training, step, 4).rows(Interval(0, 4)) for step in range(steps)], job.train
