"""Ranks wait for each other without using a core, and with a timeout: in a call, or in steps that other code drives.

Communication is *steps*: a generator that yields wherever it must wait. The driver of the steps decides how to wait: a
blocking call yields and sleeps (`complete`), a lane continues with something else meanwhile. Collectives are therefore
written once for both.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpctrain.config.errors import CommError, RankLossError

# Yielding hands the core to whoever computes on it, and sees at once when a partner arrives; a sleeper wakes 50 to
# 100 us late, twice for each collective. So: yield, and sleep only where the core is idle. Yields are counted, not
# timed: one takes a microsecond on an idle core, and as long as the others like on a busy one.
YIELDS = 2000
FIRST_SLEEP_SECONDS = 20e-6
LONGEST_SLEEP_SECONDS = 500e-6
# Where the time of an event is known, a rank sleeps until this much earlier: sleepers usually wake so late at most.
# One sleep is limited too: MPI moves other messages only when it is called.
WAKE_SECONDS = 200e-6
LONGEST_KNOWN_SLEEP_SECONDS = 5e-3


@dataclass(frozen=True)
class Phase:
    """A part of a run, and how long an operation may take in it."""

    name: str
    """Name of the phase, such as "the first step"."""
    seconds: float
    key: str
    """Key of the job that sets the timeout."""
    remedy: str = ""
    """Advice for an error, where no key of the job sets the timeout."""

    def __str__(self) -> str:
        remedy = self.remedy or f"raise {self.key} if it was only slow"
        return f"in {self.name} an operation may take {self.seconds:g} s ({remedy})"


class Patience:
    """The time that a rank waits for others before it gives up; it changes with the phase."""

    def __init__(self, phase: Phase):
        self.phase = phase
        self.grace_seconds = 0.0
        """Additional seconds, where a watchdog is to report first."""
        self.meanwhile: Callable[[], object] | None = None
        """Called before each poll, where no thread may call MPI: it moves operations in flight. Otherwise ranks that
        wait for different operations would wait for each other."""
        self.since = 0.0
        """Start of the current phase's block, in `time.monotonic`: no operation counts as older."""
        self.interruption: RankLossError | None = None
        """The loss of another rank, set by the watchdog's thread. Every wait raises it."""

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Use the timeout of a phase in this block, and the previous one after it."""
        before, self.since = (self.phase, self.since), time.monotonic()  # first: the watchdog's thread reads both
        self.phase = phase
        try:
            yield
        finally:
            self.phase, self.since = before


def wait_until(
    ready: Callable[[], bool],
    awaited: Callable[[], str],
    patience: Patience,
    not_before: Callable[[], float] | None = None,
) -> None:
    """Return once `ready()` is true: yield the core at first, then sleep between looks.

    `awaited()` names it and is only called for the message of the CommError after the timeout.
    `not_before()` is asked after each look for a time of `time.monotonic` before which another is of no use.

    Raises RankLossError once the wait is interrupted, at the next look.
    """
    start = time.monotonic()
    yields, pause = 0, FIRST_SLEEP_SECONDS
    while not ready():
        if patience.interruption is not None:
            raise patience.interruption
        if patience.meanwhile is not None:
            patience.meanwhile()
        if not_before is not None and (early := not_before() - time.monotonic() - WAKE_SECONDS) > 0:
            time.sleep(min(early, LONGEST_KNOWN_SLEEP_SECONDS))
        elif yields < YIELDS:
            yields += 1
            os.sched_yield()
            continue
        else:
            time.sleep(pause)
        waited = time.monotonic() - start
        if waited > patience.phase.seconds + patience.grace_seconds:
            raise CommError(f"waited {waited:.0f} s for {awaited()}; it is gone or far behind: {patience.phase}")
        pause = min(max(pause, waited / 50), LONGEST_SLEEP_SECONDS)


Ready = Callable[[], bool]


class Condition(NamedTuple):
    """A condition that an operation needs before its next step."""

    ready: Ready
    """Polled until it returns True, and not called again."""
    awaited: str
    """Name of the condition in the error after the timeout."""
    not_before: Callable[[], float] | None = None
    """Returns the `time.monotonic` before which polling is of no use, or 0; called after each poll."""
    moving_until: Callable[[], float] | None = None
    """For rehearsals: returns the `time.monotonic` until which bytes of this step are on the pretended network. 0: none
    are; infinite: some are, and the end is not known."""


Steps = Iterator[Condition]


def complete(steps: Steps, operation: str, patience: Patience) -> Any:
    """Drive steps to their end, and return their result.

    Raises CommError where a condition does not come true within the patience.
    """
    while True:
        try:
            condition = next(steps)
        except StopIteration as end:
            return end.value
        wait_until(condition.ready, lambda c=condition: f"{c.awaited} in {operation}", patience, condition.not_before)


def until_all(ready: Sequence[Ready], awaited: str) -> Steps:
    """Wait for several conditions; all of them are polled, since polling may move them."""
    open_ones = [r for r in ready if not r()]

    def all_ready() -> bool:
        open_ones[:] = [r for r in open_ones if not r()]
        return not open_ones

    def times() -> list[float]:
        return [r.not_before() if hasattr(r, "not_before") else 0.0 for r in tuple(open_ones)]

    def not_before() -> float:
        known = times()
        return max(known) if known and all(known) else 0.0  # poll all of them as long as one of them moves by polling

    def moving_until() -> float:
        known = times()
        return max(known, default=0.0) if all(known) or not any(known) else math.inf

    if open_ones:
        yield Condition(all_ready, awaited, not_before, moving_until)
