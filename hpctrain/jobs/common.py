"""What the commands that start ranks have in common: options, the world, the job, what the ranks run on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from hpctrain.engine.phases import phases_of
from hpctrain.engine.prepare import Described, with_values
from hpctrain.job import Job, load_job
from hpctrain.plan import Plan
from hpctrain.schedule import check_schedules

if TYPE_CHECKING:
    from hpctrain.comm.world import World

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


def load_job_on(world: "World", reference: str, overrides: tuple[str, ...]) -> Job:
    """Read a job on every rank; a file that only some of them can read is told by one of those that cannot."""
    job = load_job(reference, overrides)
    world.enter(phases_of(job.observe).start)
    return job


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

    return with_values(job, "model", vocab_size=open_tokens(job.data.tokens).vocab_size)
