"""`hpctrain probe`: measure the ranks' devices and links, or what a job takes on them, into a cluster file."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from hpctrain.config.bounds import MOST_SECONDS
from hpctrain.config.clusters.cluster import Cluster, Profile
from hpctrain.config.clusters.cluster_file import (
    dump_cluster,
    load_cluster,
    locate_cluster,
    merge_profiles,
    parse_cluster,
    ready_clusters,
    write_cluster_text,
)
from hpctrain.config.clusters.links import slowest_links
from hpctrain.config.errors import JobError, TopologyError
from hpctrain.config.job import Job
from hpctrain.config.paths import exists, is_file, is_folder
from hpctrain.config.tables import read_text
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.engine.start.resolve_overlap import resolve_overlap
from hpctrain.jobs.arguments import PATH, FiniteRange, override_option, print_result, rehearse_option
from hpctrain.jobs.common import load_described, load_job_on, start_rehearsal, started_world, with_vocabulary
from hpctrain.observe.text_tables import table, text_of
from hpctrain.plan.tiling import counted
from hpctrain.planner.prices.curves import is_profiled, model_seconds, profiles_of

MACHINE_SECONDS, JOB_SECONDS = 20.0, 45.0


@click.command("probe")
@click.option("--out", type=PATH, metavar="FILE", help="The cluster file to write.")
@click.option("--job", metavar="JOB", help="Measure what JOB takes on each family, and add it to a cluster file.")
@click.option(
    "--seconds",
    type=FiniteRange(0.1, MOST_SECONDS),
    metavar="S",
    help=f"How long to measure. Default: {MACHINE_SECONDS:g}; with --job {JOB_SECONDS:g}.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--cluster", metavar="FILE", help="With --job: the cluster file to add to. Default: this machine's own.")
@rehearse_option
@click.option("--refresh", is_flag=True, help="With --job: measure again what the file has.")
@override_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON: the cluster, or the profiles of JOB.")
def command(out, job, seconds, force, cluster, rehearse, refresh, overrides, as_json):
    """Measure this machine, or a job on it, and write a commented cluster file.

    \b
    mpirun -n 4 hpctrain probe --out cluster.toml
    mpirun -n 8 hpctrain probe --job my.toml
    mpirun -n 8 hpctrain probe --job my.toml --cluster cluster.toml
    mpirun -n 8 hpctrain probe --job mixed --rehearse v100-t4 --out profiled.toml

    Without --job: what devices compute, and the links between them. All ranks measure at once, as they train. Name the
    fabric of each host by HPCTRAIN_FABRIC where hosts are on several.

    With --job it also measures, for each family and ZeRO stage, how many rows fit and the seconds of an update. For
    the embedding, a block and the head it measures forward and backward passes over some rows. Every later search and
    prediction for JOB uses them. They are added to the description of this machine that `hpctrain train` keeps, or to
    a cluster file. The rehearsal of a cluster of real size writes its miniature, which can be rehearsed again as it is.
    """
    if job:
        if force:
            raise click.UsageError("--force is for a new cluster file; with --job use --refresh to measure again")
        probe_job(job, overrides, cluster, rehearse, out, refresh, seconds or JOB_SECONDS, as_json)
        return
    if cluster or rehearse or refresh or overrides:
        raise click.UsageError("--cluster, --rehearse, --refresh and --set go with --job JOB")
    if out is None:
        raise click.UsageError("give --out FILE, the cluster file to write; or --job JOB")
    probe_machine(out, seconds or MACHINE_SECONDS, force, as_json)


def probe_machine(out: Path, seconds: float, force: bool, as_json: bool) -> None:
    """Measure devices and links, and write a cluster file. All ranks must call."""
    with started_world() as world:
        world.on_first_rank(lambda: check_writable(out, force))

        from hpctrain.comm.bind import bind_accelerator
        from hpctrain.comm.probe.survey import probe_cluster

        accelerator = bind_accelerator(world)
        start = time.monotonic()
        result = probe_cluster(world, accelerator, seconds)
        with world.all_or_none():
            if result:
                cluster, comments, disturbance = result
                head = (
                    f"A cluster as `hpctrain probe` measured it on {time.strftime('%Y-%m-%d')} by"
                    f" {counted(world.size, 'rank')} in {time.monotonic() - start:.0f} s, over"
                    f" {' '.join(world.library.split())}.\n"
                    "It may be edited, see docs/cluster-file.md; say so by `origin` or `origins`."
                )
                if disturbance:
                    head += f"\nNot those of a quiet machine: {disturbance}."
                    busy = f"{out}: not the figures of a quiet machine: {disturbance}; measure again when they are done"
                    click.echo(f"warning: {busy}", err=True)
                write_cluster_text(out, dump_cluster(cluster, {"": head} | comments))
                dumped = cluster.model_dump(mode="json", exclude_none=True)
                print_result(dumped, _format_machine(out), as_json)


def probe_job(
    job: str,
    overrides: tuple[str, ...],
    cluster: str | None,
    rehearse: str | None,
    out: Path | None,
    refresh: bool,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure a job on the devices of all ranks, and add its profiles to a cluster file. All ranks must call."""
    rehearsed = load_described(rehearse) if rehearse else None
    with started_world(rehearsed) as world:
        parsed = load_job_on(world, job, overrides)
        if rehearsed:
            parsed, rehearsed = start_rehearsal(world, rehearsed, parsed)
        reference = cluster or rehearse
        own = None if reference else describe_this(world)

        from hpctrain.comm.bind import bind_accelerator
        from hpctrain.engine.start.profiler import profile
        from hpctrain.engine.start.resolve import check_ranks_are_devices
        from hpctrain.planner.choose import with_dtypes

        def read_source() -> tuple[Path, Path, str, Cluster]:
            source = own or locate_cluster(reference or "")
            target = choose_target(source, out)
            text = text_to_extend(source, target, None if cluster else rehearsed, parsed)
            described = parse_cluster(text, str(source))
            of_ranks = MachineDescription(described, str(source), is_rehearsed=rehearsed is not None)
            check_ranks_are_devices(of_ranks, world.topology.places)
            return source, target, text, described

        source, target, text, described = world.on_first_rank(read_source)
        accelerator = bind_accelerator(world)
        with world.all_or_none():
            families = list(dict.fromkeys(place.family for place in world.topology.places))
            parsed, _ = with_dtypes(with_vocabulary(parsed), described, families, reference or "this machine")
        dtype, profiled = parsed.train.resolved_dtype, None
        if refresh or not is_profiled(described, parsed, dtype):
            overlap, _ = resolve_overlap(parsed.overlap, world.topology)
            profiled = profile(world, accelerator, parsed.model_copy(update={"overlap": overlap}), seconds)
        with world.all_or_none():
            if world.rank == 0:
                done = f"{source} has profiles of this job; measure again with --refresh"
                if profiled:
                    text, done = merge_profiles(text, str(source), *profiled), f"wrote {target}"
                if profiled or target != source:
                    write_cluster_text(target, text)
                by_family = profiles_of(parse_cluster(text, str(target)), parsed, dtype)
                profiles = [one for by_stage in by_family.values() for one in by_stage.values()]
                dumped = [one.model_dump(mode="json", exclude_none=True) for one in profiles]
                print_result(dumped, f"{done}\n{_format_profiles(profiles, parsed)}", as_json)


def text_to_extend(source: Path, target: Path, rehearsed: MachineDescription | None, job: Job) -> str:
    """Return the text of the cluster file to which profiles are added: that of the miniature, where one is rehearsed.

    Raises JobError where that would replace the file of real size.
    """
    text = read_text(source, TopologyError)
    if rehearsed is None or rehearsed.cluster.families == parse_cluster(text, str(source)).families:
        return text
    if target == source:
        raise JobError(
            f"{source} is of real size, and its rehearsal is of a miniature; say where that one goes,"
            " with its profiles, by --out"
        )
    return dump_cluster(
        rehearsed.cluster, {"": f"{source.name}, scaled down for a rehearsal of {job.name}."}, rehearsed.truth
    )


def check_writable(path: Path, force: bool) -> None:
    """Refuse before anything is measured. Raises JobError."""
    if exists(path) and not force:
        raise JobError(f"{path}: is there already; choose another --out, or replace it with --force")
    if is_folder(path):
        raise JobError(f"{path}: is a folder; give --out the name of a file in it")
    if not os.access(path.parent, os.W_OK):
        reason = "may not be written" if exists(path.parent) else "is not there"
        raise JobError(f"{path}: its folder {reason}; choose another --out")


def _format_machine(path: Path) -> str:
    """Describe a cluster file in some lines."""
    cluster = load_cluster(path)
    lines = [f"wrote {path}: {cluster.describe()}"]
    for name, family in cluster.families.items():
        speeds = family.sustained_flops_per_second or family.peak_flops_per_second
        summary = ", ".join(f"{dtype} {speed / 1e9:,.1f} GFLOP/s" for dtype, speed in speeds.items())
        memory = f"{family.memory_bytes / 1e9:,.1f} GB at {family.memory_bytes_per_second / 1e9:,.1f} GB/s"
        lines.append(f"{name:12} {summary}, {memory}")
    for where, link in slowest_links(cluster).items():
        latency, bandwidth = link.latency_seconds * 1e6, link.message_bytes_per_second / 1e9
        lines.append(f"{where:12} {latency:,.1f} us, {bandwidth:,.2f} GB/s: the slowest pair")
    return "\n".join(lines)


def describe_this(world) -> Path:
    """Return the path of the description of the ranks' own machine, measured now where there is none.

    All ranks must call. Raises JobError where it cannot be kept.
    """
    from hpctrain.comm.bind import bind_accelerator
    from hpctrain.comm.probe.machine import CACHE_VARIABLE, describe_machine

    machine = describe_machine(world, bind_accelerator(world))
    path = machine.path
    with world.all_or_none():
        if machine.disturbance:
            raise JobError(
                f"this machine is too busy to be measured: {machine.disturbance}; start it again when they are done,"
                " or measure it as it is (hpctrain probe --out FILE), and give that by --cluster FILE"
            )
        if world.rank == 0 and not is_file(path):
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


def _format_profiles(profiles: Sequence[Profile], job: Job) -> str:
    """Say for each profile how many rows fit, and how fast the whole model goes forward and back with them."""
    figures = ("ZeRO", "rows fit", "tokens/s", "of 1 row", "update")
    rows_of = table("family", *figures, numbers=figures)
    for profile in profiles:
        length, num_blocks = job.data.sequence_length, job.model.num_layers
        counts = max(1, profile.largest_rows or 1), 1
        speeds = [rows * length / model_seconds(profile, num_blocks, rows) for rows in counts]
        update = f"{profile.update_seconds * 1e3:,.1f} ms" if profile.update_seconds else "-"
        stage = "0, 1" if profile.zero == 1 else str(profile.zero)
        fitting = str(profile.largest_rows or "-")
        rows_of.add_row(profile.family, stage, fitting, *(f"{speed:,.0f}" for speed in speeds), update)
    return text_of(rows_of)
