"""What the searched plan of each ready cluster gains on the even one and on that by speed.

    python -m benchmarks.planned                       all of them, as predicted
    python -m benchmarks.planned v100-t4 ib-roce       some
    python -m benchmarks.planned v100-t4 --measure     rehearsed too: these three, and the next best of the search

The job is that of `benchmarks.families`. A rehearsal measures all plans of a cluster one after the other on the same
ranks; its times are the rehearsed cluster's. What is `auto` of `[overlap]` is on there, and counted so by the search.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.commands import call
from benchmarks.families import OWN_JOB
from benchmarks.plan_benchmark import Candidate, PlanBenchmark
from hpctrain.config.clusters.cluster_file import dump_cluster, load_cluster, locate_cluster, ready_clusters
from hpctrain.config.errors import PlanError
from hpctrain.jobs.common import load_described, load_job_on, ready_miniature, start_rehearsal, started_world
from hpctrain.jobs.plan import search_and_summarise
from hpctrain.plan.file import load_plan
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.forecast import BUSY
from hpctrain.planner.search.search import Limits
from hpctrain.planner.search.space import BY_SPEED, EVEN, by_speed_space, even_space

SEARCHED = "searched"
TOP = 5


@dataclass(frozen=True)
class Named:
    """A plan, and how long it is predicted to take."""

    name: str
    plan: Plan
    seconds: float


def plans_of(cluster_name: str, path: Path) -> tuple[list[Named], float]:
    """Return the plans of a cluster's rehearsal, those of the search first, and the share of the best one's
    step that it takes if all devices are busy.

    The cluster's miniature is written to `path`.
    """
    made = ready_miniature(cluster_name)
    job = made.job
    path.write_text(dump_cluster(made.cluster, truth=made.truth))
    described = load_described(str(path))
    result, summary = search_and_summarise(job, described, Limits())
    best = result.plans[:TOP]
    named = [Named(f"{SEARCHED}, {place + 1}", timed.plan, timed.seconds) for place, timed in enumerate(best)]
    for name, space in ((BY_SPEED, by_speed_space()), (EVEN, even_space())):
        try:
            restricted = search_and_summarise(job, described, Limits(), space)[0].best
            named.append(Named(name, restricted.plan, restricted.seconds))
        except PlanError as error:
            print(f"{cluster_name}, {name}: {error}", file=sys.stderr)
    return named, summary["waterfall_seconds"][BUSY] / result.best.seconds


def measure(cluster_name: str, plans: list[Named], steps: int, time_scale: float | None) -> dict[str, dict]:
    """Rehearse all plans in one start; return what was measured, by name."""
    with tempfile.TemporaryDirectory() as folder:
        num_ranks = load_cluster(locate_cluster(cluster_name)).num_devices
        cluster = Path(cluster_name).resolve() if Path(cluster_name).exists() else cluster_name  # ranks start elsewhere
        # Started by itself on each rank, with the plans that this process made.
        given = Path(folder, "plans.json")
        given.write_text(json.dumps({named.name: _saved(Path(folder), i, named) for i, named in enumerate(plans)}))
        options = ["--rehearse", given, "--steps", steps, *(["--time-scale", time_scale] if time_scale else [])]
        said = call(cluster, *options, ranks=num_ranks, cwd=Path(folder), module="benchmarks.planned")
    return json.loads(said.splitlines()[-1])


def _saved(folder: Path, number: int, named: Named) -> dict:
    from hpctrain.plan.file import dump_plan

    path = folder / f"{number}.toml"
    path.write_text(dump_plan(named.plan))
    return {"path": str(path), "seconds": named.seconds}


def rehearse(cluster_name: str, given: Path, steps: int, time_scale: float | None) -> None:
    """Be one rank of a rehearsal that measures plans; rank 0 prints what was found."""
    rehearsed = load_described(cluster_name)
    with started_world(rehearsed) as world:
        job, described = start_rehearsal(world, rehearsed, load_job_on(world, OWN_JOB, ()), time_scale)
        benchmark, summary = PlanBenchmark(world, described.cluster, job, steps, lambda text: None), {}
        for name, saved in json.loads(given.read_text()).items():
            result = benchmark.best(1, [Candidate(name, load_plan(Path(saved["path"])), saved["seconds"])])
            summary[name] = result and {"step_seconds": result.step_seconds, "overrun": result.overrun}
        if world.rank == 0:
            print(json.dumps(summary), flush=True)


def show(cluster_name: str, plans: list[Named], busy: float, measured: dict[str, dict]) -> None:
    """Print a cluster's row, and below it what was measured."""
    by_name = {named.name: named for named in plans}
    best = plans[0]

    def other(name: str) -> str:
        if name not in by_name:
            return "none"
        result = by_name[name]
        return f"{result.seconds:.4g} ({result.seconds / best.seconds:.2f})"

    print(f"| {cluster_name} | {best.seconds:.4g} | {busy:.1%} | {other(BY_SPEED)} | {other(EVEN)} |", flush=True)
    for name, result in measured.items():
        named = by_name[name]
        if result is None:
            print(f"    {name}: predicted {named.seconds:.4g} s, does not fit", flush=True)
            continue
        ratio, overrun = named.seconds / result["step_seconds"], result["overrun"]
        print(
            f"    {name}: predicted {named.seconds:.4g} s, measured {result['step_seconds']:.4g} s"
            f" (predicted / measured {ratio:.3f}, overrun {overrun:.2%}): {named.plan.describe()}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clusters", nargs="*")
    parser.add_argument("--measure", action="store_true", help="rehearse the plans, too")
    parser.add_argument("--steps", default=2, type=int, help="timed of each plan")
    parser.add_argument("--rehearse", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--time-scale", type=float, help="seconds of a rehearsal for one of its cluster")
    given = parser.parse_args()
    if given.rehearse:
        rehearse(given.clusters[0], given.rehearse, given.steps, given.time_scale)
        return
    print("| cluster | searched, s | all busy | by speed, s (times) | even, s (times) |\n|---|--:|--:|--:|--:|")
    slower = []
    for name in given.clusters or ready_clusters():
        with tempfile.TemporaryDirectory() as folder:
            plans, busy = plans_of(name, Path(folder, f"{Path(name).stem}.toml"))
        show(name, plans, busy, measure(name, plans, given.steps, given.time_scale) if given.measure else {})
        slower += [f"{name}: {p.name}" for p in plans[1:] if p.seconds < plans[0].seconds * (1 - 1e-9)]
    if slower:
        sys.exit(f"predicted to be faster than what was searched: {', '.join(slower)}")


if __name__ == "__main__":
    main()
