"""What `hpctrain plan --cluster` searches for, and how it tells what it found."""

import json
from pathlib import Path

from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_defaults import describe_sources
from hpctrain.config.cluster_file import filled_figures, find_cluster, load_cluster
from hpctrain.config.job import Job
from hpctrain.jobs.common import scaled_for
from hpctrain.jobs.predict import describe, profile_source, text, with_overlap
from hpctrain.plan.file import dump_plan
from hpctrain.planner.choose import dtype_on, families_in, find_best
from hpctrain.planner.cost import Setup
from hpctrain.planner.explain import reasons, runner_up
from hpctrain.planner.rows_fit import memory_warnings
from hpctrain.planner.search import Found, Limits
from hpctrain.planner.space import Space


def find_plan(job: Job, reference: str, limits: Limits, space: Space | None = None) -> dict:
    """Search a space, or all plans, and return all there is to tell, as plain data but for `found`.

    Raises PlanError where nothing fits, TopologyError where no family computes in the job's dtype.
    """
    path = find_cluster(reference)
    cluster, job = load_cluster(path), scaled_for(reference, job)
    dtype, reason = dtype_on(job, cluster, sorted(cluster.families), reference)
    job, chosen = with_overlap(job, cluster, path, dtype)
    found = find_best(job, cluster, limits, reference, space)
    told = describe(found.best.prediction, dtype)
    computing = families_in(dtype, cluster, reference)
    if reason:
        told["guessed"].append(reason)
    left_out = [f"{name} is unused: it has no speed in {dtype}" for name in cluster.families if name not in computing]
    return {
        **told,
        "chosen": chosen,
        "warnings": memory_warnings(Setup.of_job(job), cluster),
        "filled": describe_sources(filled_figures(path)),
        "layout": _layout(found, 0),
        "lower_bound_seconds": found.lower_bound_seconds,
        "gap": found.gap,
        "searched": found.searched,
        "is_complete": found.is_complete,
        "wall_seconds": found.wall_seconds,
        "first_plan_seconds": found.first_plan_seconds,
        "reasons": reasons(found) + left_out,
        "runner_up": runner_up(found),
        "top": [],
        "found": found,
        "cluster": cluster,
    }


def _layout(found: Found, number: int) -> str:
    return found.plans[number].layout.describe([pool.name for pool in found.pools])


def tell(told: dict, top: int, out: Path | None, as_json: bool) -> str:
    """Return what is printed: one line of JSON, the plan file with comments, or, where it is written, a summary."""
    found: Found = told.pop("found")
    cluster: Cluster = told.pop("cluster")
    told["top"] = [
        {
            "layout": _layout(found, number),
            "step_seconds": timed.seconds,
            "tokens_per_second": timed.prediction.tokens_per_second,
            "mfu": timed.prediction.mfu,
        }
        for number, timed in enumerate(found.plans[:top])
    ]
    plan_text = plan_file(told, found)
    if as_json:
        return json.dumps({"plan": plan_text if out is None else str(out), **told})
    if out is None:
        return plan_text.rstrip("\n")
    lines = [f"{out}: {told['layout']}", text(told, found.best.plan, cluster), *_summary(told)]
    if told["filled"]:
        lines += ["figures that the cluster file leaves out", *(f"  {line}" for line in told["filled"])]
    if told["top"]:
        lines.append("the best plans")
        lines += [f"  {each['step_seconds']:.4g} s  {each['layout']}" for each in told["top"]]
    return "\n".join(lines)


def plan_file(told: dict, found: Found) -> str:
    """Return the plan as a file, with what is told of it as comments."""
    comments = [f"{told['layout']}: {told['step_seconds']:.4g} s a step", *_summary(told)]
    comments += filter(None, [profile_source(told["profiled"])])
    comments += [f"warning {warning}" for warning in told["warnings"]]
    comments += [f"chosen {key}: {reason}" for key, reason in told["chosen"].items()]
    comments += [f"from {line}" for line in told["filled"]]
    return "".join(f"# {line.strip()}\n" for line in comments) + dump_plan(found.best.plan)


def _summary(told: dict) -> list[str]:
    searched = told["searched"]
    return [
        f"bound     no plan takes less than {told['lower_bound_seconds']:.4g} s: the gap is {told['gap']:.1%}",
        f"searched  {searched['weighed']:,} plans in {searched['groups']:,} groups, {searched['timed']} of them timed,"
        f" in {told['wall_seconds']:.2f} s, the first found after {told['first_plan_seconds']:.2f} s"
        + ("; no other can be better" if told["is_complete"] else ""),
        "because",
        *(f"  {reason}" for reason in told["reasons"]),
        f"runner-up {told['runner_up'] or 'none'}",
    ]
