"""Messages between two devices of one host, which copy from each other's memory: no MPI, and no kernel.

The sender copies a part of a message into a slot on its own device, and counts it in host memory that both ranks see.
The receiver copies the slot to its destination, over NVLink, xGMI or PCIe, and counts that. A send of NCCL waits for
another rank on a device; a copy does not. So it needs no place in the order of launches
(`hpctrain.comm.accelerators.launches`).
"""

import os
from collections.abc import Sequence

import torch

from hpctrain.comm.accelerators.base import Accelerator, Event
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.transports.members import Members
from hpctrain.comm.transports.messages import Message, MessagePart, MessageStage
from hpctrain.comm.transports.window import SharedWindow
from hpctrain.comm.waiting import Ready

# Slots of each direction: enough to overlap copies in and out, and little device memory.
SLOTS, SLOT_BYTES = 4, 8 << 20
FILLED, EMPTIED = 0, 1
"""Counters of a rank: its own slots that it has filled, and slots of the other rank that it has emptied."""
# Set to 0: devices never copy from each other's memory.
PEER_VARIABLE = "HPCTRAIN_PEER"
PROVEN_BYTES = 4096


class PeerMemory:
    """The slots of two ranks' devices, and counts of filled and emptied ones. Made by `connect_peers`."""

    def __init__(self, members: Members, accelerator: Accelerator, own: torch.Tensor, other: torch.Tensor):
        """Both ranks must call."""
        self.accelerator = accelerator
        self._window = window = SharedWindow(members, 0)
        self._members, self._memory = members, (own, other)
        self.slot_bytes = own.numel() // SLOTS
        self.own, self.other = own.split(self.slot_bytes), other.split(self.slot_bytes)
        self._me, self._peer = window.counters[window.rank], window.counters[1 - window.rank]
        self.sent = self.received = 0
        """Numbers of slots that this rank began to fill, and to empty."""

    def has_arrived(self) -> bool:
        """Say whether the other rank has filled a slot that this one has not begun to empty."""
        if self.received >= self._peer[FILLED]:
            return False
        self._window.fence()
        return True

    def _note(self, counter: int) -> None:
        """Count a slot that the device has filled or emptied."""
        self._window.publish(counter, self._me[counter] + 1)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Ready:
        return self.accelerator.copy(target, source).query

    def send(self, parts: Sequence[torch.Tensor], queued: Event) -> Message:
        """Return a message whose parts fill slots of this rank's device, after the event `queued`."""

        def fill(part: MessagePart) -> Ready:
            slot = self.own[self.sent % SLOTS]
            self.sent += 1
            return self._copy(slot[: part.data.numel()], part.data)

        stage = MessageStage(fill, lambda: self.sent - self._peer[EMPTIED] < SLOTS and queued.query())
        return Message(parts, [stage], num_ordered=2, end=lambda part: self._note(FILLED))

    def receive(self, parts: Sequence[torch.Tensor], queued: Event) -> Message:
        """Return a message whose parts empty slots of the other rank's device, as `send` fills them."""

        def empty(part: MessagePart) -> Ready:
            slot = self.other[self.received % SLOTS]
            self.received += 1
            return self._copy(part.data, slot[: part.data.numel()])

        stage = MessageStage(empty, lambda: self.has_arrived() and queued.query())
        return Message(parts, [stage], num_ordered=2, end=lambda part: self._note(EMPTIED))

    def abandon(self) -> None:
        """Leave without the other rank. Slots stay until the process ends: copies may be in flight, the other's too."""
        self._me = self._peer = []
        self._window.close()

    def close(self) -> None:
        """Close the slots. Both ranks must call."""
        own, other = self._memory
        self.accelerator.synchronize()
        self.accelerator.close_memory(other)
        self._me = self._peer = []
        self._window.close()
        self._members.barrier()  # neither rank has the other's memory open any more
        self.accelerator.free_memory(own)


def connect_peers(members: Members, accelerator: Accelerator) -> PeerMemory | Ability:
    """Return slots through which two ranks' devices copy, or why they cannot, the same on both.

    Both must call, with their devices bound. Each rank reads bytes from the other as a proof.
    """
    exported, other, refusal, handle = None, None, None, b""
    try:
        if os.environ.get(PEER_VARIABLE) == "0":
            refusal = f"{PEER_VARIABLE}=0"
        elif (exported := accelerator.export_memory(SLOTS * SLOT_BYTES)) is None:
            refusal = f"memory of {accelerator.kind} is not opened by other processes"
        else:
            handle = exported.handle
            exported.memory[:PROVEN_BYTES].copy_(_pattern(members.rank))
            accelerator.synchronize()
    except Exception as error:  # CuPy's errors of drivers
        refusal = f"{type(error).__name__}: {error}"
    gathered = members.allgather((refusal, handle))
    if all(theirs is None for theirs, _ in gathered):
        try:
            other = accelerator.import_memory(gathered[1 - members.rank][1], SLOTS * SLOT_BYTES)
            if not torch.equal(other[:PROVEN_BYTES].cpu(), _pattern(1 - members.rank)):
                refusal = "the other device's bytes arrived changed"
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
    refusals = [text for text in members.allgather(refusal) if text is not None]
    if exported is not None and other is not None and not refusals:
        return PeerMemory(members, accelerator, exported.memory, other)
    if other is not None:
        accelerator.close_memory(other)
    members.barrier()
    if exported is not None:
        accelerator.free_memory(exported.memory)
    return Ability(False, f"the devices do not copy from each other's memory: {refusals[0]}")


def _pattern(rank: int) -> torch.Tensor:
    return ((torch.arange(PROVEN_BYTES) + 91 * rank) % 253).to(torch.uint8)
