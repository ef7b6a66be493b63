"""Compares the measured seconds and memory of a run's steps with their prediction, part by part."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from hpctrain.comm.probe.load import LoadWatch
from hpctrain.observe.folder.schema import DRIFT, SavedComparison
from hpctrain.observe.folder.spans import Observed, Observer
from hpctrain.plan.tiling import Plan, counted
from hpctrain.planner.prediction.forecast import format_waterfall
from hpctrain.planner.prediction.predictor import Prediction
from hpctrain.planner.prediction.simulate import EXPOSED

LARGE_SHARE = 0.1
"""Of a step: a difference that becomes a warning, unless the prediction itself promises less."""


class MeasuredStep(NamedTuple):
    """The means of one rank's steps."""

    step_seconds: float
    parts: dict[str, float]
    peak_bytes: int = 0
    """0: not known of this rank alone."""


def compare(
    prediction: Prediction, plan: Plan, where: str, measured: Sequence[MeasuredStep], num_steps: int, knows_parts: bool
) -> SavedComparison:
    """Return what was predicted, what was measured on the ranks in their order, and how far apart they are.

    `where` is what the prediction is from. `knows_parts` says whether ranks know where their time goes.
    """
    ranks = [measured[rank] for tile in plan.first_tiles for rank in tile.ranks]
    step = fmean(own.step_seconds for own in ranks)
    drift = step / prediction.step_seconds - 1
    within = max(LARGE_SHARE, prediction.interval_seconds[1] / prediction.step_seconds - 1)
    comparison: SavedComparison = {
        "cluster": where,
        "steps": num_steps,
        "predicted_seconds": prediction.step_seconds,
        "interval_seconds": list(prediction.interval_seconds),
        "measured_seconds": step,
        "drift": drift,
        "is_large": abs(drift) > within,
    }
    if knows_parts:
        comparison["parts"] = {
            part: {
                "predicted_seconds": prediction.exposed_seconds[part],
                "measured_seconds": fmean(own.parts[part] for own in ranks),
            }
            for part in EXPOSED
        }
        comparison["drifted"] = max(EXPOSED, key=lambda part: _difference(comparison, part))
    if prediction.waterfall_seconds:
        comparison["waterfall"] = dict(prediction.waterfall_seconds)
    if all(own.peak_bytes for own in measured):
        comparison["memory"] = [
            {
                "items": list(stage.tile.items),
                "family": stage.tile.family,
                "predicted_bytes": stage.memory.total,
                "rows": stage.tile.rows.size,
                "measured_bytes": max(measured[rank].peak_bytes for rank in stage.ranks),
            }
            for stage in prediction.memory
        ]
    return comparison


class PredictionTracker(Observer):
    """Compares the steps of a run with its prediction, which is on rank 0."""

    def __init__(self, observed: Observed, prediction: Prediction | None, where: str, doubt: str = ""):
        """`where` is what the prediction is from, where there is one; `doubt` says what speaks against that."""
        self._observed, self._prediction = observed, prediction
        self._where, self._doubt, self._watch = where, doubt, LoadWatch()
        self._steps: list[tuple[float, dict[str, float]]] = []
        """Seconds of each step, and those of its parts."""
        self._num_left_out = 1
        """The number of first steps that do not count: they create what later ones reuse."""

    def start(self, steps_done: int) -> str | None:
        """Return what is to be said of the prediction, on rank 0."""
        if not self._prediction:
            return None
        low, high = self._prediction.interval_seconds
        verdict = "" if self._prediction.fits else "; it is predicted not to fit into memory"
        step = f"{self._prediction.step_seconds:.4g} s ({low:.4g} to {high:.4g})"
        return f"predicted: a step takes {step}{verdict}"

    def step_is_done(self, seconds: float) -> None:
        """Note what a step took."""
        self._steps.append((seconds, self._observed.recorder.parts()))

    def forget(self) -> None:
        """Leave the steps so far out of the comparison."""
        self._num_left_out = len(self._steps)

    def finish(self) -> str | None:
        """Compare, and save it in the run folder; return on rank 0 what is to be said."""
        world, device, recorder, plan, files, _ = self._observed
        own = None
        if steps := self._steps[self._num_left_out :]:
            means = {part: fmean(parts[part] for _, parts in steps) for part in EXPOSED}
            peak = 0 if device.shares_memory else device.memory().peak
            own = MeasuredStep(fmean(seconds for seconds, _ in steps), means, peak)
        measured = world.gather_objects(own)
        disturbance = "" if device.overrun is not None else self._watch.disturbance(world)
        if not (self._prediction and measured[0]):
            return None
        comparison = compare(self._prediction, plan, self._where, measured, len(steps), recorder.knows_times)
        is_delayed = bool(disturbance) and comparison["drift"] > 0
        comparison["cause"] = f"{disturbance} meanwhile" if is_delayed else self._doubt
        files.write(DRIFT, comparison, indent=1)
        return format_comparison(comparison)


def _difference(comparison: SavedComparison, part: str) -> float:
    """Return by how much a part is off in the direction in which the step is."""
    seconds = comparison.get("parts", {})[part]
    by = seconds["measured_seconds"] - seconds["predicted_seconds"]
    return by if comparison["drift"] >= 0 else -by


def format_comparison(comparison: SavedComparison) -> str:
    """Return the lines that a person reads."""
    lines = [
        f"predicted from {comparison['cluster']}, seconds of a step (mean of {comparison['steps']}, and over ranks)",
        f"  {'':10}{'predicted':>11}{'measured':>11}",
    ]
    for name, seconds in {"step": comparison, **comparison.get("parts", {})}.items():
        predicted, measured = seconds["predicted_seconds"], seconds["measured_seconds"]
        of_step = (measured - predicted) / comparison["predicted_seconds"]
        lines.append(f"  {name:10}{predicted:11.4g}{measured:11.4g}{of_step:+9.1%} of the step")
    for stage in comparison.get("memory", ()):
        predicted, measured = stage["predicted_bytes"], stage["measured_bytes"]
        off = measured / predicted - 1
        rows = f", {counted(stage['rows'], 'row')}" if "rows" in stage else ""
        lines.append(
            f"  memory of items {stage['items']}, {stage['family']}{rows}:"
            f" {predicted / 2**20:,.1f} MiB predicted, {measured / 2**20:,.1f} measured ({off:+.1%})"
        )
    if waterfall := comparison.get("waterfall"):
        more = comparison["measured_seconds"] / comparison["predicted_seconds"] - 1
        lines.append(f"  predicted to be {format_waterfall(waterfall)}; measured {more:+.1%}")
    if comparison["is_large"]:
        lines.append(("" if comparison.get("cause") else "warning: ") + describe_drift(comparison))
    return "\n".join(lines)


def describe_drift(comparison: SavedComparison) -> str:
    """Return in a sentence how large the drift is, and in which part of a step."""
    direction = "longer" if comparison["drift"] > 0 else "shorter"
    result = f"steps took {abs(comparison['drift']):.0%} {direction} than predicted"
    if (drifted := comparison.get("drifted")) and drifted in comparison.get("parts", {}):  # a file may be damaged
        by = _difference(comparison, drifted) / comparison["predicted_seconds"]
        result += f", most of it in '{drifted}' ({by:.0%} of a step)"
    if cause := comparison.get("cause"):
        return f"{result}: {cause}"
    remedy = "measure the machine again (train --fresh-probe, or hpctrain probe); in a rehearsal, look at its overrun"
    return f"{result}; {remedy}; see docs/planner.md"
