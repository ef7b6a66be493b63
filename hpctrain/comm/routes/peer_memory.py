"""Messages between two devices of one host, which copy them from each other's memory: no MPI, and no kernel.

The sender copies a part of a message into a slot on its own device, and counts it in memory of the host that both ranks
see. The receiver copies the slot to where it belongs, over NVLink, xGMI or PCIe, and counts that. A copy waits for no
other rank on a device. A send of NCCL does; a copy takes no place in the order of launches (`hpctrain.comm.launches`).
"""

import os
from collections import deque
from collections.abc import Sequence

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.window import SharedWindow

# Of each direction: enough that copies in and out overlap, and little of a device.
SLOTS, SLOT_BYTES = 4, 8 << 20
FILLED, EMPTIED = 0, 1
"""Counters of a rank: slots of its own that it has filled, and of the other rank that it has emptied."""
# Set to 0: devices never copy from each other's memory.
PEER_VARIABLE = "HPCTRAIN_PEER"
PROVEN_BYTES = 4096


class PeerMemory:
    """The slots of two ranks' devices, and how many were filled and emptied. Made by `connect_peers`."""

    def __init__(self, window: SharedWindow, accelerator: Accelerator, own: torch.Tensor, other: torch.Tensor):
        self.accelerator = accelerator
        self._window, self._memory = window, (own, other)
        self.slot_bytes = own.numel() // SLOTS
        self.own, self.other = own.split(self.slot_bytes), other.split(self.slot_bytes)
        self._me, self._peer = window.counters[window.rank], window.counters[1 - window.rank]
        self.sent = self.received = 0
        """How many slots this rank began to fill, and to empty."""

    def has_free_slot(self) -> bool:
        return self.sent - self._peer[EMPTIED] < SLOTS

    def has_arrived(self) -> bool:
        """Say whether the other rank has filled a slot that this one did not begin to empty."""
        if self.received >= self._peer[FILLED]:
            return False
        self._window.fence()
        return True

    def note(self, counter: int) -> None:
        """Count a slot that the device has filled or emptied."""
        self._window.publish(counter, self._me[counter] + 1)

    def abandon(self) -> None:
        self._window.abandon()

    def close(self) -> None:
        """Both ranks must call."""
        own, other = self._memory
        self.accelerator.synchronize()
        self.accelerator.close_memory(other)
        self._me = self._peer = []
        self._window.close()  # for which both wait: nobody has the other's memory open any more
        self.accelerator.free_memory(own)


class _PeerMessage:
    """What both directions share."""

    def __init__(self, memory: PeerMemory, parts: Sequence[torch.Tensor], queued: Event):
        self._shared, self._parts, self._queued = memory, parts, queued
        self._is_ready = False
        self._next = 0
        self._copying: deque[Event] = deque()
        self.posted = self.done = False

    def _may_copy(self) -> bool:
        """Say whether all is done that was queued before the message: the host looks, and no copy waits for it."""
        self._is_ready = self._is_ready or self._queued.query()
        return self._is_ready

    def _take(self) -> torch.Tensor:
        self._next += 1
        return self._parts[self._next - 1]

    def _count(self, counter: int) -> None:
        while self._copying and self._copying[0].query():
            self._copying.popleft()
            self._shared.note(counter)
        self.posted = self.done = self._next == len(self._parts) and not self._copying


class PeerSend(_PeerMessage):
    """Fills slots of this rank's device."""

    def move(self) -> None:
        shared = self._shared
        while self._next < len(self._parts) and shared.has_free_slot() and self._may_copy():
            part = self._take()
            slot = shared.own[shared.sent % SLOTS]
            shared.sent += 1
            self._copying.append(shared.accelerator.copy(slot[: part.numel()], part))
        self._count(FILLED)


class PeerReceive(_PeerMessage):
    """Empties slots of the other rank's device."""

    def move(self) -> None:
        shared = self._shared
        while self._next < len(self._parts) and shared.has_arrived() and self._may_copy():
            part = self._take()
            slot = shared.other[shared.received % SLOTS]
            shared.received += 1
            self._copying.append(shared.accelerator.copy(part, slot[: part.numel()]))
        self._count(EMPTIED)


def connect_peers(mpi, comm, accelerator: Accelerator) -> PeerMemory | Ability:
    """Return slots through which two ranks' devices copy, or why they cannot, the same on both.

    `comm` is of these two ranks alone, and owned from now on. Both must call, with their devices bound. That they can
    is proven by bytes that each reads from the other.
    """
    exported, other, refusal, handle = None, None, None, b""
    try:
        if os.environ.get(PEER_VARIABLE) == "0":
            refusal = f"{PEER_VARIABLE}=0"
        elif (exported := accelerator.export_memory(SLOTS * SLOT_BYTES)) is None:
            refusal = f"memory of {accelerator.kind} is not opened by other processes"
        else:
            handle = exported.handle
            exported.memory[:PROVEN_BYTES].copy_(_pattern(comm.rank))
            accelerator.synchronize()
    except Exception as error:  # CuPy's errors of drivers
        refusal = f"{type(error).__name__}: {error}"
    gathered = comm.allgather((refusal, handle))
    if all(theirs is None for theirs, _ in gathered):
        try:
            other = accelerator.import_memory(gathered[1 - comm.rank][1], SLOTS * SLOT_BYTES)
            if not torch.equal(other[:PROVEN_BYTES].cpu(), _pattern(1 - comm.rank)):
                refusal = "the other device's bytes arrived changed"
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
    refusals = [text for text in comm.allgather(refusal) if text is not None]
    if exported is not None and other is not None and not refusals:
        return PeerMemory(SharedWindow(mpi, comm, 0), accelerator, exported.memory, other)
    if other is not None:
        accelerator.close_memory(other)
    comm.Barrier()
    if exported is not None:
        accelerator.free_memory(exported.memory)
    comm.Free()
    return Ability(False, f"the devices do not copy from each other's memory: {refusals[0]}")


def _pattern(rank: int) -> torch.Tensor:
    return ((torch.arange(PROVEN_BYTES) + 91 * rank) % 253).to(torch.uint8)
