"""`hpctrain plan`: write a plan for a job, or draw one. Needs neither ranks nor torch: runs on a login node."""

from pathlib import Path

import click

from hpctrain.config.cluster_file import load_cluster, locate_cluster
from hpctrain.config.errors import JobError, describe_os_error
from hpctrain.config.job import load_job
from hpctrain.jobs.common import check_runs, override_option, scaled_for, with_vocabulary
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.draw import draw_plan
from hpctrain.plan.file import dump_plan, load_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.space import by_speed_space, even_space


@click.command("plan")
@click.argument("job", required=False)
@override_option
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="How many ranks the plan is for.")
@click.option("--uniform", is_flag=True, help="The even plan: that of the job's [plan], or the best for CLUSTER.")
@click.option("--proportional", is_flag=True, help="The best plan cut by one speed of each family; with --cluster.")
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
    if not job or (uniform and proportional) or bool(ranks) == bool(cluster) or (ranks and not uniform):
        raise click.UsageError(
            "give JOB and --cluster CLUSTER, to search for a plan, with --uniform or --proportional for a restricted"
            " one; or JOB, --uniform and --ranks N; or --show PLAN"
        )
    loaded = with_vocabulary(load_job(job, overrides))
    draws = uniform and (ranks or loaded.plan)
    if draws and (as_json or seconds is not None or budget):
        raise click.UsageError(
            "--json, --seconds and --budget are of a search: JOB without [plan], and --cluster CLUSTER"
        )
    if not draws:
        from hpctrain.jobs.find import format_search, plan_file, search_plan
        from hpctrain.planner.search import Limits

        limits = Limits(seconds=seconds) if budget is None else Limits(scored=budget, seconds=seconds)
        zero = {"zero": (loaded.plan.zero,)} if loaded.plan else {}
        space = even_space() if uniform else by_speed_space(**zero) if proportional else None
        summary = search_plan(loaded, cluster, limits, space)
        if out is not None:
            _write(out, plan_file(summary, summary["found"]))
        print(format_search(summary, top, out, as_json))
        return
    families = None
    if cluster:
        families = [device.family for device in load_cluster(locate_cluster(cluster)).devices]
        loaded = scaled_for(cluster, loaded)
    resolved = resolve_plan(loaded, ranks or len(families), families)
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
