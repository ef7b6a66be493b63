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

from hpctrain.comm.progress.instruments import ObservedOperation
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

    def finish_composite(self) -> None:
        """Wait until the composite operation in flight, if there is one, has ended: nothing is launched between its
        parts."""
        composite, self._composite = self._composite, None
        if composite is not None:
            composite.wait()

    def start_composite(self, composite: Work) -> None:
        """Take note of a composite operation that was started after `finish_composite`."""
        self._composite = composite

    def launch(self, operation: "DeviceOperation", patience: Patience, observed: ObservedOperation) -> "DeviceLaunch":
        """Give an operation to the device, after all that were launched before. Raises CommError.

        `observed` learns when that was, and when the host saw its end.
        """
        self.finish_composite()
        self.look()
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            self._wait_for(self._in_flight[0], f"the device, {MOST_IN_FLIGHT} operations behind", patience)
        observed.begun = time.monotonic()
        launch = DeviceLaunch(self.accelerator, self.queue(operation), operation.tensors, observed)
        self._in_flight.append(launch)
        if self.blocks:
            self._wait_for(launch, "the device, in its first step", patience)
        return launch

    def queue(self, operation: "DeviceOperation") -> Event:
        """Queue an operation on the stream; return the place after it."""
        self.stream.wait_event(operation.queued)
        with self.accelerator.on(self.stream):
            condition = next(operation.steps, None)
            assert condition is None, f"an operation that waits for {condition and condition.awaited} is no launch"
        return self.stream.record_event()

    def _wait_for(self, launch: "DeviceLaunch", awaited: str, patience: Patience) -> None:
        """Let the host wait, which looks for errors and moves lanes meanwhile."""

        def is_over() -> bool:
            ended = launch.ended
            self.look()
            self.meanwhile()
            return ended

        wait_until(is_over, lambda: awaited, patience)


class DeviceLaunch:
    """One operation of the library that the device was given whole.

    Who waits for it lets the device wait, while the host continues: what is queued after that finds the result.
    """

    def __init__(
        self, accelerator: LaunchingDevice, end: Event, tensors: Sequence[torch.Tensor], observed: ObservedOperation
    ):
        """`end` is the operation's on the device. `tensors` are kept until somebody has waited for it."""
        self._accelerator, self._end, self._kept, self._observed = accelerator, end, tuple(tensors), observed

    @property
    def ended(self) -> bool:
        """Say whether the device has done it."""
        return self._end.query()

    def done(self) -> bool:
        """Return what `ended` says: nobody has to poll for it."""
        return self.ended

    def wait(self) -> None:
        """Let what this thread queues from now on start after it. The host continues."""
        self._observed.begin_wait()
        self._accelerator.wait_for(self._end)
        self._kept = ()
        self._observed.end_wait()

    def finish(self) -> None:
        """Take note that the device has done it. For `LaunchOrder`."""
        self._observed.ended = time.monotonic()
        self._observed.end()


class DeviceOperation(NamedTuple):
    """An operation that the library does whole: the device is given it at once, and the caller waits for a launch."""

    order: LaunchOrder
    steps: Steps
    """They wait for nothing."""
    queued: Event
    """The device does it after this."""
    tensors: Sequence[torch.Tensor]
    """What it uses."""


class CompositeOperation(NamedTuple):
    """An operation of which the library does parts, launched as messages come: no other launch may come between."""

    order: LaunchOrder
    steps: Steps


Procedure = Steps | DeviceOperation | CompositeOperation
"""What collectives return, for who carries it out."""
