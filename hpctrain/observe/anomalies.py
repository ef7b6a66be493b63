"""Notices what should not happen: a jump of the loss or of the gradient's norm, and a rank that becomes slow."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.observe.folder.schema import SavedMetrics
from hpctrain.observe.metrics import median
from hpctrain.plan.equal_tiles import tile_groups
from hpctrain.plan.tiling import Plan

WATCHED = {"loss": "the loss", "grad_norm": "the norm of the gradient"}
WINDOW_STEPS = 50
MIN_STEPS = 5
"""A figure is compared with the median of the last steps as soon as there are so many."""


class Jump(NamedTuple):
    """A figure of one step that is far above the last ones."""

    figure: str
    step: int
    value: float
    median: float

    def __str__(self) -> str:
        return (
            f"warning: step {self.step}: {WATCHED[self.figure]} is {self.value:.4g},"
            f" {self.value / self.median:,.0f} times the median of the last steps ({self.median:.4g}); where it stays"
            " high, a device may have computed wrong: continue from a checkpoint of before"
        )


class JumpWatch:
    """Watches the loss and the norm of each step, on one rank."""

    def __init__(self, factor: float):
        """A figure of `factor` times the median of the last steps is a jump; 0 turns the watch off."""
        self._factor = factor
        self._last = {figure: deque[float](maxlen=WINDOW_STEPS) for figure in WATCHED}
        self._is_high = dict.fromkeys(WATCHED, False)

    def look(self, metrics: SavedMetrics) -> list[Jump]:
        """Return the figures that jumped in a step. One that stays high is a jump once.

        A step that fp16 skipped has no norm, and one without targets no loss: they do not count.
        """
        jumps = []
        for figure, last in self._last.items():
            if not self._factor or (value := metrics.get(figure, 0.0)) <= 0:
                continue
            usual = median(np.array(last)) if len(last) >= MIN_STEPS else value
            was_high, self._is_high[figure] = self._is_high[figure], value > self._factor * usual
            if self._is_high[figure] and not was_high:
                jumps.append(Jump(figure, metrics["step"], value, usual))
            last.append(value)
        return jumps


SLOW_FACTOR = 1.3
"""A rank that computes so many times as long as its reference is a straggler; noise of shared cores stays below."""
CONSECUTIVE_STEPS = 5
"""A rank is slow, or no longer slow, after so many steps that say so."""
MIN_PEERS = 3
"""Fewer ranks with equal work have no median worth comparing with: each is compared with its own first steps."""


class Straggler(NamedTuple):
    """A rank that became slow, or caught up."""

    rank: int
    factor: float
    is_slow: bool
    reference: str
    """What it is compared with."""

    def __str__(self) -> str:
        return f"rank {self.rank} computes {self.factor:.2f} times as long as {self.reference}"


class StragglerWatch:
    """Watches how long all ranks compute in logged steps, on one rank."""

    def __init__(self, plan: Plan):
        groups = [list(group.ranks) for group in tile_groups(plan)]
        self._peers = [np.array(ranks) for ranks in groups if len(ranks) >= MIN_PEERS]
        self._alone = np.array([r for ranks in groups if len(ranks) < MIN_PEERS for r in ranks], dtype=int)
        self._first: list[np.ndarray] = []
        """The seconds of all ranks in the first steps."""
        size = max(plan.ranks) + 1
        self._is_slow, self._count = np.zeros(size, dtype=bool), np.zeros(size, dtype=int)

    def look(self, compute_seconds: Sequence[float]) -> list[Straggler]:
        """Return the ranks whose state changed, from the seconds of all ranks in one step; none where it is not known.

        A rank changes when it was slow, or no longer, for `CONSECUTIVE_STEPS` steps.
        """
        seconds = np.array(compute_seconds)
        factor = np.ones(len(seconds))
        for ranks in self._peers:
            factor[ranks] = seconds[ranks] / (median(seconds[ranks]) or 1.0)
        if len(self._first) < CONSECUTIVE_STEPS:
            self._first.append(seconds)
        elif len(self._alone):
            usual = np.median([first[self._alone] for first in self._first], axis=0)
            factor[self._alone] = seconds[self._alone] / np.where(usual > 0, usual, np.inf)
        if np.isnan(factor).any():
            return []
        differs = (factor > SLOW_FACTOR) != self._is_slow
        self._count = np.where(differs, self._count + 1, 0)
        changed = np.flatnonzero(self._count >= CONSECUTIVE_STEPS)
        self._is_slow[changed] ^= True
        self._count[changed] = 0
        stragglers = []
        for rank in changed.tolist():
            peers = next((ranks for ranks in self._peers if rank in ranks), ())
            reference = f"the median of {len(peers)} ranks with equal work" if len(peers) else "its first steps"
            stragglers.append(Straggler(rank, float(factor[rank]), bool(self._is_slow[rank]), reference))
        return stragglers
