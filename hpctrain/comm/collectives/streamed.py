"""Collectives on tensors of devices: on a separate stream, after the work queued on the caller's stream."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.comm.accelerators.launches import LaunchOrder
from hpctrain.comm.collectives.flat import Collectives
from hpctrain.comm.collectives.native import NativeCollectives
from hpctrain.comm.operations import OPERATIONS
from hpctrain.comm.transports.transport import DeviceTransport
from hpctrain.comm.waiting import Condition, Ready, Steps


class StreamedCollectives(Collectives):
    """Runs collectives on a stream that is not the caller's.

    They begin on the device after what the caller had queued when it asked, whichever thread takes their steps.

    | the library does        | stream             | they end when                    | no other launch comes between |
    |-------------------------|--------------------|----------------------------------|-------------------------------|
    | all of it               | that of `launches` | the caller's stream waits for it | steps wait for nothing        |
    | parts, between messages | that of `launches` | the device has done it           | yes                           |
    | nothing of it           | one of its own     | the device has done it           | no                            |

    Where messages are of device memory, and other groups have a library, no launch comes between steps either: none of
    the library's operations begins before they have arrived.
    """

    def __init__(
        self,
        inner: Collectives,
        accelerator: Accelerator,
        transport: DeviceTransport,
        natives: Sequence[NativeCollectives] = (),
    ):
        """`natives` are the collectives of the vendor's library that `inner` uses; they report a failed peer."""
        self._natives = natives
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size
        self._inner, self._accelerator, self._transport = inner, accelerator, transport
        self.is_launched = isinstance(inner, NativeCollectives)
        """Whether the library does the whole operation for tensors of the device."""
        self.stream = accelerator.launches.stream if natives else accelerator.new_stream()
        """The device's stream for these operations."""

    def launches_of(self, tensor: torch.Tensor) -> LaunchOrder | None:
        """Return the launch order that an operation on a tensor belongs to; None where it belongs to none."""
        order = self._accelerator.launches
        is_alone = self._natives or (self._transport.is_direct and order.has_library)
        return order if is_alone and self._accelerator.is_on_device(tensor) else None

    def steps(self, operation: str, flat: torch.Tensor, *arguments: Any) -> Steps:
        """Return the steps on the device's stream.

        The place in the caller's stream is taken in this call, not at the first step. A barrier waits for hosts: work
        queued on devices may still be in flight.
        """
        is_on_device = OPERATIONS[operation].is_launched and self._accelerator.is_on_device(flat)
        queued = self._accelerator.queued() if is_on_device else None
        return self._run(self._inner.steps(operation, flat, *arguments), queued)

    def _run(self, steps: Steps, queued: Event | None) -> Steps:
        """Take steps after the event `queued`; return the event of their end if they work on device memory."""
        if queued is not None:
            self.stream.wait_event(queued)
        while True:
            with self._accelerator.on(self.stream):
                condition = next(steps, None)
            if condition is None:
                break
            yield Condition(partial(self._look, condition.ready), condition.awaited)
        if queued is None:
            return None
        done = self.stream.record_event()
        if not (self.is_launched or done.query()):
            yield Condition(partial(self._look, done.query), "the device")
        return done

    def _look(self, ready: Ready) -> bool:
        """Say whether a condition is true, and move messages: other ranks may be waiting for them.

        Raises CommError where a library has noticed that the others are gone.
        """
        self._transport.poll()
        for native in self._natives:
            native.check()
        return ready()
