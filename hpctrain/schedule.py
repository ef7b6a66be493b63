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
    SEND_GRADIENT = "send gradient"
    REDUCE_GRADIENTS = "reduce gradients"
    UPDATE = "update"


@dataclass(frozen=True)
class Instruction:
    op: Op
    microbatch: int = -1
    substep: int = 0
    """Which piece of the tile's rows, for forward and backward."""
    starts_reducing: bool = False
    """Whether this backward pass, the last of the step, starts to sum each item's gradients when it has passed it.

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


def backward_part(plan: Plan, tile: Tile, m: int) -> list[Instruction]:
    steps = [Instruction(Op.BACKWARD, m, s) for s in range(tile.substeps)]
    if plan.downstream(tile):
        steps.insert(0, Instruction(Op.RECEIVE_GRADIENT, m))
    if plan.upstream(tile):
        steps.append(Instruction(Op.SEND_GRADIENT, m))
    return steps


def at_the_loss(plan: Plan, tile: Tile, m: int) -> list[Instruction]:
    """Return a whole microbatch on a tile with the loss: each substep forward and back, so that only one is kept."""
    steps = []
    for s in range(tile.substeps):
        steps += [Instruction(Op.FORWARD, m, s), Instruction(Op.BACKWARD, m, s)]
    if plan.upstream(tile):
        return [Instruction(Op.RECEIVE_ACTIVATION, m), *steps, Instruction(Op.SEND_GRADIENT, m)]
    return steps


def one_f_one_b(plan: Plan, tile: Tile, reduce_early: bool = False) -> tuple[Instruction, ...]:
    """Return a step by 1F1B (PipeDream-flush, Narayanan et al. 2021): warm up, alternate, drain.

    With `reduce_early` (of all tiles alike) the last backward pass starts to reduce gradients.

    The number of warm-up forwards is the tile's longest path to the loss, which is `stages - 1 - stage` for an
    even pipeline and also right for tiles that are on paths of unlike length.
    """
    if tile.is_idle:
        return (Instruction(Op.UPDATE),)
    warmup = min(plan.depth_to_loss(tile), plan.microbatches)
    steps: list[Instruction] = []
    for m in range(warmup):
        steps += forward_part(plan, tile, m)
    for m in range(warmup, plan.microbatches):
        if warmup:
            steps += forward_part(plan, tile, m) + backward_part(plan, tile, m - warmup)
        else:
            steps += at_the_loss(plan, tile, m)
    for m in range(plan.microbatches - warmup, plan.microbatches):
        steps += backward_part(plan, tile, m)
    if reduce_early:
        last = max(i for i, step in enumerate(steps) if step.op is Op.BACKWARD)
        steps[last] = replace(steps[last], starts_reducing=True)
    return (*steps, Instruction(Op.REDUCE_GRADIENTS), Instruction(Op.UPDATE))


def forward_only(plan: Plan, tile: Tile) -> tuple[Instruction, ...]:
    """Return the forward passes alone, for validation."""
    if tile.is_idle:
        return ()
    return tuple(step for m in range(plan.microbatches) for step in forward_part(plan, tile, m))


def check_no_deadlock(plan: Plan, schedules: dict[Tile, tuple[Instruction, ...]]) -> None:
    """Run all tiles' instructions against each other without ranks; raise PlanError where they would wait for ever.

    No step may end with a message that nobody took, a message must be the one that its receiver expects, and a
    reduction needs all tiles that share a parameter: here, all tiles, which is harder than need be. Tiles with ZeRO 2
    and 3 exchange in every forward and backward pass, and take each of these steps together. What is started early
    waits for nobody, but must be final and be waited for: by one backward pass, the last, before the reduction.
    """
    for tile, steps in schedules.items():
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
                following = step.op is Op.SEND_ACTIVATION
                peers = (plan.downstream if following else plan.upstream)(tile, step.microbatch)
                queues = [wires.setdefault((tile, peer, step.op), deque()) for peer in peers]
                depths = [channel_depth(plan, tile, peer) for peer in peers]
                if any(len(queue) >= depth for queue, depth in zip(queues, depths, strict=True)):
                    return False
                for queue in queues:
                    queue.append(step.microbatch)
            case Op.RECEIVE_ACTIVATION | Op.RECEIVE_GRADIENT:
                forward = step.op is Op.RECEIVE_ACTIVATION
                peers = (plan.upstream if forward else plan.downstream)(tile, step.microbatch)
                queues = [wires.get((peer, tile, pairs[step.op])) for peer in peers]
                if not all(queues):
                    return False
                for queue in queues:
                    if (got := queue.popleft()) != step.microbatch:
                        raise PlanError(f"{_name(tile)} expects microbatch {step.microbatch} and is sent {got}")
            case Op.FORWARD | Op.BACKWARD:
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


def _check_early_reduction(tile: Tile, steps: Sequence[Instruction]) -> None:
    starts = [i for i, step in enumerate(steps) if step.starts_reducing]
    if not starts:
        return
    later = [step for step in steps[starts[0] + 1 :] if step.op is Op.BACKWARD or step.starts_reducing]
    if later:
        raise PlanError(f"{_name(tile)}: '{steps[starts[0]]}' comes before '{later[0]}', which adds to the gradients")
    if Instruction(Op.REDUCE_GRADIENTS) not in steps[starts[0] :]:
        raise PlanError(
            f"{_name(tile)}: what '{steps[starts[0]]}' starts is never waited for: nothing reduces after it"
        )


def _name(tile: Tile) -> str:
    return f"tile items {list(tile.items)} rows {tile.rows}"
