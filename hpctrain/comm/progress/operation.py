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
from typing import Any, Protocol

from hpctrain.comm.progress.instruments import Instruments
from hpctrain.comm.waiting import Condition, Patience, Steps, wait_until
from hpctrain.config.errors import CommError


class Event(Protocol):
    """A place in a stream of a device."""

    def query(self) -> bool:
        """Say whether everything before it is done; never waits."""
        ...


class EndingDevice(Protocol):
    """A device that ends operations which it was given whole."""

    def wait_for(self, event: Event) -> None: ...


PASSED = Condition(lambda: True, "its next step")
"""Takes the place of a condition that came true, which is not asked again."""


class Operation:
    """One operation of a group, from the call to who has waited for it.

    Its tensors must be left alone until then. `begun_at` and `ended_at` are when its first step was taken and when the
    last one had moved, in seconds of `time.monotonic`; a rehearsal's are pretended ones.
    """

    poll: Callable[[], object] | None = None
    """Moves it and what comes before it; None where who waits for it takes its steps. Set by its lane."""
    condition: Condition | None = None
    """What it waits for, or waited for last."""
    result: Any = None
    """What its steps returned."""
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
        device: EndingDevice | None = None,
        kept: Sequence[object] = (),
    ):
        """An overlapped one continues while the rank computes, until it waits for it.

        If its steps are launches on a `device`, they return the event of their end there. The tensors `kept` are kept
        until it has ended, as the host sees it or who waits for it: the stream that they are of would get their memory.
        """
        self._instruments, self.name, self.num_bytes, self.patience = instruments, name, num_bytes, patience
        self.is_overlapped, self._device, self._kept = is_overlapped, device, kept
        self._since = instruments.tracer.now()
        if recorder := instruments.recorder:
            self._handle = recorder.start(instruments.group, name, num_bytes)
        # On a pretended device steps are taken as late as there.
        self._paced = instruments.pace.steps(steps, name, num_bytes) if instruments.pace else None
        self._steps = self._paced or steps

    @property
    def is_launched(self) -> bool:
        """Say whether the device was given all of it."""
        return self._device is not None

    @property
    def ended(self) -> bool:
        """Say whether it has ended, well or not; of what was launched, whether the device has done it."""
        return self._is_taken and (self._end is None or self._end.query())

    def done(self) -> bool:
        """Say whether it has ended; polls."""
        if not self._is_taken and self.poll is not None:
            self.poll()
        return self._is_taken and (self._end is None or self._end.query())

    def advance(self) -> bool:
        """Take steps until one must wait; say whether all were taken. For who orders operations."""
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
        except Exception as error:
            self.error = error  # it is not ended for the flight record, which shows what hung
        self.ended_at = time.monotonic()
        if self._device is not None:
            self._end = self.result
        else:
            self._kept = ()
            if self.error is None:
                self.note_end()
        self._is_taken = True
        return True

    def note_end(self) -> None:
        """Take note that all has moved; any thread may call. Of what was launched, `LaunchOrder` calls."""
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
        """Return the result when it has ended; for what was launched, let the device wait, and the host continue.

        To be called once. Raises its error, or CommError if it takes longer than the patience.
        """
        assert not self._was_awaited, f"a second wait for one {self.name} of {self._instruments.name}"
        self._was_awaited = True
        self.finish()
        return self.result

    def finish(self) -> None:
        """Wait as `wait` does. For who orders operations: a second call only raises the error again."""
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
            self._is_finished, self._kept = True, ()
            if self._paced is not None:
                self._paced.meet()
            if self.is_overlapped:
                instruments.tracer.waited(instruments.name, self.name, self._since)
            else:
                instruments.tracer.exposed(instruments.name, instruments.lane, self.name, self.num_bytes, self._since)
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Leave it where it is, without the others: who waits for it gets a CommError."""
        self.error = CommError(f"{self.name} of {self._instruments.name} was abandoned while it was in flight")
        self._is_taken = True

    def not_before(self) -> float:
        """Return a time of `time.monotonic` before which polling does not move it; 0 where there is none."""
        hint = self.condition and self.condition.not_before
        return hint() if hint else 0.0

    def awaited(self) -> str:
        """Return what it waits for now."""
        return f"{self.condition.awaited if self.condition else 'its turn'} in {self.name}"
