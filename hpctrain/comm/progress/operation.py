"""An operation of a group: begun in its caller's order, advanced by whoever polls, waited for once.

What it does are steps (`hpctrain.comm.waiting`). Flight record, trace and rehearsal see it through the instruments of
its group.

| its steps are                      | who takes them                | its end              | `wait` lets            |
|------------------------------------|-------------------------------|----------------------|------------------------|
| of a blocking call                 | the call                      | is seen by the host  | the host wait          |
| of a group that overlaps           | whoever polls the group's lane | is seen by the host  | the host wait          |
| launches, all of a maker's library | the call: they never wait     | is the device's event | the device wait        |
"""

import time
from collections.abc import Callable, Sequence
from traceback import walk_tb
from typing import Any, Protocol

from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.waiting import Condition, Patience, Steps, wait_until
from hpctrain.config.errors import CommError


class Event(Protocol):
    """A marker in a stream of a device."""

    def query(self) -> bool:
        """Say whether all work before it is done; never waits."""
        ...


class Stream(Protocol):
    """A queue of work for a device."""

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on start after the event. The host does not wait."""
        ...

    def record_event(self) -> Event:
        """Return the place after everything that is queued now."""
        ...


class LaunchingDevice(Protocol):
    """A device that runs whole operations and records their ends; see `Accelerator`."""

    def use(self) -> None: ...

    def launch_stream(self) -> Stream: ...

    def wait_for(self, event: Event) -> None: ...


PASSED = Condition(lambda: True, "its next step")
"""Replaces a condition that came true, so that it is not polled again."""


class Operation:
    """One operation of a group, from the call to the wait for it.

    Its tensors must not be touched until then. `begun_at` is when its first step was taken, `ended_at` when its last
    one was done, in seconds of `time.monotonic`; a rehearsal's are pretended times.
    """

    poll: Callable[[], object] | None = None
    """Advances this operation and those before it on its lane. None: the wait for it takes its steps. Set by its
    lane."""
    condition: Condition | None = None
    """The condition of the current wait, or of the last one."""
    result: Any = None
    """The return value of the steps."""
    begun_at = ended_at = 0.0
    _end: Event | None = None
    error: Exception | None = None
    _is_taken = _is_finished = _was_awaited = False

    def __init__(
        self,
        instruments: Instruments,
        name: str,
        num_bytes: int,
        steps: Steps,
        patience: Patience,
        is_overlapped: bool = False,
        device: LaunchingDevice | None = None,
        kept: Sequence[object] = (),
    ):
        """An overlapped operation continues while the rank computes, until the rank waits for it.

        If its steps are launches on a `device`, they return the event of their end there. The tensors `kept` are kept
        until the host sees a good end, or the rank has waited for it. Without that the stream of a tensor could reuse
        its memory too early.
        """
        self._instruments, self.name, self.num_bytes, self.patience = instruments, name, num_bytes, patience
        self.is_overlapped, self._device, self._kept = is_overlapped, device, kept
        self._since = instruments.tracer.now()
        if recorder := instruments.recorder:
            self._handle = recorder.start(instruments.group, name, num_bytes)
        # A pretended device delays the steps.
        self._paced = instruments.pace.steps(steps, name, num_bytes) if instruments.pace else None
        self._steps = self._paced or steps

    @property
    def is_launched(self) -> bool:
        """Say whether the device was given the whole operation."""
        return self._device is not None

    @property
    def ended(self) -> bool:
        """Say whether it has ended, well or not. A launched operation has ended when the device has done it."""
        return self._is_taken and (self._end is None or self._end.query())

    def done(self) -> bool:
        """Say whether it has ended; polls."""
        if not self._is_taken and self.poll is not None:
            self.poll()
        return self._is_taken and (self._end is None or self._end.query())

    def advance(self) -> bool:
        """Take steps until one must wait; say whether all were taken. For the code that orders operations."""
        if self._is_taken:
            return True
        condition, steps = self.condition, self._steps
        try:
            if condition is None:
                self.begun_at = time.monotonic()
            elif not condition.ready():
                return False
            while True:
                self.condition = condition = next(steps)
                if not condition.ready():
                    return False
        except StopIteration as last:
            self.result = last.value
        except BaseException as error:
            frames = [frame for frame, _ in walk_tb(error.__traceback__)]
            self._kept = (*self._kept, *(dict(frame.f_locals) for frame in frames[1:]))  # scratch, requests
            if not isinstance(error, Exception):
                raise
            self.error = error  # in the flight record it has not ended, so that the record shows which operation hung
        self.ended_at = time.monotonic()
        if self._device is not None:
            self._end = self.result
        elif self.error is None:
            self._kept = ()
            self.note_end()
        self._is_taken = True
        return True

    def note_end(self) -> None:
        """Record that all steps are done; any thread may call. `LaunchOrder` calls it for launched operations."""
        instruments = self._instruments
        if self._end is not None:
            self.ended_at = time.monotonic()
        if self._paced is not None:
            self.begun_at, self.ended_at = self._paced.begun, self._paced.ended
        if self.is_overlapped and (self.poll or self._device):
            what = instruments.name, instruments.lane, self.name, self.num_bytes
            instruments.tracer.overlapped(*what, self.begun_at, self.ended_at)
        if instruments.recorder:
            instruments.recorder.finish(self._handle)

    def wait(self) -> Any:
        """Return the result when the operation has ended. For a launched one the device waits, and the host continues.

        Call it once. Raises the operation's error, or CommError if it takes longer than the patience.
        """
        assert not self._was_awaited, f"a second wait for one {self.name} of {self._instruments.name}"
        self._was_awaited = True
        self.finish()
        return self.result

    def finish(self) -> None:
        """Wait as `wait` does. For the code that orders operations: a second call only raises the error again."""
        instruments = self._instruments
        if not self._is_finished:
            if self.is_overlapped:
                self._since = instruments.tracer.now()
            if self._end is not None:
                assert self._device is not None
                self._device.wait_for(self._end)
            elif self.poll is not None:
                if not self.done():
                    wait_until(self.done, self.awaited, self.patience, self.not_before)
            else:
                while not self.advance():
                    condition = self.condition
                    assert condition is not None
                    wait_until(condition.ready, self.awaited, self.patience, condition.not_before)
                    self.condition = PASSED
            self._is_finished = True
            if self.error is None:
                self._kept = ()
            if self._paced is not None:
                self._paced.meet()
            if self.is_overlapped:
                instruments.tracer.waited(instruments.name, self.name, self._since)
            else:
                instruments.tracer.exposed(instruments.name, instruments.lane, self.name, self.num_bytes, self._since)
        if self.error is not None:
            raise self.error

    @property
    def left(self) -> object:
        """Return its steps, their tensors and its own, to be kept where it has not ended well: MPI may still write into
        them."""
        return self.condition, self._steps, self._kept

    def abandon(self) -> object:
        """Leave the operation as it is, without the other ranks: a wait for it raises CommError.

        Return what is `left` of it.
        """
        self.error = CommError(f"{self.name} of {self._instruments.name} was abandoned while it was in flight")
        if self._instruments.recorder:  # else the watchdog would take it for one that hangs
            self._instruments.recorder.abandon(self._handle)
        self._is_taken = True
        left = self.left
        self.condition, self._steps, self._paced, self._kept = None, iter(()), None, ()
        return left

    def not_before(self) -> float:
        """Return the `time.monotonic` before which polling does not move it; 0: polling may help at any time."""
        hint = self.condition and self.condition.not_before
        return hint() if hint else 0.0

    def awaited(self) -> str:
        """Return the name of the condition that it waits for now."""
        return f"{self.condition.awaited if self.condition else 'its turn'} in {self.name}"
