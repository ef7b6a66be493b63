"""Lanes: operations that continue while the rank computes.

One `ProgressEngine` moves all lanes of a rank: a poll advances the first operation of every lane, or all of them. A
thread polls while there is work, so that progress never depends on the main thread. A main thread that waits polls too,
which saves the time of waking the other thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

from hpctrain.comm.progress.operation import Operation
from hpctrain.comm.waiting import (
    FIRST_SLEEP_SECONDS,
    LONGEST_KNOWN_SLEEP_SECONDS,
    LONGEST_SLEEP_SECONDS,
    WAKE_SECONDS,
)


class Lane:
    """An ordered stream of operations that begin one after the other; several lanes move independently."""

    def __init__(self, engine: "ProgressEngine", moves_all: bool):
        """Only `ProgressEngine.add_lane` calls it."""
        self._engine, self._moves_all = engine, moves_all
        self.queue: deque[Operation] = deque()

    def begin(self, operation: Operation) -> None:
        """Append an operation, and take the steps that need no wait."""
        operation.poll = self._engine.poll
        self._engine.submit(self, operation)

    def finish(self) -> None:
        """Wait for the operations in flight, unless they were abandoned."""
        for operation in tuple(self.queue):
            operation.finish()

    def close(self) -> None:
        """Wait for the operations in flight, and leave the engine."""
        self.finish()
        self._engine.remove(self)

    def abandon(self) -> None:
        """Leave the engine without the other ranks; operations in flight are abandoned."""
        self._engine.remove(self)

    def advance(self) -> bool:
        """Take the steps that need no wait; say whether any operation ended. For `ProgressEngine`."""
        ended = False
        while self.queue and self.queue[0].advance():
            operation = self.queue.popleft()
            if operation.error is not None:
                self._engine.kept.append(operation.left)
            ended = True
        if self._moves_all:
            for operation in tuple(self.queue)[1:]:
                operation.advance()
        return ended

    def not_before(self) -> float:
        """Return the `time.monotonic` before which it does not move by itself; 0: polling may help at any time."""
        moving = self.queue if self._moves_all else tuple(self.queue)[:1]
        return min(operation.not_before() for operation in moving)


class ProgressEngine:
    """Moves all lanes of one rank."""

    def __init__(self, threaded: bool, enter: Callable[[], None] | None = None):
        """`enter` is called first by the thread that moves lanes. It makes the rank's device the thread's current one,
        which a driver otherwise takes to be device 0."""
        self._enter = enter
        self._lanes: list[Lane] = []
        self.kept: list[object] = []
        """Steps and tensors of operations that failed or were abandoned: MPI may still write into these."""
        self._lock = threading.Lock()
        self._busy, self._submitted = threading.Event(), threading.Event()
        self._stop = False
        self._thread = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="lanes", daemon=True)
            self._thread.start()

    def add_lane(self, moves_all: bool = False) -> Lane:
        """Return a new lane. An operation moves when the one before has ended; with `moves_all` when it has begun."""
        lane = Lane(self, moves_all)
        with self._lock:
            self._lanes.append(lane)
        return lane

    def remove(self, lane: Lane) -> None:
        """Move a lane no more, and abandon its operations in flight. A second call does nothing."""
        with self._lock:
            if lane in self._lanes:
                self._lanes.remove(lane)
            self.kept += [operation.abandon() for operation in lane.queue]
            lane.queue.clear()

    def submit(self, lane: Lane, operation: Operation) -> None:
        """Begin an operation on a lane; see `Lane.begin`."""
        with self._lock:
            lane.queue.append(operation)
            lane.advance()
            if lane.queue:
                self._busy.set()
                self._submitted.set()

    def poll(self) -> bool:
        """Take the steps that need no wait; say whether any operation ended. Returns at once if another thread is
        polling."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            ended = is_busy = False
            for lane in self._lanes:
                if lane.queue:
                    ended |= lane.advance()
                    is_busy |= bool(lane.queue)
            if not is_busy and not self._stop:
                self._busy.clear()
            return ended
        finally:
            self._lock.release()

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
            with self._lock:  # before that time no lane moves by itself; 0: polling may help at any time
                not_before = min((lane.not_before() for lane in self._lanes if lane.queue), default=0.0)
            known = not_before - time.monotonic() - WAKE_SECONDS
            if known > pause:
                self._submitted.wait(min(known, LONGEST_KNOWN_SLEEP_SECONDS))
            else:
                time.sleep(pause)

    def finish(self) -> None:
        """Wait for the operations in flight on all lanes."""
        for lane in tuple(self._lanes):
            lane.finish()

    def close(self) -> None:
        """End the thread; operations in flight are left as they are."""
        with self._lock:  # else a poll that has found no work could clear the event that wakes the thread
            self._stop = True
            self._busy.set()
            self._submitted.set()
        if self._thread is not None:
            self._thread.join()
