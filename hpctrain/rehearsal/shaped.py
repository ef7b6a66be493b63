"""Shaped routes, for rehearsal: messages really travel by another route, and arrive when a described network says.

A message is there at start + latency + the time that its bytes take through ports that it shares with all other
messages of all ranks. Start is when its sender posts it, or when the earlier one between the same two ranks of the
group has left. All ranks of a rehearsal are on one host: the flows are in memory that all of them see.
"""

import fcntl
import math
import os
import threading
import time
from collections import deque
from contextlib import suppress

import torch

from hpctrain.comm.topology import Topology, places_of
from hpctrain.comm.transports.members import GroupMessages, Members
from hpctrain.comm.transports.transport import HostTransport, as_bytes
from hpctrain.comm.transports.window import SharedWindow, share_files
from hpctrain.comm.waiting import Ready
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.errors import CommError, LaunchError, TopologyError
from hpctrain.plan.tiling import counted
from hpctrain.rehearsal.accelerator import RehearsedAccelerator
from hpctrain.rehearsal.clock import Clock, DeviceQueue, GroupTiming
from hpctrain.rehearsal.fabric import FlowNetwork, PretendedNetwork

# How many messages of one rank may be in flight or not yet taken by their receivers.
SLOTS_PER_RANK = 256
FREE = -1
# A tag names a message: the tag of its group, its receiver, and how many went before, in these bits of an integer.
RECEIVER_BITS, SEQUENCE_BITS = 12, 32


class HostLock:
    """Mutual exclusion of the ranks of a host and their threads: `with lock`.

    A lock on a file costs 1.5 to 3 us, some 10 where it is contended; those who wait sleep in the kernel, and a process
    that dies lets go. A mutex of the C library in shared memory takes half, but needs ctypes, and the dead keep it.
    """

    def __init__(self, members: Members):
        """All ranks must call."""
        self._file, *others = share_files(members, 0, lambda path, _: os.open(path, os.O_RDWR | os.O_CLOEXEC))
        for file in others:
            os.close(file)
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        os.close(self._file)


class ShapedNetwork:
    """The flows of all ranks, in memory that all of them see. Made once by all ranks, before any shaped transport."""

    def __init__(self, members: Members, network: PretendedNetwork, slots_per_rank: int = SLOTS_PER_RANK):
        """`members` are all ranks of the world. All must call."""
        if members.size != network.num_ranks:
            raise TopologyError(
                f"a network of {network.num_ranks} devices is rehearsed by as many ranks, not {members.size}"
            )
        self.rank, self.size, self.network = members.rank, members.size, network
        self._num_slots = slots_per_rank
        num_slots = slots_per_rank * members.size
        doubles = FlowNetwork.num_doubles(num_slots)
        self._lock = HostLock(members)
        num_bytes = 8 * (doubles + 3 * num_slots) if members.rank == 0 else 0
        self._window = SharedWindow(members, num_bytes)
        memory = self._window.bytes[0].numpy().data
        integers = memory[8 * (doubles + num_slots) :].cast("q")
        self._late = memory[8 * doubles : 8 * (doubles + num_slots)].cast("d")
        self._tags, self._taken = integers[:num_slots], integers[num_slots:]
        self.flows = FlowNetwork(
            network.bandwidths, [path.ports for path in network.paths], memory[: 8 * doubles].cast("d")
        )
        if members.rank == 0:
            self.flows.reset()
            for slot in range(num_slots):
                self._tags[slot] = FREE
        self._free = deque(range(self.rank * slots_per_rank, (self.rank + 1) * slots_per_rank))
        self._finished: set[int] = set()
        """Slots of this rank that it needs no longer; their receivers may."""
        self._open = True
        members.barrier()

    def tag(self, group: int, receiver: int, sequence: int) -> int:
        return ((group << RECEIVER_BITS | receiver) << SEQUENCE_BITS) | sequence

    def start(self, target: int, num_bytes: int, tag: int, behind: int | None, now: float, late: float = 0.0) -> None:
        """Start a flow from this rank at time `now`, of which `late` seconds are lateness; later still where others
        have seen a later time.

        `behind` is the tag of the message before it, if any.
        """
        with self._lock:
            slot = self._free_slot()
            earlier = None if behind is None else self.slot_of(self.rank, behind)
            self._taken[slot], self._tags[slot] = 0, tag
            if self.flows.start(slot, self.rank * self.size + target, num_bytes, now, earlier):
                in_time = now - late
                if earlier is not None:
                    in_time = max(in_time, self.flows.left(earlier) - self._late[earlier])
                self._late[slot] = self.flows.clock - in_time
            elif earlier is not None:
                self._late[slot] = self._late[earlier]

    def late(self, slot: int) -> float:
        """Return by how many seconds a message is late; one that had to wait for another is thought to be as late."""
        return self._late[slot]

    def _free_slot(self) -> int:
        if not self._free:
            for slot in [slot for slot in tuple(self._finished) if self._taken[slot]]:
                self._finished.discard(slot)
                self._tags[slot] = FREE
                self._free.append(slot)
        if not self._free:
            raise CommError(
                f"rank {self.rank} has {self._num_slots} messages in flight that were not received or waited for, and"
                f" a shaped network holds {self._num_slots} of each rank: wait for some before sending more"
            )
        return self._free.popleft()

    def slot_of(self, source: int, tag: int) -> int | None:
        """Return the slot of a message that was started; None if it has left and both its ends have forgotten it."""
        start = source * self._num_slots
        with suppress(ValueError):
            return start + self._tags[start : start + self._num_slots].tolist().index(tag)
        return None

    def left(self, slot: int) -> float:
        """Return when the message has left its sender's port; infinity if it has not."""
        now = time.monotonic()
        left = self.flows.left(slot)
        if left < math.inf or now < self.flows.next_end:
            return left
        with self._lock:
            self.flows.advance(now)
        return self.flows.left(slot)

    def forget(self, slot: int) -> None:
        """Say that its sender or its receiver, whichever this rank is, needs a slot no longer."""
        if slot // self._num_slots == self.rank:
            self._finished.add(slot)
        else:
            self._taken[slot] = 1

    def slow_down(self, times: float) -> None:
        """Let everything take `times` as long from now on; one rank calls."""
        with self._lock:
            self.flows.slow_down(times, time.monotonic())

    def close(self) -> None:
        """Free it, after the transports of all ranks are closed; a second call does nothing."""
        if self._open:
            self._open = False
            del self.flows, self._tags, self._taken, self._late
            self._window.close()
            self._lock.close()


class MessageInFlight:
    """A message in flight; called as a `Ready`, by its sender or its receiver."""

    __slots__ = ("_inner", "_late", "_latency", "_network", "_slot", "_source", "_stream", "_tag", "due")

    def __init__(
        self, network: ShapedNetwork, inner: Ready, source: int, tag: int, latency: float, stream: DeviceQueue | None
    ):
        """`latency` is what passes, for the one who asks, after the last byte left."""
        self._network, self._latency, self._stream = network, latency, stream
        self._inner: Ready | None = inner
        self._source, self._tag = source, tag
        self._slot = -1  # until the message was sent
        self._late = 0.0
        self.due = math.inf
        """When the described network has it there, of `time.monotonic`; known once the last byte has left."""

    def __call__(self) -> bool:
        if self._inner is not None:
            if not self._inner():
                return False
            slot = self._network.slot_of(self._source, self._tag)
            assert slot is not None, "it was started before it was sent"
            self._slot = slot
            self._inner = None  # after that: `not_before` may be asked by another thread
        if self.due == math.inf:
            left = self._network.left(self._slot)
            if left == math.inf:
                return False
            self.due, self._late = left + self._latency, self._network.late(self._slot)
            self._network.forget(self._slot)
        if time.monotonic() < self.due:
            return False
        if self._stream is not None:
            self._stream.reach(self.due, self._late)
        return True

    def not_before(self) -> float:
        """Return a time of `time.monotonic` before which there is no use in calling this; 0 if it must be polled."""
        if self._inner is not None:
            return 0.0  # the bytes themselves move when they are polled
        if self.due < math.inf:
            return self.due
        return self._network.flows.earliest_end(self._slot) + self._latency


class ShapedTransport:
    """Messages of MPI, as late as a described network would deliver them."""

    polls_freely = False  # nor is it of use: they arrive whoever waits for them

    def __init__(
        self,
        network: ShapedNetwork,
        messages: GroupMessages,
        stream: DeviceQueue | None = None,
    ):
        """Messages start at the time of `stream`, which they advance; without one, when they are sent."""
        inner = HostTransport(messages)
        self.name = f"{inner.name}, shaped"
        self.rank, self.size = inner.rank, inner.size
        self._network, self._inner, self._ranks = network, inner, messages.members.ranks
        self._group, self._stream = messages.tag, stream
        self.bytes_sent = inner.bytes_sent
        self._sent, self._received = [0] * inner.size, [0] * inner.size

    def queued(self, tensor: torch.Tensor) -> None:
        """Start messages at the time of `stream` in any case."""

    def send(self, peer: int, tensor: torch.Tensor, after: object = None) -> Ready:
        network, target, count = self._network, self._ranks[peer], self._sent[peer]
        tag = network.tag(self._group, target, count)
        now, late = (time.monotonic(), 0.0) if self._stream is None else (self._stream.done_at, self._stream.late)
        network.start(target, as_bytes(tensor).numel(), tag, tag - 1 if count else None, now, late)
        self._sent[peer] += 1
        return MessageInFlight(network, self._inner.send(peer, tensor), network.rank, tag, 0.0, self._stream)

    def receive(self, peer: int, tensor: torch.Tensor, after: object = None) -> Ready:
        network, source = self._network, self._ranks[peer]
        tag = network.tag(self._group, network.rank, self._received[peer])
        self._received[peer] += 1
        path = network.network.paths[source * network.size + network.rank]
        latency = path.latency_seconds * network.flows.slowdown
        return MessageInFlight(network, self._inner.receive(peer, tensor), source, tag, latency, self._stream)


class RehearsedNetwork:
    """Makes groups whose messages are as late as a described network would deliver them."""

    def __init__(self, network: ShapedNetwork, clock: Clock):
        """`network` is shared by all ranks, and owned from now on; `clock` is this rank's."""
        self._network, self._clock = network, clock

    def pace(self, group: str = "") -> GroupTiming:
        return GroupTiming(self._clock, group)

    def transport(self, messages: GroupMessages, pace: GroupTiming | None) -> ShapedTransport:
        return ShapedTransport(self._network, messages, pace and pace.stream)

    def close(self) -> None:
        """All ranks must call."""
        self._network.close()


def rehearse(world: World, cluster: Cluster, truth: Truth) -> RehearsedAccelerator:
    """Let this rank be the device of its number, in groups made from now on; return the device. All ranks must call.

    Raises LaunchError if there are not as many ranks as devices, TopologyError where the truth of a family is missing
    or the ranks are on several hosts.
    """
    if world.size != cluster.num_devices:
        raise LaunchError(
            f"the cluster has {counted(cluster.num_devices, 'device')} ({cluster.describe()}), but MPI started"
            f" {counted(world.size, 'rank')}; start it with mpirun -n {cluster.num_devices}"
        )
    for device in cluster.devices:
        if device.family not in truth.devices:
            raise TopologyError(
                f"truth.devices.{device.family}: missing; say how pretend devices of family '{device.family}' behave"
            )
    for event in truth.events:
        if not event.ranks(cluster):
            place = f"node {event.node} has none" if event.rank is None else f"rank {event.rank} is none"
            raise TopologyError(f"truth.events: {place} of the cluster's {world.size} devices")
    families = tuple(device.family for device in cluster.devices)
    assert world.communicators.families == families, "the world was started for other families"
    own = cluster.devices[world.rank]
    if len({place.host for place in world.topology.places}) > 1:
        raise TopologyError("a rehearsal runs on one host: its ranks see each other's messages in its memory")
    clock = Clock()
    network = ShapedNetwork(world.space.members(range(world.size)), PretendedNetwork(cluster, truth.time_scale))
    device = RehearsedAccelerator(own.family, truth.devices[own.family], clock, truth.time_scale, world.rank)
    device.events = [event for event in truth.events if world.rank in event.ranks(cluster)]
    device.slow_network = network.slow_down if world.rank == 0 else None
    world.configure(
        topology=Topology(tuple(places_of(cluster)), shares_memory=False),
        rehearsal=RehearsedNetwork(network, clock),
        accelerator=device,
    )
    device.bind()
    return device
