"""Compares what a run's steps were predicted to take with what they took, part by part, and which part is to blame.

drift.json       in the run folder: the prediction, what was measured, and how far apart they are
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from hpctrain.comm.tracing import UNTRACED, Tracer
from hpctrain.config.errors import JobError, TrainingError, describe_os_error
from hpctrain.config.paths import exists, read_json
from hpctrain.config.tables import Table, explain
from hpctrain.plan.schedule import COMPUTING, Instruction, Op
from hpctrain.plan.tiling import Plan
from hpctrain.planner.predictor import Prediction
from hpctrain.planner.simulate import EXPOSED

DRIFT = "drift.json"
LARGE_SHARE = 0.1
"""Of a step: a difference that becomes a warning, unless the prediction itself promises less."""
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Part = Annotated[str, Field(pattern="|".join(f"^{part}$" for part in EXPOSED))]
PART_OF_GROUP = {"x": "tensor", "y": "tensor", "z": "tensor", "pipeline": "pipeline", "everyone": "pipeline"}
"""Whoever waits for all ranks waits for the slowest pipeline; other groups share weights."""


class _SecondsOfPart(Table):
    predicted_seconds: NonNegative
    measured_seconds: NonNegative


class _BytesOfStage(Table):
    items: list[int]
    family: str
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

    @model_validator(mode="after")
    def _names_a_part(self) -> Self:
        if self.parts and self.drifted not in self.parts:
            raise ValueError(f"drifted = {self.drifted!r} is none of the parts {', '.join(self.parts)}")
        return self


class PartMeter(Tracer):
    """Sums up where one rank's time goes in training steps; passes everything on to another tracer."""

    def __init__(self, now: Callable[[], float], then: Tracer = UNTRACED):
        self.now, self._then = now, then
        self.steps: list[dict[str, float]] = []
        """By part, in seconds of `now`."""
        self._step: dict[str, float] = dict.fromkeys(EXPOSED, 0.0)
        self._alone = 0.0
        """Of the instruction in hand, in which the rank communicated."""

    def computed(self, name: object, since: float) -> None:
        if isinstance(name, Instruction):
            own, self._alone = self.now() - since - self._alone, 0.0
            self._step[_part_of(name.op)] += own
        elif str(name).startswith("step "):  # what follows, a validation, is no part of it
            self.steps.append(self._step)
            self.begin_step()
        self._then.computed(name, since)

    def exposed(self, group: str, operation: str, num_bytes: int, since: float) -> None:
        self._communicated(group, since)
        self._then.exposed(group, operation, num_bytes, since)

    def waited(self, group: str, operation: str, since: float) -> None:
        self._communicated(group, since)
        self._then.waited(group, operation, since)

    def overlapped(self, group: str, lane: str, operation: str, num_bytes: int, begin: float, end: float) -> None:
        self._then.overlapped(group, lane, operation, num_bytes, begin, end)

    def moved(self, ranks: str, operation: str, num_bytes: int) -> None:
        self._then.moved(ranks, operation, num_bytes)

    def _communicated(self, group: str, since: float) -> None:
        seconds = self.now() - since
        self._alone += seconds
        self._step[PART_OF_GROUP.get(group, "data")] += seconds

    def begin_step(self) -> None:
        """Forget what happened since the last step."""
        self._step = dict.fromkeys(EXPOSED, 0.0)  # pyright: ignore[reportAttributeAccessIssue] - keys are plain text
        self._alone = 0.0


def _part_of(op: Op) -> str:
    if op in COMPUTING:
        return "compute"
    return {Op.UPDATE: "optimizer", Op.REDUCE_GRADIENTS: "data"}.get(op, "pipeline")


@dataclass(frozen=True)
class MeasuredStep:
    """One rank's steps."""

    step_seconds: float
    """The mean."""
    parts: dict[str, float]
    peak_bytes: int = 0
    """0: not known of this rank alone."""


@dataclass(frozen=True)
class Expected:
    """A prediction of a run's steps, kept by one rank until they are done."""

    prediction: Prediction
    plan: Plan
    where: str
    """What is known of the cluster from."""
    knows_parts: bool
    """Whether ranks know where their time goes: not on devices that compute while their host continues."""

    def compare(self, measured: Sequence[MeasuredStep], num_steps: int) -> dict:
        """Return what was predicted, what was measured on the ranks in their order, and how far apart they are."""
        result = self.prediction
        ranks = [measured[rank] for tile in self.plan.first_tiles for rank in tile.ranks]
        step = sum(each.step_seconds for each in ranks) / len(ranks)
        summary = {
            "cluster": self.where,
            "steps": num_steps,
            "predicted_seconds": result.step_seconds,
            "interval_seconds": list(result.interval_seconds),
            "measured_seconds": step,
            "drift": step / result.step_seconds - 1,
        }
        if self.knows_parts:
            means = {part: sum(each.parts[part] for each in ranks) / len(ranks) for part in EXPOSED}
            summary["parts"] = {
                part: {"predicted_seconds": result.exposed_seconds[part], "measured_seconds": seconds}
                for part, seconds in means.items()
            }
            summary["drifted"] = max(EXPOSED, key=lambda part: _difference(summary, part))
        if all(each.peak_bytes for each in measured):
            summary["memory"] = self._memory(measured)
        within = max(LARGE_SHARE, result.interval_seconds[1] / result.step_seconds - 1)
        summary["is_large"] = abs(summary["drift"]) > within
        return summary

    def _memory(self, measured: Sequence[MeasuredStep]) -> list[dict]:
        rows = []
        for stage in self.prediction.memory:
            peak = max(
                measured[rank].peak_bytes
                for tile in self.plan.tiles
                if (tile.items, tile.family) == (stage.tile.items, stage.tile.family)
                for rank in tile.ranks
            )
            items = list(stage.tile.items)
            family = stage.tile.family
            rows.append(
                {"items": items, "family": family, "predicted_bytes": stage.memory.total, "measured_bytes": peak}
            )
        return rows


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
            f"  memory of items {each['items']}: {predicted / 2**20:,.1f} MiB predicted,"
            f" {measured / 2**20:,.1f} measured ({off:+.1%})"
        )
    if summary["is_large"]:
        lines.append(f"warning: {blame(summary)}")
    return "\n".join(lines)


def blame(summary: Mapping) -> str:
    """Return in a sentence how large a drift is, and in which part."""
    how = "longer" if summary["drift"] > 0 else "shorter"
    result = f"steps took {abs(summary['drift']):.0%} {how} than predicted"
    if "parts" in summary:
        by = _difference(summary, summary["drifted"]) / summary["predicted_seconds"]
        result += f", most of it in '{summary['drifted']}' ({by:.0%} of a step)"
    again = "measure the machine again (train --fresh-probe, or hpctrain probe); in a rehearsal, look at its overrun"
    return f"{result}; {again}; see docs/planner.md"


def write(folder: Path, summary: Mapping) -> None:
    """Save a comparison in a run folder. Raises TrainingError where the disk refuses."""
    try:
        (folder / DRIFT).write_text(json.dumps(summary, indent=1) + "\n")
    except OSError as error:
        raise TrainingError(f"{folder / DRIFT}: cannot be written: {describe_os_error(error)}; free space") from None


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
