"""`hpctrain profile`: measure what a job's rows take on each family, and how many fit, for predictions and plans."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from hpctrain.config.cluster import Profile
from hpctrain.config.cluster_file import (
    dump_cluster,
    locate_cluster,
    merge_profiles,
    parse_cluster,
    ready_clusters,
    write_cluster_text,
)
from hpctrain.config.errors import JobError, TopologyError
from hpctrain.config.job import Job
from hpctrain.config.tables import read_text
from hpctrain.engine.resolve import Described, check_ranks_are_devices
from hpctrain.engine.resolve_overlap import resolve_overlap
from hpctrain.jobs.common import (
    load_job_on,
    override_option,
    rehearse_option,
    start_rehearsal,
    started_world,
    with_vocabulary,
)
from hpctrain.jobs.probe import check_writable
from hpctrain.planner.curves import is_profiled, model_seconds, profiles_of

SECONDS = 45.0


@click.command("profile")
@click.argument("job")
@override_option
@click.option("--cluster", metavar="FILE", help="The cluster file to add to. Default: this machine's own.")
@rehearse_option
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to. Default: the cluster file.")
@click.option("--refresh", is_flag=True, help="Measure again what the file has.")
@click.option("--seconds", default=SECONDS, show_default=True, type=click.FloatRange(1), help="How long to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON: the profiles.")
def command(job, overrides, cluster, rehearse, out, refresh, seconds, as_json):
    """Measure JOB on the devices of all ranks, and add what was found to a cluster file.

    \b
    mpirun -n 8 hpctrain profile my.toml
    mpirun -n 8 hpctrain profile my.toml --cluster cluster.toml
    mpirun -n 8 hpctrain profile mixed --rehearse v100-t4 --out profiled.toml

    Every later search and prediction for JOB uses what is measured. Without --cluster and --rehearse it is added to the
    description of this machine that `hpctrain train` keeps and uses.

    For each family and ZeRO stage: seconds of the forward and backward passes of the embedding, a block and the head
    over rows at once, seconds of the update, and how many rows of the whole model fit. What else is in the file stays
    as it is. The rehearsal of a cluster of real size writes its miniature, which can be rehearsed again as it is.
    """
    with started_world() as world:
        parsed = load_job_on(world, job, overrides)
        rehearsed = None
        if rehearse:
            parsed, rehearsed = start_rehearsal(world, rehearse, parsed)
        text = described = None
        own = None if cluster or rehearse else describe_this(world)
        with world.all_or_none():
            if world.rank == 0:
                source = own or locate_cluster(cluster or rehearse)
                target = choose_target(source, out)
                text = read_text(source, TopologyError)
                described = parse_cluster(text, str(source))
                if rehearsed and not cluster and rehearsed.cluster.families != described.families:
                    check_is_other_file(source, target)
                    comment = f"{source.name}, scaled down for a rehearsal of {parsed.name}."
                    text = dump_cluster(rehearsed.cluster, {"": comment}, rehearsed.truth)
                    described = parse_cluster(text, str(source))
                families = [place.family for place in world.topology.places]
                check_ranks_are_devices(Described(described, str(source)), families)
        described = world.broadcast_object(described)
        with world.all_or_none():
            parsed = with_vocabulary(parsed)

        from hpctrain.comm.accelerators.bind import bind_accelerator
        from hpctrain.engine.profiler import profile
        from hpctrain.planner.choose import dtype_on

        accelerator = bind_accelerator(world)
        with world.all_or_none():
            families = list(dict.fromkeys(place.family for place in world.topology.places))
            dtype = dtype_on(parsed, described, families, cluster or rehearse or "this machine")[0]
        known = is_profiled(described, parsed, dtype)
        result = None
        if refresh or not known:
            result = profile(world, accelerator, _resolved(world, parsed, dtype), seconds)
        with world.all_or_none():
            if world.rank == 0:
                if result:
                    text = merge_profiles(text, str(source), *result)
                if result or target != source:
                    write_cluster_text(target, text)
                profiles = profiles_of(parse_cluster(text, str(target)), parsed, dtype)
                listed = [of_stage for of_family in profiles.values() for of_stage in of_family.values()]
                said = (
                    f"wrote {target}" if result else f"{source} has profiles of this job; measure again with --refresh"
                )
                dumped = [of.model_dump(mode="json", exclude_none=True) for of in listed]
                print(json.dumps(dumped) if as_json else f"{said}\n{report(listed, parsed)}", flush=True)


def describe_this(world) -> Path:
    """Return the path of the description of the ranks' own machine, measured now where there is none.

    All ranks must call. Raises JobError where it cannot be kept.
    """
    from hpctrain.comm.accelerators.bind import bind_accelerator
    from hpctrain.comm.probe.machine import CACHE_VARIABLE, describe_machine

    path = describe_machine(world, bind_accelerator(world)).path
    with world.all_or_none():
        if world.rank == 0 and not path.is_file():
            raise JobError(f"{path}: cannot be kept; give --cluster FILE, or set {CACHE_VARIABLE} to another folder")
    return path


def choose_target(source: Path, out: Path | None) -> Path:
    """Return where the profiles go to. Raises JobError where that cannot be."""
    if out is None and source in ready_clusters().values():
        raise JobError(
            f"{source.stem} comes with hpctrain and stays as it is; say where the profiled one goes by --out"
        )
    check_writable(out or source, force=True)
    return out or source


def check_is_other_file(source: Path, target: Path) -> None:
    """Refuse to write a miniature over the cluster of real size that it is made of. Raises JobError."""
    if target == source:
        raise JobError(
            f"{source} is of real size, and its rehearsal is of a miniature; say where that one goes, with its"
            " profiles, by --out"
        )


def _resolved(world, job: Job, dtype: str) -> Job:
    overlap, _ = resolve_overlap(job.overlap, world.topology)
    train = job.train.model_copy(update={"dtype": dtype})
    return job.model_copy(update={"overlap": overlap, "train": train})


def report(profiles: Sequence[Profile], job: Job) -> str:
    """Say for each profile how many rows fit, and how fast the whole model goes forward and back with them."""
    lines = [f"{'family':16} {'ZeRO':>4} {'rows fit':>8} {'tokens/s':>10} {'of 1 row':>10} {'update':>10}"]
    for profile in profiles:
        length, num_blocks = job.data.sequence_length, job.model.num_layers
        counts = max(1, profile.largest_rows), 1
        speeds = [rows * length / model_seconds(profile, num_blocks, rows) for rows in counts]
        update = f"{profile.update_seconds * 1e3:,.1f} ms" if profile.update_seconds else "-"
        stage = "0, 1" if profile.zero == 1 else str(profile.zero)
        summary = "".join(f" {speed:>10,.0f}" for speed in speeds)
        lines.append(f"{profile.family:16} {stage:>4} {profile.largest_rows:>8}{summary} {update:>10}")
    return "\n".join(lines)
