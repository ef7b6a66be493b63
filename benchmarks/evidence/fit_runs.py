"""Fits the predictor to steps that were measured, or tells how well it predicts them. Needs neither ranks nor torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import click

from benchmarks.evidence.calibrate import SHIPPED, Measured, Parameters, changes, dump_parameters, fit, load_parameters
from benchmarks.evidence.measured import load_measured
from hpctrain.cli import main
from hpctrain.config.errors import PlanError


@click.command("benchmarks.evidence.fit_runs")
@click.argument("measurements", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where to write what changed. Default: print it.")
@click.option("--parameters", type=click.Path(path_type=Path), help="A file of parameters to start from.")
@click.option("--check", is_flag=True, help="Fit nothing: tell how well the rows are predicted.")
@click.option("--rows", "show_rows", is_flag=True, help="Print each row.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(measurements, out, parameters, check, show_rows, as_json):
    """Fit the predictor to MEASUREMENTS, a CSV file of runs: one parameter set a family, three constants a software.

    \b
    python -m benchmarks.evidence.fit_runs runs.csv --out mine.toml
    python -m benchmarks.evidence.fit_runs runs.csv --check --rows
    """
    rows = load_measured(measurements)
    if not check and not any(row.ran for row in rows):
        raise PlanError(f"{measurements}: no row ran, so there is nothing to fit to; see --check")
    before = load_parameters(parameters) if parameters else SHIPPED
    after = before if check else fit(rows, before, lambda line: None if as_json else click.echo(line, err=True))
    summary = _format_reason(rows, before, after)
    text = dump_parameters(SHIPPED, after, f"Fitted to {measurements}, {sum(row.ran for row in rows)} rows.")
    if out and not check:
        out.write_text(text)
    if as_json:
        print(json.dumps(summary | {"out": str(out) if out else text}))
        return
    for line in _lines(summary, show_rows):
        print(line)
    if not check:
        print(f"written to {out}" if out else f"\n{text}", end="\n" if out else "")


def _format_reason(rows: Sequence[Measured], before: Parameters, after: Parameters) -> dict:
    """Return the errors of all rows before and after, and what changed."""
    listed = []
    for row in rows:
        result = [which.predict(row) for which in (before, after)]
        old, new = (prediction.step_seconds for prediction in result)
        needed = max(stage.memory.total for stage in result[1].memory)
        seconds = row.seconds if row.ran else None
        one = {"name": row.name, "step_seconds": seconds, "before_seconds": old, "after_seconds": new}
        memory = {
            "memory_bytes": row.memory_bytes,
            "predicted_memory_bytes": needed,
            "predicted_to_fit": result[1].fits,
        }
        listed.append(one | memory)
    ran, ran_out = ([one for one in listed if (one["step_seconds"] is not None) == did] for did in (True, False))
    errors = {
        when: mean(abs(one[f"{when}_seconds"] / one["step_seconds"] - 1) for one in ran) if ran else None
        for when in ("before", "after")
    }
    of_memory = [abs(one["predicted_memory_bytes"] / one["memory_bytes"] - 1) for one in ran if one["memory_bytes"]]
    return {
        "rows": listed,
        "mean_error": errors,
        "ran": len(ran),
        "ran_predicted_not_to_fit": sum(not one["predicted_to_fit"] for one in ran),
        "ran_out_of_memory": len(ran_out),
        "ran_out_of_memory_predicted_to_fit": sum(one["predicted_to_fit"] for one in ran_out),
        "mean_memory_error": mean(of_memory) if of_memory else None,
        "changed": [
            {"table": table, "constant": constant, "before": old, "after": new}
            for table, constant, old, new in changes(before, after)
        ],
    }


def _lines(summary: dict, show_rows: bool) -> list[str]:
    lines = [f"{'':40}{'before':>12}{'after':>12}"]
    if summary["ran"]:
        lines.append(
            f"{'mean error of ' + str(summary['ran']) + ' steps':40}"
            + "".join(f"{summary['mean_error'][when]:12.1%}" for when in ("before", "after"))
        )
        lines.append(f"{summary['ran']} ran, of which predicted not to fit: {summary['ran_predicted_not_to_fit']}")
    if summary["ran_out_of_memory"]:
        missed = summary["ran_out_of_memory_predicted_to_fit"]
        lines.append(f"{summary['ran_out_of_memory']} ran out of memory, of which predicted to fit: {missed}")
    if summary["mean_memory_error"] is not None:
        lines.append(f"{'mean error of memory':40}{'':12}{summary['mean_memory_error']:12.1%}")
    for one in summary["changed"]:
        lines.append(f"{one['table'] + '.' + one['constant']:40}{one['before']:12.4g}{one['after']:12.4g}")
    if show_rows:
        lines.append(f"{'row':40}{'before':>12}{'after':>12}{'measured':>12}  error after")
        for one in summary["rows"]:
            result = "".join(f"{one[when]:12.4g}" for when in ("before_seconds", "after_seconds"))
            if one["step_seconds"] is None:
                needs = f"needs {one['predicted_memory_bytes'] / 1e9:.1f} GB"
                lines.append(f"{one['name'][:39]:40}{result}{'oom':>12}  {needs}")
                continue
            error = one["after_seconds"] / one["step_seconds"] - 1
            lines.append(f"{one['name'][:39]:40}{result}{one['step_seconds']:12.4g}  {error:+.1%}")
    return lines


if __name__ == "__main__":
    main(command)
