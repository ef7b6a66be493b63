"""Where complete metrics and events of a run go, on rank 0: its folder, and other software that the job names."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hpctrain.config.cluster import Cluster
from hpctrain.observe.events import END, RECOVERY, SAVE, START, STRAGGLER, VALIDATE, note_event
from hpctrain.observe.exports import MetricsWriter
from hpctrain.observe.metrics import RankFigures, Rates
from hpctrain.observe.run import append_metrics
from hpctrain.observe.sample import SAMPLED_STEP, write_json
from hpctrain.observe.stragglers import StragglerWatch
from hpctrain.plan.tiling import Plan
from hpctrain.planner.predictor import Prediction
from hpctrain.planner.simulate import EXPOSED

RANKS = "ranks.json"
RANKS_SECONDS = 60.0
"""How old it may become: of a run that fails it is the last that is known of every rank."""


class LiveMetrics:
    """Takes what rank 0 knows of a run while it lasts. Its methods raise TrainingError where a disk refuses."""

    def __init__(self, folder: Path, plan: Plan, writers: Sequence[MetricsWriter] = ()):
        """`writers` get every line, in addition to the run folder."""
        self._folder, self._plan, self._writers = folder, plan, writers
        self._watch = StragglerWatch(plan)
        self._figures: np.ndarray | None = None
        self._step = self._count = 0
        self._written = time.monotonic()

    @staticmethod
    def rates(prediction: Prediction | None, sum_of_families: float | None) -> Rates:
        """Return what turns seconds into shares."""
        return Rates(prediction.mfu * prediction.step_seconds if prediction else None, sum_of_families)

    def take(self, metrics: dict, figures: np.ndarray) -> None:
        """Write one step's metrics, whose figures of all ranks [ranks, figures] have come."""
        append_metrics(self._folder, metrics)
        for writer in self._writers:
            writer.write(metrics)
        self._figures, self._step = figures, metrics["step"]
        self._count += 1
        if self._count == SAMPLED_STEP or time.monotonic() - self._written > RANKS_SECONDS:
            self._write_ranks()
        if "validation_loss" in metrics:
            note_event(
                self._folder, VALIDATE, self._step, f"validation loss {metrics['validation_loss']:.4f}",
                validation_loss=metrics["validation_loss"],
            )  # fmt: skip
        compute = figures[:, list(RankFigures._fields).index("parts") + EXPOSED.index("compute")]
        for rank, factor, is_slow, reference in self._watch.look(compute.tolist()):
            text = f"rank {rank} computes {factor:.2f} times as long as {reference}"
            note_event(self._folder, STRAGGLER if is_slow else RECOVERY, self._step, text, rank=rank, factor=factor)

    def note_start(
        self,
        step: int,
        checkpoint: Path | None,
        reasons: Mapping[str, str],
        cluster: Cluster,
        is_rehearsed: bool,
        prediction: Prediction | None,
    ) -> None:
        """Note that a start is about to train, with its choices and what it expects."""
        text = f"{self._plan.describe()} on {cluster.describe()}"
        if checkpoint:
            text = f"continues after step {step} from {checkpoint.name}: {text}"
        predicted = {}
        if prediction:
            predicted = {
                "predicted_seconds": prediction.step_seconds,
                "interval_seconds": list(prediction.interval_seconds),
            }
        note_event(
            self._folder, START, step, text, ranks=len(self._plan.ranks), plan=self._plan.describe(),
            rehearsed=is_rehearsed, planned_again="planned again" in reasons, **predicted, reasons=dict(reasons),
        )  # fmt: skip

    def note_save(self, step: int, checkpoint: Path, seconds: float) -> None:
        """Note a checkpoint, and keep the figures of all ranks of the last logged step."""
        note_event(self._folder, SAVE, step, f"{checkpoint.name} written in {seconds:.3g} s", seconds=seconds)
        self._write_ranks()

    def note_end(self, step: int, until: int, summary: Mapping) -> None:
        """Note how a start ended, in order; `summary` is what the command prints."""
        self._write_ranks()
        for writer in self._writers:
            writer.close()
        by = summary.get("stopped_by")
        text = f"stopped by {by} after step {step} of {until}" if by else f"{step} of {until} steps are done"
        kept = {key: summary[key] for key in ("overrun", "yardstick", "unigram_entropy") if key in summary}
        note_event(self._folder, END, step, text, stopped_by=by, steps=until, **kept)

    def _write_ranks(self) -> None:
        """Write the figures of all ranks of the last logged step: ranks.json."""
        if self._figures is None:
            return
        names = [*RankFigures._fields[:-1], *(f"{part}_seconds" for part in EXPOSED)]
        columns = {
            name: [None if np.isnan(value) else value for value in column.tolist()]
            for name, column in zip(names, self._figures.T, strict=True)
        }
        self._written = time.monotonic()
        write_json(self._folder / RANKS, {"step": self._step, **columns})
