"""Schedules as data: what ranks do in one step, as typed instructions from pure functions.

Ranks have one tile, or several, their virtual stages, between which they alternate. Schedules that are listed by tile
name the first one for all, and each instruction says which virtual stage it is for.

The engine executes them, a person can print them; `plan.schedule_run` proves before the start that they end.
At most `channel_depth` messages of a kind are in flight between two tiles, each in a slot that both made for it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers


class Action(Enum):
    """Kinds of instructions. Each but the last two is about one microbatch."""

    RECEIVE_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    RECEIVE_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    """Computes the gradient of the tile's input, and keeps the operands that gradients of weights need."""
    BACKWARD_WEIGHT = "backward weight"
    """Computes the gradients of weights. Both parts together do what BACKWARD does, to the bit."""
    SEND_GRADIENT = "send gradient"
    REDUCE_GRADIENTS = "reduce gradients"
    UPDATE = "update"

    __hash__ = object.__hash__  # there is one of each; an Enum's own hashes its name, in Python


COMPUTING = (Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
ADDING = (Action.BACKWARD, Action.BACKWARD_WEIGHT)
"""Instructions that add to the gradients of weights."""
GOING_BACK = (Action.BACKWARD, Action.BACKWARD_INPUT)
"""Instructions that need the gradient of a tile's output, and compute that of its input."""
RECEIVING = (Action.RECEIVE_ACTIVATION, Action.RECEIVE_GRADIENT)
SENDING = (Action.SEND_ACTIVATION, Action.SEND_GRADIENT)
EXPECTED_AHEAD = 2
"""Number of receives for which a rank has memory before it comes to them: in the steady state one of each kind."""


@dataclass(frozen=True)
class Instruction:
    action: Action
    microbatch: int = -1
    row_chunk: int = 0
    """Number of the tile's row chunk, for forward and backward passes."""
    starts_reducing: bool = False
    """Whether this pass, the last that adds to gradients, starts to sum each item's when it has passed it.

    Nobody waits for that before REDUCE_GRADIENTS.
    """
    virtual_stage: int = 0
    """Number of the tile among its ranks' tiles, in the order of items."""

    def __str__(self) -> str:
        if self.microbatch < 0:
            return self.action.value
        text = f"{self.action.value} {self.microbatch}" + (f".{self.row_chunk}" if self.row_chunk else "")
        text += f" of virtual stage {self.virtual_stage}" if self.virtual_stage else ""
        return f"{text} and start to reduce" if self.starts_reducing else text


Schedule = Sequence[Instruction]
"""What the ranks of a tile do in a step."""


def channel_depth(plan: Plan, tile: Tile, other: Tile) -> int:
    """Return how many messages a channel between two neighbours holds.

    It is as many as either tile has microbatches in flight, so that no send of a training step waits.
    """
    return max(in_flight(plan, tile), in_flight(plan, other))


def in_flight(plan: Plan, tile: Tile) -> int:
    """Return how many microbatches of a tile are in flight at once, from its forward to its backward pass.

    By 1F1B these are those of its warm-up and the current one. An interleaved pipeline may have fewer in a step.
    """
    virtual_stages = plan.virtual_stages(tile)
    if len(virtual_stages) == 1:
        return min(plan.warm_up(tile) + 1, plan.microbatches)
    return _in_flight(*_place(plan, tile))[virtual_stages.index(tile)]


@lru_cache(maxsize=256)
def _in_flight(virtual_stages: int, stages: int, behind: int, microbatches: int) -> list[int]:
    """Return `in_flight` for each virtual stage of a stage."""
    alive, most = [0] * virtual_stages, [0] * virtual_stages
    for action, virtual_stage, _ in _passes(virtual_stages, stages, behind, microbatches):
        alive[virtual_stage] += 1 if action is Action.FORWARD else -1
        most[virtual_stage] = max(most[virtual_stage], alive[virtual_stage])
    return most


Pass = tuple[Action, int, int]
"""FORWARD or BACKWARD, the virtual stage, the microbatch."""


def passes(plan: Plan, tile: Tile) -> tuple[Pass, ...]:
    """Return the order in which a tile's ranks go through their passes by 1F1B (PipeDream-flush, Narayanan et al. 2021,
    arXiv 2104.04473): warm up, alternate, drain.

    Warm-up forwards: the longest path to the loss (`stages - 1 - stage` in an even pipeline), plus
    its `extra_warmup`. With one more, a message to the next tile and back may take as long as a microbatch before it
    delays them (Zhuang et al. 2023, arXiv 2211.05322).

    Ranks with several virtual stages form an interleaved pipeline. They take as many microbatches through a virtual
    stage as there are stages, then through the next one. They warm up by
    `2 (stages - 1 - stage) + (virtual_stages - 1) stages` passes. Where microbatches are no multiple of the stages, the
    order is that of the next multiple, without the missing ones.
    """
    return _passes(*_place(plan, tile))


def _place(plan: Plan, tile: Tile) -> tuple[int, int, int, int]:
    """Return what the order of a tile's ranks depends on: virtual stages, stages of the pipeline, tiles behind the last
    (of a single tile: its warm-up), microbatches."""
    tiles = plan.virtual_stages(tile)
    stages = plan.depth_from_start(tiles[1]) - plan.depth_from_start(tiles[0]) if len(tiles) > 1 else 1
    behind = plan.depth_to_loss(tiles[-1]) if len(tiles) > 1 else plan.warm_up(tile)
    return len(tiles), stages, behind, plan.microbatches


@lru_cache(maxsize=256)
def _passes(virtual_stages: int, stages: int, behind: int, microbatches: int) -> tuple[Pass, ...]:
    """Return `passes` of a stage."""
    rounds = range(0, microbatches, stages)
    forward = [
        (virtual_stage, m)
        for first in rounds
        for virtual_stage in range(virtual_stages)
        for m in range(first, first + stages)
    ]
    warmup = behind if virtual_stages == 1 else 2 * behind + (virtual_stages - 1) * stages
    made = [(Action.FORWARD, *each) for each in forward[:warmup]]
    for i, (virtual_stage, m) in enumerate(forward):
        made += [(Action.FORWARD, *each) for each in forward[warmup + i : warmup + i + 1]]
        made.append((Action.BACKWARD, virtual_stages - 1 - virtual_stage, m))
    return tuple(each for each in made if each[2] < microbatches)


def _microbatch_steps(
    plan: Plan, tiles: Sequence[Tile], virtual_stage: int, m: int, *actions: Action
) -> Iterator[Instruction]:
    """Yield the passes of one microbatch on a tile, with the messages before and after them.

    Of several passes a row chunk goes through all before the next one: forward and back at the loss, so that only one
    chunk is kept.
    """
    tile, made = tiles[virtual_stage], partial(Instruction, microbatch=m, virtual_stage=virtual_stage)
    if actions[0] is Action.FORWARD and plan.upstream(tile):
        yield made(Action.RECEIVE_ACTIVATION)
    if actions[0] in GOING_BACK and plan.downstream(tile):
        yield made(Action.RECEIVE_GRADIENT)
    for row_chunk in range(tile.row_chunks):
        for action in actions:
            yield made(action, row_chunk=row_chunk)
    if actions[-1] is Action.FORWARD and plan.downstream(tile):
        yield made(Action.SEND_ACTIVATION)
    if actions[-1] in GOING_BACK and plan.upstream(tile):
        yield made(Action.SEND_GRADIENT)


def weight_delay(plan: Plan, tile: Tile) -> int | None:
    """Return how many microbatches a tile's weight passes are behind its input passes; None where a backward pass is
    not split.

    It is not split where no tile waits for the gradient of the input. By 1F1B that gradient is sent as soon as it is
    there (H2, arXiv 2505.17548), and the weights' gradients follow at once, where that costs nothing. With x or y it
    would cost: the products of weights' gradients would no longer hide sums. Tiles that recompute or have row_chunks
    are short of the memory in which the operands wait. Tiles with ZeRO 2 and 3 must all do the same. By ZB-H1 each tile
    keeps as many microbatches in flight as the first one on its longest path does by 1F1B. So weight passes are left
    for the end.
    """
    if not plan.upstream(tile):
        return None
    if plan.schedule == "zb-h1":
        return plan.depth_from_start(tile)
    return 0 if splits_freely(tile) else None


def splits_freely(tile: Tile) -> bool:
    """Say whether it costs a tile nothing to send the gradient of its input before it computes those of weights."""
    return not tile.tensor.cuts_weights and tile.recompute == "none" and tile.row_chunks == 1 and tile.zero < 2


def schedule_of(plan: Plan, tile: Tile, reduce_early: bool = False) -> tuple[Instruction, ...]:
    """Return a training step of a tile's ranks by the plan's schedule; `reduce_early` as in `one_f_one_b`."""
    return one_f_one_b(plan, tile, reduce_early, splits_backward=True)


def one_f_one_b(
    plan: Plan, tile: Tile, reduce_early: bool = False, splits_backward: bool = False
) -> tuple[Instruction, ...]:
    """Return a step in the order of `passes`.

    With `reduce_early`, the same for all tiles, the last pass of each virtual stage that adds to gradients starts to
    reduce them.
    If it `splits_backward`, backward passes are in two parts where `weight_delay` says so, of which that of weights is
    so many passes behind: the order in which tiles wait for each other stays the same. Delayed by the number of tiles
    before this one, it is ZB-H1 (Qi et al. 2024, arXiv 2401.10241).
    """
    if tile.is_idle:
        return (Instruction(Action.UPDATE),)
    tiles = plan.virtual_stages(tile)
    delays = [weight_delay(plan, each) if splits_backward else None for each in tiles]
    steps: list[Instruction] = []
    delayed: deque[tuple[int, int]] = deque()
    for action, virtual_stage, m in passes(plan, tile):
        has_loss, delay = not plan.downstream(tiles[virtual_stage]), delays[virtual_stage]
        if action is Action.FORWARD:
            if not has_loss:  # else it goes forward just before it goes back
                steps += _microbatch_steps(plan, tiles, virtual_stage, m, Action.FORWARD)
            continue
        back = Action.BACKWARD if delay is None else Action.BACKWARD_INPUT
        steps += _microbatch_steps(plan, tiles, virtual_stage, m, *([Action.FORWARD] if has_loss else []), back)
        if delay is not None:
            delayed.append((virtual_stage, m))
            while len(delayed) > delay:
                steps += _microbatch_steps(plan, tiles, *delayed.popleft(), Action.BACKWARD_WEIGHT)
    for late in delayed:
        steps += _microbatch_steps(plan, tiles, *late, Action.BACKWARD_WEIGHT)
    if reduce_early:
        for virtual_stage in range(len(tiles)):
            last = max(
                i for i, step in enumerate(steps) if step.action in ADDING and step.virtual_stage == virtual_stage
            )
            steps[last] = replace(steps[last], starts_reducing=True)
    return (*steps, Instruction(Action.REDUCE_GRADIENTS), Instruction(Action.UPDATE))


def forward_only(plan: Plan, tile: Tile) -> tuple[Instruction, ...]:
    """Return the forward passes alone, for validation."""
    if tile.is_idle:
        return ()
    tiles = plan.virtual_stages(tile)
    forward = [(virtual_stage, m) for action, virtual_stage, m in passes(plan, tile) if action is Action.FORWARD]
    return tuple(step for each in forward for step in _microbatch_steps(plan, tiles, *each, Action.FORWARD))


def schedules_of(plan: Plan, make: Callable[[Plan, Tile], Schedule]) -> dict[Tile, Schedule]:
    """Return the schedules that `make` returns for the ranks of a plan, by their first tiles.

    Ranks with equal schedules share one object, made once.
    """
    made: dict[tuple, Schedule] = {}
    schedules = {}
    for first in plan.first_tiles:
        shapes = [
            (bool(plan.upstream(t)), bool(plan.downstream(t)), t.row_chunks, weight_delay(plan, t))
            for t in plan.virtual_stages(first)
        ]
        key = _place(plan, first), *shapes
        if key not in made:
            made[key] = make(plan, first)
        schedules[first] = made[key]
    return schedules


def layers_in_order(schedule: Sequence[Instruction], tiles: Sequence[Tile]) -> Iterator[Interval]:
    """Yield the layers whose weights ranks with these tiles need, pass by pass: in their order
    forward, from the last to the first backward."""
    for instruction in schedule:
        if instruction.action in (Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT):
            step = 1 if instruction.action is Action.FORWARD else -1
            yield from layers(tiles[instruction.virtual_stage].items)[::step]
