"""More microbatches in flight than by 1F1B, which keep slow messages from delaying anybody. Pure.

Let one of two tiles have n more in flight than the other. A gradient goes back and the next activation comes forward
while both go through n + 1 microbatches. By 1F1B n is 1, and messages of m seconds per direction make every
microbatch m longer. With n = 2 they delay nothing while m is less than half a microbatch (Zhuang et al. 2023, arXiv
2211.05322). An extra warm-up costs the activations of as many microbatches, on all tiles before. Where memory is
short, the longest delays get it first.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prices.prices import Costs

MAX_EXTRA = 2
"""Maximum number of microbatches by which a tile's lead over the next one exceeds that of 1F1B."""
WORTH_WAITING = 0.02
"""Share of a microbatch's time by which messages may delay it."""
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


def with_extra_warmup(plan: Plan, costs: Costs, headroom: Mapping[Tile, float] | None = None) -> Plan | None:
    """Return a plan with more microbatches in flight; None where that shortens no delay or does not fit in memory.

    Only plans by 1F1B with one tile a rank and several microbatches can have an extra warm-up; others get None.
    `headroom` is the number of further microbatches that fit in a tile's memory; None: no limit.
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
    raised = [[number[other] for other in before[tile]] for tile in tiles]
    slowest = max(seconds.values())
    in_flight = in_flight_by_delays(gaps, least, slowest, raised, lambda i, extra: extra <= limits[i])
    extra = [max(0, min(now, plan.microbatches - 1) - had) for now, had in zip(in_flight, least, strict=True)]
    if not any(extra):
        return None
    return replace(plan, tiles=tuple(replace(tile, extra_warmup=n) for tile, n in zip(tiles, extra, strict=True)))


def in_flight_by_delays(
    gaps: Sequence[Gap],
    least: Sequence[int],
    slowest: float,
    raised: Sequence[Collection[int]],
    has_headroom: Callable[[int, int], bool],
) -> list[int]:
    """Return the number of microbatches in flight of each tile: more than the `least` while that shortens the longest
    delay.

    The slowest tile takes `slowest` seconds for a microbatch. Where one tile gets one more, its `raised` tiles do too.
    `has_headroom` says whether a tile has memory for so many more.
    """
    result = list(least)
    while gaps:
        times = [gap.round_trip / (gap.lead(result) + 1) for gap in gaps]
        longest = max(times)
        widest = [gap for gap, delay in zip(gaps, times, strict=True) if delay >= longest * EQUAL]
        more = {i for gap in widest for i in (gap.before, *raised[gap.before])}
        if (
            all(gap.round_trip <= slowest * (gap.lead(result) + 1 + WORTH_WAITING) for gap in widest)
            or any(gap.lead(result) > MAX_EXTRA for gap in widest)
            or not all(has_headroom(i, result[i] + 1 - least[i]) for i in more)
        ):
            break
        for i in more:
            result[i] += 1
    return result


def _before(plan: Plan) -> dict[Tile, set[Tile]]:
    """Return by tile all tiles whose output it needs, directly or not, and those that take each pass together with
    these."""
    together: dict[object, list[Tile]] = {}
    for tile in plan.tiles:
        together.setdefault(tile.items if tile.zero >= 2 else tile, []).append(tile)
    result: dict[Tile, set[Tile]] = {}
    for tiles in sorted(together.values(), key=lambda tiles: tiles[0].items.start):
        direct = {other for tile in tiles for other in plan.upstream(tile)}
        result |= dict.fromkeys(tiles, set(tiles).union(direct, *(result[other] for other in direct)))
    return result
