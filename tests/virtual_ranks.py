"""All ranks of a network in one process and in virtual time: what the fluid model predicts for given steps."""

import math
from collections.abc import Sequence

import torch

from hpctrain.comm.waiting import Ready, Steps
from hpctrain.rehearsal.fabric import FlowNetwork, PretendedNetwork

NUM_SLOTS = 4096


def fluid_of(network: PretendedNetwork, num_slots: int = NUM_SLOTS) -> FlowNetwork:
    """Return a fluid of a network in this process's own memory."""
    memory = memoryview(bytearray(8 * FlowNetwork.num_doubles(num_slots))).cast("d")
    fluid = FlowNetwork(network.bandwidths, [path.ports for path in network.paths], memory)
    fluid.reset()
    return fluid


class VirtualRanks:
    """Ranks that compute in no time, on a described network."""

    def __init__(self, network: PretendedNetwork):
        self.network, self.fluid, self.clock = network, fluid_of(network), 0.0
        self.messages: list[tuple[torch.Tensor, float]] = []
        """By slot: the bytes, and the latency."""

    def run(self, steps: Sequence[Steps]) -> float:
        """Take the steps of all ranks to their ends; return when the last one ended, in seconds."""
        waiting = {rank: pending for rank, s in enumerate(steps) if (pending := next(s, None)) is not None}
        while waiting:
            able = [rank for rank, pending in waiting.items() if pending.ready()]
            for rank in able:
                waiting[rank] = next(steps[rank], None)
            waiting = {rank: pending for rank, pending in waiting.items() if pending is not None}
            if not able:
                self.clock = min([self.fluid.next_end, *self._arrivals()])
                assert self.clock < math.inf, f"ranks {sorted(waiting)} wait for nothing that is in flight"
                self.fluid.advance(self.clock)
        return self.clock

    def _arrivals(self) -> list[float]:
        """Return the arrivals to come of what has left."""
        arrivals = [self.fluid.left(slot) + latency for slot, (_, latency) in enumerate(self.messages)]
        return [time for time in arrivals if self.clock < time < math.inf]

    def arrived(self, slot: int, latency: float) -> bool:
        return self.fluid.left(slot) + latency <= self.clock


class VirtualTransports:
    """The transports of one group, `self[position]` each."""

    def __init__(self, world: VirtualRanks, ranks: Sequence[int]):
        self.world, self.ranks = world, ranks
        self.sent: dict[tuple[int, int], list[int]] = {}
        """The slots of all messages of a pair."""

    def __getitem__(self, position: int) -> "VirtualTransport":
        return VirtualTransport(self, position)


class VirtualTransport:
    name = "virtual"

    def __init__(self, group: VirtualTransports, position: int):
        self.rank, self.size = position, len(group.ranks)
        self._group, self._world = group, group.world
        self._received = [0] * self.size

    def queued(self, tensor: torch.Tensor) -> None:
        pass

    def send(self, peer: int, tensor: torch.Tensor, after: object = None) -> Ready:
        world, network, ranks = self._world, self._world.network, self._group.ranks
        path = ranks[self.rank] * network.num_ranks + ranks[peer]
        slots = self._group.sent.setdefault((self.rank, peer), [])
        slot = len(world.messages)
        world.messages.append((tensor.clone(), network.paths[path].latency_seconds))
        num_bytes = tensor.numel() * tensor.element_size()
        world.fluid.start(slot, path, num_bytes, world.clock, slots[-1] if slots else None)
        slots.append(slot)
        return lambda: world.arrived(slot, 0.0)

    def receive(self, peer: int, tensor: torch.Tensor, after: object = None) -> Ready:
        world, sequence = self._world, self._received[peer]
        self._received[peer] += 1

        def ready() -> bool:
            slots = self._group.sent.get((peer, self.rank), [])
            if sequence >= len(slots):
                return False
            sent, latency = world.messages[slots[sequence]]
            if not world.arrived(slots[sequence], latency):
                return False
            tensor.copy_(sent.view(tensor.shape))
            return True

        return ready
