"""What `hpctrain plan --cluster` searches for, and how it tells what it found."""

import json
from pathlib import Path

from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_defaults import describe_sources
from hpctrain.config.cluster_file import filled_figures, load_cluster, locate_cluster
from hpctrain.config.job import Job
from hpctrain.jobs.common import scaled_for
from hpctrain.jobs.predict import describe, profile_source, text, with_overlap
from hpctrain.plan.file import dump_plan
from hpctrain.planner.choose import dtype_on, families_in, search_best
from hpctrain.planner.cost import Setup
from hpctrain.planner.explain import reasons, runner_up
from hpctrain.planner.rows_fit import memory_warnings
from hpctrain.planner.search import Limits, SearchResult
from hpctrain.planner.space import Space


def search_plan(job: Job, reference: str, limits: Limits, space: Space | None = None) -> dict:
    """Search a space, or all plans, and return all there is to tell, as plain data but for `result`.

    Raises PlanError where nothing fits, TopologyError where no family computes in the job's dtype.
    """
    path = locate_cluster(reference)
    cluster, job = load_cluster(path), scaled_for(reference, job)
    dtype, reason = dtype_on(job, cluster, sorted(cluster.families), reference)
    job, resolved = with_overlap(job, cluster, path, dtype)
    result = search_best(job, cluster, limits, reference, space)
    summary = describe(result.best.prediction, dtype)
    computing = families_in(dtype, cluster, reference)
    if reason:
        summary["assumed_inputs"].append(reason)
    left_out = [f"{name} is unused: it has no speed in {dtype}" for name in cluster.families if name not in computing]
    return {
        **summary,
        "resolved": resolved,
        "warnings": memory_warnings(Setup.of_job(job), cluster),
        "filled": describe_sources(filled_figures(path)),
        "layout": _layout(result, 0),
        "lower_bound_seconds": result.lower_bound_seconds,
        "gap": result.gap,
        "searched": result.searched,
        "is_complete": result.is_complete,
        "wall_seconds": result.wall_seconds,
        "first_plan_seconds": result.first_plan_seconds,
        "reasons": reasons(result) + left_out,
        "runner_up": runner_up(result),
        "top": [],
        "found": result,
        "cluster": cluster,
    }


def _layout(result: SearchResult, number: int) -> str:
    return result.plans[number].layout.describe([pool.name for pool in result.pools])


def format_search(summary: dict, top: int, out: Path | None, as_json: bool) -> str:
    """Return what is printed: one line of JSON, the plan file with comments, or, where it is written, a summary."""
    result: SearchResult = summary.pop("found")
    cluster: Cluster = summary.pop("cluster")
    summary["top"] = [
        {
            "layout": _layout(result, number),
            "step_seconds": timed.seconds,
            "tokens_per_second": timed.prediction.tokens_per_second,
            "mfu": timed.prediction.mfu,
        }
        for number, timed in enumerate(result.plans[:top])
    ]
    plan_text = plan_file(summary, result)
    if as_json:
        return json.dumps({"plan": plan_text if out is None else str(out), **summary})
    if out is None:
        return plan_text.rstrip("\n")
    lines = [f"{out}: {summary['layout']}", text(summary, result.best.plan, cluster), *_summary(summary)]
    if summary["filled"]:
        lines += ["figures that the cluster file leaves out", *(f"  {line}" for line in summary["filled"])]
    if summary["top"]:
        lines.append("the best plans")
        lines += [f"  {each['step_seconds']:.4g} s  {each['layout']}" for each in summary["top"]]
    return "\n".join(lines)


def plan_file(summary: dict, result: SearchResult) -> str:
    """Return the plan as a file, with what is told of it as comments."""
    comments = [f"{summary['layout']}: {summary['step_seconds']:.4g} s a step", *_summary(summary)]
    comments += filter(None, [profile_source(summary["profiled"])])
    comments += [f"warning {warning}" for warning in summary["warnings"]]
    comments += [f"chosen {key}: {reason}" for key, reason in summary["resolved"].items()]
    comments += [f"from {line}" for line in summary["filled"]]
    return "".join(f"# {line.strip()}\n" for line in comments) + dump_plan(result.best.plan)


def _summary(summary: dict) -> list[str]:
    searched = summary["searched"]
    return [
        f"bound     no plan takes less than {summary['lower_bound_seconds']:.4g} s: the gap is {summary['gap']:.1%}",
        f"searched  {searched['scored']:,} plans in {searched['groups']:,} groups, {searched['timed']} of them timed,"
        f" in {summary['wall_seconds']:.2f} s, the first found after {summary['first_plan_seconds']:.2f} s"
        + ("; no other can be better" if summary["is_complete"] else ""),
        "reasons",
        *(f"  {reason}" for reason in summary["reasons"]),
        f"runner-up {summary['runner_up'] or 'none'}",
    ]
