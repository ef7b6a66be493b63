"""What the commands that start ranks have in common: from a job file to a resolved job, a plan and data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.comm.launcher import host_memory_bytes
from hpctrain.comm.topology import Preferences
from hpctrain.engine.overlap import continued, crossings, resolve_forward, resolve_overlap
from hpctrain.engine.phases import phases_of
from hpctrain.errors import JobError
from hpctrain.intervals import cut_evenly
from hpctrain.job import Job, load_job
from hpctrain.parameters import padded_vocabulary
from hpctrain.plan import Plan
from hpctrain.schedule import check_schedules

if TYPE_CHECKING:
    from hpctrain.cluster import Cluster
    from hpctrain.comm.world import World
    from hpctrain.data.order import Sequences
    from hpctrain.data.tokens import TokenSource

BLOCKS_VERIFIED_AT_START = 256  # a rank, of 1 MiB: well under a second

override_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change one key of the job file, such as train.steps=10 or plan.tensor.y=2. May be repeated.",
)

rehearse_option = click.option(
    "--rehearse",
    metavar="CLUSTER",
    help="A cluster file, or the name of a ready one, whose devices the ranks impersonate: a rank for each.",
)


@contextmanager
def started_world() -> Iterator["World"]:
    """Start MPI, and end it in order; an error that leaves the block ends all ranks, and is told once."""
    from hpctrain.comm.world import World

    world = World.start()
    try:
        yield world
        world.close()
    except (Exception, KeyboardInterrupt) as error:
        world.fail(error)


@dataclass
class Prepared:
    """All that is known before anything heavy is imported."""

    job: Job
    plan: Plan
    reasons: dict[str, str]
    source: "TokenSource"
    training: "Sequences"
    validation: "Sequences | None"
    data_identity: str
    """Tells token files and their training parts apart; a run that is continued must have the same."""


def load_job_on(world: "World", reference: str, overrides: tuple[str, ...]) -> Job:
    """Read a job on every rank; a file that only some of them can read is told by one of those that cannot."""
    job = load_job(reference, overrides)
    world.enter(phases_of(job.observe).start)
    return job


def prepare_run(
    world: "World", job: Job, resume_from: Path | None = None, cluster: "Cluster | None" = None
) -> Prepared:
    """Open the data, replace what is `auto` by values, make the plan. All ranks must call.

    With `resume_from` (a checkpoint) values that can change a bit of the result are taken from it. `cluster` is what
    the ranks run on, where that is known.
    """
    from hpctrain.data.order import open_datasets
    from hpctrain.planner.even import Resolved, resolve_plan

    reasons = {}
    source, training, validation = open_datasets(job.data, job.train.seed)
    with world.all_or_none():  # small files whole, by all ranks together; the rest when it is first read
        known = min(source.num_blocks, world.size * BLOCKS_VERIFIED_AT_START)
        source.verify(cut_evenly(known, world.size)[world.rank])
    if job.model.vocab_size is None:
        job = _with(job, "model", vocab_size=source.vocab_size)
        reasons["model.vocab_size"] = f"{source.vocab_size}: that of {job.data.tokens}"
    elif job.model.vocab_size < source.vocab_size:
        raise JobError(
            f"model.vocab_size {job.model.vocab_size} is less than the {source.vocab_size} token ids of"
            f' {job.data.tokens}; set it to {source.vocab_size} or more, or "auto"'
        )
    data_identity = f"{source.identity} {tuple(training.interval)}"
    saved_plan = None
    if resume_from is not None:
        from hpctrain.checkpoint.state import check_same_run

        theirs, saved_plan = check_same_run(resume_from, job, data_identity)
        if job.train.dtype is None:
            job = _with(job, "train", dtype=theirs.train.dtype)
            reasons["train.dtype"] = f"{theirs.train.dtype}: that of {resume_from}"
        if job.comm.links is None:
            job = _with(job, "comm", links=theirs.comm.links)
        overlap, taken = continued(job.overlap, theirs.overlap)
        job = job.model_copy(update={"overlap": overlap})
        reasons |= {key: f"{value}: that of {resume_from}" for key, value in taken.items()}
        if job.products.tune is not False:
            tune = job.products.tune or bool(theirs.products.tune)
            job = _with(job, "products", tune=tune, ways=theirs.products.ways | job.products.ways)
    resolved = None
    memory_bytes = world.smallest(_memory_bytes(world))
    families = [place.family for place in world.topology.places]
    with world.all_or_none():  # one rank decides for all, whatever their hosts are like
        if world.rank == 0:
            if job.plan is None and saved_plan and _fits(saved_plan, families):
                resolved = Resolved(saved_plan, {"plan": f"{saved_plan.describe()}: that of {resume_from}"})
            else:
                resolved = resolve_plan(job, world.size, memory_bytes, families)
    resolved = world.broadcast_object(resolved)
    reasons |= resolved.reasons
    overlap, chosen = resolve_overlap(job.overlap, world.topology, crossings(world, job, resolved.plan))
    job, reasons = job.model_copy(update={"overlap": overlap}), reasons | chosen
    with world.all_or_none():
        if world.rank == 0:
            check_schedules(resolved.plan, reduce_early=bool(job.overlap.data))
    padded = max(padded_vocabulary(job.model, tile.tensor) for tile in resolved.plan.tiles)
    if padded != job.model.vocab_size:
        reasons["vocabulary"] = f"{job.model.vocab_size} ids are padded to {padded}, a multiple of tensor y"
    if job.train.dtype is None:
        from hpctrain.comm.accelerator import agree_on_dtype, bind_accelerator  # the first thing that needs torch

        dtype, reasons["train.dtype"] = agree_on_dtype(world, bind_accelerator(world))
        job = _with(job, "train", dtype=dtype)
    what = job, resolved.plan, world.topology, cluster
    overlap, chosen = world.broadcast_object(resolve_forward(*what) if world.rank == 0 else None)
    job, reasons = job.model_copy(update={"overlap": overlap}), reasons | chosen
    from hpctrain.engine.tuning import tune_products

    products, chosen = tune_products(world, job, resolved.plan)
    job, reasons = job.model_copy(update={"products": products}), reasons | chosen
    if job.comm.links is None:
        from hpctrain.comm.links import measure_links

        links, reasons["comm.links"] = measure_links(world)
        job = _with(job, "comm", links=links)
    world.preferences = Preferences(job.comm.route, job.comm.algorithm, job.comm.links)
    return Prepared(job, resolved.plan, reasons, source, training, validation, data_identity)


def _fits(plan: Plan, families: list[str]) -> bool:
    """Say whether a plan is for ranks of these families."""
    from hpctrain.planner.even import families_of

    tiles = [tile.family for tile in plan.tiles]
    return len(plan.ranks) == len(families) and families_of(plan, families) == tiles


def _memory_bytes(world: "World") -> int:
    """Return what this rank may fill: the memory of its device, or its share of the host's. All ranks must call."""
    if world.topology.has_devices or world.accelerator is not None:
        from hpctrain.comm.accelerator import bind_accelerator

        accelerator = bind_accelerator(world)
        if not accelerator.shares_memory:
            return accelerator.memory().total
    return host_memory_bytes() // world.topology.ranks_on_host(world.rank)


@dataclass(frozen=True)
class Described:
    """A description of what the ranks run on: the real thing, or what they impersonate."""

    cluster: "Cluster"
    name: str
    is_rehearsed: bool


def describe(world: "World", reference: str, is_rehearsed: bool = False) -> Described:
    """Read a cluster, a file or a ready one's name. All ranks must call."""
    from hpctrain.cluster_file import find_cluster, load_cluster

    with world.all_or_none():
        return Described(load_cluster(find_cluster(reference)), reference, is_rehearsed)


def start_rehearsal(world: "World", reference: str) -> Described:
    """Let the ranks be the devices of a cluster, a file or a ready one's name, from now on. All ranks must call."""
    from hpctrain.cluster_file import find_cluster, load_truth

    described = describe(world, reference, is_rehearsed=True)
    with world.all_or_none():
        truth = load_truth(find_cluster(reference))

    from hpctrain.comm.rehearsal.start import rehearse  # torch, when nothing is wrong with the file

    rehearse(world, described.cluster, truth)
    return described


def check_runs(job: Job, plan: Plan, where: str) -> None:
    """Refuse a plan that cannot run a job, or would wait for ever. Raises PlanError."""
    from hpctrain.planner.even import check_plan

    check_plan(job, plan, where)
    check_schedules(plan)


def with_vocabulary(job: Job) -> Job:
    """Return the job with the vocabulary size of its token file, where it says none."""
    if job.model.vocab_size is not None:
        return job
    from hpctrain.data.tokens import open_tokens

    return _with(job, "model", vocab_size=open_tokens(job.data.tokens).vocab_size)


def _with(job: Job, section: str, **values) -> Job:
    """Return the job with some values of a section replaced."""
    return job.model_copy(update={section: getattr(job, section).model_copy(update=values)})
