"""Runs the passes of one pipeline by 1F1B, with a clock for each stage. Pure.

It ranks layouts. Between the best `prediction/simulate.py` decides, which runs all instructions of a plan at exact
prices, and takes a hundred times as long.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpctrain.planner.search.extra_warmup import MAX_EXTRA, Gap, in_flight_by_delays
from hpctrain.planner.search.stages import Passes

PERIOD = math.lcm(*range(2, MAX_EXTRA + 3))
"""Microbatches after which the same delays come again: a multiple of the 2, 3 or 4 that a round trip between neighbours
has in flight."""


class StageMessages(NamedTuple):
    """Seconds of the messages of a microbatch between a stage and the next one."""

    activation: float
    gradient: float
    """Seconds of the gradient's message to the stage before."""
    leave_node: bool = False
    """Whether they leave a node: what a stage sends forward and backward shares a NIC then."""
    under_way: float = 0.0
    """Seconds of each of them in which the next one may leave."""
    blocking: float = 0.0
    """Share of each of them in which its sender computes nothing."""

    def unblocked_at(self, sent: float, seconds: float) -> float:
        """Return when the sender of a message may compute again, which takes so many seconds and was `sent` then."""
        return sent - (1 - self.blocking) * (seconds - self.under_way) if self.blocking else 0.0


def done_after(
    passes: Sequence[Passes],
    messages: Sequence[StageMessages],
    microbatches: int,
    has_headroom: Callable[[int, int], bool],
) -> list[float]:
    """Return when each stage of a pipeline is done with all microbatches.

    Where messages would delay stages, these have more microbatches in flight than by 1F1B. `has_headroom` says whether
    a stage has memory for so many more. Of many microbatches some are run, and the others take as long as these.
    """
    last, stages = len(passes) - 1, range(len(passes))
    if not last:
        return [microbatches * passes[0].both]
    gaps = [
        Gap(i, i + 1, passes[i].both + passes[i + 1].both + message.activation + message.gradient)
        for i, message in enumerate(messages)
    ]
    slowest = max(each.both for each in passes)
    warm_ups = in_flight_by_delays(gaps, range(last, -1, -1), slowest, [range(i) for i in stages], has_headroom)
    num_run = min(microbatches, 2 * (warm_ups[0] + PERIOD))
    now, num_forward, num_backward = [0.0] * len(passes), [0] * len(passes), [0] * len(passes)
    activations_at: list[list[float]] = [[] for _ in stages]
    gradients_at: list[list[float]] = [[] for _ in stages]
    activation_sent, gradient_sent = [0.0] * len(passes), [0.0] * len(passes)
    while num_backward[0] < num_run:
        for i in stages:
            forward, backward, weight = passes[i]
            after, before = messages[i] if i < last else None, messages[i - 1] if i else None
            shares_nic = bool(after and before and after.leave_node and before.leave_node)
            while num_backward[i] < num_run:
                if num_forward[i] < num_run and num_forward[i] - num_backward[i] <= warm_ups[i]:
                    if before:
                        if len(activations_at[i]) == num_forward[i]:
                            break
                        now[i] = max(now[i], activations_at[i][num_forward[i]])
                    now[i] += forward
                    num_forward[i] += 1
                    if after:
                        nic_free_at = gradient_sent[i] if shares_nic else 0.0
                        start = max(now[i], activation_sent[i], nic_free_at)
                        activation_sent[i] = start + after.activation - after.under_way
                        activations_at[i + 1].append(start + after.activation)
                        now[i] = max(now[i], after.unblocked_at(activation_sent[i], after.activation))
                else:
                    if after:
                        if len(gradients_at[i]) == num_backward[i]:
                            break
                        now[i] = max(now[i], gradients_at[i][num_backward[i]])
                    if before:
                        start = max(
                            now[i] + backward - weight, gradient_sent[i], activation_sent[i] if shares_nic else 0.0
                        )
                        gradient_sent[i] = start + before.gradient - before.under_way
                        gradients_at[i - 1].append(start + before.gradient)
                    now[i] += backward
                    if before:
                        now[i] = max(now[i], before.unblocked_at(gradient_sent[i], before.gradient))
                    num_backward[i] += 1
    if num_run == microbatches:
        return now
    middle = num_run - 1 - warm_ups[0]  # the last microbatch before the pipeline drains
    each = (gradients_at[0][middle] - gradients_at[0][middle - PERIOD]) / PERIOD
    return [time + (microbatches - num_run) * each for time in now]
