"""Writes complete metrics and events of a run, on rank 0: to its folder, and to other software."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.observe.anomalies import StragglerWatch
from hpctrain.observe.exports import MetricsWriter
from hpctrain.observe.folder.run_folder import (
    COPIES,
    END,
    LEG,
    RECOVERY,
    SAVE,
    SLOWER,
    START,
    STRAGGLER,
    VALIDATE,
    RunFolder,
)
from hpctrain.observe.folder.schema import EXPERTS, METRICS, RANKS, SavedExperts, SavedMetrics, SavedRanks
from hpctrain.observe.metrics import FIGURES
from hpctrain.observe.sample import SAMPLED_STEP
from hpctrain.observe.speeds import SpeedWatch
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.predictor import Prediction

RANKS_SECONDS = 60.0
"""The most between two writes of ranks.json: where a run fails, it has the last figures of every rank."""


class LiveMetrics:
    """Writes what rank 0 knows of a run while it lasts."""

    def __init__(
        self, files: RunFolder, plan: Plan, writers: Sequence[MetricsWriter] = (), speeds: SpeedWatch | None = None
    ):
        """`writers` get every line, in addition to the run folder. `speeds` compares ranks with their prediction, where
        there is one that is better than other ranks."""
        self._files, self._plan, self._writers = files, plan, writers
        self._watch = speeds or StragglerWatch(plan)
        self._figures: np.ndarray | None = None
        self._experts: SavedExperts | None = None
        self._step = self._count = 0
        self._written = time.monotonic()

    def write_step(self, metrics: SavedMetrics, figures: np.ndarray, experts: SavedExperts | None = None) -> None:
        """Write one step's metrics, whose figures of all ranks [ranks, figures] have come.

        Keep these, and the load of `experts` in the same step, for the files of the last step.
        """
        self._files.append(METRICS, metrics)
        for writer in self._writers:
            self._files.attempt(writer.path, partial(writer.write, metrics))
        self._figures, self._experts, self._step = figures, experts, metrics["step"]
        self._count += 1
        if self._count == SAMPLED_STEP or time.monotonic() - self._written > RANKS_SECONDS:
            self._write_ranks()
        if "validation_loss" in metrics:
            value = metrics["validation_loss"]
            self._files.note(VALIDATE, self._step, f"validation loss {value:.4f}", validation_loss=value)
        compute = figures[:, FIGURES.index("compute_seconds")]
        for change in self._watch.look(compute.tolist()):
            kind = STRAGGLER if change.is_slow else RECOVERY
            self._files.note(kind, self._step, str(change), rank=change.rank, factor=change.factor)

    def note_start(
        self,
        step: int,
        origin: Path | str | None,
        reasons: Mapping[str, str],
        cluster: Cluster,
        is_rehearsed: bool,
        prediction: Prediction | None,
        seconds: Mapping[str, float],
    ) -> None:
        """Note that a start is about to train, with its choices, what it expects, and the seconds of its parts.

        It continues from the `origin`.
        """
        text = f"{self._plan.describe()} on {cluster.describe()}"
        if origin:
            changes = f", changed: {reasons['changed']}" if "changed" in reasons else ""
            name = origin.name if isinstance(origin, Path) else origin
            text = f"continues after step {step} from {name}{changes}: {text}"
        predicted = {}
        if prediction:
            predicted = {
                "predicted_seconds": prediction.step_seconds,
                "interval_seconds": list(prediction.interval_seconds),
            }
        self._files.note(
            START, step, text, ranks=len(self._plan.ranks), plan=self._plan.describe(),
            rehearsed=is_rehearsed, planned_again="planned again" in reasons, **predicted, seconds=dict(seconds),
            reasons=dict(reasons),
        )  # fmt: skip

    def note_leg(
        self,
        step: int,
        reason: str,
        seconds: Mapping[str, float],
        predicted_stall: float,
        prediction: Prediction | None,
    ) -> None:
        """Note that the run went on by this plan after `step`, why, and how long each part of the change took.

        The `predicted_stall` is that of moving and making.
        """
        text = f"{reason}: {self._plan.describe()}, {sum(seconds.values()):.3g} s"
        more = {
            "number": self._files.leg,
            "reason": reason,
            "ranks": len(self._plan.ranks) - len(self._plan.unused),
            "plan": self._plan.describe(),
            "predicted_stall_seconds": predicted_stall,
        }
        more |= {"predicted_seconds": prediction.step_seconds} if prediction else {}
        self._files.note(LEG, step, text, **more, seconds=dict(seconds))

    def note_copies(self, step: int, seconds: Sequence[float], predicted: float) -> None:
        """Note what the copies of a leg in the memory of hosts took from training."""
        taken, most = sum(seconds), len(seconds) * predicted
        text = f"{len(seconds)} copies took {taken:.3g} s from training, predicted at most {most:.3g} s"
        self._files.note(COPIES, step, text, seconds=taken, predicted_stall_seconds=most)

    def note_slower(self, text: str) -> None:
        """Note that a rehearsal's time scale was raised."""
        self._files.note(SLOWER, self._step, text)

    def note_save(self, step: int, checkpoint: Path, seconds: float) -> None:
        """Note a checkpoint, and keep the figures of all ranks of the last logged step."""
        self._files.note(SAVE, step, f"{checkpoint.name} written in {seconds:.3g} s", seconds=seconds)
        self._write_ranks()

    def note_end(self, step: int, until: int, summary: Mapping) -> None:
        """Note how a start ended, in order; `summary` is what the command prints."""
        self.close()
        by = summary.get("stopped_by")
        text = f"stopped by {by} after step {step} of {until}" if by else f"{step} of {until} steps are done"
        kept = {key: summary[key] for key in ("overrun", "yardstick", "unigram_entropy") if key in summary}
        self._files.note(END, step, text, stopped_by=by, steps=until, **kept)

    def close(self) -> None:
        """Write the last figures, and let other software's writers end."""
        self._write_ranks()
        for writer in self._writers:
            self._files.attempt(writer.path, writer.close)

    def _write_ranks(self) -> None:
        """Write the figures of all ranks of the last logged step, and the load of experts: ranks.json, experts.json."""
        if self._figures is None:
            return
        columns = {
            name: [None if np.isnan(value) else value for value in column.tolist()]
            for name, column in zip(FIGURES, self._figures.T, strict=True)
        }
        self._written = time.monotonic()
        self._files.write(RANKS, SavedRanks(step=self._step, **columns))
        if self._experts:
            self._files.write(EXPERTS, self._experts)
