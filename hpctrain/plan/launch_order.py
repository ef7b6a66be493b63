"""Proves that devices which do one collective at a time come to the end of a step: no two wait for each other.

A rank launches the operations of all its groups in the order in which it executes its schedule (`comm.launches`). An
operation ends when all ranks of its group have come to it. These orders fit together if there is one order of all
operations that contains each of them; then the first operation that has not ended is one that nobody is kept from.

The event loop of `plan.schedule_run` looks for it, by rules that are harder than need be:

| operation                          | rule                                                                        |
|------------------------------------|-----------------------------------------------------------------------------|
| over x, y, z                       | the ranks of a tile execute the same instructions: they are one runner      |
| of holders, ZeRO 2 and 3           | the tiles of a stage take each pass together                                |
| of holders, sums that start early  | tiles with an item wait for each other, item by item, before they continue  |
| of holders, at the end of a step   | all tiles are there, and launch in the order of `RankShards`                |

MPI that is given memory of devices may need the devices of both ranks for a message. NVIDIA's guide calls it "not
guaranteed to be safe" while NCCL uses them. `check_messages` proves that no rank waits in an operation for one that
waits in such a message, whatever is late:

- A message may be late until its sender has ended all operations that it can come to before the message has arrived.
- What a rank knows of arrivals it knows by messages: who has its gradient back knows that its activation has arrived.
- At the end of a step tiles sum item by item. A tied embedding is summed by the first and the last tiles.

Two tiles whose passes both have operations, and whose messages cross, as in 1F1B, are refused: a rank of each tile may
wait in its pass for the other one, which waits in a message.
"""

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
    Instruction,
    Op,
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


@dataclass(eq=False)
class Meeting:
    """The sum of the gradients of one item, over all tiles that have it."""

    size: int = 0
    """How many runners have the item."""
    arrived: set[Runner] = field(default_factory=set)


@dataclass(eq=False)
class SummingRunner(Runner):
    """Ranks of one tensor grid that start sums of gradients early."""

    scattering: deque[Interval | None] = field(default_factory=deque)
    """Layers whose gradients are in flight over z. None: a layer whose gradients are not final."""
    sums: deque[int] = field(default_factory=deque)
    """The items whose sums are to be launched next."""
    listed: int = -1
    """The last instruction whose sums are in `sums`, or were."""


class LaunchOrderRun(ScheduleRun):
    """One step of all ranks whose devices do one collective at a time."""

    def __init__(self, plan: Plan, schedules: Mapping[Tile, Schedule], overlaps_z: bool):
        self._overlaps_z = overlaps_z
        super().__init__(plan, schedules)
        self._meetings: dict[int, Meeting] = {}

    def runner(self, virtual_stages: tuple[Tile, ...], schedule: Schedule) -> Runner:
        return SummingRunner(virtual_stages, schedule)

    def prices(self, tiles: Sequence[Tile]) -> object:
        """Return what else equivalent pipelines have in common."""
        return tuple(self._num_buffers(tile) for tile in tiles)

    def _num_buffers(self, tile: Tile) -> int:
        return OVERLAPPED_BUFFERS if self._overlaps_z and tile.tensor.z > 1 else 0

    def _connect(self, runners: Sequence[Runner]) -> None:
        super()._connect(runners)
        for runner in runners:
            for item in (item for tile in runner.virtual_stages for item in range(*tile.items)):
                self._meetings.setdefault(item, Meeting()).size += 1

    def may_pass(self, runner: Runner, step: Instruction) -> bool:
        """Say whether the sums that are launched in an instruction have met all who share them."""
        assert isinstance(runner, SummingRunner)
        if runner.listed < runner.place:
            runner.listed = runner.place
            runner.sums.extend(self._started(runner, step))
        while runner.sums:
            meeting = self._meetings[runner.sums[0]]
            meeting.arrived.add(runner)
            if len(meeting.arrived) < meeting.size:
                runner.waits_for = meeting
                return False
            for other in meeting.arrived:
                self._wake(other, meeting)
            runner.sums.popleft()
        return True

    def _started(self, runner: SummingRunner, step: Instruction) -> Iterator[int]:
        """Yield the items whose sums an instruction launches, in that order: behind each layer, or, where gradients go
        over z first, when there is no other buffer for those of the next layer."""
        if step.op in ADDING:
            tile = runner.virtual_stages[step.virtual_stage]
            buffers = self._num_buffers(tile)
            for layer in reversed(layers(tile.items)):
                if buffers and len(runner.scattering) == buffers:
                    yield from _items(runner.scattering.popleft())
                runner.scattering.append(layer if step.starts_reducing and tile.zero < 2 else None)
                if not buffers:
                    yield from _items(runner.scattering.popleft())
        elif step.op is Op.REDUCE_GRADIENTS:
            while runner.scattering:
                yield from _items(runner.scattering.popleft())

    def run(self) -> None:
        super().run()
        for runner in self.runners.values():
            if isinstance(runner, SummingRunner) and runner.sums:
                item, tile = runner.sums[0], runner.virtual_stages[0]
                raise PlanError(f"{label(tile)} waits for ever to sum the gradients of item {item}")


def _items(layer: Interval | None) -> Iterator[int]:
    return reversed(range(*layer)) if layer else iter(())


def check_launch_order(plan: Plan) -> None:
    """Refuse a plan whose devices could wait for each other where sums of gradients start early. Raises PlanError."""
    schedules = schedules_of(plan, partial(schedule_of, reduce_early=True))
    for overlaps_z in (False, True):
        LaunchOrderRun(plan, schedules, overlaps_z).run()


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
        if step.op in RECEIVING:
            return tile.tensor.y > 1  # which may gather what it has received in parts
        return len(tile.ranks) > 1 or tile.zero >= 2 or step.starts_reducing or step.op is Op.REDUCE_GRADIENTS


Ends = tuple[Tile, Tile]


@dataclass(eq=False)
class WatchedRunner(SummingRunner):
    """Ranks of one tensor grid, and what they know of messages of device memory."""

    arrived: dict[Ends, int] = field(default_factory=dict)
    """By wire, how many of its messages have arrived, as far as the runner can know."""
    operations: list[tuple[int, dict[Ends, int]]] = field(default_factory=list)
    """The places of instructions that use a library, and what was known of arrivals there."""


@dataclass(eq=False)
class WatchedWire(Wire):
    sent: int = 0
    received: int = 0
    known: deque[dict[Ends, int]] = field(default_factory=deque)
    """What the sender of each message on the wire knew of arrivals."""


class MessageRun(LaunchOrderRun):
    """One step of ranks between which MPI moves memory of devices."""

    sums_at_end = True

    def __init__(
        self,
        plan: Plan,
        schedules: Mapping[Tile, Schedule],
        overlaps_z: bool,
        bridge: Bridge,
        held: Mapping[Ends, Sequence[int]] | None = None,
    ):
        """`held` is of `latest`, by wire: behind which place of its sender each message comes at the latest."""
        self._bridge, self._held = bridge, held or {}
        self._outgoing: dict[Runner, list[Wire]] = {}
        super().__init__(plan, schedules, overlaps_z)

    def runner(self, virtual_stages: tuple[Tile, ...], schedule: Schedule) -> Runner:
        return WatchedRunner(virtual_stages, schedule)

    def wire(self, ends: Ends, *rest) -> Wire:
        return WatchedWire(ends, *rest)

    def prices(self, tiles: Sequence[Tile]) -> object:
        return super().prices(tiles), tuple(tile.family for tile in tiles)

    def _connect(self, runners: Sequence[Runner]) -> None:
        super()._connect(runners)
        for wire in self._wires:
            if self._bridge.joins(*wire.ends):
                self._outgoing.setdefault(wire.source, []).append(wire)
        shared = Meeting(sum(any(map(self._is_an_end, runner.virtual_stages)) for runner in runners))
        self._meetings[TIED] = shared

    def _is_an_end(self, tile: Tile) -> bool:
        return not tile.is_idle and not (self._plan.upstream(tile) and self._plan.downstream(tile))

    def _started(self, runner: SummingRunner, step: Instruction) -> Iterator[int]:
        yield from super()._started(runner, step)
        if step.op is Op.REDUCE_GRADIENTS:
            yield from (item for tile in runner.virtual_stages for item in range(*tile.items))
            if self._bridge.is_tied and any(map(self._is_an_end, runner.virtual_stages)):
                yield TIED

    def has_arrived(self, wire: Wire) -> bool:
        assert isinstance(wire, WatchedWire) and isinstance(wire.source, WatchedRunner)
        if not wire.microbatches:
            return False
        held = self._held.get(wire.ends)
        done = wire.source.operations[-1][0] if wire.source.operations else -1
        return held is None or held[wire.received] <= done

    def compute(self, runner: Runner, step: Instruction) -> None:
        """Take note of the operations of an instruction, which have ended: its messages need not be late any more."""
        assert isinstance(runner, WatchedRunner)
        if self._bridge.launches(runner.virtual_stages[step.virtual_stage], step):
            runner.operations.append((runner.place, dict(runner.arrived)))
            for wire in self._outgoing.get(runner, ()):
                self._wake(wire.target, wire)

    def send(self, runner: Runner, step: Instruction, wires: tuple[Wire, ...]) -> None:
        assert isinstance(runner, WatchedRunner)
        for wire in wires:
            assert isinstance(wire, WatchedWire)
            wire.sent += 1  # of a full channel the first message has arrived before another one is sent
            runner.arrived[wire.ends] = max(runner.arrived.get(wire.ends, 0), wire.sent - wire.depth)
        for wire in wires:
            wire.known.append(dict(runner.arrived))  # pyright: ignore[reportAttributeAccessIssue]

    def receive(self, runner: Runner, step: Instruction, wires: tuple[Wire, ...]) -> None:
        assert isinstance(runner, WatchedRunner)
        for wire in wires:
            assert isinstance(wire, WatchedWire)
            wire.received += 1
            for ends, count in (wire.known.popleft() | {wire.ends: wire.received}).items():
                runner.arrived[ends] = max(runner.arrived.get(ends, 0), count)
        self.compute(runner, step)

    def latest(self) -> dict[Ends, list[int]]:
        """Return, of a run that has ended, the last place of its sender before which each message may be on its way:
        an instruction with operations that was reached without knowing of the arrival; -1: there is none."""
        result = {}
        for runner, wires in self._outgoing.items():
            assert isinstance(runner, WatchedRunner)
            for wire in wires:
                assert isinstance(wire, WatchedWire)
                known = [arrived.get(wire.ends, 0) for _, arrived in runner.operations]
                last = [bisect_right(known, number) - 1 for number in range(wire.sent)]
                result[wire.ends] = [runner.operations[at][0] if at >= 0 else -1 for at in last]
        return result


TIED = -1
"""In the place of an item: the embedding that the first and the last tiles have."""


def check_messages(plan: Plan, bridge: Bridge, reduces_early: bool, overlaps_z: bool) -> None:
    """Refuse a plan by which a rank could wait in an operation of a library for one that waits in a message of device
    memory. Raises PlanError."""
    training = schedules_of(plan, partial(schedule_of, reduce_early=reduces_early))
    for schedules in (training, schedules_of(plan, forward_only)):
        first = MessageRun(plan, schedules, overlaps_z, bridge)
        first.run()
        MessageRun(plan, schedules, overlaps_z, bridge, first.latest()).run()
