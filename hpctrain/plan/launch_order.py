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
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpctrain.config.errors import PlanError
from hpctrain.plan.schedule import ADDING, Instruction, Op, Schedule, schedule_of, schedules_of
from hpctrain.plan.schedule_run import Runner, ScheduleRun, label
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
