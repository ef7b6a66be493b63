"""The operations of a vendor's library on one device: launched in one order, and done one at a time.

A collective of NCCL occupies its device until all ranks of its group have launched theirs. Nobody promises that two of
them fit on a device at once (https://github.com/NVIDIA/nccl/issues/195 and 217). Ranks whose devices begin with
different ones may therefore wait for each other for ever.

So all groups of a rank share one stream. The device does their operations in the order in which the rank's main thread
asks for them. `hpctrain.plan.launch_order` proves from the schedule that the orders of all ranks fit together.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from hpctrain.comm.steps import Steps
from hpctrain.comm.waiting import Patience, wait_until

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator, Event, Stream

LOOK_SECONDS = 0.5
"""Between two looks for an error that a library noticed by itself, such as a peer that is gone."""
MOST_IN_FLIGHT = 128
"""How many operations may wait on a device: fewer than a flight record has slots."""


class Watched(Protocol):
    """What notices by itself that a peer or a network is gone."""

    def check(self) -> None:
        """Raise CommError where it has noticed that."""
        ...


class Noticing(Protocol):
    """A communicator that can be asked for an error."""

    def look(self) -> None:
        """Take note of an error, and abort."""
        ...


class Moving(Protocol):
    """An operation in flight on a lane."""

    def wait(self) -> None:
        """Return when it has ended."""
        ...


@dataclass
class LaunchTimes:
    """When the device was given an operation, and when the host saw that it was done: seconds of `time.monotonic`."""

    begun: float = 0.0
    ended: float = 0.0


class ErrorWatch:
    """A thread that looks for errors of all connections of a rank while there are any.

    One for all: a thread that wakes takes the interpreter's lock from the main thread, which then waits for a core.
    """

    def __init__(self, enter: Callable[[], None] | None = None):
        """`enter` makes the rank's device the current one of each thread that uses the library: otherwise each rank
        would open a context on device 0."""
        self.enter = enter or _nothing
        self._connections: list[Noticing] = []
        self._lock, self._over = threading.Lock(), threading.Event()

    def add(self, connection: Noticing) -> None:
        with self._lock:
            self._connections.append(connection)
            if len(self._connections) == 1:
                self._over = threading.Event()
                threading.Thread(target=self._run, args=(self._over,), name="errors", daemon=True).start()

    def remove(self, connection: Noticing) -> None:
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)
                if not self._connections:
                    self._over.set()

    def _run(self, over: threading.Event) -> None:
        self.enter()
        while not over.wait(LOOK_SECONDS):
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                connection.look()


def _nothing() -> None:
    pass


class LaunchOrder:
    """One rank's launches. Its methods are for the rank's main thread."""

    def __init__(self, accelerator: "Accelerator"):
        self.accelerator = accelerator
        self.errors = ErrorWatch(accelerator.use)
        self._watched: list[Watched] = []
        self._in_flight: deque[DeviceLaunch] = deque()
        self._composite: Moving | None = None
        self.blocks = False
        """Whether the host waits for the end of each operation before it continues, as in the first step of a process.

        Kernels are loaded at their first launch, which may wait until the device is idle: for an operation, and so for
        other ranks."""
        self.meanwhile: Callable[[], object] = _nothing
        """Moves lanes while the host waits so: other ranks may wait for their messages."""

    @cached_property
    def stream(self) -> "Stream":
        """Where the device does all of them."""
        return self.accelerator.launch_stream()

    def watch(self, watched: Watched) -> None:
        """Have errors of a communicator end every wait of this rank."""
        self._watched.append(watched)

    @property
    def has_library(self) -> bool:
        """Whether any group of this rank has communicators of a library."""
        return bool(self._watched)

    def forget(self, watched: Watched) -> None:
        if watched in self._watched:
            self._watched.remove(watched)

    def look(self) -> None:
        """Take note of what the device has done. Raises CommError where a communicator has noticed an error."""
        for each in self._watched:
            each.check()
        self.note_ended()

    def note_ended(self) -> None:
        """Take note of what the device has done."""
        while self._in_flight and self._in_flight[0].ended:
            self._in_flight.popleft().finish()

    def settle(self) -> None:
        """Wait until the composite operation in flight, if there is one, has launched all of its parts."""
        composite, self._composite = self._composite, None
        if composite is not None:
            composite.wait()

    def start_composite(self, composite: Moving) -> None:
        """Take note of a composite operation that was started after `settle`."""
        self._composite = composite

    def launch(self, launch: "DeviceLaunch", patience: Patience) -> None:
        """Give an operation to the device, after all that were launched before. Raises CommError."""
        self.settle()
        self.look()
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            first, awaited = self._in_flight[0], f"the device, {MOST_IN_FLIGHT} operations behind"
            wait_until(lambda: self._is_over(first), lambda: awaited, patience)
        launch.run_on(self.stream, self.accelerator)
        self._in_flight.append(launch)
        if self.blocks:
            wait_until(lambda: self._is_over(launch), lambda: "the device, in its first step", patience)

    def _is_over(self, launch: "DeviceLaunch") -> bool:
        ended = launch.ended
        self.look()
        self.meanwhile()
        return ended


class DeviceLaunch:
    """One operation of the library, which the device is given whole.

    Who waits for it lets the device wait, while the host continues: what is queued after that finds the result.
    """

    def __init__(self, order: LaunchOrder, steps: Steps, queued: "Event", tensors: Sequence[torch.Tensor]):
        """`steps` wait for nothing; the device does them after the event `queued`. `tensors` are what it uses."""
        self._order, self._steps, self._queued = order, steps, queued
        self._kept = tuple(tensors)
        self._place: Event | None = None
        self._on_end: Callable[[], None] = _do_nothing
        self.times = LaunchTimes()

    def start(self, patience: Patience, on_end: Callable[[], None]) -> None:
        """Give it to the device; `on_end` is called when the host sees that it is done. Raises CommError."""
        self._on_end = on_end
        self._order.launch(self, patience)

    def run_on(self, stream: "Stream", accelerator: "Accelerator") -> None:
        """Queue it on a stream. For `LaunchOrder`."""
        self.times.begun = time.monotonic()
        stream.wait_event(self._queued)
        with accelerator.on(stream):
            pending = next(self._steps, None)
            assert pending is None, f"an operation that waits for {pending and pending.awaited} is no launch"
        self._place = stream.record_event()

    @property
    def ended(self) -> bool:
        """Whether the device has done it."""
        return self._place is not None and self._place.query()

    def done(self) -> bool:
        """As `ended`: nobody has to poll for it."""
        return self.ended

    def wait(self) -> None:
        """Let what this thread queues from now on start after it. The host continues."""
        assert self._place is not None, "it was started"
        self._order.accelerator.wait_for(self._place)
        self._kept = ()

    def finish(self) -> None:
        """Take note that the device has done it. For `LaunchOrder`."""
        self.times.ended = time.monotonic()
        self._on_end()


class Composite(NamedTuple):
    """An operation of which the library does parts, launched as messages come: no other launch may come between."""

    order: LaunchOrder
    steps: Steps


Asked = Steps | DeviceLaunch | Composite
"""What collectives return, for who carries it out."""


def _do_nothing() -> None:
    pass
