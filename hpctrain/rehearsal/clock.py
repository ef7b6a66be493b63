"""Pretended time: when a described device would have done what its rank has asked for.

All times are seconds of `time.monotonic`, which the ranks of a host share, so that a pretended time is also one at
which something really happens. They are absolute: a rank that is late, as its core was busy, does not make what
follows late too, as long as it catches up. What it does make late are messages that should have started when others
had seen a later time. So each time comes with its lateness: how much earlier it would be if no rank were ever late.
"""

import threading
import time
from collections.abc import Callable

from hpctrain.comm.waiting import WAKE_SECONDS, Condition, Steps

# A rank does not lead its device by more than this: what it sees of others would be of an earlier time.
LONGEST_LEAD_SECONDS = 2e-3
MESSAGES = "send", "receive"


class DeviceQueue:
    """One queue of a device: when all that was queued is done, and how late that is."""

    __slots__ = ("done_at", "late")

    def __init__(self):
        self.done_at = time.monotonic()
        self.late = 0.0
        """The part of `done_at`, in seconds, that is due to messages which started late."""

    def reach(self, when: float, late: float = 0.0) -> None:
        """Let what is queued from now on start no earlier than at time `when`, of which `late` seconds are lateness."""
        in_time = max(self.done_at - self.late, when - late)
        self.done_at = max(self.done_at, when)
        self.late = self.done_at - in_time


class Clock:
    """The stream on which one rank's device computes, and how much of its lanes is in flight meanwhile."""

    def __init__(self):
        self.compute = DeviceQueue()
        self.in_flight: set[TimedOperation] = set()
        """Operations that have begun and not ended. Of several threads."""
        self.busy_seconds = 0.0
        """The seconds that the device computed."""
        self.late_seconds = 0.0
        """The seconds by which steps ended after they should have."""
        self.measured_seconds = 0.0
        """The seconds of all steps together."""
        self._taken = 0.0, 0.0
        """Late and measured seconds when `take_overrun` was called last."""
        self._is_running = False
        self._here = threading.local()

    def charge(self, seconds: float) -> None:
        """Queue what takes the device so long, and wait where the rank leads it by too much."""
        self.compute.done_at += seconds
        self.busy_seconds += seconds
        self._wait(LONGEST_LEAD_SECONDS)

    def slowed(self, seconds: float, times: float) -> float:
        """Return the seconds of an operation queued now, which takes `seconds` alone and `times` as long next to a
        collective.

        A collective that waits for a rank moves nothing. Messages between two ranks slow nothing: NICs
        and copy engines move them, and what a cluster file says was measured with a collective.
        """
        collectives = (operation for operation in tuple(self.in_flight) if operation.operation not in MESSAGES)
        until = max((operation.moving_until for operation in collectives), default=0.0)
        moving = max(0.0, until - self.compute.done_at)
        return min(seconds * times, seconds + moving * (1 - 1 / times))

    @property
    def is_communicating(self) -> bool:
        """Say whether this thread computes for communication now, which the network is charged for."""
        return getattr(self._here, "communicating", False)

    @is_communicating.setter
    def is_communicating(self, value: bool) -> None:
        self._here.communicating = value

    def catch_up(self) -> None:
        """Wait until everything that was queued is done."""
        self._wait(0.0)

    def _wait(self, lead: float) -> None:
        lead_seconds = self.compute.done_at - time.monotonic()
        if lead_seconds > max(lead, 0.0):
            time.sleep(max(0.0, lead_seconds - WAKE_SECONDS))

    @property
    def now(self) -> float:
        """The time at which all is done that the device was asked to compute; between measurements it is not past."""
        if not self._is_running:
            self.compute.reach(time.monotonic())
        return self.compute.done_at

    def forget(self) -> None:
        """Reset the sums of seconds."""
        self.busy_seconds = self.late_seconds = self.measured_seconds = 0.0
        self._taken = 0.0, 0.0

    def dilated_stopwatch(self) -> Callable[[], float]:
        """Start to measure; return a function that returns the pretended seconds since, in seconds of this host.

        These are `time_scale` times those of the cluster. It also notes how late the rank is.
        """
        start, self._is_running = self.now, True
        self.compute.late = 0.0

        def read() -> float:
            self.catch_up()
            self._is_running = False
            seconds = self.compute.done_at - start
            self.late_seconds += max(0.0, time.monotonic() - self.compute.done_at - WAKE_SECONDS) + self.compute.late
            self.measured_seconds += seconds
            return seconds

        return read

    def take_overrun(self) -> float:
        """Return the share of time by which steps were late since this was called last; 0 where there were none."""
        (late, measured), self._taken = self._taken, (self.late_seconds, self.measured_seconds)
        seconds = self.measured_seconds - measured
        return (self.late_seconds - late) / seconds if seconds else 0.0

    @property
    def overrun(self) -> float:
        """The share of time by which steps were late."""
        return self.late_seconds / self.measured_seconds if self.measured_seconds else 0.0


class GroupTiming:
    """Lets the operations of one group begin and end when they would on pretended devices."""

    def __init__(self, clock: Clock, group: str = ""):
        self.clock, self.group = clock, group
        self.stream = DeviceQueue()
        """The group's; its transports start messages at its time, and advance it to their arrival."""

    def steps(self, steps: Steps, operation: str = "", num_bytes: int = 0) -> "TimedOperation":
        """Return steps that begin when all is done that the device was asked to compute before this call."""
        return TimedOperation(self, steps, operation, num_bytes)


class TimedOperation:
    """One operation of a group, as its steps: when it began, and when it had ended.

    Any thread may take the steps; it is made and met on the thread that computes.
    """

    def __init__(self, pace: GroupTiming, steps: Steps, operation: str, num_bytes: int):
        self.pace, self.operation, self.num_bytes = pace, operation, num_bytes
        clock = pace.clock
        self.begun = self.ended = clock.now
        """When the group could begin, and when it had done it."""
        self._late = clock.compute.late
        self._condition: Condition | None = None
        self._steps = self._paced(steps)

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Condition:
        return next(self._steps)

    def _paced(self, steps: Steps) -> Steps:
        clock, stream = self.pace.clock, self.pace.stream
        stream.reach(self.begun, self._late)
        self.begun = stream.done_at
        if time.monotonic() < stream.done_at:
            yield Condition(lambda: time.monotonic() >= stream.done_at, "the pretended device", lambda: stream.done_at)
        clock.in_flight.add(self)
        try:
            while True:
                clock.is_communicating = True
                condition = next(steps, None)
                clock.is_communicating = False
                if condition is None:
                    return
                self._condition = condition
                yield condition
        finally:
            clock.is_communicating = False
            clock.in_flight.discard(self)
            self.ended, self._late = stream.done_at, stream.late

    @property
    def moving_until(self) -> float:
        """See `Condition`. Any thread may ask."""
        condition = self._condition
        return 0.0 if condition is None or condition.moving_until is None else condition.moving_until()

    def meet(self) -> None:
        """Let the device wait for what the group has done: called by who has waited for it."""
        self.pace.clock.compute.reach(self.ended, self._late)
