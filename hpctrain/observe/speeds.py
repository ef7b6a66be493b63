"""Compares how long each rank computes with its prediction: a device whose speed has changed is named, and measured."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain.comm.topology import Place
from hpctrain.observe.anomalies import Straggler

CHANGED = 1.15
"""A rank whose time is so many times as long as predicted, or as short, has another speed."""
WINDOW_STEPS, CONFIRMING_STEPS = 5, 3
"""It has it after so many of the last steps that say so; one slow step says nothing."""


class SpeedWatch:
    """Watches how long all ranks compute in logged steps, on one rank, beside what was predicted."""

    def __init__(self, predicted: Mapping[int, float], places: Sequence[Place]):
        """`predicted` are the seconds of each rank that computes."""
        self._ranks, self._predicted = list(predicted), np.array(list(predicted.values()))
        self._places = places
        self._last: deque[np.ndarray] = deque(maxlen=WINDOW_STEPS)
        """The measured over the predicted seconds in the last steps, 1 for most ranks."""
        self._differ = np.zeros(len(self._ranks), dtype=bool)
        self._num_steps = 0
        self.text = ""
        """The last change, in words."""
        self.has_news = False
        """Whether a rank was found to have another speed, and nobody asked for the speeds since."""

    def look(self, compute_seconds: Sequence[float]) -> list[Straggler]:
        """Return the ranks whose speed has changed, from the seconds of all ranks in one step."""
        self._num_steps += 1
        times = np.array(compute_seconds)[self._ranks] / self._predicted
        if self._num_steps == 1 or not np.isfinite(times).all() or not times.all():
            return []  # a first step creates what later ones reuse
        self._last.append(times / np.sort(times)[(len(times) - 1) // 2])
        last = np.array(self._last)
        differs = ((last > CHANGED) | (last < 1 / CHANGED)).sum(axis=0) >= CONFIRMING_STEPS
        changed, self._differ = np.flatnonzero(differs != self._differ), differs
        self.has_news |= len(changed) > 0
        factors = np.median(last, axis=0)
        result = []
        for number in changed.tolist():
            place = self._places[self._ranks[number]]
            where = f"predicted, on a device of {place.family} of host {place.host}"
            is_slow = bool(differs[number] and factors[number] > 1)  # else it is as fast as predicted, or faster
            result.append(Straggler(self._ranks[number], float(factors[number]), is_slow, where))
        self.text = "; ".join(map(str, result)) or self.text
        return result

    def take_factors(self) -> dict[int, float]:
        """Return how many times as long as predicted each rank with another speed computes, a median of steps."""
        self.has_news = False
        factors = np.median(np.array(self._last), axis=0)
        return {self._ranks[number]: float(factors[number]) for number in np.flatnonzero(self._differ)}
