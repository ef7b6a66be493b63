"""How many microbatches more than by 1F1B tiles should have in flight, for slow messages to delay nobody. Pure.

Let one of two tiles have n microbatches more in flight than the other. A gradient goes back and the next activation
comes forward while both go through n + 1 microbatches. By 1F1B n is 1, and messages of m seconds per direction make
every microbatch m longer. With n = 2 they delay nothing while they take less than half of it (Zhuang et al. 2023,
arXiv 2211.05322). An extra warm-up costs the activations of as many microbatches, on all tiles before. Where memory
does not suffice for all, the tiles with the longest delay by messages get it first.
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
    if (
        plan.schedule != "1f1b"
        or plan.microbatches == 1
        or any(len(plan.virtual_stages(tile)) > 1 for tile in plan.tiles)
    ):
        return None
    number = {tile: i for i, tile in enumerate(plan.tiles)}
    seconds = {tile: cost.seconds for tile, cost in costs.tiles.items()}

    def round_trip(tile: Tile, other: Tile) -> float:
        messages = (costs.messages.get(pair, 0.0) for pair in ((tile, other), (other, tile)))
        return seconds[tile] + seconds[other] + sum(messages)

    gaps = [Gap(number[a], number[b], round_trip(a, b)) for a in plan.tiles for b in plan.downstream(a)]
    before = _before(plan)
    warm_up = [plan.depth_to_loss(tile) for tile in plan.tiles]
    least = list(warm_up)
    has_headroom = [math.inf if headroom is None else headroom[tile] for tile in plan.tiles]
    widen(
        gaps, warm_up, has_headroom, max(seconds.values()), [[number[each] for each in before[t]] for t in plan.tiles]
    )
    extra_warmup = [max(0, min(now, plan.microbatches - 1) - had) for now, had in zip(warm_up, least, strict=True)]
    if not any(extra_warmup):
        return None
    return replace(
        plan, tiles=tuple(replace(tile, extra_warmup=n) for tile, n in zip(plan.tiles, extra_warmup, strict=True))
    )


def _before(plan: Plan) -> dict[Tile, set[Tile]]:
    """Return by tile all whose output it needs, directly or not, and those that go through their items with these."""
    together: dict[object, list[Tile]] = {}
    for tile in plan.tiles:
        together.setdefault(tile.items if tile.zero >= 2 else tile, []).append(tile)
    result: dict[Tile, set[Tile]] = {}
    for tiles in sorted(together.values(), key=lambda tiles: tiles[0].items.start):
        direct = {other for tile in tiles for other in plan.upstream(tile)}
        every = set(tiles).union(direct, *(result[other] for other in direct))
        result |= dict.fromkeys(tiles, every)
    return result
