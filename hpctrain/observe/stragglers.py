"""Notices ranks that compute longer than ranks with equal work, or longer than they did before."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.plan.tiling import Plan

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
        self._peers = list(work.values())
        self._first: dict[int, deque[float]] = {}
        self._count: dict[int, int] = {}
        self._slow: set[int] = set()

    def look(self, compute_seconds: Sequence[float]) -> list[Straggler]:
        """Return the ranks whose state changed, from the seconds of all ranks in one step."""
        changes = []
        for ranks in self._peers:
            values = np.array([compute_seconds[rank] for rank in ranks])
            if np.isnan(values).any():
                return []
            has_peers = len(ranks) >= FEWEST_PEERS
            reference = f"the median of {len(ranks)} ranks with equal work" if has_peers else "its first steps"
            for rank, seconds in zip(ranks, values, strict=True):
                usual = float(np.median(values)) if has_peers else self._own_usual(rank, float(seconds))
                if not usual:
                    continue
                factor = float(seconds) / usual
                if self._changes(rank, factor > SLOW_FACTOR):
                    changes.append(Straggler(rank, factor, rank in self._slow, reference))
        return changes

    def _own_usual(self, rank: int, seconds: float) -> float:
        """Return the median of a rank's first steps, 0 until these are over."""
        first = self._first.setdefault(rank, deque())
        if len(first) < STEPS_IN_A_ROW:
            first.append(seconds)
            return 0.0
        return float(np.median(first))

    def _changes(self, rank: int, is_slow: bool) -> bool:
        """Count steps in which a rank is not what it was; say whether it has now changed."""
        if is_slow == (rank in self._slow):
            self._count[rank] = 0
            return False
        self._count[rank] = self._count.get(rank, 0) + 1
        if self._count[rank] < STEPS_IN_A_ROW:
            return False
        self._count[rank] = 0
        self._slow ^= {rank}
        return True
