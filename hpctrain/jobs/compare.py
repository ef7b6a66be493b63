"""`hpctrain compare`: say how far two runs are apart."""

import math
import sys
from pathlib import Path

import click

from hpctrain.config.errors import JobError
from hpctrain.jobs.arguments import PATH, FiniteRange, json_option, print_result
from hpctrain.plan.tiling import counted

DIFFERENT_EXIT_CODE = 1


@click.command("compare")
@click.argument("run_a", type=PATH)
@click.argument("run_b", type=PATH)
@click.option(
    "--tolerance",
    default=1e-5,
    show_default=True,
    type=FiniteRange(0),
    help="Largest relative difference of the losses.",
)
@click.option("--mean", is_flag=True, help="The tolerance is of the mean relative difference of the losses instead.")
@click.option("--exact", is_flag=True, help="Losses, gradient norms, weights and moments must agree bit for bit.")
@json_option
def command(run_a, run_b, tolerance, mean, exact, as_json):
    """Compare the losses of two runs step by step; exit code 1 if they differ by more than the tolerance.

    Both must have logged the same steps. Runs on different devices or in different dtypes are compared by their mean:
    --mean --tolerance 0.015. With --exact the latest checkpoints are compared too: every whole parameter and
    moment, whatever layouts wrote them.
    """
    if mean and exact:
        raise click.UsageError("--exact compares bits, and --mean means; leave one of them out")
    losses = [_losses(path) for path in (run_a, run_b)]
    if losses[0].keys() != losses[1].keys():
        only = sorted(losses[0].keys() ^ losses[1].keys())
        raise JobError(
            f"{run_a} and {run_b} did not log the same: step {only[0][0]} ({only[0][1]}) is in one of them only"
            f" ({len(only)} such entries)"
        )
    differences = {
        key: _relative_difference(losses[0][key], losses[1][key]) for key in losses[0] if exact or key[1] != "grad_norm"
    }
    worst = max(differences, key=differences.__getitem__)
    of_losses = [difference for key, difference in differences.items() if key[1] == "loss"]
    mean_difference = sum(of_losses) / len(of_losses) if of_losses else 0.0
    summary = {
        "steps": len({step for step, _ in differences}),
        "largest_difference": differences[worst],
        "mean_difference": mean_difference,
        "at_step": worst[0],
        "of": worst[1],
        "values": [loss[worst] for loss in losses],
        "tolerance": 0.0 if exact else tolerance,
    }
    same = (mean_difference if mean else differences[worst]) <= summary["tolerance"]
    if exact:
        summary["different_parameters"] = _different_parameters(run_a, run_b)
        same = same and not summary["different_parameters"]
    summary["same"] = same
    a, b = summary["values"]
    figures = f"largest relative difference {differences[worst]:.3g}, mean of the losses' {mean_difference:.3g}"
    lines = [f"{counted(summary['steps'], 'step')}; {figures}", f"  {worst[1]} at step {worst[0]}: {a!r} and {b!r}"]
    if exact:
        differing = summary["different_parameters"]
        lines.append(" ".join([f"  {len(differing)} parameters or moments differ", *differing[:5]]))
    lines.append("same" if same else f"different: beyond {summary['tolerance']:g}")
    print_result(summary, "\n".join(lines), as_json)
    sys.exit(0 if same else DIFFERENT_EXIT_CODE)


def _losses(path: Path) -> dict[tuple[int, str], float]:
    """Return loss, validation loss and gradient norm by (step, name)."""
    from hpctrain.observe.folder.run_folder import read_metrics

    names = ("loss", "validation_loss", "grad_norm")
    result = {(m["step"], name): m[name] for m in read_metrics(path) for name in names if name in m}
    if not result:
        raise JobError(f"{path}: no metrics.jsonl with losses in it; name a run folder")
    return result


def _relative_difference(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _different_parameters(run_a: Path, run_b: Path) -> list[str]:
    """Return what is not the same, bit for bit, in the latest checkpoints of two runs."""
    from hpctrain.checkpoint.folder import locate_checkpoint
    from hpctrain.checkpoint.index import Index

    with Index(locate_checkpoint(run_a)) as a, Index(locate_checkpoint(run_b)) as b:
        there = [{tensor.name for tensor in index.manifest.tensors} for index in (a, b)]
        both = (name.rpartition("/") for name in sorted(there[0] & there[1]))
        differing = [
            f"{kind}/{name}" for kind, _, name in both if a.whole(kind, name).tobytes() != b.whole(kind, name).tobytes()
        ]
        return sorted(there[0] ^ there[1]) + differing
