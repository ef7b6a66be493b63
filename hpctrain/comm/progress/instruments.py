"""Instruments observe every operation of a group: flight record, trace of the run, and pace of a pretended device.

Times are seconds of `time.monotonic`; a rehearsal's are pretended ones.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Protocol

from hpctrain.comm.waiting import Condition, Steps
from hpctrain.comm.watchdog.flight import write_ranks
from hpctrain.comm.watchdog.recorder import Recorder


class Tracer:
    """Takes spans of what one rank does. This one drops them: for runs that nobody traces."""

    def now(self) -> float:
        """Return where the rank is in what it computes. To be called by the thread that computes."""
        return 0.0

    def computed(self, name: object, since: float) -> None:
        """Note what the rank did until now, and all that it waited for; `str(name)` is asked for later, if at all."""

    def exposed(self, group: str, lane: str, operation: str, num_bytes: int, since: float) -> None:
        """Note that the rank communicated until now, and did nothing else.

        `lane` is the group's name and its ranks, such as `y 0-3`.
        """

    def waited(self, group: str, operation: str, since: float) -> None:
        """Note that the rank waited until now for an overlapped operation."""

    def overlapped(self, group: str, lane: str, operation: str, num_bytes: int, begin: float, end: float) -> None:
        """Note that a lane of a group moved something; may be called by any thread."""


UNTRACED = Tracer()


class PacedSteps(Protocol):
    """The steps of one operation on pretended devices."""

    begun: float
    """When the first step could be taken."""
    ended: float
    """When the last one had been taken."""

    def __iter__(self) -> Steps: ...

    def __next__(self) -> Condition: ...

    def meet(self) -> None:
        """Let the device wait for the operation. The rank that has waited for it calls."""
        ...


class RehearsedTiming(Protocol):
    """Lets the operations of one group begin and end when they would on pretended devices."""

    group: str

    def steps(self, steps: Steps, operation: str = "", num_bytes: int = 0) -> PacedSteps: ...


class Instruments:
    """The instruments of one rank's part of one group, or of none: then its operations pass unseen."""

    def __init__(
        self,
        recorder: Recorder | None = None,
        name: str = "group",
        ranks: Sequence[int] = (),
        tracer: Tracer = UNTRACED,
        pace: RehearsedTiming | None = None,
        which: str = "",
    ):
        """`pace` is for groups of pretended devices. `which` distinguishes lanes of the same name and ranks."""
        self.recorder, self.name = recorder, name
        self.group = recorder.add_group(name, ranks) if recorder else 0
        self.tracer, self.is_traced, self.pace = tracer, tracer is not UNTRACED, pace
        self.lane = f"{name} {write_ranks(ranks)}{which and f' {which}'}" if self.is_traced else ""

    def unrecorded(self) -> "Instruments":
        """Return the same instruments without the flight record."""
        result = copy(self)
        result.recorder = None
        return result

    def recorded(self, operation: str) -> AbstractContextManager:
        """Record what the group does in a block."""
        assert self.recorder is not None, "groups of several ranks are recorded"
        return self.recorder.recorded(self.group, operation)

    def start(self, operation: str, num_bytes: int, is_overlapped: bool = False) -> "ObservedOperation":
        """Begin to observe an operation; an overlapped one continues while the rank computes, until it waits for it."""
        return ObservedOperation(self, operation, num_bytes, is_overlapped)


class ObservedOperation:
    """One operation, as the instruments of its group see it: from its start to who has waited for it."""

    __slots__ = (
        "_handle",
        "_instruments",
        "_is_overlapped",
        "_num_bytes",
        "_paced",
        "_since",
        "_was_awaited",
        "begun",
        "ended",
        "operation",
    )

    def __init__(self, instruments: Instruments, operation: str, num_bytes: int, is_overlapped: bool):
        self._instruments, self.operation, self._num_bytes = instruments, operation, num_bytes
        self._is_overlapped, self._was_awaited = is_overlapped, False
        self._paced: PacedSteps | None = None
        self.begun = self.ended = 0.0
        """When the first of its steps was taken and when the last had been; 0 where nobody takes note of that."""
        self._since = instruments.tracer.now()
        if recorder := instruments.recorder:
            self._handle = recorder.start(instruments.group, operation, num_bytes)

    def steps(self, steps: Steps) -> Steps:
        """Return the steps so that it is known when they are taken, and on a pretended device as late as there."""
        if self._instruments.pace is not None:
            self._paced = self._instruments.pace.steps(steps, self.operation, self._num_bytes)
            return self._paced
        return self._timed(steps) if self._is_overlapped and self._instruments.is_traced else steps

    def _timed(self, steps: Steps) -> Steps:
        self.begun = time.monotonic()
        try:
            yield from steps
        finally:
            self.ended = time.monotonic()

    def end(self) -> None:
        """Take note that all has moved; any thread may call."""
        instruments = self._instruments
        if self._paced is not None:
            self.begun, self.ended = self._paced.begun, self._paced.ended
        if self._is_overlapped and self.ended:
            what = instruments.name, instruments.lane, self.operation, self._num_bytes
            instruments.tracer.overlapped(*what, self.begun, self.ended)
        if instruments.recorder:
            instruments.recorder.finish(self._handle)

    def begin_wait(self) -> None:
        """Take note that the rank waits from now on, where it has computed meanwhile."""
        if self._is_overlapped:
            self._since = self._instruments.tracer.now()

    def end_wait(self) -> None:
        """Take note that the rank has waited for the operation; again, if it has before, changes nothing."""
        if self._was_awaited:
            return
        self._was_awaited = True
        if self._paced is not None:
            self._paced.meet()
        instruments = self._instruments
        if self._is_overlapped:
            instruments.tracer.waited(instruments.name, self.operation, self._since)
        else:
            what = instruments.name, instruments.lane, self.operation, self._num_bytes
            instruments.tracer.exposed(*what, self._since)
