"""Groups whose operations are traced: when something moved, and for how long the rank that computes waited for it."""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from hpctrain.comm.lanes import Work
from hpctrain.comm.launches import DeviceLaunch, LaunchTimes
from hpctrain.comm.steps import Pending, Steps
from hpctrain.comm.tracing import Tracer


class TimedSteps(Protocol):
    """Steps that know when the first could be taken and when the last had been, as those of a rehearsal do."""

    begun: float
    ended: float

    def __iter__(self) -> Steps: ...

    def __next__(self) -> Pending: ...


class StopwatchSteps:
    """Steps that note when the first was taken and when the last had been."""

    def __init__(self, steps: Steps):
        self.begun = self.ended = 0.0
        self._steps = self._timed(steps)

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Pending:
        return next(self._steps)

    def _timed(self, steps: Steps) -> Steps:
        self.begun = time.monotonic()
        try:
            yield from steps
        finally:
            self.ended = time.monotonic()


class GroupTrace:
    """Reports to a tracer what one rank's part of one group does."""

    def __init__(self, tracer: Tracer, group: str, lane: str):
        """`lane` names the group with its ranks; no other lane of this rank has that name."""
        self._tracer, self._group, self._lane = tracer, group, lane

    def now(self) -> float:
        return self._tracer.now()

    def exposed(self, operation: str, num_bytes: int, since: float) -> None:
        self._tracer.exposed(self._group, self._lane, operation, num_bytes, since)

    def waited(self, operation: str, since: float) -> None:
        self._tracer.waited(self._group, operation, since)

    def telling(
        self, operation: str, num_bytes: int, times: TimedSteps | LaunchTimes, on_end: Callable[[], None]
    ) -> Callable[[], None]:
        """Return what is to be called at the end of what is overlapped; calls `on_end`."""
        return partial(self._report_overlapped, operation, num_bytes, times, on_end)

    def _report_overlapped(
        self, operation: str, num_bytes: int, times: TimedSteps | LaunchTimes, on_end: Callable[[], None]
    ) -> None:
        self._tracer.overlapped(self._group, self._lane, operation, num_bytes, times.begun, times.ended)
        on_end()


class TracedWork:
    """An operation in flight on a lane; offers what `Work` does, and records how long it is waited for."""

    def __init__(self, work: Work | DeviceLaunch, operation: str, trace: GroupTrace):
        self._work, self._operation, self._trace = work, operation, trace
        self._was_waited_for = False

    @property
    def ended(self) -> bool:
        return self._work.ended

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        since = self._trace.now()
        self._work.wait()
        if not self._was_waited_for:
            self._was_waited_for = True
            self._trace.waited(self._operation, since)
