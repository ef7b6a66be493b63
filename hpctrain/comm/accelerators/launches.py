"""The operations of a vendor's library on one device: launched in one order, and done one at a time.

A collective of NCCL occupies its device until all ranks of its group have launched theirs. Nobody promises that two of
them fit on a device at once (https://github.com/NVIDIA/nccl/issues/195 and 217). Ranks whose devices begin with
different ones may therefore wait for each other for ever.

So all groups of a rank share one stream. The device does their operations in the order in which the rank's main thread
asks for them. `hpctrain.plan.launch_order` proves from the schedule that the orders of all ranks fit together.
"""

import threading
from collections import deque
from functools import cached_property
from typing import Protocol

from hpctrain.comm.progress.lanes import Lane
from hpctrain.comm.progress.operation import LaunchingDevice, Operation, Stream
from hpctrain.comm.waiting import wait_until

LOOK_SECONDS = 0.5
"""Seconds between two checks for an error that a library noticed by itself, such as a lost peer."""
MOST_IN_FLIGHT = 128
"""Most operations that may wait on a device: fewer than a flight record has slots."""


class Watched(Protocol):
    """A communicator that notices a lost peer or network by itself."""

    def look(self) -> None:
        """Record an error of the library, and abort the communicator."""
        ...

    def check(self) -> None:
        """Raise CommError where an error was recorded."""
        ...


class LaunchOrder:
    """One rank's launches. Its methods are for the rank's main thread."""

    def __init__(self, accelerator: LaunchingDevice):
        self.accelerator = accelerator
        self._watched: list[Watched] = []
        self._nothing_watched = threading.Event()
        self._in_flight: deque[Operation] = deque()
        self._composite: Operation | None = None
        """The last operation on a lane of which the library does only parts, between messages."""
        self.blocks = False
        """Whether the host waits for the end of each operation before it continues, as in the first step of a process.

        A kernel is loaded at its first launch. Loading may wait until the device is idle. It may so wait for an
        operation, and for other ranks.
        """

    @cached_property
    def stream(self) -> Stream:
        """The stream on which the device does all operations of the library."""
        return self.accelerator.launch_stream()

    def watch(self, watched: Watched) -> None:
        """Let errors of a communicator end every wait of this rank.

        One thread checks all communicators: a thread that wakes takes the interpreter's lock from the main thread,
        which then waits for a core.
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
        """Record which operations the device has ended. Raises CommError where a communicator has noticed an error."""
        for each in self._watched:
            each.check()
        self.note_ended()

    def note_ended(self) -> None:
        """Record which operations the device has ended."""
        while self._in_flight and self._in_flight[0].ended:
            self._in_flight.popleft().note_end()

    def begin(self, operation: Operation, lane: Lane | None = None) -> None:
        """Begin an operation that no other launch may divide, when the previous one has launched all of its parts.

        An operation that the library does alone is launched now. Others have parts for the library, between messages.
        They move on a `lane`, or the caller takes their steps in a blocking call. Raises CommError.
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
        """Let the host wait for a launch, while it checks for errors. Lanes move meanwhile, as in any wait."""

        def is_over() -> bool:
            ended = launch.ended
            self.look()
            return ended

        wait_until(is_over, lambda: awaited, launch.patience)
