"""Communication as steps: a generator that yields wherever it must wait for somebody else.

Who drives the steps decides how the waiting is done: a blocking call waits politely (`complete`), a lane continues with
something else meanwhile. Collectives are therefore written once for both.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hpctrain.comm.waiting import Patience, wait_until

Ready = Callable[[], bool]


class Pending(NamedTuple):
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


Steps = Iterator[Pending]


def complete(steps: Steps, operation: str, patience: Patience) -> None:
    """Drive steps to their end. Raises CommError where something does not come within the patience."""
    for pending in steps:
        wait_until(pending.ready, lambda p=pending: f"{p.awaited} in {operation}", patience, pending.not_before)


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
        yield Pending(all_ready, awaited, not_before, moving_until)
