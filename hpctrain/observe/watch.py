"""Looks at the loss and at the norm of the gradient for what no training does: a jump far above the last steps."""

from collections import deque
from typing import NamedTuple

import numpy as np

from hpctrain.observe.metrics import median

WATCHED = {"loss": "the loss", "grad_norm": "the norm of the gradient"}
WINDOW_STEPS = 50
FEWEST_STEPS = 5
"""With fewer steps before it a figure is compared with nothing."""


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
    """Looks at each step of a run; for one rank."""

    def __init__(self, factor: float):
        """`factor` is how many times the median a jump is; 0: nothing is one."""
        self._factor = factor
        self._last = {figure: deque[float](maxlen=WINDOW_STEPS) for figure in WATCHED}
        self._is_high = dict.fromkeys(WATCHED, False)

    def look(self, metrics: dict) -> list[Jump]:
        """Return the figures that jumped in a step. One that stays high is a jump once.

        A step that fp16 skipped has no norm, and does not count.
        """
        jumps = []
        for figure, last in self._last.items():
            if not self._factor or (value := metrics[figure]) <= 0:
                continue
            usual = median(np.array(last)) if len(last) >= FEWEST_STEPS else value
            was_high, self._is_high[figure] = self._is_high[figure], value > self._factor * usual
            if self._is_high[figure] and not was_high:
                jumps.append(Jump(figure, metrics["step"], value, usual))
            last.append(value)
        return jumps
