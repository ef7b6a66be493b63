"""Estimates how long the stages of a pipeline take by 1F1B, with more in flight where messages ask for it. Pure.

A stage waits for its first microbatch, computes all of them, and waits for the last one to come back, whose gradient is
sent before those of weights are computed where that is free (`splits_freely`). Where it is a bottleneck, stages behind
it are waited for only as far as its own warm-up does not hide them.

More microbatches in flight than by 1F1B keep slow messages from delaying anybody. Let one of two tiles have n more in
flight than the other. A gradient goes back and the next activation comes forward while both go through n + 1
microbatches. By 1F1B n is 1, and messages of m seconds per direction make every microbatch m longer. With n = 2 they
delay nothing while they take less than half of it (Zhuang et al. 2023, arXiv 2211.05322). An extra warm-up costs the
activations of as many microbatches, on all tiles before. Where memory is short, the longest delays get it first.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prices import Costs

MAX_EXTRA = 2
"""Microbatches in flight beyond those of 1F1B, more than the next tile has."""
WORTH_WAITING = 0.02
"""Of a microbatch's time, that messages may delay it."""
EQUAL = 1 - 1e-9


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

    See `widen`.
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


class Gap(NamedTuple):
    """Two neighbours, by their numbers."""

    before: int
    after: int
    round_trip: float
    """Seconds of a microbatch through both, there and back, and of its two messages."""

    def lead(self, in_flight: Sequence[int]) -> int:
        """Return how many microbatches more the first of them has in flight."""
        return in_flight[self.before] - in_flight[self.after]


def is_hidden(round_trip: float, lead: int, slowest: float) -> bool:
    """Say whether nobody waits for messages, where the slowest takes so many seconds for a microbatch."""
    return round_trip <= slowest * (lead + 1 + WORTH_WAITING)


def widen(
    gaps: Sequence[Gap],
    in_flight: list[int],
    headroom: Sequence[float],
    slowest: float,
    raised: Sequence[Collection[int]],
) -> None:
    """Add to the microbatches `in_flight` while that shortens the longest delay of a microbatch.

    `headroom` is how many more each has memory for. `slowest` is the seconds of a microbatch on the slowest. `raised`
    lists who else gets one more in flight when one does.
    """
    at_first = list(in_flight)
    while True:
        times = [gap.round_trip / (gap.lead(in_flight) + 1) for gap in gaps]
        longest = max(times, default=0.0)
        widest = [gap for gap, seconds in zip(gaps, times, strict=True) if seconds >= longest * EQUAL]
        more = {number for gap in widest for number in (gap.before, *raised[gap.before])}
        if (
            all(is_hidden(gap.round_trip, gap.lead(in_flight), slowest) for gap in widest)
            or any(gap.lead(in_flight) > MAX_EXTRA for gap in widest)
            or any(in_flight[i] + 1 - at_first[i] > headroom[i] for i in more)
        ):
            return
        for i in more:
            in_flight[i] += 1


def with_extra_warmup(plan: Plan, costs: Costs, headroom: Mapping[Tile, float] | None = None) -> Plan | None:
    """Return a plan with more in flight, None where messages delay nobody or its schedule has no such thing.

    `headroom` is how many more a tile has memory for; None: whatever they want.
    """
    tiles, seconds = plan.tiles, {tile: cost.seconds for tile, cost in costs.tiles.items()}
    is_interleaved = any(len(plan.virtual_stages(tile)) > 1 for tile in tiles)
    if plan.schedule != "1f1b" or plan.microbatches == 1 or is_interleaved:
        return None

    def round_trip(tile: Tile, other: Tile) -> float:
        return seconds[tile] + seconds[other] + sum(costs.messages.get(p, 0.0) for p in ((tile, other), (other, tile)))

    number = {tile: i for i, tile in enumerate(tiles)}
    gaps = [Gap(number[a], number[b], round_trip(a, b)) for a in tiles for b in plan.downstream(a)]
    least, before = [plan.depth_to_loss(tile) for tile in tiles], _before(plan)
    limits = [math.inf if headroom is None else headroom[tile] for tile in tiles]
    warm_up = list(least)
    widen(gaps, warm_up, limits, max(seconds.values()), [[number[each] for each in before[tile]] for tile in tiles])
    extra = [max(0, min(now, plan.microbatches - 1) - had) for now, had in zip(warm_up, least, strict=True)]
    if not any(extra):
        return None
    return replace(plan, tiles=tuple(replace(tile, extra_warmup=n) for tile, n in zip(tiles, extra, strict=True)))


def _before(plan: Plan) -> dict[Tile, set[Tile]]:
    """Return by tile all whose output it needs, directly or not, and those that go through their items with these."""
    together: dict[object, list[Tile]] = {}
    for tile in plan.tiles:
        together.setdefault(tile.items if tile.zero >= 2 else tile, []).append(tile)
    result: dict[Tile, set[Tile]] = {}
    for tiles in sorted(together.values(), key=lambda tiles: tiles[0].items.start):
        direct = {other for tile in tiles for other in plan.upstream(tile)}
        result |= dict.fromkeys(tiles, set(tiles).union(direct, *(result[other] for other in direct)))
    return result
