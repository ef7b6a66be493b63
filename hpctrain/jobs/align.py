"""`hpctrain align`: compare every operator of a job on every family with float64."""

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from hpctrain.config.precision import TRAINED_DTYPES
from hpctrain.engine.step.phases import phases_of
from hpctrain.jobs.arguments import (
    COUNT,
    NONE_OR_MORE,
    FiniteRange,
    complete_job,
    json_option,
    override_option,
    print_result,
)
from hpctrain.jobs.common import load_job_on, started_world, with_some_vocabulary
from hpctrain.observe.text_tables import table, text_of
from hpctrain.plan.tiling import counted

if TYPE_CHECKING:
    from hpctrain.engine.alignment import RankAlignment

BEYOND_EXIT_CODE = 1
MAX_DEVIATION = 1e6
"""The largest standard deviation of inputs: with larger ones float64 would overflow too."""
TOLERANCE = 0.015
"""The largest mean difference of the first losses in a family's dtype from those in fp32: 1.5 %."""
FP16_MAX = 65504.0


@click.command("align")
@click.argument("job", shell_complete=complete_job)
@override_option
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(TRAINED_DTYPES),
    help="May be repeated. Default: each family's own in JOB, or all three where JOB leaves it open.",
)
@click.option("--tokens", default=128, show_default=True, type=COUNT, help="Of the inputs, in two rows.")
@click.option(
    "--deviation",
    default=1.0,
    show_default=True,
    type=FiniteRange(min=0, max=MAX_DEVIATION, min_open=True),
    help="Standard deviation of the inputs. With larger ones only overflow counts: it shows where fp16 ends.",
)
@click.option(
    "--steps",
    default=0,
    show_default=True,
    type=NONE_OR_MORE,
    help="Also train so many steps on one rank of each family, and compare the losses.",
)
@click.option(
    "--tolerance",
    default=TOLERANCE,
    show_default=True,
    type=FiniteRange(0),
    help="Largest mean relative difference of these losses from those in fp32.",
)
@json_option
def command(job, overrides, dtypes, tokens, deviation, steps, tolerance, as_json):
    """Compare every operator of JOB, forward and backward, with float64 on each family's devices.

    \b
    hpctrain align tiny                              this process alone, in fp32, bf16 and fp16
    mpirun -n 4 hpctrain align my.toml               every rank's device, in its family's dtype
    mpirun -n 4 hpctrain align my.toml --steps 20    and the losses of the first steps

    All ranks get the same inputs. An error is the largest difference of a result over the largest number of the
    float64 result; its bound follows from the dtype, and from how much the result depends on errors of its inputs
    (docs/accelerators.md). What is beyond its bound comes with the line to type, if computing it in fp32 mends it. Exit
    code 1 where something is beyond a bound, overflows, or trains to other losses.
    """
    code = 0
    with started_world() as world:
        parsed = load_job_on(world, job, overrides)
        with world.all_or_none():
            parsed = with_some_vocabulary(parsed)

        from hpctrain.comm.bind import bind_accelerator
        from hpctrain.engine.alignment import align

        accelerator = bind_accelerator(world)
        world.enter(phases_of(parsed.observe).first_step)
        own = parsed.precision.by_family.get(accelerator.family, parsed.train.dtype)
        dtypes = tuple(dict.fromkeys(dtypes)) or ((own,) if own else TRAINED_DTYPES)
        rows = min(2, tokens)
        positions = min(tokens // rows, parsed.data.sequence_length)
        alignments = align(world, accelerator, parsed, dtypes, rows, positions, deviation, steps)
        summary = summarise(alignments, tolerance) | {"rows": rows, "positions": positions, "deviation": deviation}
        code = 0 if summary["aligned"] else BEYOND_EXIT_CODE
        if world.rank == 0:
            finite = json.loads(json.dumps(summary), parse_constant=lambda name: None)  # JSON has no NaN
            print_result(finite, format_alignment(summary), as_json)
    sys.exit(code)


def summarise(alignments: "Sequence[RankAlignment]", tolerance: float) -> dict:
    """Return what all ranks saw as plain data: the worst rank of each family, dtype, operator and result. Pure."""
    worst: dict[tuple[str, str, str, str], dict] = {}
    for rank in alignments:
        for compared in rank.compared:
            place = {"family": rank.family, "rank": rank.rank, "host": rank.host}
            entry = compared._asdict() | place | {"beyond": compared.is_beyond}
            key = rank.family, compared.dtype, compared.operator, compared.result
            if key not in worst or _severity(entry) > _severity(worst[key]):
                worst[key] = entry
    losses = _compare_losses(alignments, tolerance)
    families = Counter((rank.family, rank.model) for rank in alignments)
    return {
        "families": {family: {"model": model, "ranks": count} for (family, model), count in families.items()},
        "operators": list(worst.values()),
        "losses": losses,
        "aligned": not any(entry["beyond"] for entry in worst.values()) and all(loss["aligned"] for loss in losses),
    }


def _severity(entry: Mapping) -> tuple[bool, float]:
    """Return whether an error is beyond its bound, and its ratio to the bound."""
    return entry["beyond"], entry["error"] / entry["bound"] if entry["bound"] else entry["error"]


def _compare_losses(alignments: "Sequence[RankAlignment]", tolerance: float) -> list[dict]:
    """Return how far the losses of each family and dtype are from those of rank 0 in fp32."""
    from hpctrain.engine.alignment import REFERENCE_DTYPE

    losses = {(rank.family, dtype): values for rank in alignments for dtype, values in rank.losses.items()}
    reference = next((values for (_, dtype), values in losses.items() if dtype == REFERENCE_DTYPE), ())
    result = []
    for (family, dtype), values in losses.items():
        run = {"family": family, "dtype": dtype, "steps": len(values), "losses": values, "tolerance": tolerance}
        difference = mean_relative_difference(values, reference)
        result.append(run | {"mean_relative_difference": difference, "aligned": difference <= tolerance})
    return result


def mean_relative_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the mean over steps of the relative difference of two losses; infinite where one is no number."""
    differences = [
        abs(a - b) / abs(b) if math.isfinite(a) and b else math.inf for a, b in zip(losses, others, strict=True)
    ]
    return sum(differences) / len(differences)


def format_alignment(summary: Mapping) -> str:
    """Return a table of operators by family and dtype, what is beyond its bound, and the lines to type."""
    columns = list(dict.fromkeys((entry["family"], entry["dtype"]) for entry in summary["operators"]))
    cells: dict[str, dict[tuple[str, str], dict]] = {}
    for entry in summary["operators"]:
        row = cells.setdefault(entry["operator"], {})
        column = entry["family"], entry["dtype"]
        if column not in row or _severity(entry) > _severity(row[column]):
            row[column] = entry
    families = summary["families"].items()
    models = ", ".join(f"{family['ranks']} x {name} ({family['model']})" for name, family in families)
    names = [f"{family} {dtype}" for family, dtype in columns]
    rows = table("operator", *names, numbers=names)
    for operator, row in cells.items():
        rows.add_row(operator, *(_format_cell(row.get(column)) for column in columns))
    lines = [
        f"{len(cells)} operators, {counted(summary['rows'], 'row')} of {summary['positions']} positions, on {models}",
        "worst relative error against float64, and its share of the bound, of outputs and gradients:",
        text_of(rows),
    ]
    overrides = dict.fromkeys(entry["override"] for entry in summary["operators"] if entry["override"])
    for entry in summary["operators"]:
        if entry["beyond"]:
            lines.append(_format_beyond(entry))
        elif not entry["repeats"]:
            where = f"{entry['family']} in {entry['dtype']}"
            lines.append(f"not the same bits twice: {entry['operator']}, {entry['result']}, on {where}")
    if overrides:
        lines.append(
            "within its bound in fp32; to compute it so: " + " ".join(f"--set {override}" for override in overrides)
        )
    for run in summary["losses"]:
        difference = run["mean_relative_difference"]
        figure = f"{difference:.2e}" if math.isfinite(difference) else "not finite"
        lines.append(
            f"losses of {counted(run['steps'], 'step')} on {run['family']} in {run['dtype']}: mean relative"
            f" difference from fp32 {figure}{'' if run['aligned'] else ', beyond ' + format(run['tolerance'], 'g')}"
        )
    lines.append("aligned" if summary["aligned"] else "not aligned")
    return "\n".join(lines)


def _format_cell(entry: Mapping | None) -> str:
    if entry is None:
        return "-"
    if entry["overflow"]:
        return "overflow !"
    share = _severity(entry)[1]
    return f"{entry['error']:.1e} {share:.0%} !" if entry["beyond"] else f"{entry['error']:.1e} {share:.0%}"


def _format_beyond(entry: Mapping) -> str:
    where = f"{entry['family']} in {entry['dtype']}, rank {entry['rank']} on {entry['host']}"
    result = f"{entry['operator']}, {entry['result']}"
    remedy = "; no dtype mends that: the operator, the device or its library is wrong"
    if overflow := entry["overflow"]:
        if entry["dtype"] == "fp16" and abs(overflow["expected"]) > FP16_MAX:
            remedy = (
                f", beyond the largest number of fp16, {FP16_MAX:g}; to train this family in another dtype:"
                f" --set precision.by_family.{entry['family']}=fp32"
            )
        text = (
            f"overflow: {result}, on {where}: {overflow['count']} are not finite; the first at"
            f" {list(overflow['at'])}, in float64 {overflow['expected']:.3g}"
        )
    else:
        text = f"beyond the bound: {result}, on {where}: error {entry['error']:.2e}, bound {entry['bound']:.2e}"
    return text if entry["override"] else text + remedy
