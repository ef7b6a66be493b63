"""Where complete metrics and events of a run go, on rank 0: its folder, and other software; which ranks became slow."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.config.cluster import Cluster
from hpctrain.observe.exports import MetricsWriter
from hpctrain.observe.metrics import FIGURES, median
from hpctrain.observe.run import (
    END,
    METRICS,
    RECOVERY,
    SAVE,
    SLOWER,
    START,
    STRAGGLER,
    VALIDATE,
    ReportFiles,
)
from hpctrain.observe.sample import SAMPLED_STEP
from hpctrain.plan.tiling import Plan
from hpctrain.planner.predictor import Prediction

RANKS = "ranks.json"
RANKS_SECONDS = 60.0
"""How old it may become: of a run that fails it is the last that is known of every rank."""


class LiveMetrics:
    """Takes what rank 0 knows of a run while it lasts."""

    def __init__(self, files: ReportFiles, plan: Plan, writers: Sequence[MetricsWriter] = ()):
        """`writers` get every line, in addition to the run folder."""
        self._files, self._plan, self._writers = files, plan, writers
        self._watch = StragglerWatch(plan)
        self._figures: np.ndarray | None = None
        self._step = self._count = 0
        self._written = time.monotonic()

    def take(self, metrics: dict, figures: np.ndarray) -> None:
        """Write one step's metrics, whose figures of all ranks [ranks, figures] have come."""
        self._files.append(METRICS, metrics)
        for writer in self._writers:
            self._files.attempt(writer.path, partial(writer.write, metrics))
        self._figures, self._step = figures, metrics["step"]
        self._count += 1
        if self._count == SAMPLED_STEP or time.monotonic() - self._written > RANKS_SECONDS:
            self._write_ranks()
        if "validation_loss" in metrics:
            value = metrics["validation_loss"]
            self._files.note(VALIDATE, self._step, f"validation loss {value:.4f}", validation_loss=value)
        compute = figures[:, FIGURES.index("compute_seconds")]
        for rank, factor, is_slow, reference in self._watch.look(compute.tolist()):
            text = f"rank {rank} computes {factor:.2f} times as long as {reference}"
            self._files.note(STRAGGLER if is_slow else RECOVERY, self._step, text, rank=rank, factor=factor)

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
            changes = f", changed: {reasons['changed']}" if "changed" in reasons else ""
            text = f"continues after step {step} from {checkpoint.name}{changes}: {text}"
        predicted = {}
        if prediction:
            predicted = {
                "predicted_seconds": prediction.step_seconds,
                "interval_seconds": list(prediction.interval_seconds),
            }
        self._files.note(
            START, step, text, ranks=len(self._plan.ranks), plan=self._plan.describe(),
            rehearsed=is_rehearsed, planned_again="planned again" in reasons, **predicted, reasons=dict(reasons),
        )  # fmt: skip

    def note_slower(self, text: str) -> None:
        """Note that a rehearsal's time scale was raised."""
        self._files.note(SLOWER, self._step, text)

    def note_save(self, step: int, checkpoint: Path, seconds: float) -> None:
        """Note a checkpoint, and keep the figures of all ranks of the last logged step."""
        self._files.note(SAVE, step, f"{checkpoint.name} written in {seconds:.3g} s", seconds=seconds)
        self._write_ranks()

    def note_end(self, step: int, until: int, summary: Mapping) -> None:
        """Note how a start ended, in order; `summary` is what the command prints."""
        self._write_ranks()
        for writer in self._writers:
            self._files.attempt(writer.path, writer.close)
        by = summary.get("stopped_by")
        text = f"stopped by {by} after step {step} of {until}" if by else f"{step} of {until} steps are done"
        kept = {key: summary[key] for key in ("overrun", "yardstick", "unigram_entropy") if key in summary}
        self._files.note(END, step, text, stopped_by=by, steps=until, **kept)

    def _write_ranks(self) -> None:
        """Write the figures of all ranks of the last logged step: ranks.json."""
        if self._figures is None:
            return
        columns = {
            name: [None if np.isnan(value) else value for value in column.tolist()]
            for name, column in zip(FIGURES, self._figures.T, strict=True)
        }
        self._written = time.monotonic()
        self._files.write(RANKS, {"step": self._step, **columns})


SLOW_FACTOR = 1.3
"""So many times as long as the reference is a straggler; the noise of shared cores stays below."""
STEPS_IN_A_ROW = 5
FEWEST_PEERS = 3
"""With fewer equal ranks a median says little: a rank is compared with its own first steps."""


class Straggler(NamedTuple):
    """A rank that became slow, or caught up."""

    rank: int
    factor: float
    is_slow: bool
    reference: str
    """What it is compared with."""


class StragglerWatch:
    """Looks at the seconds that ranks compute in logged steps; for one rank."""

    def __init__(self, plan: Plan):
        work: dict[tuple, list[int]] = {}
        for tile in plan.first_tiles:
            key = tuple((t.items, t.rows.size, t.tensor, t.family) for t in plan.virtual_stages(tile))
            work.setdefault(key, []).extend(tile.ranks)
        self._peers = [np.array(ranks) for ranks in work.values() if len(ranks) >= FEWEST_PEERS]
        alone = [ranks for ranks in work.values() if len(ranks) < FEWEST_PEERS]
        self._alone = np.array([rank for ranks in alone for rank in ranks], dtype=int)
        self._first: list[np.ndarray] = []
        """The seconds of all ranks in the first steps."""
        size = max(plan.ranks) + 1
        self._is_slow, self._count = np.zeros(size, dtype=bool), np.zeros(size, dtype=int)

    def look(self, compute_seconds: Sequence[float]) -> list[Straggler]:
        """Return the ranks whose state changed, from the seconds of all ranks in one step; none where it is not known.

        A rank changes when it was slow, or no longer, for `STEPS_IN_A_ROW` steps.
        """
        seconds = np.array(compute_seconds)
        factor = np.ones(len(seconds))
        for ranks in self._peers:
            factor[ranks] = seconds[ranks] / (median(seconds[ranks]) or 1.0)
        if len(self._first) < STEPS_IN_A_ROW:
            self._first.append(seconds)
        elif len(self._alone):
            usual = np.median([first[self._alone] for first in self._first], axis=0)
            factor[self._alone] = seconds[self._alone] / np.where(usual > 0, usual, np.inf)
        if np.isnan(factor).any():
            return []
        differs = (factor > SLOW_FACTOR) != self._is_slow
        self._count = np.where(differs, self._count + 1, 0)
        changed = np.flatnonzero(self._count >= STEPS_IN_A_ROW)
        self._is_slow[changed] ^= True
        self._count[changed] = 0
        return [Straggler(int(r), float(factor[r]), bool(self._is_slow[r]), self._reference(int(r))) for r in changed]

    def _reference(self, rank: int) -> str:
        ranks = next((ranks for ranks in self._peers if rank in ranks), None)
        return "its first steps" if ranks is None else f"the median of {len(ranks)} ranks with equal work"
