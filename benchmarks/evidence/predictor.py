"""Scores the predictor against published measurements (`published.py`), beside a trivial baseline.

    python -m benchmarks.evidence.predictor --rows

For each set: the mean and the 95th percentile of the error of a step's time, Kendall's tau, what the plan that is
predicted to be the fastest loses against the one that was (of runs of the same model, batch and devices), and the
error of memory. The baseline is one efficiency for all devices, the best for the same set or for all others, and
(P - 1) / M of bubble. "Fitted without it": with parameters fitted to all other sets (`benchmarks.evidence.calibrate`),
starting from values that no set has touched.
"""

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.evidence.calibrate import SHIPPED, Measured, Parameters, dump_parameters, fit
from benchmarks.evidence.held_out import golden_memory, held_out_sets
from benchmarks.evidence.published import PublishedSet, all_sets, korthikanti_memory, sailor_single_layers
from hpctrain.config.clusters.device_catalogue import ACCELERATORS
from hpctrain.planner.prices.cost import model_flops
from hpctrain.software.advice import own_engine

MOST_FITTED = 20
"""Rows of a set that a fit looks at, evenly chosen: 749 say little more, and each set counts the same."""
LONGEST_FITTED = 3000
"""Stages x microbatches of such a row: longer ones take seconds to simulate, some hundred times over."""
FEWEST_LAYOUTS = 4
"""Of a job, for Kendall's tau of them alone."""
TELLING_SHARE = 0.75
"""A run that ran says something of "fits" where it is predicted to need so much of its device, or more."""
MOST_SEARCHED, SEARCH_SECONDS = 64, 10.0
"""Devices and seconds of a search for our own best plan, next to a published run."""
UNTOUCHED = {"product_share": 0.7, "memory_share": 0.8, "dispatch_seconds": 10e-6, "link_share": 0.8}


def at_peak(row: Measured) -> float:
    """Return the trivial prediction, at full efficiency."""
    run = row.run
    flops = model_flops(run.setup(), run.global_batch * run.positions) * (4 / 3 if run.recompute == "full" else 1)
    microbatches = run.global_batch // run.data // run.microbatch
    bubble = 1 + (run.pipeline - 1) / microbatches / run.interleave
    return flops * bubble / run.num_devices / ACCELERATORS[run.accelerator].peak_flops_per_second[run.dtype]


def baseline(rows: Sequence[Measured], of: Sequence[Measured]) -> list[float]:
    """Return the trivial predictions of `rows`, with the efficiency that fits `of` best."""
    efficiency = statistics.median(at_peak(row) / row.seconds for row in of)
    return [at_peak(row) / efficiency for row in rows]


def kendall(predicted: list[float], measured: list[float]) -> float:
    """Return Kendall's tau-a: the share of pairs in the right order, less that in the wrong one."""
    pairs = list(itertools.combinations(zip(predicted, measured, strict=True), 2))
    signs = (((a[0] > b[0]) - (a[0] < b[0])) * ((a[1] > b[1]) - (a[1] < b[1])) for a, b in pairs)
    return sum(signs) / max(1, len(pairs))


def choices(predicted: Sequence[float], rows: Sequence[Measured]) -> list[list[tuple[float, float]]]:
    """Return what was predicted and measured of each choice: runs of the same model and batch on as many devices."""
    result: dict[str, list[tuple[float, float]]] = {}
    for seconds, row in zip(predicted, rows, strict=True):
        run = row.run
        key = run.model, run.positions, run.accelerator, run.num_devices, run.global_batch, row.name.split("(")[1:]
        result.setdefault(str(key), []).append((seconds, row.seconds))
    return [each for each in result.values() if len(each) > 1]


def regret(of: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return how much longer than the fastest the one predicted to be it took, in the mean over choices."""
    return statistics.mean(min(each)[1] / min(measured for _, measured in each) - 1 for each in of)


def scores(predicted: Sequence[float], rows: Sequence[Measured]) -> str:
    """Return a line of scores."""
    relative = [p / row.seconds - 1 for p, row in zip(predicted, rows, strict=True)]
    result = sorted(map(abs, relative))
    high = result[min(len(result) - 1, int(0.95 * len(result)))]
    tau = kendall(list(predicted), [row.seconds for row in rows])
    of = choices(predicted, rows)
    layouts = [each for each in of if len(each) >= FEWEST_LAYOUTS]
    summary = (
        f"mean {statistics.mean(result):6.1%}  95th {high:6.1%}  tau {tau:5.2f}  bias {statistics.mean(relative):+6.1%}"
    )
    summary += f"  regret {regret(of):5.1%} of {len(of)} choices" if of else ""
    taus = [kendall(*map(list, zip(*each, strict=True))) for each in layouts]
    return summary + (f"  tau of layouts {statistics.mean(taus):5.2f} of {len(taus)} jobs" if taus else "")


def _names(row: Measured) -> set[str]:
    """Return whose parameters a row depends on."""
    return {row.run.stack} | (set() if row.layers else {ACCELERATORS[row.run.accelerator].family_name})


def fitted_without(left_out: PublishedSet | None, sets: Sequence[PublishedSet]) -> Parameters:
    """Return the parameters that fit all sets but one, from values that no set has touched."""
    rows = []
    concerned = {name for row in left_out.rows for name in _names(row)} if left_out else None
    for each in sets:
        if each is not left_out and (concerned is None or concerned & {n for row in each.rows for n in _names(row)}):
            short = [r for r in each.rows if r.run.pipeline * r.run.plan.microbatches <= LONGEST_FITTED]
            resolved = short[:: -(-len(short) // MOST_FITTED)]
            rows += [replace(row, weight=100 / len(resolved)) for row in resolved]
    used = rows + list(left_out.rows if left_out else ())
    names = {"efficiencies": {ACCELERATORS[row.run.accelerator].family_name for row in used if not row.layers}}
    names["stacks"] = {row.run.stack for row in used}
    start: Mapping = {
        (kind, name, constant): value
        for kind, constants in (("efficiencies", 2), ("stacks", 4))
        for name in names[kind]
        for constant, value in itertools.islice(UNTOUCHED.items(), constants - 2, constants)
    }
    return fit(rows, SHIPPED.changed(start)) if rows else SHIPPED.changed(start)


def elsewhere(rows: Sequence[Measured], others: Sequence[Measured]) -> list[float]:
    """Return the trivial predictions of `rows`, with one efficiency for each accelerator, by `others` on it."""
    shares = {
        accelerator: [other for other in others if other.run.accelerator == accelerator] or others
        for accelerator in {row.run.accelerator for row in rows}
    }
    by_accelerator = {name: statistics.median(at_peak(row) / row.seconds for row in of) for name, of in shares.items()}
    return [at_peak(row) / by_accelerator[row.run.accelerator] for row in rows]


def mean_error(predicted: Sequence[float], rows: Sequence[Measured]) -> float:
    return statistics.mean(abs(p / row.seconds - 1) for p, row in zip(predicted, rows, strict=True))


def table(sets: Sequence[PublishedSet], every: Sequence[PublishedSet]) -> None:
    """Print one line for each of some sets out of `every`, with the trivial predictors next to ours."""
    print("| set | rows | error | bias | tau | one share: of this set | of the accelerator elsewhere | memory | fits |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for each in sets:
        rows, others = each.rows, [row for other in every if other is not each for row in other.rows]
        predictions = [SHIPPED.predict(row) for row in rows]
        predicted = [prediction.step_seconds for prediction in predictions]
        bias = statistics.mean(p / row.seconds - 1 for p, row in zip(predicted, rows, strict=True))
        needed = [max(stage.memory.total for stage in prediction.memory) for prediction in predictions]
        off = [abs(n / row.memory_bytes - 1) for n, row in zip(needed, rows, strict=True) if row.memory_bytes]
        right = sum(p.fits for p in predictions) + sum(not SHIPPED.predict(row).fits for row in each.out_of_memory)
        tau = kendall(predicted, [row.seconds for row in rows])
        figures = [
            *(f"{value:.1%}" for value in (mean_error(predicted, rows), bias)),
            f"{tau:.2f}",
            *(f"{mean_error(trivial, rows):.1%}" for trivial in (baseline(rows, rows), elsewhere(rows, others))),
            f"{statistics.mean(off):.1%}" if off else "",
            f"{right} of {len(rows) + len(each.out_of_memory)}",
        ]
        print(f"| {each.name} | {len(rows)} | {' | '.join(figures)} |", flush=True)
    telling = [each for of_set in sets for each in _fits_that_tell(of_set)]
    print(f"fits: {sum(telling)} of {len(telling)} runs that tell are right ({sum(telling) / len(telling):.0%})")
    off = [predicted / published - 1 for _, published, predicted in golden_memory()]
    mean, bias = statistics.mean(map(abs, off)), statistics.mean(off)
    print(f"Megatron-LM's functional tests, memory of {len(off)} runs: mean error {mean:.1%}, bias {bias:+.1%}")


def _fits_that_tell(of_set: PublishedSet) -> list[bool]:
    """Return of the runs that ran out of memory, or nearly filled it, whether that is predicted."""
    result = [not SHIPPED.predict(row).fits for row in of_set.out_of_memory]
    for row in of_set.rows:
        stages = row.run.memory()
        if max(stage.memory.total / stage.available_bytes for stage in stages) >= TELLING_SHARE:
            result.append(all(stage.fits for stage in stages))
    return result


def model_share(row: Measured, seconds: float) -> float:
    """Return which share of the devices' peak in half precision the model's own operations come to."""
    run = row.run
    peaks = ACCELERATORS[run.accelerator].peak_flops_per_second
    flops = model_flops(run.setup(), run.global_batch * run.positions)
    return flops / seconds / run.num_devices / (peaks.get("bf16") or peaks["fp16"])


def best_published(sets: Sequence[PublishedSet]) -> None:
    """Print the best published run of each accelerator and dtype, with what is predicted of it and of our best plan.

    That plan is for the same job and machine, where it has at most `MOST_SEARCHED` devices and no fp8."""
    best: dict[tuple[str, str], Measured] = {}
    for row in (row for each in sets for row in each.rows if not row.layers):
        key = row.run.accelerator, row.run.linear_dtype or row.run.dtype
        best[key] = max(row, best.get(key, row), key=lambda row: model_share(row, row.seconds))
    print("| accelerator | dtype | best published run | MFU | predicted of it | error | predicted of our best plan |")
    print("|---|---|---|--:|--:|--:|--:|")
    off = []
    for (accelerator, dtype), row in sorted(best.items()):
        seconds = SHIPPED.predict(row).step_seconds
        measured, predicted = model_share(row, row.seconds), model_share(row, seconds)
        off.append(seconds / row.seconds - 1)
        own = ""
        if row.run.num_devices <= MOST_SEARCHED and not row.run.linear_dtype and row.run.dtype != "fp32":
            own = f"{model_share(row, own_engine(row.run, SEARCH_SECONDS).prediction.step_seconds):.1%}"
        figures = f"{measured:.1%} | {predicted:.1%} | {off[-1]:+.1%} | {own}"
        print(f"| {accelerator} | {dtype} | {row.name} | {figures} |", flush=True)
    print(f"{len(off)} best runs: mean error {statistics.mean(map(abs, off)):.1%}, bias {statistics.mean(off):+.1%}")


def report(each: PublishedSet, sets: Sequence[PublishedSet], fitted: Sequence[PublishedSet], show_rows: bool) -> None:
    """Print the scores of one of the `sets`; where `fitted` are given, also by a fit to these without it."""
    rows = each.rows
    others = [row for other in sets if other is not each for row in other.rows]
    predictions = [SHIPPED.predict(row) for row in rows]
    predicted = [prediction.step_seconds for prediction in predictions]
    print(f"{each.name}, {len(rows)} rows")
    print(f"  predictor                {scores(predicted, rows)}")
    if fitted:
        parameters = fitted_without(each, fitted)
        print(f"    fitted without it      {scores([parameters.predict(row).step_seconds for row in rows], rows)}")
    print(f"  trivial baseline         {scores(baseline(rows, rows), rows)}")
    print(f"    fitted without it      {scores(baseline(rows, others), rows)}")
    needed = [max(stage.memory.total for stage in prediction.memory) for prediction in predictions]
    with_memory = [(n, row.memory_bytes) for n, row in zip(needed, rows, strict=True) if row.memory_bytes]
    if with_memory:
        off = sorted(abs(n / measured - 1) for n, measured in with_memory)
        print(f"  memory                   mean {statistics.mean(off):6.1%}  largest {off[-1]:6.1%}")
    overflowing = sum(not prediction.fits for prediction in predictions)
    print(f"  predicted not to fit, though it ran: {overflowing} of {len(rows)}")
    if each.out_of_memory:
        missed = sum(SHIPPED.predict(row).fits for row in each.out_of_memory)
        print(f"  predicted to fit, though it ran out of memory: {missed} of {len(each.out_of_memory)}")
    for name in each.left_out:
        print(f"  left out: {name}")
    if show_rows and len(rows) < 100:
        for p, n, row in zip(predicted, needed, rows, strict=True):
            memory = (
                f", memory {row.memory_bytes / 1e9:5.1f} GB ({n / row.memory_bytes - 1:+.1%})"
                if row.memory_bytes
                else ""
            )
            print(f"    {row.name:40} {row.seconds:9.3f} s, predicted {p:9.3f} ({p / row.seconds - 1:+.1%}){memory}")


def report_layers(show_rows: bool) -> None:
    """Print how well single layers are predicted from data sheets, for each device."""
    rows = sailor_single_layers()
    print(f"Sailor, single layers from data sheets, {len(rows)} rows")
    for device in dict.fromkeys(row.device for row in rows):
        for name, many in (("one device", False), ("tensor parallel", True)):
            of_it = [row for row in rows if row.device == device and (" t1 " not in row.name) == many]
            off = [row.predicted / row.measured - 1 for row in of_it]
            if off:
                mean, bias = statistics.mean(map(abs, off)), statistics.mean(off)
                print(f"  {device:12} {name:16} {len(off):3} rows  mean {mean:6.1%}  bias {bias:+6.1%}")
    for row in rows if show_rows else ():
        off = row.predicted / row.measured - 1
        print(f"    {row.device:12} {row.name:30} {row.measured * 1e3:9.2f} ms, predicted {off:+.1%}")


def main() -> None:
    """Print the scores of each set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print each row of the small sets")
    parser.add_argument("--quick", action="store_true", help="leave no set out")
    parser.add_argument(
        "--fit", action="store_true", help="print what a fit to all sets would change, and nothing else"
    )
    parser.add_argument("--table", action="store_true", help="print one line for each set, and leave none out")
    parser.add_argument("--best", action="store_true", help="print the best published run of each accelerator")
    parser.add_argument("--only", default="", metavar="NAME", help="sets whose name has this in it")
    arguments = parser.parse_args()
    sets = all_sets()
    if arguments.fit:
        fitted = fitted_without(None, sets)
        print(dump_parameters(SHIPPED, fitted, f"Fitted to all {len(sets)} sets."))
        for each in sets:
            print(f"{each.name:40} {scores([fitted.predict(row).step_seconds for row in each.rows], each.rows)}")
        return
    every = [*sets, *held_out_sets()]
    if arguments.best:
        best_published(every)
        return
    if arguments.table:
        table([each for each in every if arguments.only.lower() in each.name.lower()], every)
        return
    for each in every:
        if arguments.only.lower() in each.name.lower():
            report(each, every, [] if arguments.quick else sets, arguments.rows)
    if arguments.only:
        return
    report_layers(arguments.rows)
    off = [(name, result / published - 1) for name, published, result in korthikanti_memory()]
    print(f"Korthikanti, memory by part, {len(off)} figures")
    print(
        f"  memory                   mean {statistics.mean(abs(o) for _, o in off):6.1%}  largest"
        f" {max(abs(o) for _, o in off):6.1%}"
    )
    if arguments.rows:
        for name, by in off:
            print(f"    {name:40} {by:+.1%}")


if __name__ == "__main__":
    main()
