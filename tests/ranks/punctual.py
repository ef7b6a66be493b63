"""Assertions on what was measured: they fail where the machine kept up, and say so where it did not."""

from collections.abc import Callable
from contextlib import contextmanager

import pytest

from tests.busy import TOO_BUSY, OtherPrograms

TOO_LATE = 0.02
"""Overrun of a rehearsal, above which its steps say nothing about 5 %."""

MOST_STEPS = 6
"""Steps after which a machine that was late in each of them is taken as it is."""


def punctual_step(
    world, trainer, training, begin: Callable[[], None] | None = None, most: int = MOST_STEPS
) -> tuple[float, float]:
    """Take rehearsed steps until one is punctual, at most `most`; return its seconds on the slowest rank, and overrun.

    `begin` is called before each step; without it the device forgets its peak and overrun. All ranks must call.
    """
    for _ in range(most):
        (begin or world.accelerator.start_anew)()
        # A rank that starts the step later than others has a shorter one.
        seconds = world.largest(trainer.step(training)[0]["step_seconds"])
        if (overrun := trainer.overrun()) <= TOO_LATE:
            break
    return seconds, overrun


class Measurement:
    """Notes from when it is made whether this machine keeps up. All ranks must call its methods."""

    def __init__(self, world):
        self._world, self._others = world, OtherPrograms()

    def excuse(self, overrun: float = 0.0) -> str | None:
        """Return why figures prove nothing, the same on all ranks; None where the machine kept up."""
        own = [self._others.own_seconds(), overrun]
        every = self._world.all_objects(own)
        overrun = max(late for _, late in every)
        share = self._world.broadcast_object(self._others.share(sum(seconds for seconds, _ in every)))
        if overrun <= TOO_LATE and share <= TOO_BUSY:
            return None
        return f"ranks were late by {overrun:.1%}, and other programs used {share:.0%} of the cores"

    @contextmanager
    def checking(self, overrun: float = 0.0):
        """Enclose assertions on measured times; where one fails and the machine did not keep up, skip on all ranks."""
        failure = None
        try:
            yield
        except AssertionError as error:
            failure = error
        failures = self._world.all_objects(failure and str(failure))
        if not any(failures):
            return
        if excuse := self.excuse(overrun):
            text = next(filter(None, failures)).strip().splitlines()[0]
            pytest.skip(f"not measured: {excuse}; got {text}")
        if failure is not None:
            raise failure
