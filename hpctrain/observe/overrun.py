"""Watches whether the ranks of a rehearsal keep up with their pretended devices, and slows these down where not."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hpctrain.config.errors import TrainingError
from hpctrain.observe.folder.spans import Observer

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.rehearsal.accelerator import RehearsedAccelerator

# Of a rehearsal: up to the first its ratios are quoted, beyond the second it means nothing.
QUOTED_OVERRUN, UNTRUSTED_OVERRUN = 0.01, 0.05
CONSECUTIVE_STEPS = 2
"""The time scale is raised after so many steps with more than `UNTRUSTED_OVERRUN`."""
MIN_RAISE, RAISE_MARGIN = 1.5, 1.25
"""Factors: the smallest raise, and the raise over what the overrun asks for, since ranks must be early, not in time."""
MAX_RAISE = 4.0
"""The largest factor between the last time scale and the first."""


class OverrunWatch(Observer):
    """Raises the time scale of a rehearsal whose ranks are late."""

    def __init__(self, world: "World", device: "RehearsedAccelerator", on_raise: Callable[[str], None]):
        """`on_raise` is called on all ranks, with what is said of it: steps so far do not count."""
        self._world, self._device, self._on_raise = world, device, on_raise
        self._first_scale = device.time_scale
        self._num_steps = self._num_late = 0
        self._overrun, self._is_last = 0.0, False

    def look(self, is_last: bool = False) -> float | None:
        """Return the overrun of the step that ended on the rank that was the latest; None of the first step, which does
        not count. After the last one nothing is raised: its figures would be left out for nothing."""
        self._is_last = is_last
        self._overrun = self._world.largest(self._device.clock.take_overrun())
        self._num_steps += 1
        return self._overrun if self._num_steps > 1 else None

    def step_is_done(self, seconds: float) -> str | None:
        """Raise the time scale where ranks were late, after `look`; return what is to be said of that.

        Raises TrainingError where it would have to be raised by more than `MAX_RAISE`.
        """
        is_late = self._num_steps > 1 and self._overrun > UNTRUSTED_OVERRUN and not self._is_last
        self._num_late = self._num_late + 1 if is_late else 0
        if self._num_late < CONSECUTIVE_STEPS:
            return None
        device, most = self._device, MAX_RAISE * self._first_scale
        before, wanted = device.time_scale, device.time_scale * max(MIN_RAISE, RAISE_MARGIN * (1 + self._overrun))
        late = f"ranks were late by {self._overrun:.0%} in step {self._num_steps}, and in the step before it"
        with self._world.all_or_none():
            if before >= most:
                raise TrainingError(
                    f"{late}, with a time scale of {before:.3g} s for one of the cluster, {MAX_RAISE:g} times the"
                    " first one: this machine is too slow for the rehearsal, or busy; set --time-scale"
                    f" {max(2 * before, wanted):.2g} or more, or rehearse fewer devices"
                )
        device.raise_time_scale(min(wanted, most) / before)
        self._world.largest(0.0)  # nobody begins a step before the network is as slow
        self._num_late = 0
        text = (
            f"{late}: this machine is too slow for the rehearsal, or busy. Its time scale is raised from {before:.3g}"
            f" to {device.time_scale:.3g} s for one of the cluster, and steps so far do not count"
        )
        self._on_raise(text)
        return text
