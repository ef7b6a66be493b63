"""Speed of a rehearsed mixed cluster, as a share of what its families do each on its own."""

import click

from benchmarks.plan_benchmark import PlanBenchmark
from hpctrain.cli import main
from hpctrain.jobs.arguments import COUNT, json_option, override_option, print_result, time_scale_option
from hpctrain.jobs.common import load_described, load_job_on, start_rehearsal, started_world
from hpctrain.observe.console import describe_overrun
from hpctrain.plan.tiling import Plan
from hpctrain.planner.search.search import SCORE_ALL, Limits
from hpctrain.planner.search.space import BY_SPEED, EVEN, Space, by_speed_space, even_space

SEARCHED = "searched"
OWN_JOB = "mixed"


@click.command("benchmarks.families")
@click.argument("cluster")
@click.option("--job", "reference", default=OWN_JOB, show_default=True, help="What to train; its [plan] is not used.")
@override_option
@click.option("--alone", default=5, show_default=True, type=COUNT, help="Plans measured of each family.")
@click.option("--plans", default=2, show_default=True, type=COUNT, help="Plans measured of each other kind.")
@click.option("--steps", default=2, show_default=True, type=COUNT, help="Steps timed, after one more.")
@time_scale_option
@json_option
def command(cluster, reference, overrides, alone, plans, steps, time_scale, as_json):
    """Rehearse CLUSTER, a file or the name of a ready one: each family alone, all evenly, all by speed and by search.

    \b
    mpirun -n 8 python -m benchmarks.families v100-t4

    All train the same global batch. The yardstick is the sum of what the families do alone (HetHub, arXiv 2405.16256):
    all plans of a family are scored, the best ones simulated, and the best of these measured.
    """
    rehearsed = load_described(cluster)
    with started_world(rehearsed) as world:
        job, described = start_rehearsal(world, rehearsed, load_job_on(world, reference, overrides), time_scale)
        report = (lambda text: click.echo(text, err=True)) if world.rank == 0 else (lambda text: None)
        benchmark = PlanBenchmark(world, described.cluster, job, steps, report)
        measured = {"cluster": cluster, "ranks": world.size} | _measure(benchmark, alone, plans)
        if world.rank == 0:
            print_result(measured, _table(measured), as_json)


def _measure(benchmark, num_alone: int, num_plans: int) -> dict:
    """Measure everything; return it as plain data, the same on all ranks."""
    cluster = benchmark.cluster
    families = list(dict.fromkeys(device.family for device in cluster.devices))
    alone = {
        family: benchmark.best(num_alone, benchmark.search(f"{family} alone", [family], Space(), SCORE_ALL))
        for family in families
    }
    mixed = {
        name: benchmark.best(num_plans, benchmark.search(name, families, space, Limits()))
        for name, space in ((EVEN, even_space()), (BY_SPEED, by_speed_space()), (SEARCHED, Space()))
    }
    result: dict = {
        "alone": {name: _about(measured, cluster.num_of(name)) for name, measured in alone.items()},
        "mixed": {name: _about(measured, cluster.num_devices) for name, measured in mixed.items()},
        "loss_difference": benchmark.loss_difference(),
        "overrun": benchmark.overrun(),
    }
    uneven = [measured for name, measured in mixed.items() if measured and name != EVEN]
    if without := [name for name, measured in alone.items() if measured is None]:
        return result | {"no_ratio": f"{', '.join(without)} alone cannot hold the model"}
    if not uneven:
        return result | {"no_ratio": "no plan of all families fits"}
    return result | _ratios(cluster, alone, mixed[EVEN], max(uneven, key=lambda each: each.tokens_per_second))


def _ratios(cluster, alone, even, best) -> dict:
    total = sum(measured.tokens_per_second for measured in alone.values())
    each = [measured.tokens_per_second / cluster.num_of(name) for name, measured in alone.items()]
    ratios = {
        "fraction_of_sum": best.tokens_per_second / total,
        "speedup_over_best_family": best.tokens_per_second / max(m.tokens_per_second for m in alone.values()),
        "possible_speedup_over_even": total / cluster.num_devices / min(each),
        "fraction_of_simulated": best.candidate.seconds / best.step_seconds,
    }
    if even is not None:
        ratios["speedup_over_even"] = best.tokens_per_second / even.tokens_per_second
    losses = best.losses(best.tokens / total)
    if ratios["fraction_of_sum"] > 1:
        ratios["reasons"] = _weaknesses(alone, best)
    # Of the plans that the ratios are of; others, that were slower, may have been late.
    overrun = max(measured.overrun for measured in (*alone.values(), best, *([even] if even else [])))
    return ratios | {"overrun": overrun, "losses": losses, "cause": max(losses, key=losses.get)}


def _weaknesses(alone, best) -> list[str]:
    """Say what families alone do for lack of memory, which makes their sum a weak baseline."""
    reasons, rows = [], _rows_at_once(best.plan)
    for family, measured in alone.items():
        tiles, own_rows = measured.plan.tiles, _rows_at_once(measured.plan)
        zero = max(tile.zero for tile in tiles)
        weaknesses = [
            *(["computes blocks again"] if any(tile.recompute != "none" for tile in tiles) else []),
            *(["offloads to host memory"] if any(tile.offload != "none" for tile in tiles) else []),
            *([f"exchanges {'gradients' if zero == 2 else 'weights'} in every pass"] if zero >= 2 else []),
            *([f"has {own_rows} rows at once at the most, where the mix has up to {rows}"] if own_rows < rows else []),
        ]
        if weaknesses:
            reasons.append(f"{family} {' and '.join(weaknesses)}")
    return reasons


def _rows_at_once(plan: Plan) -> int:
    return max(-(-tile.rows.size // tile.row_chunks) for tile in plan.tiles)


def _about(measured, num_devices: int) -> dict | None:
    """Return the figures of a measured plan as plain data."""
    if measured is None:
        return None
    return {
        "plan": measured.plan.describe(),
        "tokens_per_second": measured.tokens_per_second,
        "per_device": measured.tokens_per_second / num_devices,
        "step_seconds": measured.step_seconds,
        "overrun": measured.overrun,
        "memory_share": measured.memory_share,
    }


def _table(measured: dict) -> str:
    lines = [f"{'':24} {'tokens/s':>10} {'overrun':>8} {'memory':>7}  plan"]
    rows = [(f"{name} alone", about) for name, about in measured["alone"].items()]
    rows += [(f"all, {name}", about) for name, about in measured["mixed"].items()]
    for name, about in rows:
        if about is None:
            lines.append(f"{name:24} no plan fits")
        else:
            figures = f"{about['tokens_per_second']:>10,.0f} {about['overrun']:>8.2%} {about['memory_share']:>7.0%}"
            lines.append(f"{name:24} {figures}  {about['plan']}")
    lines.append(f"losses differ by {measured['loss_difference']:.1e} at most")
    lines.append(f"overrun {measured['overrun']:.2%} at most, {describe_overrun(measured['overrun'])}")
    if "no_ratio" in measured:
        lines.append(f"no ratio: {measured['no_ratio']}")
    else:
        for key, what in (
            ("fraction_of_sum", "of the sum of the families alone"),
            ("speedup_over_best_family", "times the best family alone"),
            ("speedup_over_even", "times the even cut"),
            ("fraction_of_simulated", "of the speed that the simulator gives this plan"),
        ):
            if key in measured:
                lines.append(f"{measured[key]:6.3f} {what}")
        if "reasons" in measured:
            why = "; ".join(measured["reasons"]) or "nothing that memory explains: measure again"
            lines.append(f"more than the sum for a weak baseline: alone, {why}")
        parts = ", ".join(f"{name} {share:.1%}" for name, share in measured["losses"].items())
        lines.append(f"losses, share of the step: {parts}; the largest by {measured['cause']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(command)
