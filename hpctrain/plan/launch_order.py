"""Proves that devices which do one collective at a time come to the end of a step: no two wait for each other.

A rank launches the operations of all its groups in the order in which it executes its schedule (`LaunchOrder`). An
operation ends when all ranks of its group have come to it. These orders fit together if there is one order of all
operations that contains each of them; then the first operation that has not ended is one that nobody is kept from.

The event loop of `plan.schedule_run` looks for it, by rules that are stricter than need be:

| operation                          | rule                                                                        |
|------------------------------------|-----------------------------------------------------------------------------|
| over x, y, z                       | the ranks of a tile execute the same instructions: they are one runner      |
| of holders, ZeRO 2 and 3           | the tiles of a stage take each pass together                                |
| of holders, sums that start early  | tiles with an item wait for each other, item by item, before they continue  |
| of holders, at the end of a step   | tiles wait for each other, item by item, in the order of `Holding`       |

MPI that is given memory of devices may need the devices of both ranks for a message. NVIDIA's guide calls it "not
guaranteed to be safe" while NCCL uses them. `check_messages` proves that no rank waits in an operation for one that
waits in such a message, whatever is late:

- A message may be late until its sender has ended all operations that it can come to before the message has arrived.
- What a rank knows of arrivals it knows by messages: who has its gradient back knows that its activation has arrived.
- At the end of a step tiles sum item by item. A tied embedding is summed by the first and the last tiles.

Two tiles whose passes both have operations, and whose messages cross, as in 1F1B, are refused: a rank of each tile may
wait in its pass for the other one, which waits in a message.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from hpctrain.config.errors import PlanError
from hpctrain.plan.schedule import (
    ADDING,
    RECEIVING,
    Action,
    Instruction,
    Schedule,
    forward_only,
    schedule_of,
    schedules_of,
)
from hpctrain.plan.schedule_run import Runner, ScheduleRun, Wire, label
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers

OVERLAPPED_BUFFERS = 2
"""Layers whose gradients are in the making or in flight over z: the one that goes back, and the one before it."""


class Bridge(NamedTuple):
    """The work of devices whose memory MPI moves to each other."""

    direct: frozenset[str]
    """Families whose memory MPI is given, for messages to other ones of them."""
    launching: frozenset[str]
    """Families whose groups use their maker's library."""
    is_tied: bool
    """Whether the first and the last tiles sum gradients of one embedding."""

    def joins(self, one: Tile, other: Tile) -> bool:
        """Say whether messages between two tiles are of memory of devices."""
        pairs = ((a, b) for a in one.family.split("+") for b in other.family.split("+"))
        return any(a != b and {a, b} <= self.direct for a, b in pairs)

    def launches(self, tile: Tile, step: Instruction) -> bool:
        """Say whether a tile may use a library in an instruction."""
        if self.launching.isdisjoint(tile.family.split("+")):
            return False
        if step.action in RECEIVING:
            return tile.tensor.y > 1  # which may gather what it has received in parts
        return len(tile.ranks) > 1 or tile.zero >= 2 or step.starts_reducing or step.action is Action.REDUCE_GRADIENTS


NO_BRIDGE = Bridge(frozenset(), frozenset(), is_tied=False)
TIED = -1
"""Number in place of an item for the embedding that the first and the last tiles have."""
Ends = tuple[Tile, Tile]


@dataclass(eq=False)
class Meeting:
    """The sum of the gradients of one item, over all tiles that have it."""

    size: int = 0
    """How many runners have the item."""
    arrived: set[Runner] = field(default_factory=set)


@dataclass
class RunnerLog:
    """The operations of one runner, and what it knows of messages of device memory."""

    scattering: deque[Interval | None] = field(default_factory=deque)
    """Layers whose gradients are in flight over z. None: a layer whose gradients are not final."""
    sums: deque[int] = field(default_factory=deque)
    """The items whose sums are to be launched next."""
    listed: int = -1
    """The last instruction whose sums are in `sums`, or were."""
    arrived: dict[Ends, int] = field(default_factory=dict)
    """Number of messages that have arrived on each wire, as far as the runner can know."""
    operations: list[tuple[int, dict[Ends, int]]] = field(default_factory=list)
    """The places of instructions that use a library, and what was known of arrivals there."""


@dataclass
class WireLog:
    """The messages of one wire."""

    sent: int = 0
    received: int = 0
    known: deque[dict[Ends, int]] = field(default_factory=deque)
    """What the sender of each message on the wire knew of arrivals."""


class LaunchOrderRun(ScheduleRun):
    """One step of all ranks whose devices do one collective at a time, and whose memory MPI moves over a bridge."""

    sums_at_end = True

    def __init__(
        self,
        plan: Plan,
        schedules: Mapping[Tile, Schedule],
        overlaps_z: bool,
        bridge: Bridge = NO_BRIDGE,
        held: Mapping[Ends, Sequence[int]] | None = None,
    ):
        """`held` is what `latest` returns: for each message of a wire, the place of its sender behind which it arrives
        at the latest."""
        super().__init__(plan, schedules)
        self._overlaps_z, self._bridge, self._held = overlaps_z, bridge, held or {}
        self._runner_logs = {runner: RunnerLog() for runner in self.runners.values()}
        self._meetings: dict[int, Meeting] = {}
        self._outgoing: dict[Runner, list[Wire]] = {}
        self._wire_logs: dict[Wire, WireLog] = {}

    def connect(self, runners: Sequence[Runner]) -> None:
        super().connect(runners)
        for runner in runners:
            for item in (item for tile in runner.virtual_stages for item in range(*tile.items)):
                self._meetings.setdefault(item, Meeting()).size += 1
        self._meetings[TIED] = Meeting(sum(map(self._has_an_end, runners)))
        for wire in self.wires:
            self._wire_logs[wire] = WireLog()
            if self._bridge.joins(*wire.ends):
                self._outgoing.setdefault(wire.source, []).append(wire)

    def _has_an_end(self, runner: Runner) -> bool:
        """Say whether ranks have the first or the last tile of a path."""
        up, down = self._plan.upstream, self._plan.downstream
        return any(not tile.is_idle and not (up(tile) and down(tile)) for tile in runner.virtual_stages)

    def may_pass(self, runner: Runner, step: Instruction) -> bool:
        """Say whether the sums that are launched in an instruction have met all who share them."""
        log = self._runner_logs[runner]
        if log.listed < runner.place:
            log.listed = runner.place
            log.sums.extend(self._started(runner, step))
        while log.sums:
            meeting = self._meetings[log.sums[0]]
            meeting.arrived.add(runner)
            if len(meeting.arrived) < meeting.size:
                runner.waits_for = meeting
                return False
            for other in meeting.arrived:
                self.wake(other, meeting)
            log.sums.popleft()
        return True

    def _started(self, runner: Runner, step: Instruction) -> Iterator[int]:
        """Yield the items whose sums an instruction launches, in that order: behind each layer, or, where gradients go
        over z first, when there is no other buffer for those of the next layer; the others at the end of the step."""
        scattering = self._runner_logs[runner].scattering
        if step.action in ADDING:
            tile = runner.virtual_stages[step.virtual_stage]
            buffers = OVERLAPPED_BUFFERS if self._overlaps_z and tile.tensor.stored_parts > 1 else 0
            for layer in reversed(layers(tile.items)):
                if buffers and len(scattering) == buffers:
                    yield from _items(scattering.popleft())
                scattering.append(layer if step.starts_reducing and tile.zero < 2 else None)
                if not buffers:
                    yield from _items(scattering.popleft())
        elif step.action is Action.REDUCE_GRADIENTS:
            while scattering:
                yield from _items(scattering.popleft())
            yield from (item for tile in runner.virtual_stages for item in range(*tile.items))
            if self._bridge.is_tied and self._has_an_end(runner):
                yield TIED

    def has_arrived(self, wire: Wire) -> bool:
        held = self._held.get(wire.ends)
        if not wire.microbatches or held is None:
            return bool(wire.microbatches)
        operations = self._runner_logs[wire.source].operations
        return held[self._wire_logs[wire].received] <= (operations[-1][0] if operations else -1)

    def compute(self, runner: Runner, step: Instruction) -> None:
        """Take note of the operations of an instruction, which have ended: its messages need not be late any more."""
        if self._bridge.launches(runner.virtual_stages[step.virtual_stage], step):
            log = self._runner_logs[runner]
            log.operations.append((runner.place, dict(log.arrived)))
            for wire in self._outgoing.get(runner, ()):
                self.wake(wire.target, wire)

    def send(self, runner: Runner, step: Instruction, wires: tuple[Wire, ...]) -> None:
        if not self._outgoing:
            return
        arrived = self._runner_logs[runner].arrived
        for wire in wires:
            self._wire_logs[
                wire
            ].sent += 1  # of a full channel the first message has arrived before another one is sent
            arrived[wire.ends] = max(arrived.get(wire.ends, 0), self._wire_logs[wire].sent - wire.depth)
        for wire in wires:
            self._wire_logs[wire].known.append(dict(arrived))

    def receive(self, runner: Runner, step: Instruction, wires: tuple[Wire, ...]) -> None:
        if not self._outgoing:
            return
        arrived = self._runner_logs[runner].arrived
        for wire in wires:
            log = self._wire_logs[wire]
            log.received += 1
            for ends, count in (log.known.popleft() | {wire.ends: log.received}).items():
                arrived[ends] = max(arrived.get(ends, 0), count)
        self.compute(runner, step)

    def run(self) -> None:
        super().run()
        for runner, log in self._runner_logs.items():
            if log.sums:
                tile = runner.virtual_stages[0]
                raise PlanError(f"{label(tile)} waits for ever to sum the gradients of item {log.sums[0]}")

    def latest(self) -> dict[Ends, list[int]]:
        """Return, of a run that has ended, the last place of its sender before which each message may be on its way:
        an instruction with operations that was reached without knowing of the arrival; -1: there is none."""
        result = {}
        for runner, wires in self._outgoing.items():
            operations = self._runner_logs[runner].operations
            for wire in wires:
                known = [arrived.get(wire.ends, 0) for _, arrived in operations]
                last = [bisect_right(known, number) - 1 for number in range(self._wire_logs[wire].sent)]
                result[wire.ends] = [operations[at][0] if at >= 0 else -1 for at in last]
        return result


def _items(layer: Interval | None) -> Iterator[int]:
    return reversed(range(*layer)) if layer else iter(())


def check_launch_order(plan: Plan) -> None:
    """Refuse a plan whose devices could wait for each other where sums of gradients start early. Raises PlanError."""
    schedules = schedules_of(plan, partial(schedule_of, reduce_early=True))
    for overlaps_z in sorted({False, any(tile.tensor.stored_parts > 1 for tile in plan.tiles)}):
        LaunchOrderRun(plan, schedules, overlaps_z).run()


def shortened(plan: Plan) -> Plan:
    """Return a plan of many microbatches with fewer of them, which may launch its sums in one order if the plan may.

    Ranks warm up and drain as by the plan. They alternate less often, and do the same each time.
    """
    enough = 2 * max(plan.path_length(tile) + tile.extra_warmup for tile in plan.tiles)
    interleaved = (tiles for first in plan.first_tiles if len(tiles := plan.virtual_stages(first)) > 1)
    period = math.lcm(*{plan.depth_from_start(b) - plan.depth_from_start(a) for a, b, *_ in interleaved})
    if plan.microbatches <= enough + period:
        return plan
    return plan.with_schedule(microbatches=enough + (plan.microbatches - enough) % period)


def check_messages(plan: Plan, bridge: Bridge, reduces_early: bool, overlaps_z: bool) -> None:
    """Refuse a plan by which a rank could wait in an operation of a library for one that waits in a message of device
    memory. Raises PlanError."""
    training = schedules_of(plan, partial(schedule_of, reduce_early=reduces_early))
    for schedules in (training, schedules_of(plan, forward_only)):
        first = LaunchOrderRun(plan, schedules, overlaps_z, bridge)
        first.run()
        LaunchOrderRun(plan, schedules, overlaps_z, bridge, first.latest()).run()
