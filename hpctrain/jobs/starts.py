"""Starts that a command writes for a launcher: what `hpctrain mpirun` and `hpctrain slurm` share."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hpctrain.config.bounds import MOST_RANKS
from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.clusters.launch import Launch
from hpctrain.config.job import Job, load_job
from hpctrain.jobs.arguments import PATH, RANKS, cluster_option, complete_job, override_option
from hpctrain.jobs.common import check_runs, with_vocabulary
from hpctrain.launch.components import Component, components_of
from hpctrain.launch.files import launch_files, write_files
from hpctrain.launch.scripts import Start
from hpctrain.observe.folder.run_folder import default_run_folder
from hpctrain.plan.uniform import resolve_plan


def start_options(command: Callable) -> Callable:
    """Add the argument and options that say what is started, and where; the command gets them as a `Start`."""

    @functools.wraps(command)
    def with_start(job, overrides, cluster, nodes, ranks_per_node, plan, run_path, **more: Any) -> Any:
        return command(prepare_start(job, overrides, cluster, plan, nodes, ranks_per_node, run_path), **more)

    result: Callable = with_start
    for option in reversed(
        (
            click.argument("job", shell_complete=complete_job),
            override_option,
            cluster_option(required=False),
            click.option("--nodes", type=RANKS, metavar="N", help="Or: N equal nodes, described later."),
            click.option("--ranks-per-node", type=RANKS, metavar="N", help="Of such nodes."),
            click.option("--plan", type=PATH, metavar="FILE", help="A plan file. Default: searched for."),
            click.option(
                "--run", "run_path", type=PATH, help="Run folder, seen by all nodes. Default: runs/NAME-DATE-TIME."
            ),
        )
    ):
        result = option(result)
    return result


def prepare_start(
    reference: str,
    overrides: tuple[str, ...],
    cluster_reference: str | None,
    plan_path: Path | None,
    nodes: int | None,
    ranks_per_node: int | None,
    run_path: Path | None,
) -> Start:
    """Check a job, its cluster and its plan, and return its start.

    Raises JobError, TopologyError, LaunchError, PlanError.
    """
    if bool(cluster_reference) == bool(nodes) or bool(nodes) != bool(ranks_per_node):
        raise click.UsageError("give --cluster CLUSTER, or --nodes N and --ranks-per-node N")
    if nodes and ranks_per_node and nodes * ranks_per_node > MOST_RANKS:
        raise click.UsageError(f"{nodes} nodes of {ranks_per_node} ranks are more than {MOST_RANKS:,} ranks; lower one")
    if plan_path:
        overrides = (*overrides, f"plan.file={plan_path}")
    job = load_job(reference, overrides)
    check_inputs(job)
    run = (run_path or default_run_folder(job.name)).absolute()
    if cluster_reference:
        cluster = load_cluster(cluster_reference)
        components = components_of(cluster, cluster_reference)
        families = [device.family for device in cluster.devices]
        arguments = ("--cluster", '"$run/launch/cluster.toml"')
    else:
        assert nodes and ranks_per_node
        cluster, families, arguments = None, None, ()
        components = (Component(nodes, {"": ranks_per_node}, {"": Launch()}),)
    plan, notes = None, []
    if job.plan is not None:
        num_ranks = sum(component.num_ranks for component in components)
        plan = resolve_plan(with_vocabulary(job), num_ranks, families).plan
        check_runs(with_vocabulary(job), plan, str(plan_path or reference))
        notes.append(f"plan: {plan.describe()}, the job's own")
    elif cluster:
        notes.append("plan: searched for when the job starts, with the nodes that it then has")
    files = launch_files(job, plan, cluster, components)
    return Start(job.name, run, Path.cwd(), components, arguments, files, notes)


def write_start(start: Start, scripts: Mapping[str, str], launcher: str, command: str) -> None:
    """Write the run folder of a start with its scripts, and say which command starts it. Raises JobError."""
    write_files(start.run, {**start.files, **scripts})
    for line in (f"{start.describe()}{launcher}", *start.notes, f"start it with: {command}"):
        click.echo(line)


def check_inputs(job: Job) -> None:
    """Refuse a job that would wait in a queue for a start without its data. Raises DataError, CheckpointError."""
    from hpctrain.checkpoint.folder import locate_checkpoint
    from hpctrain.data.tokens import open_tokens

    data = job.data
    for path in (data.tokens, data.validation, *(source.tokens for source in data.more)):
        if path is not None:
            open_tokens(path).close()
    if job.train.start_from:
        locate_checkpoint(job.train.start_from)
