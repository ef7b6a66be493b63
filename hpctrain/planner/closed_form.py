"""How long the stages of a pipeline take by 1F1B, with more in flight where messages ask for it, in closed form. Pure.

A stage waits for its first microbatch, computes all of them, and waits for the last one to come back, whose gradient is
sent before those of weights are computed where that is free (`splits_freely`). Where it is a bottleneck, stages behind
it are waited for only as far as its own warm-up does not hide them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.planner.extra_warmup import Gap, is_hidden, widen


class PassSeconds(NamedTuple):
    """Seconds of a stage for one microbatch."""

    forward: float
    backward: float
    """Until the gradient is sent."""
    weight: float = 0.0
    """What is left of its backward pass then."""


def done_after(
    passes: Sequence[PassSeconds], messages: Sequence[float], microbatches: int, headroom: Sequence[float]
) -> list[float]:
    """Return about when each stage of a pipeline is done.

    `messages` are the seconds of a message between a stage and the next one. `headroom` is how many more microbatches
    than by 1F1B a stage has memory for.
    """
    count, m = len(passes), microbatches
    delay = _delays(passes, messages, headroom)
    behind = [0.0] * count  # from the end of a stage's forward pass to when its backward pass can start
    for s in range(count - 2, -1, -1):
        behind[s] = behind[s + 1] + passes[s + 1].forward + passes[s + 1].backward + 2 * messages[s]
    done, before = [], 0.0
    for s, (forward, to_send, weight) in enumerate(passes):
        backward = to_send + weight
        warmup = count - 1 - s
        if m > warmup + 1:
            first = max((warmup + 1) * forward, forward + behind[s])
            last = max(warmup * backward, behind[s])
            each = max(forward + backward, *delay[max(0, s - 1) : s + 1], 0.0)
            own = first + (m - 1 - warmup) * each + last + backward
        else:
            own = max(max(m * forward, forward + behind[s]) + m * backward, m * forward + behind[s] + backward)
        by_nic = m * sum(messages[max(0, s - 1) : s + 1])  # what it sends forward and backward shares one
        done.append(before + max(own, forward + by_nic))
        before += forward + (messages[s] if s < count - 1 else 0.0)
    sent = done[-1] - passes[-1].weight  # the last microbatch's gradient, which comes back through all stages
    for s in range(count - 2, -1, -1):
        sent = max(done[s] - passes[s].weight, sent + messages[s] + passes[s].backward)
        done[s] = max(done[s], sent + passes[s].weight)
    return done


def done_interleaved(
    passes: Sequence[PassSeconds], messages: Sequence[float], microbatches: int, virtual_stages: int
) -> list[float]:
    """Return about when each stage of an interleaved pipeline is done (Narayanan et al. 2021, arXiv 2104.04473).

    A stage is behind those before it by one of their tiles, and waits for those behind it as long as one tile of each
    takes there and back. `messages` are the seconds of a message to the next stage, and from the last one to the first.
    Nothing hides them before the first microbatch is at the loss, and after the last one. In between a stage has
    two passes more in flight than the next one, so they delay nobody while they take less than half a tile.
    """
    v, tiles = virtual_stages, [PassSeconds(*(part / virtual_stages for part in each)) for each in passes]
    round_trips = (
        sum(a) + sum(b) + 2 * seconds for a, b, seconds in zip(tiles, (*tiles[1:], tiles[0]), messages, strict=True)
    )
    each = max(*map(sum, tiles), max(round_trips) / 3)
    exposed = 2 * (v * sum(messages) - messages[-1])
    behind = sum(tile.forward + tile.backward for tile in tiles)
    done, before = [], exposed
    for tile in tiles:
        behind -= tile.forward + tile.backward
        done.append(before + microbatches * v * each + behind)
        before += tile.forward
    return done


def _delays(passes: Sequence[PassSeconds], messages: Sequence[float], headroom: Sequence[float]) -> list[float]:
    """Return the seconds by which messages between a stage and the next one delay a microbatch; 0 where they do not.

    See `extra_warmup.py`.
    """
    if not any(messages):
        return [0.0] * len(messages)
    whole = [sum(each) for each in passes]
    slowest, gaps = max(whole), []
    for s, seconds in enumerate(messages):
        round_trip = whole[s] + passes[s + 1].forward + passes[s + 1].backward + 2 * seconds
        if seconds and not is_hidden(round_trip, 1, slowest):
            gaps.append(Gap(s, s + 1, round_trip))
    in_flight = list(range(len(passes) - 1, -1, -1))
    widen(gaps, in_flight, headroom, slowest, [range(s) for s in range(len(passes))])
    result = [0.0] * len(messages)
    for gap in gaps:
        result[gap.before] = gap.round_trip / (gap.lead(in_flight) + 1)
    return result
