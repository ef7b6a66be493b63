"""Instruments observe every operation of a group: flight record, trace of the run, and pace of a pretended device.

Times are seconds of `time.monotonic`; a rehearsal's are pretended ones.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Protocol

from hpctrain.comm.waiting import Condition, Steps
from hpctrain.comm.watchdog.flight import write_ranks
from hpctrain.comm.watchdog.recorder import Recorder


class Tracer:
    """Records spans of one rank's activities. This class drops them, for runs without a trace."""

    def now(self) -> float:
        """Return the time that the rank's computing has reached. Only the computing thread may call."""
        return 0.0

    def computed(self, name: object, since: float) -> None:
        """Record that the rank computed from `since` until now, waits included. `str(name)` is called later, if at
        all."""

    def exposed(self, group: str, lane: str, operation: str, num_bytes: int, since: float) -> None:
        """Record exposed communication: the rank only communicated from `since` until now.

        `lane` is the group's name and its ranks, such as `y 0-3`.
        """

    def waited(self, group: str, operation: str, since: float) -> None:
        """Record that the rank waited for an overlapped operation from `since` until now."""

    def overlapped(self, group: str, lane: str, operation: str, num_bytes: int, begin: float, end: float) -> None:
        """Record an overlapped operation on a lane of a group; any thread may call."""


UNTRACED = Tracer()


class PacedSteps(Protocol):
    """The steps of one operation on pretended devices."""

    begun: float
    """Time at which the first step could be taken."""
    ended: float
    """Time at which the last step was taken."""

    def __iter__(self) -> Steps: ...

    def __next__(self) -> Condition: ...

    def meet(self) -> None:
        """Let the device wait for the operation. The rank calls it after its own wait."""
        ...


class RehearsedTiming(Protocol):
    """Lets the operations of one group begin and end at the times of pretended devices."""

    group: str

    def steps(self, steps: Steps, operation: str = "", num_bytes: int = 0) -> PacedSteps: ...


class Instruments:
    """The instruments of one rank's part of a group; without arguments they record nothing."""

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
        self._is_closed = False
        self.tracer, self.is_traced, self.pace = tracer, tracer is not UNTRACED, pace
        self.lane = f"{name} {write_ranks(ranks)}{which and f' {which}'}" if self.is_traced else ""

    def unrecorded(self) -> "Instruments":
        """Return the same instruments without the flight record."""
        result = copy(self)
        result.recorder = None
        return result

    def close(self, alone: bool = False) -> None:
        """Record that all ranks close the group, or that this one leaves it `alone`. A second call does nothing."""
        if self.recorder is not None and not (alone or self._is_closed):
            self.recorder.close_group(self.group)
        self._is_closed = True

    def recorded(self, operation: str) -> AbstractContextManager:
        """Record the group's activity in a block."""
        assert self.recorder is not None, "groups of several ranks are recorded"
        return self.recorder.recorded(self.group, operation)
