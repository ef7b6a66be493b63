"""Ranks wait for each other politely, and not for ever: in a call, or in steps that somebody else drives.

Communication is *steps*: a generator that yields wherever it must wait for somebody else. Who drives the steps decides
how the waiting is done: a blocking call waits politely (`complete`), a lane continues with something else meanwhile.
Collectives are therefore written once for both.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpctrain.config.errors import CommError

# Yielding hands the core to whoever computes on it, and sees at once when a partner arrives; a sleeper wakes 50 to
# 100 us late, twice for each collective. So: yield, and sleep only where the core is idle. Yields are counted, not
# timed: one takes a microsecond on an idle core, and as long as the others like on a busy one.
YIELDS = 2000
FIRST_SLEEP_SECONDS = 20e-6
LONGEST_SLEEP_SECONDS = 500e-6
# Who knows when it will come sleeps until so much before, the most that a sleeper usually wakes late; but no longer
# than this at once: MPI moves what else is in flight only when it is called.
WAKE_SECONDS = 200e-6
LONGEST_KNOWN_SLEEP_SECONDS = 5e-3


@dataclass(frozen=True)
class Phase:
    """A part of a run, and how long an operation may take in it."""

    name: str
    """Such as "the first step"."""
    seconds: float
    key: str
    """Of the job, which sets the seconds."""
    remedy: str = ""
    """What to do where no key of the job sets them."""

    def __str__(self) -> str:
        remedy = self.remedy or f"raise {self.key} if it was only slow"
        return f"in {self.name} an operation may take {self.seconds:g} s ({remedy})"


class Patience:
    """The time that a rank waits for others before it gives up; it follows changes of the phase."""

    def __init__(self, phase: Phase):
        self.phase = phase
        self.grace_seconds = 0.0
        """Longer than that, where a watchdog is to speak first."""
        self.meanwhile: Callable[[], object] | None = None
        """Called before each look: moves what is in flight where no thread may call MPI. Else ranks that wait for
        different operations would wait for each other."""
        self.since = 0.0
        """When the phase of a block began, in `time.monotonic`: for it no operation is older."""

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Wait as a phase says in this block, and as before after it."""
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
    """
    start = time.monotonic()
    yields, pause = 0, FIRST_SLEEP_SECONDS
    while not ready():
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
    """A condition that an operation waits for before it can take its next step."""

    ready: Ready
    """Polled; once it was true it is not called again."""
    awaited: str
    """Named in the error after the timeout."""
    not_before: Callable[[], float] | None = None
    """A time of `time.monotonic` before which polling is of no use, 0 where there is none; asked after each poll."""
    moving_until: Callable[[], float] | None = None
    """For rehearsals: until when, in `time.monotonic`, bytes of this step are on the pretended network. 0: none are;
    infinite: some are, and the end is not known."""


Steps = Iterator[Condition]


def complete(steps: Steps, operation: str, patience: Patience) -> Any:
    """Drive steps to their end, and return what they return.

    Raises CommError where something does not come within the patience.
    """
    while True:
        try:
            condition = next(steps)
        except StopIteration as end:
            return end.value
        wait_until(condition.ready, lambda c=condition: f"{c.awaited} in {operation}", patience, condition.not_before)


def until_all(ready: Sequence[Ready], awaited: str) -> Steps:
    """Wait for several things; all of them are polled, since polling may be what moves them."""
    open_ones = [r for r in ready if not r()]

    def all_ready() -> bool:
        open_ones[:] = [r for r in open_ones if not r()]
        return not open_ones

    def times() -> list[float]:
        return [r.not_before() if hasattr(r, "not_before") else 0.0 for r in tuple(open_ones)]

    def not_before() -> float:
        known = times()
        return max(known) if known and all(known) else 0.0  # as long as one moves when it is polled, all are

    def moving_until() -> float:
        known = times()
        return max(known, default=0.0) if all(known) or not any(known) else math.inf

    if open_ones:
        yield Condition(all_ready, awaited, not_before, moving_until)
