"""what measuring products at the start brings to a step."""

import json
import statistics
from collections import Counter
from dataclasses import replace

import click

from benchmarks.pairs import Ratio, measure_pairs
from hpctrain.cli import main
from hpctrain.engine.resolve import prepare_run
from hpctrain.jobs.common import load_job_on, override_option, started_world


@click.command("benchmarks.products")
@click.argument("job")
@override_option
@click.option("--pairs", default=20, show_default=True, type=click.IntRange(2), help="Pairs of steps that are timed.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(job, overrides, pairs, as_json):
    """Time training steps of JOB with products as their operands lie, and in the ways that were measured to be faster.

    A step of the one and a step of the other are taken in turn. Told is the median ratio of their times with its 95 %
    confidence interval, and which products go by which way. `layouts` and what came of them are as in the job.

    \b
    mpirun -n 4 python -m benchmarks.products tiny --set plan.data=4
    """
    with started_world() as world:
        prepared = prepare_run(world, load_job_on(world, job, overrides))
        tuned = prepared.job
        plain = tuned.model_copy(update={"products": tuned.products.model_copy(update={"layouts": {}})})
        paired = measure_pairs(world, replace(prepared, job=plain), {"tuned": tuned}, pairs)["tuned"]
        summary = {
            "plan": prepared.plan.describe(),
            "ranks": world.size,
            "pairs": pairs,
            "plain_seconds": statistics.median(paired.first),
            "tuned_seconds": statistics.median(paired.second),
            "ratio": paired.ratio._asdict(),
            "same_bits": paired.same_bits,
            "layouts": tuned.products.layouts,
            "reason": prepared.reasons.get("products.layouts", prepared.reasons.get("products.tune", "off: asked for")),
        }
        if world.rank == 0:
            print(json.dumps(summary) if as_json else table(summary), flush=True)


def table(summary: dict) -> str:
    ratio = Ratio(**summary["ratio"])
    lines = [f"{summary['ranks']} ranks: {summary['plan']}; {summary['pairs']} pairs of steps"]
    lines.append(f"  as they lie {summary['plain_seconds'] * 1e3:10.2f} ms")
    bits = "the same bits" if summary["same_bits"] else "other bits"
    lines.append(f"  tuned       {summary['tuned_seconds'] * 1e3:10.2f} ms, {ratio} of the former; {bits}")
    lines.append(f"  products: {summary['reason']}")
    for family, layouts in summary["layouts"].items():
        lines += [f"    {family} {name}: {layout}" for name, layout in layouts.items() if layout != "plain"]
        lines += [f"    {family} others: {Counter(layouts.values())['plain']} plain"]
    return "\n".join(lines)


if __name__ == "__main__":
    main(command)
