"""Runs the schedules of all ranks against each other: the one event loop of the deadlock check and of the simulator.

The loop has no clock. Ranks advance through their instructions until they must wait, and run again when what they wait
for has come. Messages between two tiles arrive in the order in which they were sent. A receive waits for its message; a
send waits while `channel_depth` messages are on the wire. All ranks sum gradients and update together, so the loop ends
there.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hpctrain.config.errors import PlanError
from hpctrain.plan.schedule import (
    ADDING,
    COMPUTING,
    RECEIVING,
    SENDING,
    Action,
    Instruction,
    Schedule,
    channel_depth,
    forward_only,
    schedule_of,
    schedules_of,
)
from hpctrain.plan.tiling import Plan, Tile

ENDING = (Action.REDUCE_GRADIENTS, Action.UPDATE)
"""The instructions that all ranks execute together, after all others."""


@dataclass(eq=False)
class Wire:
    """The messages of one kind from a tile to another."""

    ends: tuple[Tile, Tile]
    action: Action
    """The instruction that sends them."""
    source: "Runner"
    target: "Runner"
    depth: int
    microbatches: deque[int] = field(default_factory=deque)
    """The microbatches of the messages that were sent and not received."""


@dataclass(eq=False)
class Runner:
    """The ranks of one tensor grid and how far they are in their schedule."""

    virtual_stages: tuple[Tile, ...]
    schedule: Schedule
    place: int = 0
    """The number of instructions that are done."""
    waits_for: object = None
    """A wire, or an operation in which several runners meet."""
    wires: dict[tuple[Action, int], tuple[Wire, ...]] = field(default_factory=dict)
    """The wires that an instruction sends to or receives from, by its kind and virtual stage."""
    partners: tuple["Runner", ...] = ()
    """The runners that take each pass at the same time as this one."""


class ScheduleRun:
    """One step of all ranks, by the hardest rules and without prices.

    A subclass may price the step: it makes runners and wires that carry clocks, and overrides `compute`, `send` and
    `receive`, which are called when an instruction is executed. The order of these calls among runners does not change
    what any runner sends or receives: wires are FIFO, and each has one sender and one receiver.
    """

    sums_at_end = False
    """Whether runners go on to the end of REDUCE_GRADIENTS when they may pass it, and stop before UPDATE."""
    passes_together = True
    """Whether the tiles of a stage with ZeRO 2 or 3, which exchange in every pass, take each pass together."""

    def __init__(self, plan: Plan, schedules: Mapping[Tile, Schedule]):
        self._plan = plan
        originals = self.originals(schedules)
        self.runners = {
            tile: self.runner(plan.virtual_stages(tile), steps)
            for tile, steps in schedules.items()
            if originals[tile] is tile
        }
        """The runners by their first tiles, as the schedules are: of equivalent pipelines the first one's."""
        self.runner_of = {
            tile: self.runners[original] for first, original in originals.items() for tile in plan.virtual_stages(first)
        }
        """The runners by their tiles, and by those whose runners would do the same."""
        self.wires: list[Wire] = []
        self._runnable: deque[Runner] = deque()

    # ---- what a subclass overrides -----------------------------------------------------------------------------------

    def runner(self, virtual_stages: tuple[Tile, ...], schedule: Schedule) -> Runner:
        return Runner(virtual_stages, schedule)

    def wire(self, ends: tuple[Tile, Tile], *rest) -> Wire:
        return Wire(ends, *rest)

    def prices(self, tiles: Sequence[Tile]) -> object:
        """Return what the step of tiles depends on, to compare with that of other tiles: where nothing has a price, all
        but their rows and ranks."""
        return tuple(map(self._plan.equal_work.__getitem__, tiles))

    def has_arrived(self, wire: Wire) -> bool:
        """Say whether the next message of a wire can be received; its receiver is woken where that changes."""
        return bool(wire.microbatches)

    def may_pass(self, runner: Runner, step: Instruction) -> bool:
        """Say whether nothing that is launched in a computing instruction, or in one that ends a step, keeps a runner
        there; called again when it is woken."""
        return True

    def wakes_later(self) -> bool:
        """Let time pass until a runner may go on, where all of them wait; say whether one may."""
        return False

    def compute(self, runner: Runner, step: Instruction) -> None: ...

    def send(self, runner: Runner, step: Instruction, wires: tuple[Wire, ...]) -> None: ...

    def receive(self, runner: Runner, step: Instruction, wires: tuple[Wire, ...]) -> None: ...

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all schedules until every runner is at the end. Raises PlanError where they deadlock."""
        self._runnable.extend(self.runners.values())
        self.connect(tuple(self._runnable))
        while self._runnable or self.wakes_later():
            self.advance(self._runnable.popleft())
        self._check_ends()
        for wire in self.wires:
            if wire.microbatches:
                sender, receiver = map(label, wire.ends)
                raise PlanError(
                    f"{sender}: '{wire.action.value} {wire.microbatches[0]}' to {receiver} is never received"
                )

    def _check_ends(self) -> None:
        """Refuse schedules that did not all come to the same collectives, which end a step."""
        ends = {runner: runner.schedule[runner.place :] for runner in self.runners.values()}
        for runner, rest in ends.items():
            late = next((step for step in rest if step.action not in ENDING), None)
            if late and rest[0].action in ENDING:
                raise PlanError(f"{label(runner.virtual_stages[late.virtual_stage])}: '{late}' comes after '{rest[0]}'")
        if stuck := [
            (rest[0], runner.virtual_stages) for runner, rest in ends.items() if rest and rest[0].action not in ENDING
        ]:
            waits = "; ".join(
                f"{label(virtual_stages[step.virtual_stage])} waits at '{step}'" for step, virtual_stages in stuck[:4]
            )
            raise PlanError(f"the schedule deadlocks: {waits}")
        first, *others = ends
        for other in others:
            if [step.action for step in ends[other]] != [step.action for step in ends[first]]:
                mine, theirs = (", ".join(map(str, ends[each])) or "no more" for each in (first, other))
                one, another = (label(each.virtual_stages[0]) for each in (first, other))
                raise PlanError(
                    f"the schedule deadlocks: {one} ends with '{mine}' and {another} with '{theirs}',"
                    " which all ranks do together"
                )

    def originals(self, schedules: Mapping[Tile, Schedule]) -> dict[Tile, Tile]:
        """Return by first tile the one in whose place it is in the first equivalent pipeline.

        Pipelines that share no messages, and have the same items, schedules and prices, take the same times, so only
        the first runs. Even plans then take the same time with any number of replicas. Passes that tiles take together
        keep this: a tile and its copy have the same partners and are always equally far.
        """
        known: dict[tuple, list[list[Tile]]] = {}
        result = {tile: tile for tile in schedules}
        for tiles, form in zip(self._plan.pipelines, self._plan.forms, strict=True):
            firsts = [tile for tile in tiles if tile in schedules]
            equivalent = known.setdefault((form, self.prices(tiles)), [])
            for others in equivalent:
                if all(schedules[mine] == schedules[its] for mine, its in zip(firsts, others, strict=True)):
                    result |= zip(firsts, others, strict=True)
                    break
            else:
                equivalent.append(firsts)
        return result

    def connect(self, runners: Sequence[Runner]) -> None:
        """Lay the wires between runners, and name those that take each pass together."""
        down, up = self._plan.downstream, self._plan.upstream
        laid: dict[tuple[Tile, Tile], Wire] = {}
        for tile in (tile for runner in runners for tile in runner.virtual_stages):
            for other in down(tile):
                depth, here, there = channel_depth(self._plan, tile, other), self.runner_of[tile], self.runner_of[other]
                laid[tile, other] = self.wire((tile, other), Action.SEND_ACTIVATION, here, there, depth)
                laid[other, tile] = self.wire((other, tile), Action.SEND_GRADIENT, there, here, depth)
        self.wires = list(laid.values())
        stages: dict[tuple, list[Runner]] = {}
        for runner in runners:
            stages.setdefault(runner.virtual_stages[0].items, []).append(runner)
            for virtual_stage, tile in enumerate(runner.virtual_stages):
                runner.wires |= {
                    (Action.RECEIVE_ACTIVATION, virtual_stage): tuple(laid[other, tile] for other in up(tile)),
                    (Action.SEND_ACTIVATION, virtual_stage): tuple(laid[tile, other] for other in down(tile)),
                    (Action.RECEIVE_GRADIENT, virtual_stage): tuple(laid[other, tile] for other in down(tile)),
                    (Action.SEND_GRADIENT, virtual_stage): tuple(laid[tile, other] for other in up(tile)),
                }
        for runner in runners if self.passes_together else ():
            tile = runner.virtual_stages[0]
            if tile.zero >= 2:
                runner.partners = tuple(other for other in stages[tile.items] if other is not runner)

    def advance(self, runner: Runner) -> None:
        """Take a runner through its instructions until it must wait."""
        schedule, wires_of = runner.schedule, runner.wires
        while runner.place < len(schedule):
            step = schedule[runner.place]
            action = step.action
            if action in COMPUTING:
                if (runner.partners and not self._meet(runner, step)) or not self.may_pass(runner, step):
                    return
                self.compute(runner, step)
            elif action in RECEIVING:
                wires = wires_of[action, step.virtual_stage]
                for wire in wires:
                    if not self.has_arrived(wire):
                        runner.waits_for = wire
                        return
                for wire in wires:
                    if (got := wire.microbatches.popleft()) != step.microbatch:
                        raise PlanError(f"{label(wire.ends[1])} expects microbatch {step.microbatch} and is sent {got}")
                    if wire.source.waits_for is wire:
                        self.wake(wire.source, wire)
                self.receive(runner, step, wires)
            elif action in SENDING:
                wires = wires_of[action, step.virtual_stage]
                for wire in wires:
                    if len(wire.microbatches) >= wire.depth:
                        runner.waits_for = wire
                        return
                self.send(runner, step, wires)
                for wire in wires:
                    wire.microbatches.append(step.microbatch)
                    if wire.target.waits_for is wire:
                        self.wake(wire.target, wire)
            elif not self.may_pass(runner, step) or action is Action.UPDATE or not self.sums_at_end:
                return
            else:
                self.compute(runner, step)
            runner.place += 1

    def wake(self, runner: Runner, event: object) -> None:
        if runner.waits_for is event:
            runner.waits_for = None
            self._runnable.append(runner)

    def _meet(self, runner: Runner, step: Instruction) -> bool:
        """Say whether all partners of a runner have come to its pass, and wake them if it is the last."""
        for other in runner.partners:
            theirs = other.schedule[runner.place] if runner.place < len(other.schedule) else "the end"
            if theirs is not step and theirs != step:
                mine = runner.virtual_stages[step.virtual_stage]
                raise PlanError(
                    f"{label(mine)} exchanges in '{step}' while {label(other.virtual_stages[0])} is at '{theirs}'"
                )
        if any(other.place < runner.place for other in runner.partners):
            runner.waits_for = step.action
            return False
        for other in runner.partners:
            self.wake(other, step.action)
        return True


def check_schedules(plan: Plan, reduce_early: bool = False) -> None:
    """Refuse a plan by which a step of training or validation would wait for ever. Raises PlanError."""
    check_no_deadlock(plan, schedules_of(plan, partial(schedule_of, reduce_early=reduce_early)))
    check_no_deadlock(plan, schedules_of(plan, forward_only))


def check_no_deadlock(plan: Plan, schedules: Mapping[Tile, Schedule]) -> None:
    """Run all ranks' instructions, by their first tiles, against each other; raise PlanError where they would wait for
    ever.

    Every message is received, and is the one that its receiver expects. All tiles sum gradients and update together,
    which is harder than need be: only those that share a parameter have to. Tiles with ZeRO 2 and 3 exchange in every
    pass, and take each pass together. A reduction that starts early waits for nobody, but must be final and be waited
    for: the last pass that adds to gradients starts it, before the reduction. On devices that do one collective at a
    time it does wait: see `plan.launch_order`. Gradients are added in the order of microbatches and row_chunks, so that
    no schedule changes a bit.
    """
    checked: set[int] = set()
    for tile, schedule in schedules.items():
        for virtual_stage, own in enumerate(plan.virtual_stages(tile) if id(schedule) not in checked else ()):
            steps = [step for step in schedule if step.virtual_stage == virtual_stage or step.microbatch < 0]
            _check_order_of_gradients(own, steps)
            _check_early_reduction(own, steps)
        checked.add(id(schedule))
    ScheduleRun(plan, schedules).run()


def _check_order_of_gradients(tile: Tile, steps: Sequence[Instruction]) -> None:
    kept: set[tuple[int, int]] = set()
    added = (-1, 0)
    for step in steps:
        at = step.microbatch, step.row_chunk
        if step.action is Action.BACKWARD_INPUT:
            kept.add(at)
        elif step.action is Action.BACKWARD_WEIGHT and at not in kept:
            raise PlanError(f"{label(tile)}: '{step}' comes before its input pass")
        if step.action in ADDING:
            if at <= added:
                raise PlanError(
                    f"{label(tile)}: '{step}' comes after microbatch {added[0]}, row chunk {added[1]} was added to the"
                    " gradients; add them in order"
                )
            kept.discard(at)
            added = at
    if kept:
        raise PlanError(f"{label(tile)}: '{Instruction(Action.BACKWARD_INPUT, *min(kept))}' has no weight pass")


def _check_early_reduction(tile: Tile, steps: Sequence[Instruction]) -> None:
    starts = [i for i, step in enumerate(steps) if step.starts_reducing]
    if not starts:
        return
    later = [step for step in steps[starts[0] + 1 :] if step.action in ADDING or step.starts_reducing]
    if later:
        raise PlanError(f"{label(tile)}: '{steps[starts[0]]}' comes before '{later[0]}', which adds to the gradients")
    if Instruction(Action.REDUCE_GRADIENTS) not in steps[starts[0] :]:
        raise PlanError(
            f"{label(tile)}: what '{steps[starts[0]]}' starts is never waited for: nothing reduces after it"
        )


def label(tile: Tile) -> str:
    """Return how a tile is called in messages."""
    return f"tile items {list(tile.items)} rows {list(tile.rows)}"
