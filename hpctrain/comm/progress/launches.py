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
from contextlib import AbstractContextManager
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from hpctrain.comm.progress.instruments import Followed
from hpctrain.comm.progress.lanes import Work
from hpctrain.comm.waiting import Patience, Steps, wait_until

LOOK_SECONDS = 0.5
"""Between two looks for an error that a library noticed by itself, such as a peer that is gone."""
MOST_IN_FLIGHT = 128
"""How many operations may wait on a device: fewer than a flight record has slots."""


class Event(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Say whether everything before it is done; never waits."""
        ...


class Stream(Protocol):
    """A queue of work for the device."""

    def wait_event(self, event: Event) -> None:
        """Let what is queued from now on start after the event. The host does not wait."""
        ...

    def record_event(self) -> Event:
        """Return the place after everything that is queued now."""
        ...


class LaunchingDevice(Protocol):
    """A device as far as launches need it; see `Accelerator`."""

    def use(self) -> None: ...

    def launch_stream(self) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager: ...

    def wait_for(self, event: Event) -> None: ...


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
        self._in_flight: deque[DeviceLaunch] = deque()
        self._composite: Work | None = None
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
            self._in_flight.popleft().finish()

    def settle(self) -> None:
        """Wait until the composite operation in flight, if there is one, has launched all of its parts."""
        composite, self._composite = self._composite, None
        if composite is not None:
            composite.wait()

    def start_composite(self, composite: Work) -> None:
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

    def __init__(self, order: LaunchOrder, steps: Steps, queued: Event, tensors: Sequence[torch.Tensor]):
        """`steps` wait for nothing; the device does them after the event `queued`. `tensors` are what it uses."""
        self._order, self._steps, self._queued = order, steps, queued
        self._kept = tuple(tensors)
        self._place: Event | None = None
        self._followed: Followed | None = None

    def start(self, patience: Patience, followed: Followed) -> None:
        """Give it to the device. `followed` learns when that was, and when the host saw its end. Raises CommError."""
        self._followed = followed
        self._order.launch(self, patience)

    def run_on(self, stream: Stream, accelerator: LaunchingDevice) -> None:
        """Queue it on a stream. For `LaunchOrder`."""
        assert self._followed is not None, "it was started"
        self._followed.begun = time.monotonic()
        stream.wait_event(self._queued)
        with accelerator.on(stream):
            pending = next(self._steps, None)
            assert pending is None, f"an operation that waits for {pending and pending.awaited} is no launch"
        self._place = stream.record_event()

    @property
    def ended(self) -> bool:
        """Say whether the device has done it."""
        return self._place is not None and self._place.query()

    def done(self) -> bool:
        """Return what `ended` says: nobody has to poll for it."""
        return self.ended

    def wait(self) -> None:
        """Let what this thread queues from now on start after it. The host continues."""
        assert self._place is not None and self._followed is not None, "it was started"
        self._followed.begin_wait()
        self._order.accelerator.wait_for(self._place)
        self._kept = ()
        self._followed.end_wait()

    def finish(self) -> None:
        """Take note that the device has done it. For `LaunchOrder`."""
        assert self._followed is not None, "it was started"
        self._followed.ended = time.monotonic()
        self._followed.end()


class Composite(NamedTuple):
    """An operation of which the library does parts, launched as messages come: no other launch may come between."""

    order: LaunchOrder
    steps: Steps


Procedure = Steps | DeviceLaunch | Composite
"""What collectives return, for who carries it out."""
