"""Runs the passes of one pipeline by 1F1B, with a clock for each stage. Pure.

It ranks layouts. Between the best `prediction/simulate.py` decides, which runs all instructions of a plan at exact
prices, and takes a hundred times as long.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hpctrain.planner.prices.network import Port
from hpctrain.planner.search.extra_warmup import MAX_EXTRA, Gap, in_flight_by_delays
from hpctrain.planner.search.stage_variants import Passes

PERIOD = math.lcm(*range(2, MAX_EXTRA + 3))
"""Microbatches after which the same delays come again: a multiple of the 2, 3 or 4 that a round trip between neighbours
has in flight."""

OWN_PIPELINE_SHARE = 0.5
"""Share of the other messages of its pipeline that a message meets at a busy port, as simulations show."""


class StageMessages(NamedTuple):
    """Seconds of the messages of a microbatch between a stage and the next one."""

    activation: float
    gradient: float
    """Seconds of the gradient's message to the stage before."""
    under_way: float = 0.0
    """Seconds of each of them in which the next one may leave."""
    blocking: float = 0.0
    """Share of each of them in which its sender computes nothing."""

    def unblocked_at(self, sent: float, seconds: float) -> float:
        """Return when the sender of a message may compute again, which takes so many seconds and was `sent` then."""
        return sent - (1 - self.blocking) * (seconds - self.under_way)


def slowed_by_shared_ports(
    messages: Sequence[Sequence[StageMessages]],
    ports: Sequence[Sequence[tuple[Collection[Port], Collection[Port]]]],
    slowest: float,
) -> list[list[StageMessages]]:
    """Return the messages of each pipeline, which take longer where others pass the same ports of nodes.

    `ports` are those of each activation and gradient. The `slowest` stage computes a microbatch in so many seconds. A
    message meets others for the share of time in which its port is busy. Those of its own pipeline take turns with it.
    """
    passed: dict[Port, list[float]] = {}
    for number, pipeline in enumerate(messages):
        for each, ways in zip(pipeline, ports[number], strict=True):
            for seconds, of_message in zip(each[:2], ways, strict=True):
                for port in of_message:
                    passed.setdefault(port, [0.0] * len(messages))[number] += seconds - each.under_way

    def slowed(number: int, seconds: float, own: float, of_message: Collection[Port]) -> float:
        longest = 0.0
        for port in of_message:
            busy, pipeline = sum(passed[port]), passed[port][number]
            meets = busy - pipeline + OWN_PIPELINE_SHARE * (pipeline - own)
            longest = max(longest, meets * min(1.0, busy / slowest))
        return seconds + longest

    return [
        [
            each._replace(
                activation=slowed(number, each.activation, each.activation - each.under_way, forward),
                gradient=slowed(number, each.gradient, each.gradient - each.under_way, back),
            )
            for each, (forward, back) in zip(pipeline, ports[number], strict=True)
        ]
        for number, pipeline in enumerate(messages)
    ]


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
        for i in stages:  # each as far as it can go; comparisons take a third of the time of calls of max
            forward, backward, weight = passes[i]
            after, before = messages[i] if i < last else None, messages[i - 1] if i else None
            time, ahead, back, most_ahead = now[i], num_forward[i], num_backward[i], warm_ups[i]
            arrived, returned, sent, sent_back = (
                activations_at[i],
                gradients_at[i],
                activation_sent[i],
                gradient_sent[i],
            )
            while back < num_run:
                if ahead < num_run and ahead - back <= most_ahead:
                    if before:
                        if len(arrived) == ahead:
                            break
                        if arrived[ahead] > time:
                            time = arrived[ahead]
                    time += forward
                    ahead += 1
                    if after:
                        start = sent if sent > time else time
                        sent = start + after.activation - after.under_way
                        activations_at[i + 1].append(start + after.activation)
                        if after.blocking:
                            time = max(time, after.unblocked_at(sent, after.activation))
                else:
                    if after:
                        if len(returned) == back:
                            break
                        if returned[back] > time:
                            time = returned[back]
                    if before:
                        start = time + backward - weight
                        if sent_back > start:
                            start = sent_back
                        sent_back = start + before.gradient - before.under_way
                        gradients_at[i - 1].append(start + before.gradient)
                    time += backward
                    if before and before.blocking:
                        time = max(time, before.unblocked_at(sent_back, before.gradient))
                    back += 1
            now[i], num_forward[i], num_backward[i], activation_sent[i], gradient_sent[i] = (
                time,
                ahead,
                back,
                sent,
                sent_back,
            )
    if num_run == microbatches:
        return now
    middle = num_run - 1 - warm_ups[0]  # the last microbatch before the pipeline drains
    each = (gradients_at[0][middle] - gradients_at[0][middle - PERIOD]) / PERIOD
    return [time + (microbatches - num_run) * each for time in now]
