"""Schedules as data: what a tile's ranks do in one step, as typed instructions from pure functions.

The engine executes them, a person can print them, and `check_no_deadlock` proves before anything starts that they
end. Messages between two tiles arrive in the order in which they were sent. A receive waits for its message; a send
waits only while `channel_depth` messages are on their way, each in a slot that both ends made for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hpctrain.errors import PlanError
from hpctrain.plan import Plan, Tile


class Op(Enum):
    """Kinds of instructions. Each but the last two is about one microbatch."""

    RECEIVE_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    RECEIVE_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward input"
    """The gradient of the tile's input; what it takes to add those of weights is kept."""
    BACKWARD_WEIGHT = "backward weight"
    """The rest of it. Both together do what BACKWARD does, to the bit."""
    SEND_GRADIENT = "send gradient"
    REDUCE_GRADIENTS = "reduce gradients"
    UPDATE = "update"


COMPUTING = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
ADDING = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
"""What adds to the gradients of weights."""


@dataclass(frozen=True)
class Instruction:
    op: Op
    microbatch: int = -1
    substep: int = 0
    """Which piece of the tile's rows, for forward and backward."""
    starts_reducing: bool = False
    """Whether this pass, the last that adds to gradients, starts to sum each item's when it has passed it.

    Nobody waits for that before REDUCE_GRADIENTS.
    """

    def __str__(self) -> str:
        if self.microbatch < 0:
            return self.op.value
        text = f"{self.op.value} {self.microbatch}" + (f".{self.substep}" if self.substep else "")
        return f"{text} and start to reduce" if self.starts_reducing else text


def channel_depth(plan: Plan, tile: Tile, other: Tile) -> int:
    """Return how many messages a channel between two neighbours holds: in 1F1B a tile runs ahead of the next one by
    its warm-up and the microbatch that it has in hand."""
    return max(plan.depth_to_loss(tile), plan.depth_to_loss(other)) + 1


def forward_part(plan: Plan, tile: Tile, m: int) -> list[Instruction]:
    """Return the instructions of one microbatch's forward pass on a tile."""
    steps = [Instruction(Op.FORWARD, m, s) for s in range(tile.substeps)]
    if plan.upstream(tile):
        steps.insert(0, Instruction(Op.RECEIVE_ACTIVATION, m))
    if plan.downstream(tile):
        steps.append(Instruction(Op.SEND_ACTIVATION, m))
    return steps


def backward_part(plan: Plan, tile: Tile, m: int, op: Op = Op.BACKWARD) -> list[Instruction]:
    """Return those of its backward pass, or by BACKWARD_INPUT of the part that its neighbours wait for."""
    steps = [Instruction(op, m, s) for s in range(tile.substeps)]
    if plan.downstream(tile):
        steps.insert(0, Instruction(Op.RECEIVE_GRADIENT, m))
    if plan.upstream(tile):
        steps.append(Instruction(Op.SEND_GRADIENT, m))
    return steps


def at_the_loss(plan: Plan, tile: Tile, m: int, op: Op = Op.BACKWARD) -> list[Instruction]:
    """Return a whole microbatch on a tile with the loss: each substep forward and back, so that only one is kept."""
    steps = []
    for s in range(tile.substeps):
        steps += [Instruction(Op.FORWARD, m, s), Instruction(op, m, s)]
    if plan.upstream(tile):
        return [Instruction(Op.RECEIVE_ACTIVATION, m), *steps, Instruction(Op.SEND_GRADIENT, m)]
    return steps


def weight_part(tile: Tile, m: int) -> list[Instruction]:
    return [Instruction(Op.BACKWARD_WEIGHT, m, s) for s in range(tile.substeps)]


def weight_delay(plan: Plan, tile: Tile) -> int | None:
    """Return how many microbatches a tile's weight passes are behind its input passes; None where they are one.

    They are one where nobody waits for the gradient of the input. By 1F1B it is sent as soon as it is there (H2,
    arXiv 2505.17548), with the weights' right after it, where that costs nothing: sums over x or y would no longer be
    hidden behind the weights' products, and tiles that recompute or have substeps are short of the memory in which
    these wait. Tiles with ZeRO 2 and 3 must do alike. By ZB-H1 each tile keeps as many microbatches under way as the
    first one on its longest path does by 1F1B, so that what is left at the end are weight passes.
    """
    if not plan.upstream(tile):
        return None
    if plan.schedule == "zb-h1":
        return plan.depth_from_start(tile)
    costs = tile.tensor.x > 1 or tile.tensor.y > 1 or tile.recompute != "none" or tile.substeps > 1 or tile.zero >= 2
    return None if costs else 0


def schedule_of(plan: Plan, tile: Tile, reduce_early: bool = False) -> tuple[Instruction, ...]:
    """Return a training step of a tile by the plan's schedule; `reduce_early` as in `one_f_one_b`."""
    return one_f_one_b(plan, tile, reduce_early, weight_delay(plan, tile))


def one_f_one_b(
    plan: Plan, tile: Tile, reduce_early: bool = False, weight_delay: int | None = None
) -> tuple[Instruction, ...]:
    """Return a step by 1F1B (PipeDream-flush, Narayanan et al. 2021): warm up, alternate, drain.

    With `reduce_early` (of all tiles alike) the last pass that adds to gradients starts to reduce them. With a
    `weight_delay` each backward pass is split, and its weights' part so many microbatches behind: the order in which
    tiles wait for each other stays that of 1F1B. Delayed by the number of tiles before this one, it is ZB-H1 (Qi et al.
    2024, arXiv 2401.10241).

    The number of warm-up forwards is the tile's longest path to the loss, which is `stages - 1 - stage` for an
    even pipeline and also right for tiles that are on paths of unlike length.
    """
    if tile.is_idle:
        return (Instruction(Op.UPDATE),)
    warmup = min(plan.depth_to_loss(tile), plan.microbatches)
    backward = Op.BACKWARD if weight_delay is None else Op.BACKWARD_INPUT
    delay = weight_delay or 0
    steps: list[Instruction] = []
    for m in range(warmup):
        steps += forward_part(plan, tile, m)
    for m in range(plan.microbatches + delay):
        if m < plan.microbatches and not warmup:
            steps += at_the_loss(plan, tile, m, backward)
        elif m < plan.microbatches:
            if m + warmup < plan.microbatches:
                steps += forward_part(plan, tile, m + warmup)
            steps += backward_part(plan, tile, m, backward)
        if weight_delay is not None and m >= delay:
            steps += weight_part(tile, m - delay)
    if reduce_early:
        last = max(i for i, step in enumerate(steps) if step.op in ADDING)
        steps[last] = replace(steps[last], starts_reducing=True)
    return (*steps, Instruction(Op.REDUCE_GRADIENTS), Instruction(Op.UPDATE))


def forward_only(plan: Plan, tile: Tile) -> tuple[Instruction, ...]:
    """Return the forward passes alone, for validation."""
    if tile.is_idle:
        return ()
    return tuple(step for m in range(plan.microbatches) for step in forward_part(plan, tile, m))


def check_schedules(plan: Plan, reduce_early: bool = False) -> None:
    """Refuse a plan by which a step of training or validation would wait for ever. Raises PlanError."""
    check_no_deadlock(plan, {tile: schedule_of(plan, tile, reduce_early) for tile in plan.tiles})
    check_no_deadlock(plan, {tile: forward_only(plan, tile) for tile in plan.tiles})


def check_no_deadlock(plan: Plan, schedules: dict[Tile, tuple[Instruction, ...]]) -> None:
    """Run all tiles' instructions against each other without ranks; raise PlanError where they would wait for ever.

    No step may end with a message that nobody took, a message must be the one that its receiver expects, and a
    reduction needs all tiles that share a parameter: here, all tiles, which is harder than need be. Tiles with ZeRO 2
    and 3 exchange in every forward and backward pass, and take each of these steps together. What is started early
    waits for nobody, but must be final and be waited for: by the last pass that adds to gradients, before the
    reduction. Gradients are added in the order of microbatches and substeps, so that no schedule changes a bit.
    """
    for tile, steps in schedules.items():
        _check_order_of_gradients(tile, steps)
        _check_early_reduction(tile, steps)
    at = dict.fromkeys(schedules, 0)
    together = {
        tile: [t for t in schedules if t is not tile and t.items == tile.items] if tile.zero >= 2 else []
        for tile in schedules
    }
    wires: dict[tuple[Tile, Tile, Op], deque[int]] = {}
    pairs = {Op.RECEIVE_ACTIVATION: Op.SEND_ACTIVATION, Op.RECEIVE_GRADIENT: Op.SEND_GRADIENT}

    def ready(tile: Tile, step: Instruction) -> bool:
        match step.op:
            case Op.SEND_ACTIVATION | Op.SEND_GRADIENT:
                peers = plan.downstream(tile) if step.op is Op.SEND_ACTIVATION else plan.upstream(tile)
                queues = [wires.setdefault((tile, peer, step.op), deque()) for peer in peers]
                depths = [channel_depth(plan, tile, peer) for peer in peers]
                if any(len(queue) >= depth for queue, depth in zip(queues, depths, strict=True)):
                    return False
                for queue in queues:
                    queue.append(step.microbatch)
            case Op.RECEIVE_ACTIVATION | Op.RECEIVE_GRADIENT:
                forward = step.op is Op.RECEIVE_ACTIVATION
                peers = plan.upstream(tile) if forward else plan.downstream(tile)
                queues = [wires.get((peer, tile, pairs[step.op])) for peer in peers]
                if not all(queues):
                    return False
                for queue in queues:
                    if (got := queue.popleft()) != step.microbatch:
                        raise PlanError(f"{_name(tile)} expects microbatch {step.microbatch} and is sent {got}")
            case op if op in COMPUTING:
                for other in together[tile]:
                    if (theirs := schedules[other][at[tile]]) != step:
                        raise PlanError(f"{_name(tile)} exchanges in '{step}' while {_name(other)} is at '{theirs}'")
                return all(at[other] >= at[tile] for other in together[tile])
            case Op.REDUCE_GRADIENTS:
                return all(at[t] >= at_reduce[t] for t in schedules)
        return True

    at_reduce = {
        tile: next((i for i, s in enumerate(steps) if s.op is Op.REDUCE_GRADIENTS), len(steps))
        for tile, steps in schedules.items()
    }
    unfinished = [tile for tile, steps in schedules.items() if steps]
    while unfinished:
        moved = False
        for tile in unfinished:
            while at[tile] < len(schedules[tile]) and ready(tile, schedules[tile][at[tile]]):
                at[tile] += 1
                moved = True
        unfinished = [tile for tile in unfinished if at[tile] < len(schedules[tile])]
        if unfinished and not moved:
            waits = "; ".join(f"{_name(t)} waits at '{schedules[t][at[t]]}'" for t in unfinished[:4])
            raise PlanError(f"the schedule deadlocks: {waits}")
    for (sender, receiver, op), queue in wires.items():
        if queue:
            raise PlanError(f"{_name(sender)}: '{op.value} {queue[0]}' to {_name(receiver)} is never received")


def _check_order_of_gradients(tile: Tile, steps: Sequence[Instruction]) -> None:
    kept: set[tuple[int, int]] = set()
    added = (-1, 0)
    for step in steps:
        at = step.microbatch, step.substep
        if step.op is Op.BACKWARD_INPUT:
            kept.add(at)
        elif step.op is Op.BACKWARD_WEIGHT and at not in kept:
            raise PlanError(f"{_name(tile)}: '{step}' comes before its input pass")
        if step.op in ADDING:
            if at <= added:
                raise PlanError(
                    f"{_name(tile)}: '{step}' comes after microbatch {added[0]}, substep {added[1]} was added to the"
                    " gradients; add them in order"
                )
            kept.discard(at)
            added = at
    if kept:
        raise PlanError(f"{_name(tile)}: '{Instruction(Op.BACKWARD_INPUT, *min(kept))}' has no weight pass")


def _check_early_reduction(tile: Tile, steps: Sequence[Instruction]) -> None:
    starts = [i for i, step in enumerate(steps) if step.starts_reducing]
    if not starts:
        return
    later = [step for step in steps[starts[0] + 1 :] if step.op in ADDING or step.starts_reducing]
    if later:
        raise PlanError(f"{_name(tile)}: '{steps[starts[0]]}' comes before '{later[0]}', which adds to the gradients")
    if Instruction(Op.REDUCE_GRADIENTS) not in steps[starts[0] :]:
        raise PlanError(
            f"{_name(tile)}: what '{steps[starts[0]]}' starts is never waited for: nothing reduces after it"
        )


def _name(tile: Tile) -> str:
    return f"tile items {list(tile.items)} rows {list(tile.rows)}"
