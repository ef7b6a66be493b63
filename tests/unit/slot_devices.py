"""What each rank of a plan launches in a step, as the engine does it, and devices on which one collective fits."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.groups.group import Backend, Group
from hpctrain.comm.groups.offline_world import OfflineWorld, SilentCollectives
from hpctrain.comm.progress.lanes import Lane, ProgressEngine
from hpctrain.comm.progress.operation import Operation
from hpctrain.config.job import Job
from hpctrain.engine.step.layout import make_layout
from hpctrain.engine.step.optimizer import Optimizer
from hpctrain.engine.step.pipeline import Pipeline
from hpctrain.model.stage import initialise
from hpctrain.plan.tiling import Plan

POSITIONS = 4


class Entry(NamedTuple):
    """One thing that a rank's main thread does."""

    kind: str
    """"collective", "send" or "receive"."""
    group: tuple
    """Whose: of a collective with all its ranks at the end; of a message sender, receiver and channel."""
    is_started: bool = False
    """Whether the rank continues without waiting for it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group[-1]


class NotedGroup(Group):
    """A group that notes when its collectives begin, and leaves the rank's own part."""

    def __init__(self, log: list[Entry], name: str, ranks: Sequence[int], rank: int, lane: Lane | None):
        silent = SilentCollectives(tuple(ranks).index(rank), len(ranks))
        super().__init__(ranks, Backend(silent, None, "noted"), lane=lane)
        self._log, self._noted = log, (name, tuple(ranks))

    def _begin(self, name, tensor, cuts=None, out=None, op="sum", is_started=False) -> Operation:
        if name != "barrier":
            self._log.append(Entry("collective", self._noted, is_started and self.is_overlapped))
        return super()._begin(name, tensor, cuts, out, op, is_started)


class NotedChannel:
    def __init__(self, log: list[Entry], rank: int, peer: int, name: str):
        self._log, self._out, self._in = log, (rank, peer, name), (peer, rank, name)

    def send(self, tensor: torch.Tensor) -> None:
        self._log.append(Entry("send", self._out))

    def expect(self, tensor: torch.Tensor) -> None:
        tensor.zero_()

    def receive(self, tensor: torch.Tensor) -> None:
        self._log.append(Entry("receive", self._in))


class NotingWorld(OfflineWorld):
    """One rank of many, alone: what it would exchange is noted."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.log: list[Entry] = []

    def group(self, ranks: Sequence[int], name: str = "", overlapped: bool = False, on_host: bool = False):
        if len(ranks) == 1:
            return Group(ranks)
        lane = ProgressEngine(threaded=False).add_lane() if overlapped else None
        return NotedGroup(self.log, name, ranks, self.rank, lane)

    def channel(self, peer: int, num_bytes: int, depth: int, name: str = ""):
        return NotedChannel(self.log, self.rank, peer, name)


class AnyBatch:
    def rows(self, rows) -> np.ndarray:
        return np.ones((rows.size, POSITIONS + 1), dtype=np.int64)

    def document_starts(self, rows) -> None:
        return None

    def loss_mask(self, rows) -> None:
        return None


def launched_steps(job: Job, plan: Plan, steps: int = 2) -> dict[int, list[Entry]]:
    """Return by rank what the engine of each launches in some steps of training, one rank after the other."""
    logs = {}
    for rank in plan.ranks:
        world, device = NotingWorld(rank, len(plan.ranks)), CpuAccelerator()
        layout = make_layout(world, job, plan, device)
        initialise(layout.store, job.model, 1)
        optimizer = Optimizer(layout, job.train)
        optimizer.load_masters()
        world.log.clear()
        pipeline = Pipeline(layout, optimizer)
        for step in range(steps):
            pipeline.train(AnyBatch(), step, 100)
        logs[rank] = world.log
    return logs


class Device:
    """One rank and its device, where one collective at a time is: from when it is begun until all its ranks have."""

    def __init__(self, log: Sequence[Entry]):
        self.to_do = deque(log)
        self.streams: dict[object, deque[tuple]] = {}
        self.slot: tuple | None = None
        """The operation that the device has begun: a group, and which of the group's."""
        self.awaited: tuple | None = None
        """The operation for which the host waits."""
        self.counts: Counter[tuple] = Counter()

    @property
    def is_done(self) -> bool:
        return not (self.to_do or self.slot or any(self.streams.values()))

    @property
    def is_free(self) -> bool:
        """Whether no library works on it; all ranks agree on hosts."""
        return self.slot is None or self.slot[0][0] == "everyone"

    def run_host(self, one_stream: bool, blocks: bool, messages: Counter[tuple], sent: list[tuple]) -> bool:
        """Go on until the host must wait; say whether anything was done."""
        moved = False
        while self.to_do and self.awaited is None:
            entry = self.to_do[0]
            if entry.kind == "receive" and not messages[entry.group]:
                return moved
            self.to_do.popleft()
            moved = True
            if entry.kind == "send":
                sent.append(entry.group)
                continue
            if entry.kind == "receive":
                messages[entry.group] -= 1
                continue
            operation = entry.group, self.counts[entry.group]
            self.counts[entry.group] += 1
            self.streams.setdefault(one_stream or (entry.group, entry.is_started), deque()).append(operation)
            if blocks or not entry.is_started:
                self.awaited = operation
        return moved

    def begin(self, random: Random) -> bool:
        """Begin with the first operation of any stream, if nothing is begun."""
        waiting = [stream for stream in self.streams.values() if stream]
        if self.slot is not None or not waiting:
            return False
        self.slot = random.choice(waiting).popleft()
        return True


def run(
    logs: dict[int, list[Entry]],
    seed: int,
    one_stream: bool,
    blocks: bool,
    is_direct: Callable[[int, int], bool] = lambda sender, receiver: False,
) -> list[int]:
    """Run all ranks until nothing moves; return the ranks that are not done.

    Without `one_stream` each group has streams of its own, of which the device takes any. If it `blocks`, each host
    waits for all that it launches, which is the hardest rule. Messages between ranks that are `is_direct` are late as
    long as they may be, and need the devices of both: they move while neither does a collective.
    """
    random, messages, sent = Random(seed), Counter(), []
    devices = {rank: Device(log) for rank, log in logs.items()}
    moved = True
    while moved:
        moved = False
        for rank in random.sample(sorted(devices), len(devices)):
            device = devices[rank]
            moved |= device.run_host(one_stream, blocks, messages, sent)
            moved |= device.begin(random)
            begun = device.slot
            if begun and all(devices[other].slot == begun for other in begun[0][-1]):
                for other in begun[0][-1]:
                    devices[other].slot = None
                    if devices[other].awaited == begun:
                        devices[other].awaited = None
                moved = True
        for message in [each for each in sent if not is_direct(*each[:2])]:
            sent.remove(message)
            messages[message] += 1
            moved = True
        may_move = [each for each in sent if all(devices[rank].is_free for rank in each[:2])]
        if may_move and (not moved or random.random() < 0.1):
            message = random.choice(may_move)
            sent.remove(message)
            messages[message] += 1
            moved = True
    return [rank for rank, device in devices.items() if not device.is_done]
