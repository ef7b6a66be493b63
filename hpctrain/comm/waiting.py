"""How a rank waits for another one: politely, and not for ever."""

import os
import time
from collections.abc import Callable

from hpctrain.errors import CommError

# Yielding hands the core to whoever computes on it, and finds a partner that arrives at once; a sleeper wakes 50 to
# 100 us late, twice for each collective. So: yield, and sleep only where the core is idle. Yields are counted, not
# timed: one takes a microsecond on an idle core, and as long as the others like on a busy one.
YIELDS = 2000
FIRST_SLEEP_SECONDS = 20e-6
LONGEST_SLEEP_SECONDS = 500e-6


class Patience:
    """How long a rank waits for others before it gives up; what is waited for now follows changes."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.grace_seconds = 0.0
        """Longer than that, where a watchdog is to speak first."""


def wait_until(ready: Callable[[], bool], what: Callable[[], str], patience: Patience) -> None:
    """Return once `ready()` is true: yield the core at first, then sleep between looks.

    `what()` names the awaited thing and is only called for the message of the CommError after the timeout.
    """
    start = time.monotonic()
    for _ in range(YIELDS):
        if ready():
            return
        os.sched_yield()
    pause = FIRST_SLEEP_SECONDS
    while not ready():
        time.sleep(pause)
        waited = time.monotonic() - start
        if waited > patience.seconds + patience.grace_seconds:
            raise CommError(
                f"waited {waited:.0f} s for {what()}; it is gone or far behind"
                " (raise observe.timeout_seconds if it was only slow)"
            )
        pause = min(max(pause, waited / 50), LONGEST_SLEEP_SECONDS)
