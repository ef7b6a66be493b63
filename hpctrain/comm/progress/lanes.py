"""Lanes: communication that continues while the rank computes.

A lane is an ordered stream of operations with connections of its own; several lanes move independently. One
`ProgressEngine` moves all lanes of a rank: each operation is a generator of steps, and whoever polls takes every lane's
first operation as far as it goes. A thread polls while there is work, so that progress never depends on what the main
thread does; a main thread that waits polls too, which spares it the thread's wake-up.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from hpctrain.comm.progress.instruments import ObservedOperation
from hpctrain.comm.waiting import (
    FIRST_SLEEP_SECONDS,
    LONGEST_KNOWN_SLEEP_SECONDS,
    LONGEST_SLEEP_SECONDS,
    WAKE_SECONDS,
    Condition,
    Patience,
    Steps,
    wait_until,
)


class Work:
    """An operation in flight on a lane."""

    __slots__ = ("_engine", "_error", "_observed", "_patience", "condition", "ended", "steps")

    def __init__(self, engine: "ProgressEngine", steps: Steps, patience: Patience, observed: ObservedOperation):
        """`observed` learns of the last step from who takes it, and of the end of the wait from who has waited."""
        self.steps, self._observed = steps, observed
        self.condition: Condition | None = None
        self._engine, self._patience = engine, patience
        self.ended = False
        self._error: Exception | None = None

    def done(self) -> bool:
        """Say whether it has ended, well or not; polls."""
        if not self.ended:
            self._engine.poll()
        return self.ended

    def wait(self) -> None:
        """Return when it has ended. Raises its error, or CommError if it takes longer than the patience."""
        self._observed.begin_wait()
        if not self.done():
            wait_until(self.done, self._awaited, self._patience, self.not_before)
        self._observed.end_wait()
        if self._error is not None:
            raise self._error

    def not_before(self) -> float:
        """Return a time of `time.monotonic` before which polling does not move it; 0 where there is none."""
        hint = self.condition and self.condition.not_before
        return hint() if hint else 0.0

    def _awaited(self) -> str:
        return f"{self.condition.awaited if self.condition else 'its turn'} in {self._observed.operation}"

    def advance(self) -> bool:
        """Take steps until it waits or ends; return whether it has ended. For `ProgressEngine`."""
        try:
            if self.condition is not None and not self.condition.ready():
                return False
            for condition in self.steps:
                self.condition = condition
                if not condition.ready():
                    return False
        except Exception as error:
            self._error = error  # it is not ended for the flight record, which shows what hung
        else:
            self._observed.end()
        self.ended = True
        return True


class PendingNumbers:
    """A gather of numbers that is in flight. Made by `World.gather_numbers`; every rank waits for its own."""

    def __init__(self, work: Work, received: list[bytes]):
        """`received` has the float64 numbers of each rank when the `work` has ended; it is empty but on rank 0."""
        self._work, self._received = work, received

    def done(self) -> bool:
        """Say whether this rank's part of it is over; never waits."""
        return self._work.done()

    def wait(self) -> np.ndarray:
        """Return [ranks, numbers] (float64) on rank 0, and no rows on others, as soon as it is done."""
        self._work.wait()
        return np.array([np.frombuffer(numbers) for numbers in self._received])


class Ended:
    """An operation that is already complete, with the interface of a `Work`, where there is no lane."""

    ended = True

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


ENDED = Ended()


class ProgressEngine:
    """Moves all lanes of one rank."""

    def __init__(self, threaded: bool, enter: Callable[[], None] | None = None):
        """`enter` is called first by the thread that moves lanes: it makes the rank's device the thread's current one,
        which a driver otherwise takes to be device 0."""
        self._enter = enter
        self._lanes: list[deque[Work]] = []
        self._lock = threading.Lock()
        self._busy, self._submitted = threading.Event(), threading.Event()
        self._stop = False
        self._thread = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="lanes", daemon=True)
            self._thread.start()

    def add_lane(self) -> deque[Work]:
        queue: deque[Work] = deque()
        with self._lock:
            self._lanes.append(queue)
        return queue

    def submit(self, queue: deque[Work], work: Work) -> None:
        """Append to a lane, and take what steps can be taken at once."""
        with self._lock:
            queue.append(work)
            self._advance(queue)
            if queue:
                self._busy.set()
                self._submitted.set()

    def poll(self) -> bool:
        """Take what steps can be taken; return whether anything ended. Returns at once if the other thread is at it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            ended = [self._advance(queue) for queue in self._lanes]
            if not any(self._lanes) and not self._stop:
                self._busy.clear()
            return any(ended)
        finally:
            self._lock.release()

    @staticmethod
    def _advance(queue: deque[Work]) -> bool:
        ended = False
        while queue and queue[0].advance():
            queue.popleft()
            ended = True
        return ended

    def _run(self) -> None:
        if self._enter is not None:
            self._enter()
        pause = FIRST_SLEEP_SECONDS
        while True:
            self._busy.wait()
            if self._stop:
                return
            self._submitted.clear()
            pause = FIRST_SLEEP_SECONDS if self.poll() else min(2 * pause, LONGEST_SLEEP_SECONDS)
            known = self._not_before() - time.monotonic() - WAKE_SECONDS
            if known > pause:
                self._submitted.wait(min(known, LONGEST_KNOWN_SLEEP_SECONDS))
            else:
                time.sleep(pause)

    def _not_before(self) -> float:
        """Return a time of `time.monotonic` before which no lane moves by itself; 0 where there is none."""
        with self._lock:
            return min((queue[0].not_before() for queue in self._lanes if queue), default=0.0)

    def close(self) -> None:
        """End the thread; what is in flight is left where it is."""
        with self._lock:  # else a poll that has found no work could take back what wakes the thread
            self._stop = True
            self._busy.set()
            self._submitted.set()
        if self._thread is not None:
            self._thread.join()
