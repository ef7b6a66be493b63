"""How a rank waits for another one: politely, and not for ever."""

import os
import time
from collections.abc import Callable

from hpctrain.errors import CommError

# A partner that is just about to arrive is met within some 20 us of yielding; after that the core is worth more to
# somebody else. Sleeping wakes 50 to 100 us late, growing with the time already waited to 2 % of it at most.
YIELDS = 20
FIRST_SLEEP_SECONDS = 20e-6
LONGEST_SLEEP_SECONDS = 500e-6


def wait_until(ready: Callable[[], bool], what: Callable[[], str], timeout_seconds: float) -> None:
    """Return once `ready()` is true: yield the core at first, then sleep between looks.

    `what()` names the awaited thing and is only called for the message of the CommError after the timeout.
    """
    for _ in range(YIELDS):
        if ready():
            return
        os.sched_yield()
    start = time.monotonic()
    pause = FIRST_SLEEP_SECONDS
    while not ready():
        time.sleep(pause)
        waited = time.monotonic() - start
        if waited > timeout_seconds:
            raise CommError(
                f"waited {waited:.0f} s for {what()}; it is gone or far behind"
                " (raise observe.timeout_seconds if it was only slow)"
            )
        pause = min(max(pause, waited / 50), LONGEST_SLEEP_SECONDS)
