"""Compares what a run's steps were predicted to take with what they took, part by part, and which part is to blame.

drift.json       in the run folder: the prediction, what was measured, and how far apart they are
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from hpctrain.comm.probe.load import LoadWatch
from hpctrain.config.errors import JobError
from hpctrain.config.paths import exists, read_json
from hpctrain.config.tables import Table, explain
from hpctrain.observe.run import ReportFiles
from hpctrain.plan.tiling import Plan, counted
from hpctrain.planner.predictor import Prediction
from hpctrain.planner.simulate import EXPOSED

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World
    from hpctrain.observe.recorder import StepRecorder

DRIFT = "drift.json"
LARGE_SHARE = 0.1
"""Of a step: a difference that becomes a warning, unless the prediction itself promises less."""
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Part = Annotated[str, Field(pattern="|".join(f"^{part}$" for part in EXPOSED))]


class _SecondsOfPart(Table):
    predicted_seconds: NonNegative
    measured_seconds: NonNegative


class _BytesOfStage(Table):
    items: list[int]
    family: str
    rows: int | None = None
    """Of a microbatch. Left out by earlier versions."""
    predicted_bytes: Positive
    measured_bytes: NonNegative


class _SavedComparison(Table):
    """What is in the file."""

    cluster: str
    steps: int
    predicted_seconds: Positive
    interval_seconds: list[NonNegative]
    measured_seconds: NonNegative
    drift: float
    is_large: bool
    parts: dict[Part, _SecondsOfPart] = Field(default_factory=dict)
    drifted: Part | None = None
    memory: list[_BytesOfStage] = Field(default_factory=list)
    cause: str = ""
    """Why steps differ from their prediction, where that is known; then the user is not asked to measure again."""

    @model_validator(mode="after")
    def _names_a_part(self) -> Self:
        if self.parts and self.drifted not in self.parts:
            raise ValueError(f"drifted = {self.drifted!r} is none of the parts {', '.join(self.parts)}")
        return self


class MeasuredStep(NamedTuple):
    """One rank's steps."""

    step_seconds: float
    """The mean."""
    parts: dict[str, float]
    peak_bytes: int = 0
    """0: not known of this rank alone."""


def compare(
    prediction: Prediction, plan: Plan, where: str, measured: Sequence[MeasuredStep], num_steps: int, knows_parts: bool
) -> dict:
    """Return what was predicted, what was measured on the ranks in their order, and how far apart they are.

    `where` is what the prediction is from. `knows_parts` says whether ranks know where their time goes.
    """
    ranks = [measured[rank] for tile in plan.first_tiles for rank in tile.ranks]
    step = fmean(each.step_seconds for each in ranks)
    summary = {
        "cluster": where,
        "steps": num_steps,
        "predicted_seconds": prediction.step_seconds,
        "interval_seconds": list(prediction.interval_seconds),
        "measured_seconds": step,
        "drift": step / prediction.step_seconds - 1,
    }
    if knows_parts:
        summary["parts"] = {
            part: {
                "predicted_seconds": prediction.exposed_seconds[part],
                "measured_seconds": fmean(each.parts[part] for each in ranks),
            }
            for part in EXPOSED
        }
        summary["drifted"] = max(EXPOSED, key=lambda part: _difference(summary, part))
    if all(each.peak_bytes for each in measured):
        summary["memory"] = [
            {
                "items": list(stage.tile.items),
                "family": stage.tile.family,
                "predicted_bytes": stage.memory.total,
                "rows": stage.tile.rows.size,
                "measured_bytes": max(measured[rank].peak_bytes for rank in stage.ranks),
            }
            for stage in prediction.memory
        ]
    within = max(LARGE_SHARE, prediction.interval_seconds[1] / prediction.step_seconds - 1)
    summary["is_large"] = abs(summary["drift"]) > within
    return summary


class Expectation:
    """What one rank knows of a run's prediction. All ranks make one and call the same; rank 0 has the prediction."""

    def __init__(
        self,
        world: "World",
        accelerator: "Accelerator",
        recorder: "StepRecorder",
        prediction: Prediction | None,
        plan: Plan,
        where: str,
        files: ReportFiles,
        doubt: str = "",
    ):
        """`prediction` is on rank 0, where there is one; `where` is what it is from, and `doubt`, what speaks against
        that."""
        self._world, self._accelerator, self._recorder = world, accelerator, recorder
        self._prediction, self._plan, self._where, self._files = prediction, plan, where, files
        self._doubt, self._watch = doubt, LoadWatch()
        self._steps: list[tuple[float, dict[str, float]]] = []
        """Seconds of each step, and those of its parts."""
        self._num_left_out = 1
        """Of the first steps: the first one creates what later ones reuse."""

    def start(self) -> str | None:
        """Return what is to be said of the prediction, on rank 0."""
        if not self._prediction:
            return None
        low, high = self._prediction.interval_seconds
        verdict = "" if self._prediction.fits else "; it is predicted not to fit into memory"
        step = f"{self._prediction.step_seconds:.4g} s ({low:.4g} to {high:.4g})"
        return f"predicted: a step takes {step}{verdict}"

    def step_is_done(self, seconds: float) -> None:
        """Note what a step took."""
        self._steps.append((seconds, self._recorder.parts()))

    def forget(self) -> None:
        """Leave the steps so far out of the comparison."""
        self._num_left_out = len(self._steps)

    def finish(self) -> str | None:
        """Compare, and save it in the run folder; return on rank 0 what is to be said."""
        world, device, own = self._world, self._accelerator, None
        if steps := self._steps[self._num_left_out :]:
            means = {part: fmean(parts[part] for _, parts in steps) for part in EXPOSED}
            peak = 0 if device.shares_memory else device.memory().peak
            own = MeasuredStep(fmean(seconds for seconds, _ in steps), means, peak)
        measured = world.gather_objects(own)
        disturbance = "" if device.overrun is not None else self._watch.disturbance(world)
        if not (self._prediction and measured[0]):
            return None
        what = self._prediction, self._plan, self._where, measured, len(steps), self._recorder.knows_times
        compared = compare(*what)
        is_delayed = bool(disturbance) and compared["drift"] > 0
        compared["cause"] = f"{disturbance} meanwhile" if is_delayed else self._doubt
        self._files.write(DRIFT, compared, indent=1)
        return text(compared)


def _difference(summary: Mapping, part: str) -> float:
    """Return by how much a part is off in the direction in which the step is."""
    of_part = summary["parts"][part]
    by = of_part["measured_seconds"] - of_part["predicted_seconds"]
    return by if summary["drift"] >= 0 else -by


def text(summary: Mapping) -> str:
    """Write a comparison for people."""
    lines = [
        f"predicted from {summary['cluster']}, seconds of a step (mean of {summary['steps']}, and over ranks)",
        f"  {'':10}{'predicted':>11}{'measured':>11}",
    ]
    rows = {"step": summary, **summary.get("parts", {})}
    for name, each in rows.items():
        predicted, measured = each["predicted_seconds"], each["measured_seconds"]
        of_step = (measured - predicted) / summary["predicted_seconds"]
        lines.append(f"  {name:10}{predicted:11.4g}{measured:11.4g}{of_step:+9.1%} of the step")
    for each in summary.get("memory", ()):
        predicted, measured = each["predicted_bytes"], each["measured_bytes"]
        off = measured / predicted - 1
        lines.append(
            f"  memory of items {each['items']}, {each['family']}, {counted(each['rows'], 'row')}:"
            f" {predicted / 2**20:,.1f} MiB predicted, {measured / 2**20:,.1f} measured ({off:+.1%})"
        )
    if summary["is_large"]:
        lines.append(blame(summary) if summary.get("cause") else f"warning: {blame(summary)}")
    return "\n".join(lines)


def blame(summary: Mapping) -> str:
    """Return in a sentence how large a drift is, and in which part."""
    how = "longer" if summary["drift"] > 0 else "shorter"
    result = f"steps took {abs(summary['drift']):.0%} {how} than predicted"
    if "parts" in summary:
        by = _difference(summary, summary["drifted"]) / summary["predicted_seconds"]
        result += f", most of it in '{summary['drifted']}' ({by:.0%} of a step)"
    if cause := summary.get("cause"):
        return f"{result}: {cause}"
    again = "measure the machine again (train --fresh-probe, or hpctrain probe); in a rehearsal, look at its overrun"
    return f"{result}; {again}; see docs/planner.md"


def read(folder: Path) -> dict | None:
    """Return the comparison of a run folder; None where it has none. Raises JobError where it is damaged."""
    path = folder / DRIFT
    if not exists(path):
        return None
    tree = read_json(path, JobError, "a comparison with a prediction")
    try:
        return _SavedComparison.model_validate(tree).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        what = explain(error, _SavedComparison)[0][1]
        raise JobError(f"{path}: is damaged: {what}; remove it, the next run writes it again") from None
