"""`hpctrain plan`: write a plan for a job, or draw one. Needs neither ranks nor torch: runs on a login node."""

from collections.abc import Mapping
from pathlib import Path

import click

from hpctrain.cluster import Cluster
from hpctrain.cluster_file import find_cluster, load_cluster
from hpctrain.engine.prepare import with_values
from hpctrain.errors import JobError, describe_os_error
from hpctrain.job import Job, load_job
from hpctrain.jobs.common import check_runs, override_option, scaled_for, with_vocabulary
from hpctrain.plan_checks import check_tiling
from hpctrain.plan_file import dump_plan, load_plan
from hpctrain.planner.choose import dtype_on
from hpctrain.planner.curves import FamilyCurves, curves_of
from hpctrain.planner.draw import draw_plan
from hpctrain.planner.estimate import Work
from hpctrain.planner.even import Resolved, check_plan, resolve_plan, resolve_plan_on
from hpctrain.planner.proportional import parties_of, proportional_candidates
from hpctrain.planner.replicas import exchange_seconds


@click.command("plan")
@click.argument("job", required=False)
@override_option
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="How many ranks the plan is for.")
@click.option("--uniform", is_flag=True, help="The even plan: that of the job's [plan], or chosen for the ranks.")
@click.option("--proportional", is_flag=True, help="The plan by the speed of each family; with --cluster.")
@click.option("--cluster", metavar="CLUSTER", help="A cluster file, or the name of a ready one, that the plan is for.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to. Default: standard output.")
@click.option("--json", "as_json", is_flag=True, help="Of a search: print one line of JSON.")
@click.option("--top", type=click.IntRange(0), default=5, show_default=True, help="Of a search: tell so many plans.")
@click.option("--seconds", type=click.FloatRange(0), metavar="S", help="Of a search: end it after so long.")
@click.option("--budget", type=click.IntRange(1), metavar="N", help="Of a search: how many plans are weighed.")
@click.option("--show", type=click.Path(path_type=Path), metavar="PLAN", help="Draw a plan file instead.")
@click.option("--job", "for_job", metavar="JOB", help="With --show: also check that the plan can run this job.")
def command(job, overrides, ranks, uniform, proportional, cluster, out, as_json, top, seconds, budget, show, for_job):
    """Write a plan for JOB, or draw one.

    \b
    hpctrain plan mixed --cluster v100-t4 --out plan.toml
    hpctrain plan tiny --ranks 4 --uniform --out plan.toml
    hpctrain plan mixed --cluster v100-t4 --proportional --out plan.toml
    hpctrain plan --show plan.toml --job tiny

    With --cluster alone, the plan is searched for that is predicted to be the fastest on its devices. The answer
    depends on --budget, and not on the machine that searches, unless --seconds ends it. See docs/plan.md.

    A plan is a tiling of the work of a microbatch, items x rows. It is a file to be edited: give a tile more rows,
    other items, another tensor grid, and `plan.file` of a job its path.
    """
    if show:
        if job or uniform or proportional or cluster or out or ranks:
            raise click.UsageError("--show stands alone, or with --job JOB")
        plan = load_plan(show)
        if for_job:
            check_runs(load_job(for_job, overrides), plan, str(show))
        else:
            check_tiling(plan, max(tile.items.stop for tile in plan.tiles))
        print(draw_plan(plan))
        return
    searches = bool(cluster) and not (uniform or proportional)
    is_one = searches or uniform != proportional
    if not job or not is_one or bool(ranks) == bool(cluster) or (proportional and not cluster):
        raise click.UsageError(
            "give JOB and --cluster CLUSTER, to search for a plan; or JOB, --uniform or --proportional, and"
            " --cluster CLUSTER or --ranks N; or --show PLAN"
        )
    if not searches and (as_json or seconds is not None or budget):
        raise click.UsageError("--json, --seconds and --budget are of a search: JOB and --cluster CLUSTER alone")
    loaded = with_vocabulary(load_job(job, overrides))
    if searches:
        from hpctrain.jobs.find import find_plan, plan_file, tell
        from hpctrain.planner.search import Limits

        limits = Limits(seconds=seconds) if budget is None else Limits(weighed=budget, seconds=seconds)
        told = find_plan(loaded, cluster, limits)
        if out is not None:
            _write(out, plan_file(told, told["found"]))
        print(tell(told, top, out, as_json))
        return
    described = None
    if cluster:
        described, loaded = load_cluster(find_cluster(cluster)), scaled_for(cluster, loaded)
    resolved = _by_speed(loaded, described) if proportional else _uniform(loaded, described, ranks)
    text = "".join(f"# {key}: {reason}\n" for key, reason in resolved.reasons.items()) + dump_plan(resolved.plan)
    if out is None:
        print(text, end="")
        return
    _write(out, text)
    print(f"{out}: {resolved.plan.describe()}")


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text)
    except OSError as error:
        raise JobError(f"{out}: cannot be written: {describe_os_error(error)}; choose another --out") from None


def _uniform(job: Job, cluster: Cluster | None, num_ranks: int | None) -> Resolved:
    """Return the even plan, with the families of a cluster's devices where there is one."""
    if cluster is None:
        return resolve_plan(job, num_ranks)
    dtype, _ = dtype_on(job, cluster, sorted(cluster.families), "the cluster")
    return resolve_plan_on(with_values(job, "train", dtype=dtype), cluster)


def _by_speed(job: Job, cluster: Cluster) -> Resolved:
    """Return the best plan by speed, as far as an estimate of computation and bubble tells."""
    work = Work(job.model, job.data.sequence_length, job.train.global_batch)
    zero = max(1, job.plan.zero if job.plan else 1)
    dtype, curves = _profiled(job, cluster, zero)
    parties = parties_of(cluster, dtype, curves=curves)
    exchanged = exchange_seconds(cluster, job.model, range(cluster.num_devices), zero, dtype) if curves else 0.0
    found = proportional_candidates(work, parties, cluster.num_devices, zero, exchanged)
    check_plan(job, found[0].plan, "the plan by speed")
    if curves:
        rows = ", ".join(f"{family} up to {of.largest_rows} rows at once" for family, of in curves.items())
        speeds = f"the profiles of this job ({dtype}, ZeRO {zero}: {rows}); {found[0].seconds:.3g} s a step"
    else:
        speeds = ", ".join(f"{party.family} {party.speed:.3g} FLOP/s" for party in parties)
        speeds += "; the cluster file has no profiles of this job (`hpctrain profile`)"
    reason = f"{found[0].describe}: least estimated computation and bubble of {len(found)} plans, by {speeds}"
    return Resolved(found[0].plan, {"plan": reason})


def _profiled(job: Job, cluster: Cluster, zero: int) -> tuple[str, Mapping[str, FamilyCurves] | None]:
    """Return the job's dtype, and the curves of it that the cluster has; where it is auto, what was profiled."""
    for dtype in (job.train.dtype,) if job.train.dtype else ("bf16", "fp32"):
        if curves := curves_of(cluster, job, dtype, zero):
            return dtype, curves
    return dtype_on(job, cluster, sorted(cluster.families), "the cluster")[0], None
