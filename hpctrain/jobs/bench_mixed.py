"""`hpctrain bench mixed`: what a mixed cluster does, as a share of what its families do each on its own."""

import json
from functools import partial

import click

from hpctrain.errors import PlanError
from hpctrain.jobs.common import (
    load_job_on,
    override_option,
    start_rehearsal,
    started_world,
    time_scale_option,
)
from hpctrain.planner.alone import alone_candidates, searched_candidates
from hpctrain.planner.proportional import (
    IN_A_ROW,
    SEARCHED,
    SIDE_BY_SIDE,
    even_candidates,
    parties_of,
    proportional_candidates,
    rows_at_once,
)
from hpctrain.planner.timed import MOST_TIMED

OWN_JOB = "mixed"


@click.command("mixed")
@click.argument("cluster")
@click.option("--job", "reference", default=OWN_JOB, show_default=True, help="What to train; its [plan] is not used.")
@override_option
@click.option("--alone", default=5, show_default=True, type=click.IntRange(1), help="Plans measured of each family.")
@click.option(
    "--plans", default=2, show_default=True, type=click.IntRange(1), help="Plans measured of each other kind."
)
@click.option("--steps", default=2, show_default=True, type=click.IntRange(1), help="Steps timed, after one more.")
@time_scale_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(cluster, reference, overrides, alone, plans, steps, time_scale, as_json):
    """Rehearse CLUSTER, a file or the name of a ready one: each family alone, all evenly, all by speed and by search.

    \b
    mpirun -n 8 hpctrain bench mixed v100-t4

    All train the same global batch. The yardstick is the sum of what the families do alone (HetHub, arXiv 2405.16256):
    all plans of a family are simulated, and the best ones measured, of each depth and tensor grid one.
    """
    with started_world() as world:
        job, described = start_rehearsal(world, cluster, load_job_on(world, reference, overrides), time_scale)

        from hpctrain.jobs.stand import Stand

        stand = Stand(world, described.cluster, job, steps, _teller(world))
        told = {"cluster": cluster, "ranks": world.size} | _yardstick(stand, alone, plans)
        if world.rank == 0:
            print(json.dumps(told) if as_json else _table(told), flush=True)


def _yardstick(stand, num_alone: int, plans: int) -> dict:
    """Measure everything; return it as plain data, the same on all ranks."""
    job, cluster, work = stand.job, stand.cluster, stand.work
    parties = parties_of(cluster, job.train.dtype)
    speeds = {party.family: party.speed / work.flops for party in parties}
    alone = {}
    for party in parties:
        name = f"{party.family} alone"
        listed = _listed(stand, name, speeds, partial(alone_candidates, job, cluster, work, party), None)
        alone[party.family] = stand.best(name, num_alone, listed)
    told: dict = {"alone": {name: _about(best, cluster.num_of(name)) for name, best in alone.items()}}
    without = [name for name, best in alone.items() if best is None]
    if not without:
        each = sum(work.costs) / work.positions
        speeds = {name: best.tokens_per_second / cluster.num_of(name) * each for name, best in alone.items()}
    even = stand.best("even", plans, _listed(stand, "even", speeds, partial(even_candidates, work, parties)))
    by_speed = parties_of(cluster, job.train.dtype, speeds)
    listed = _listed(stand, "by speed", speeds, partial(proportional_candidates, work, by_speed, cluster.num_devices))
    families = [party.family for party in parties]
    listed += _listed(stand, "searched", speeds, partial(searched_candidates, job, cluster, families))
    mixed = [
        stand.best(kind, plans, [candidate for candidate in listed if candidate.kind == kind])
        for kind in (SIDE_BY_SIDE, IN_A_ROW, SEARCHED)
    ]
    mixed = [measured for measured in mixed if measured is not None]
    told |= {"even": _about(even, cluster.num_devices), "mixed": [_about(m, cluster.num_devices) for m in mixed]}
    told["loss_difference"] = stand.loss_difference()
    told["overrun"] = stand.overrun()
    if without:
        told["no_ratio"] = f"{', '.join(without)} alone cannot hold the model"
    elif not mixed:
        told["no_ratio"] = "no plan of all families fits"
    else:
        best = max(mixed, key=lambda measured: measured.tokens_per_second)
        told |= _ratios(cluster, alone, even, best)
    return told


def _listed(stand, name: str, speeds, make, most: int | None = MOST_TIMED) -> list:
    """Return the plans to be tried, the fastest by simulation first; where there can be none, say why."""
    try:
        return stand.timed(make, speeds, most)
    except PlanError as error:
        stand.tell(f"{name}: {error}")
        return []


def _ratios(cluster, alone, even, best) -> dict:
    total = sum(measured.tokens_per_second for measured in alone.values())
    each = [measured.tokens_per_second / cluster.num_of(name) for name, measured in alone.items()]
    found = {
        "of_sum": best.tokens_per_second / total,
        "of_best_family": best.tokens_per_second / max(m.tokens_per_second for m in alone.values()),
        "possible_of_even": total / cluster.num_devices / min(each),
        "of_simulated": best.candidate.seconds / best.step_seconds,
    }
    if even is not None:
        found["of_even"] = best.tokens_per_second / even.tokens_per_second
    lost = best.lost(best.tokens / total)
    if found["of_sum"] > 1:
        found["because"] = _weaknesses(alone, best)
    # Of the plans that the ratios are of; others, that were slower, may have been late.
    overrun = max(measured.overrun for measured in (*alone.values(), best, *([even] if even else [])))
    return found | {"overrun": overrun, "lost": lost, "cause": max(lost, key=lost.get)}


def _weaknesses(alone, best) -> list[str]:
    """Say what families alone do for lack of memory, which makes their sum a weak baseline."""
    found = []
    rows = max(rows_at_once(best.candidate.plan, tile) for tile in best.candidate.plan.tiles)
    for family, measured in alone.items():
        plan = measured.candidate.plan
        most = max(rows_at_once(plan, tile) for tile in plan.tiles)
        does = []
        if any(tile.recompute != "none" for tile in plan.tiles):
            does.append("computes blocks again")
        zero = max(tile.zero for tile in plan.tiles)
        if zero >= 2:
            does.append(f"exchanges {'gradients' if zero == 2 else 'weights'} in every pass")
        if most < rows:
            does.append(f"has {most} rows at once at the most, where the mix has up to {rows}")
        if does:
            found.append(f"{family} {' and '.join(does)}")
    return found


def _about(measured, num_devices: int) -> dict | None:
    """Return what is told of a measured plan."""
    if measured is None:
        return None
    return {
        "plan": measured.candidate.describe,
        "tokens_per_second": measured.tokens_per_second,
        "per_device": measured.tokens_per_second / num_devices,
        "step_seconds": measured.step_seconds,
        "overrun": measured.overrun,
        "memory_share": measured.memory_share,
    }


def _teller(world):
    """Return what tells of each plan that was measured, on standard error."""
    return (lambda text: click.echo(text, err=True)) if world.rank == 0 else (lambda text: None)


def _table(told: dict) -> str:
    from hpctrain.observe.console import trust

    lines = [f"{'':24} {'tokens/s':>10} {'overrun':>8} {'memory':>7}  plan"]
    rows = [(f"{name} alone", about) for name, about in told["alone"].items()]
    rows += [("all, evenly", told["even"]), *(("all, mixed", about) for about in told["mixed"])]
    for name, about in rows:
        if about is None:
            lines.append(f"{name:24} no plan fits")
        else:
            figures = f"{about['tokens_per_second']:>10,.0f} {about['overrun']:>8.2%} {about['memory_share']:>7.0%}"
            lines.append(f"{name:24} {figures}  {about['plan']}")
    lines.append(f"losses differ by {told['loss_difference']:.1e} at most")
    lines.append(f"overrun {told['overrun']:.2%} at most, {trust(told['overrun'])}")
    if "no_ratio" in told:
        lines.append(f"no ratio: {told['no_ratio']}")
    else:
        for key, what in (
            ("of_sum", "of the sum of the families alone"),
            ("of_best_family", "times the best family alone"),
            ("of_even", "times the even cut"),
            ("of_simulated", "of the speed that the simulator gives this plan"),
        ):
            if key in told:
                lines.append(f"{told[key]:6.3f} {what}")
        if "because" in told:
            why = "; ".join(told["because"]) or "nothing that memory explains: measure again"
            lines.append(f"more than the sum for a weak baseline: alone, {why}")
        parts = ", ".join(f"{name} {share:.1%}" for name, share in told["lost"].items())
        lines.append(f"lost, of the step: {parts}; most by {told['cause']}")
    return "\n".join(lines)
