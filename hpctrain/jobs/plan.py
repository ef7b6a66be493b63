"""`hpctrain plan`: search for a plan, write the even one, draw or check one. Runs on a login node, without torch."""

from collections.abc import Iterable

import click
from rich.table import Table

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import locate_cluster
from hpctrain.config.job import Job, load_job
from hpctrain.config.tables import toml_comment
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.engine.start.resolve_overlap import resolve_switches, setups_by_plan, topology_of
from hpctrain.jobs.arguments import (
    LARGE_COUNT,
    NONE_OR_MORE,
    PATH,
    RANKS,
    SECONDS,
    cluster_option,
    complete_job,
    json_option,
    override_option,
    print_result,
)
from hpctrain.jobs.common import check_runs, load_job_for, with_vocabulary, write_out
from hpctrain.jobs.predict import format_prediction, prediction_data, predictor_of_run, profile_source, with_overlap
from hpctrain.jobs.what_if import SCORED, searches_for
from hpctrain.observe.machines import format_losses
from hpctrain.observe.text_tables import table, text_of
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.draw import draw_plan
from hpctrain.plan.file import dump_plan, load_plan
from hpctrain.plan.tiling import Plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.choose import families_in, memory_warnings, search_best, with_dtypes, with_enough_rows
from hpctrain.planner.explain import MIB, reasons, runner_up
from hpctrain.planner.if_lost import KINDS, price_losses
from hpctrain.planner.prediction.forecast import Forecast, format_waterfall
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.search import Limits, SearchResult
from hpctrain.planner.search.space import Space, by_speed_space, even_space

SHOWN_REASONS = 3
"""Number of reasons of a search that are shown without --verbose."""
out_option = click.option("--out", type=PATH, metavar="FILE", help="The plan file to write. Default: standard output.")


@click.group("plan")
def command():
    """Search for a plan, write the even one, draw, check or export one.

    \b
    hpctrain plan search mixed --cluster v100-t4 --out plan.toml
    hpctrain plan draw plan.toml
    hpctrain plan check plan.toml mixed
    hpctrain plan uniform mixed --cluster v100-t4 --set plan.data=8 --out even.toml
    hpctrain plan export even.toml mixed --cluster v100-t4 --to megatron

    A plan is a tiling of the work of a microbatch, items x rows. It is a file to be edited: give a tile more rows,
    other items or another tensor grid. Then set `plan.file` of the job to its path.
    """


@command.command("search")
@click.argument("job", shell_complete=complete_job)
@override_option
@cluster_option()
@click.option(
    "--space",
    type=click.Choice(["all", "by-speed", "even"]),
    default="all",
    show_default=True,
    help="The plans to search: all; those cut by one measured speed a family; the even ones.",
)
@out_option
@json_option
@click.option("--top", type=NONE_OR_MORE, default=5, show_default=True, help="List so many plans.")
@click.option("--seconds", type=SECONDS, metavar="S", help="End the search after S seconds.")
@click.option("--budget", type=LARGE_COUNT, metavar="N", help="Score N plans.")
@click.option(
    "--if-lost",
    type=click.Choice(KINDS),
    help="Say what the loss of each rank, node or family would cost: the best plan of those left, and the stall.",
)
@click.option("--verbose", is_flag=True, help="Print all reasons, assumed inputs, memory by part and other plans.")
def search_command(job, overrides, cluster, space, out, as_json, top, seconds, budget, if_lost, verbose):
    """Search for the fastest plan of JOB on a cluster.

    \b
    hpctrain plan search mixed --cluster v100-t4 --out plan.toml
    hpctrain plan search mixed --cluster v100-t4 --space even
    hpctrain plan search mixed --cluster v100-t4 --out plan.toml --if-lost rank

    The answer depends on --budget. It does not depend on the machine that searches, unless --seconds ends the search.
    """
    loaded, described = load_job_for(job, overrides, cluster)
    limits = Limits(seconds=seconds) if budget is None else Limits(scored=budget, seconds=seconds)
    zero = {"zero": (loaded.plan.zero,)} if loaded.plan else {}
    spaces = {"all": None, "by-speed": by_speed_space(**zero), "even": even_space()}
    result, summary = search_and_summarise(loaded, described, limits, spaces[space], top)
    plan_text = plan_file(summary, result)
    if out is not None:
        write_out(out, plan_text)
    text = plan_text.rstrip("\n")
    if out is not None:
        text = f"{out}: {summary['layout']}\n" + format_search(summary, result, described.cluster, verbose)
    if if_lost:
        searches = searches_for(loaded, described, Limits(scored=budget or SCORED))
        losses = price_losses(loaded, described.cluster, result.best.predictor, if_lost, *searches)
        summary["if_lost"] = [loss.data() for loss in losses]
        table_text = format_losses(losses)
        text += "\n\n" + (table_text if out is not None else "\n".join(toml_comment(table_text)))
    print_result({"plan": plan_text if out is None else str(out), **summary}, text, as_json)


@command.command("uniform")
@click.argument("job", shell_complete=complete_job)
@override_option
@click.option("--ranks", type=RANKS, metavar="N", help="How many ranks the plan is for.")
@cluster_option("Or: the cluster that it is for, a file or a ready one's name.", required=False)
@out_option
def uniform_command(job, overrides, ranks, cluster, out):
    """Write the even plan that the [plan] section of JOB describes.

    \b
    hpctrain plan uniform mixed --ranks 4 --set plan.pipeline=2 --set plan.data=2 --out even.toml

    The product of plan.tensor.y, plan.pipeline and plan.data is the number of ranks.
    """
    if bool(ranks) == bool(cluster):
        raise click.UsageError("give --ranks N or --cluster CLUSTER")
    if cluster:
        loaded, described = load_job_for(job, overrides, cluster)
        families = [device.family for device in described.cluster.devices]
        resolved = resolve_plan(loaded, len(families), families)
        if not described.is_rehearsed:
            resolved = with_enough_rows(
                loaded, resolved, families, described.cluster, lambda plan: _predictor_on(loaded, described, plan).setup
            )
    else:
        resolved = resolve_plan(with_vocabulary(load_job(job, overrides)), ranks)
    plan_text = _with_comments((f"{key}: {reason}" for key, reason in resolved.reasons.items()), resolved.plan)
    if out is None:
        print(plan_text, end="")
        return
    write_out(out, plan_text)
    print(f"{out}: {resolved.plan.describe()}")


@command.command("export")
@click.argument("plan", type=PATH)
@click.argument("job", shell_complete=complete_job)
@override_option
@cluster_option("The cluster that the plan is for: a file, or the name of a ready one.")
@click.option("--to", type=click.Choice(["megatron", "torchtitan"]), required=True, help="The software to write for.")
def export_command(plan, job, overrides, cluster, to):
    """Write the launch line or the configuration of other software for a plan, with the step of both as predicted.

    \b
    hpctrain plan uniform mixed --cluster a100-80-40 --set plan.pipeline=2 --set plan.data=4 --out even.toml
    hpctrain plan export even.toml mixed --cluster a100-80-40 --to megatron

    What the other software cannot do is refused, such as tiles with different tensor grids. Add data and tokenizer, and
    the flags of torchrun.
    """
    from hpctrain.software.megatron_export import launch_line
    from hpctrain.software.torchtitan_export import titan_config

    loaded, described = load_job_for(job, overrides, cluster)
    own = load_plan(plan)
    check_runs(loaded, own, str(plan))
    predictor, machine = _predictor_on(loaded, described, own), described.cluster
    setup = predictor.setup
    if to == "megatron":
        text, other = launch_line(loaded, setup.dtype, own, machine)
        text = " \\\n  --".join(["torchrun pretrain_gpt.py", *text.removeprefix("--").split(" --")])
    else:
        text, other = titan_config(loaded, setup.dtype, own, machine)
    seconds = predictor.simulated.step_seconds, other.run.predict(other.software).step_seconds
    print(
        f"# {own.describe()}: {seconds[0]:.4g} s a step by hpctrain, {seconds[1]:.4g} s by {other.software.name}"
        f" ({seconds[1] / seconds[0] - 1:+.0%}), as predicted; add data, tokenizer, schedule and torchrun's flags"
    )
    print(text)


def _predictor_on(job: Job, described: MachineDescription, plan: Plan) -> Predictor:
    """Return the predictor of a run by a plan on a cluster."""
    used = list(dict.fromkeys(device.family for device in described.cluster.devices))
    job, _ = with_dtypes(job, described.cluster, used, str(locate_cluster(described.name)))
    return predictor_of_run(job, described, plan)[0]


@command.command("draw")
@click.argument("plan", type=PATH)
@click.option("--html", type=PATH, metavar="FILE", help="Draw it into a page for a browser.")
def draw_command(plan, html):
    """Draw a plan file as tiles: items across, rows down."""
    loaded = load_plan(plan)
    check_tiling(loaded, max(tile.items.stop for tile in loaded.tiles))
    if html is None:
        print(draw_plan(loaded))
        return
    from hpctrain.observe.report.page import render_plan

    write_out(html, render_plan(loaded, plan.name))
    print(f"{html}: {loaded.describe()}")


@command.command("check")
@click.argument("plan", type=PATH)
@click.argument("job", shell_complete=complete_job)
@override_option
def check_command(plan, job, overrides):
    """Check that JOB can run by a plan file: its tiling, its grids, and that its schedule ends."""
    loaded = load_plan(plan)
    check_runs(load_job(job, overrides), loaded, str(plan))
    print(draw_plan(loaded))
    print(f"{plan} can run {job}")


def search_and_summarise(
    job: Job, described: MachineDescription, limits: Limits, space: Space | None = None, top: int = 0
) -> tuple[SearchResult, dict]:
    """Search a space, or all plans; return the result, and everything about it and its `top` plans as plain data.

    Raises PlanError where nothing fits, TopologyError where no family computes in the job's dtype.
    """
    cluster = described.cluster
    job, reason = with_dtypes(job, cluster, sorted(cluster.families), described.name)
    asked, (job, resolved) = job, with_overlap(job, described)
    topology = topology_of(cluster, described.is_rehearsed)
    result = search_best(job, cluster, limits, described.name, space, setups_by_plan(asked, job, topology))
    resolved |= resolve_switches(asked, topology, result.best.plan)[1]
    summary = prediction_data(Forecast.of(result.best.predictor).prediction, job.train.resolved_dtype)
    computing = families_in(job, cluster, described.name)
    if reason:
        summary["assumed_inputs"].append(reason)
    left_out = [
        f"{name} is unused: it has no speed in {job.dtype_of(name)}"
        for name in cluster.families
        if name not in computing
    ]
    best = [
        {
            "layout": _layout(result, number),
            "step_seconds": simulated.seconds,
            "tokens_per_second": simulated.prediction.tokens_per_second,
            "mfu": simulated.prediction.mfu,
        }
        for number, simulated in enumerate(result.plans[:top])
    ]
    return result, {
        **summary,
        "resolved": resolved,
        "warnings": [*cluster.without_effect, *memory_warnings(Setup.of_job(job), cluster)],
        "filled": described.filled,
        "layout": _layout(result, 0),
        "searched": result.searched,
        "is_complete": result.is_complete,
        "wall_seconds": result.wall_seconds,
        "first_plan_seconds": result.first_plan_seconds,
        "reasons": reasons(result) + left_out,
        "runner_up": runner_up(result),
        "top": best,
    }


def _layout(result: SearchResult, number: int) -> str:
    return result.plans[number].describe([pool.name for pool in result.pools])


def format_search(summary: dict, result: SearchResult, cluster: Cluster, verbose: bool = False) -> str:
    """Return the answer of a search for people: tiles, step, three reasons; `verbose` adds all that is known."""
    low, high = summary["interval_seconds"]
    lines = [
        text_of(tiles_table(result)),
        f"step      {summary['step_seconds']:.4g} s, between {low:.4g} and {high:.4g}, in {summary['dtype']}:"
        f" {summary['tokens_per_second']:,.0f} tokens/s, {summary['mfu']:.1%} of peak (MFU)",
        f"of it     {format_waterfall(summary['waterfall_seconds'])}",
        *(f"why       {reason}" for reason in summary["reasons"][: None if verbose else SHOWN_REASONS]),
        f"runner-up {summary['runner_up'] or 'none'}",
        *(f"warning   {warning}" for warning in summary["warnings"]),
    ]
    if not verbose:
        assumed = f"{len(summary['assumed_inputs'])} assumed inputs"
        return "\n".join([*lines, f"more      --verbose: {assumed}, all reasons, memory by part, other plans"])
    lines += ["", format_prediction(summary, result.best.plan, cluster), *_search_lines(summary)]
    if summary["filled"]:
        lines += ["figures that the cluster file leaves out", *(f"  {line}" for line in summary["filled"])]
    if summary["top"]:
        lines.append("the best plans")
        lines += [f"  {each['step_seconds']:.4g} s  {each['layout']}" for each in summary["top"]]
    return "\n".join(lines)


def tiles_table(result: SearchResult) -> Table:
    """Return a row for each kind of tile: its ranks, its part of the model, its memory use and its seconds."""
    best = result.best
    columns = ("family", "tiles", "grid", "items", "rows", "memory, MiB", "of", "computes, s")
    tiles = table(*columns, numbers={*columns[4:], "tiles"})
    costs = best.predictor.costs.tiles
    for stage in best.prediction.memory:
        tile = stage.tile
        equal = [each for each in best.plan.tiles if (each.items, each.family) == (tile.items, tile.family)]
        computes = best.plan.microbatches * costs[tile].seconds if tile in costs else 0.0
        tiles.add_row(
            tile.family,
            f"{len(equal)}",
            f"{tile.tensor}",
            f"{tile.items.start}-{tile.items.stop - 1}",
            f"{tile.rows.size}",
            f"{stage.memory.total / MIB:,.0f}" + ("" if stage.fits else " DOES NOT FIT"),
            f"{stage.available_bytes / MIB:,.0f}",
            f"{computes:.4g}",
        )
    return tiles


def plan_file(summary: dict, result: SearchResult) -> str:
    """Return the plan as a file, with what the search learned as comments."""
    comments = [f"{summary['layout']}: {summary['step_seconds']:.4g} s a step", *_search_lines(summary)]
    comments += filter(None, [profile_source(summary["profiled"])])
    comments += [f"warning {warning}" for warning in summary["warnings"]]
    comments += [f"resolved {key}: {reason}" for key, reason in summary["resolved"].items()]
    comments += [f"from {line}" for line in summary["filled"]]
    return _with_comments(comments, result.best.plan)


def _with_comments(comments: Iterable[str], plan: Plan) -> str:
    return "".join(f"{line}\n" for line in toml_comment("\n".join(map(str.strip, comments)))) + dump_plan(plan)


def _search_lines(summary: dict) -> list[str]:
    searched = summary["searched"]
    return [
        f"searched  {searched['scored']:,} plans in {searched['groups']:,} groups, {searched['timed']} of them"
        f" simulated, in {summary['wall_seconds']:.2f} s, the first one after {summary['first_plan_seconds']:.2f} s"
        + ("; no other can be better" if summary["is_complete"] else ""),
        "reasons",
        *(f"  {reason}" for reason in summary["reasons"]),
        f"runner-up {summary['runner_up'] or 'none'}",
    ]
