"""The operations of a vendor's library on one device: launched in one order, and done one at a time.

A collective of NCCL occupies its device until all ranks of its group have launched theirs. Nobody promises that two of
them fit on a device at once (https://github.com/NVIDIA/nccl/issues/195 and 217). Ranks whose devices begin with
different ones may therefore wait for each other for ever.

So all groups of a rank share one stream. The device does their operations in the order in which the rank's main thread
asks for them. `hpctrain.plan.launch_order` proves from the schedule that the orders of all ranks fit together.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from hpctrain.comm.progress.lanes import Lane
from hpctrain.comm.progress.operation import EndingDevice, Event, Operation
from hpctrain.comm.waiting import wait_until

LOOK_SECONDS = 0.5
"""Between two looks for an error that a library noticed by itself, such as a peer that is gone."""
MOST_IN_FLIGHT = 128
"""How many operations may wait on a device: fewer than a flight record has slots."""


class Stream(Protocol):
    """A queue of work for the device."""

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on start after the event. The host does not wait."""
        ...

    def record_event(self) -> Event:
        """Return the place after everything that is queued now."""
        ...


class LaunchingDevice(EndingDevice, Protocol):
    """A device as far as launches need it; see `Accelerator`."""

    def use(self) -> None: ...

    def launch_stream(self) -> Stream: ...


class Watched(Protocol):
    """A communicator that notices by itself that a peer or a network is gone."""

    def look(self) -> None:
        """Take note of an error, and abort."""
        ...

    def check(self) -> None:
        """Raise CommError where an error was noted."""
        ...


class LaunchOrder:
    """One rank's launches. Its methods are for the rank's main thread."""

    def __init__(self, accelerator: LaunchingDevice):
        self.accelerator = accelerator
        self._watched: list[Watched] = []
        self._nothing_watched = threading.Event()
        self._in_flight: deque[Operation] = deque()
        self._composite: Operation | None = None
        """The last operation of which the library does parts, as messages come, if it is on a lane."""
        self.blocks = False
        """Whether the host waits for the end of each operation before it continues, as in the first step of a process.

        Kernels are loaded at their first launch, which may wait until the device is idle: for an operation, and so for
        other ranks."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Moves lanes while the host waits so: other ranks may wait for their messages."""

    @cached_property
    def stream(self) -> Stream:
        """The stream on which the device does all of them."""
        return self.accelerator.launch_stream()

    def watch(self, watched: Watched) -> None:
        """Have errors of a communicator end every wait of this rank.

        One thread looks at all of them: a thread that wakes takes the interpreter's lock from the main thread, which
        then waits for a core.
        """
        self._watched.append(watched)
        if len(self._watched) == 1:
            self._nothing_watched = threading.Event()
            threading.Thread(target=self._watch, args=(self._nothing_watched,), name="errors", daemon=True).start()

    def _watch(self, over: threading.Event) -> None:
        self.accelerator.use()  # else each rank would open a context on device 0
        while not over.wait(LOOK_SECONDS):
            for watched in list(self._watched):
                watched.look()

    @property
    def has_library(self) -> bool:
        """Say whether any group of this rank has communicators of a library."""
        return bool(self._watched)

    def forget(self, watched: Watched) -> None:
        if watched in self._watched:
            self._watched.remove(watched)
            if not self._watched:
                self._nothing_watched.set()

    def look(self) -> None:
        """Take note of what the device has done. Raises CommError where a communicator has noticed an error."""
        for each in self._watched:
            each.check()
        self.note_ended()

    def note_ended(self) -> None:
        """Take note of what the device has done."""
        while self._in_flight and self._in_flight[0].ended:
            self._in_flight.popleft().note_end()

    def begin(self, operation: Operation, lane: Lane | None = None) -> None:
        """Begin an operation that no other launch may divide, when the one before it has launched all of its parts.

        What the library does whole is launched now. Of others it does parts, as messages come; they move on a `lane`,
        or are of a blocking call, whose steps the caller takes. Raises CommError.
        """
        composite, self._composite = self._composite, None
        if composite is not None:
            composite.finish()
        if operation.is_launched:
            self._launch(operation)
        elif lane is not None:
            lane.begin(operation)
            self._composite = operation
            if self.blocks:
                operation.finish()

    def _launch(self, operation: Operation) -> None:
        self.look()
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            self._wait_for(self._in_flight[0], f"the device, {MOST_IN_FLIGHT} operations behind")
        operation.advance()
        assert operation.condition is None, f"an operation that waits is no launch: {operation.awaited()}"
        if operation.error is not None:
            raise operation.error
        self._in_flight.append(operation)
        if self.blocks:
            self._wait_for(operation, "the device, in its first step")

    def _wait_for(self, launch: Operation, awaited: str) -> None:
        """Let the host wait, which looks for errors and moves lanes meanwhile."""

        def is_over() -> bool:
            ended = launch.ended
            self.look()
            self.meanwhile()
            return ended

        wait_until(is_over, lambda: awaited, launch.patience)
