"""`hpctrain probe`: measure devices and links of the ranks that were started, and write a cluster file."""

import json
import os
import time
from pathlib import Path

import click

from hpctrain.config.cluster_file import dump_cluster, load_cluster, write_cluster_text
from hpctrain.config.errors import JobError
from hpctrain.config.links import slowest_links
from hpctrain.jobs.common import started_world


@click.command("probe")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The cluster file to write.")
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(0.1), help="How long to measure.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON: the cluster.")
def command(out, seconds, force, as_json):
    """Measure what devices compute and what is between them, and write it to a commented cluster file.

    \b
    mpirun -n 4 hpctrain probe --out cluster.toml

    All ranks measure at once, as they train. Hosts on unlike fabrics are told by HPCTRAIN_FABRIC in the ranks'
    environment.
    """
    with started_world() as world:
        with world.all_or_none():
            if world.rank == 0:
                check_writable(out, force)

        from hpctrain.comm.accelerators.bind import bind_accelerator
        from hpctrain.comm.probe.survey import probe_cluster

        accelerator = bind_accelerator(world)
        start = time.monotonic()
        result = probe_cluster(world, accelerator, seconds)
        with world.all_or_none():
            if result:
                cluster, comments = result
                head = (
                    f"A cluster as `hpctrain probe` measured it on {time.strftime('%Y-%m-%d')} by {world.size} ranks"
                    f" in {time.monotonic() - start:.0f} s, over {' '.join(world.library.split())}.\n"
                    "It may be edited, see docs/cluster-file.md; say so by `origin` or `origins`."
                )
                write_cluster_text(out, dump_cluster(cluster, {"": head} | comments))
                print(json.dumps(cluster.model_dump(mode="json", exclude_none=True)) if as_json else report(out))


def check_writable(path: Path, force: bool) -> None:
    """Refuse before anything is measured. Raises JobError."""
    if path.exists() and not force:
        raise JobError(f"{path}: is there already; choose another --out, or replace it with --force")
    if path.is_dir():
        raise JobError(f"{path}: is a folder; give --out the name of a file in it")
    if not os.access(path.parent, os.W_OK):
        reason = "may not be written" if path.parent.exists() else "is not there"
        raise JobError(f"{path}: its folder {reason}; choose another --out")


def report(path: Path) -> str:
    """Say what is in a cluster file, in some lines."""
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
