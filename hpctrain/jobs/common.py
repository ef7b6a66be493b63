"""Parts that several commands share: the world, the job, and the cluster that ranks run on or rehearse."""

import atexit
import itertools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain import __version__
from hpctrain.architectures.registry import presets
from hpctrain.config.clusters.cluster_defaults import describe_sources
from hpctrain.config.clusters.cluster_file import read_cluster_file
from hpctrain.config.clusters.truth import Truth, after_losses
from hpctrain.config.errors import JobError
from hpctrain.config.job import Job, load_job
from hpctrain.config.paths import exists, refused_as
from hpctrain.config.saved import ignore, say_on_stderr
from hpctrain.engine.start.facts import MachineDescription, with_values
from hpctrain.engine.step.phases import phases_of
from hpctrain.plan.checks import check_plan
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.rehearsal.miniature import Miniature


@contextmanager
def started_world(rehearsed: MachineDescription | None = None) -> Iterator["World"]:
    """Start MPI, and end it in order; an error that leaves the block ends all ranks, and is printed once.

    Ranks that were started with another hpctrain or another MPI library are refused. The families of ranks that are to
    impersonate devices are those of the `rehearsed` cluster.
    """
    from hpctrain.comm.start.launcher import promised_size
    from hpctrain.comm.topology import places_of
    from hpctrain.comm.world import World
    from hpctrain.jobs.doctor.software import compare_software, describe_environments

    places = None
    if rehearsed:  # without those that events took, where there are as few ranks
        places = places_of(after_losses(rehearsed.cluster, rehearsed.truth or Truth(), promised_size()[0])[0])
    world = World.start(rehearsed=places)
    try:
        software = compare_software(world)
        if world.rank == 0:
            families = [place.family for place in world.topology.places]
            if text := describe_environments(software, families):
                click.echo(f"software: {text}", err=True)
        yield world
        world.close()
    except (Exception, KeyboardInterrupt) as error:
        world.fail(error)


def load_job_on(world: "World", reference: str, overrides: tuple[str, ...]) -> Job:
    """Read a job on every rank; where only some can read the file, one of the others reports it."""
    job = load_job(reference, overrides, say_on_stderr if world.rank == 0 else ignore)
    world.enter(phases_of(job.observe).start)
    if world.rank == 0:  # before anything that takes seconds
        families = Counter((place.family, place.kind) for place in world.topology.places)
        ranks = " and ".join(
            f"{count} {family}" + (f" ({kind})" if kind != family else "") for (family, kind), count in families.items()
        )
        on = f"{ranks} rank{'s' * (world.size > 1)}, {world.library.split(' ')[0]}"
        click.echo(f"hpctrain {__version__}: {job.name} on {on}", err=True)
    return job


def load_described(reference: str) -> MachineDescription:
    """Read a cluster, a file or a ready one's name, with the truth of a file for rehearsals. Raises TopologyError."""
    file = read_cluster_file(reference)
    filled = tuple(describe_sources(file.sources))
    return MachineDescription(
        file.cluster, reference, is_rehearsed=file.truth is not None, truth=file.truth, filled=filled
    )


def load_job_for(reference: str, overrides: tuple[str, ...], cluster: str) -> tuple[Job, MachineDescription]:
    """Read a job, and the cluster that it is planned for; the job is scaled down where that is a finished miniature."""
    from hpctrain.rehearsal.miniature import scale_for_finished

    job, described = with_vocabulary(load_job(reference, overrides)), load_described(cluster)
    return scale_for_finished(described.truth, job), described


def start_rehearsal(
    world: "World", rehearsed: MachineDescription, job: Job, time_scale: float | None = None
) -> tuple[Job, MachineDescription]:
    """Let the ranks be the devices of a cluster, from now on. All ranks must call, in a world that was started so.

    Cluster and job are scaled down together where the file is of real size. Return the job to train, and the cluster
    that it is trained on. A scaled job gets generated tokens: the ids of its own do not fit its vocabulary.
    """
    cores = world.gather_objects(sorted(os.sched_getaffinity(0)))
    num_cores = len(set(itertools.chain(*cores)))
    miniature = world.on_first_rank(lambda: miniature_of(rehearsed, job, num_cores, time_scale))
    scale, remark, job = miniature.describe(rehearsed.name), "", miniature.job
    if miniature.is_job_scaled:
        remark, tokens = "; trained on generated tokens", world.on_first_rank(lambda: generated_tokens(job))
        job = with_values(job, "data", tokens=tokens, validation=None)
    if world.rank == 0:
        click.echo(scale + remark, err=True)

    from hpctrain.rehearsal.shaped import rehearse

    cluster, truth = after_losses(miniature.cluster, miniature.truth, world.size)
    if world.rank == 0 and cluster is not miniature.cluster:
        click.echo(f"after the losses of truth.events: {cluster.describe()} are left", err=True)
    rehearse(world, cluster, truth)
    return job, MachineDescription(cluster, rehearsed.name, is_rehearsed=True, truth=truth, scale=scale)


def generated_tokens(job: Job) -> Path:
    """Return a token file that fits a job's vocabulary, and that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    generate_tokens(folder / "generated.bin", job.model.num_ids)
    return folder / "generated.bin"


def miniature_of(
    described: MachineDescription, job: Job, cores: int = 1, time_scale: float | None = None
) -> "Miniature":
    """Return what is rehearsed of a cluster and a job. Raises TopologyError."""
    from hpctrain.rehearsal.miniature import is_finished, miniature

    cluster, truth = described.cluster, described.truth
    if truth is None or not is_finished(cluster, truth) or truth.width_scale > 1:
        job = with_some_vocabulary(job)
    return miniature(cluster, truth, job, cores, time_scale)


def ready_miniature(name: str, job: str | Job = "mixed") -> "Miniature":
    """Return what is rehearsed of a ready cluster and a job, for tests and benchmarks that need no ranks."""
    return miniature_of(load_described(name), load_job(job) if isinstance(job, str) else job, cores=2)


def generate_tokens(path: Path, vocab_size: int, num_tokens: int = 200_000) -> None:
    """Write a token file in which each token follows from its place, but for a little noise.

    Its ids are below `vocab_size`, and below the size that a reader takes such a file's vocabulary for.
    """
    import numpy as np

    from hpctrain.data.tokens import BIN_VOCABULARY_MULTIPLE

    ids = max(1, vocab_size // BIN_VOCABULARY_MULTIPLE) * BIN_VOCABULARY_MULTIPLE
    noise = np.random.default_rng(0).integers(0, 3, num_tokens)
    with refused_as(JobError, f"{path}: cannot be written"):
        ((3 * np.arange(num_tokens) + noise) % min(ids, 2**16)).astype("<u2").tofile(path)


def with_vocabulary(job: Job) -> Job:
    """Return the job with the vocabulary size of its token file, where it says none."""
    if job.model.vocab_size is not None:
        return job
    from hpctrain.data.tokens import open_tokens

    return with_values(job, "model", vocab_size=open_tokens(job.data.tokens).vocab_size)


def with_some_vocabulary(job: Job) -> Job:
    """Return the job with a vocabulary size, its preset's where it has no token file. Raises JobError."""
    preset = presets().get(job.model.preset or "", {}).get("vocab_size")
    if job.model.vocab_size is None and not exists(job.data.tokens):
        if preset is None:
            raise JobError(
                f"{job.data.tokens}: no such token file, and so no vocabulary size; set model.vocab_size to rehearse"
                " the job without it"
            )
        return with_values(job, "model", vocab_size=preset)
    return with_vocabulary(job)


def write_out(path: Path, text: str, is_script: bool = False) -> None:
    """Write what a command makes where its user says. Raises JobError."""
    with refused_as(JobError, f"{path}: cannot be written", "choose another --out"):
        path.write_text(text, encoding="utf-8")
        if is_script:
            path.chmod(0o755)


def check_runs(job: Job, plan: Plan, where: str) -> None:
    """Refuse a plan that cannot run a job, or would wait for ever. Raises PlanError."""
    check_plan(job, plan, where)
    check_schedules(plan)
