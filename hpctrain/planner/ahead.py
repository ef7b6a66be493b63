"""How many microbatches more than by 1F1B tiles should have under way, for slow messages to hold up nobody. Pure.

Between two tiles, one of which has n microbatches more under way than the other, a gradient goes back, and what it
makes room for comes forth: meanwhile both go through n + 1 microbatches. By 1F1B n is 1, and messages of m seconds each
way make every microbatch m longer; with n = 2 nothing is lost while they take less than half of it (Zhuang et al. 2023,
arXiv 2211.05322). It costs the activations of as many microbatches, on all tiles before.
"""

import math
from dataclasses import replace

from hpctrain.plan import Plan, Tile
from hpctrain.planner.simulate import Costs, TileCost

MOST_AHEAD = 2
"""Of the next tile, beyond 1F1B's."""
WORTH_WAITING = 0.02
"""Of a microbatch's time, that messages may hold it up."""


def further_ahead(plan: Plan, costs: Costs) -> Plan | None:
    """Return a plan with more under way, None where messages hold up nobody or its schedule has no such thing."""
    if plan.schedule != "1f1b" or plan.microbatches == 1 or any(len(plan.chunks(tile)) > 1 for tile in plan.tiles):
        return None
    seconds = {tile: max(map(_seconds, by_turns)) for tile, by_turns in costs.tiles.items()}
    slowest = max(seconds.values())

    def wanted(tile: Tile, other: Tile) -> int:
        """Return how many more than the next tile's."""
        messages = (max(costs.messages.get(pair, (0.0,))) for pair in ((tile, other), (other, tile)))
        round_trip = seconds[tile] + seconds[other] + sum(messages)
        return max(1, min(math.ceil(round_trip / slowest - WORTH_WAITING) - 1, 1 + MOST_AHEAD))

    warm_up: dict[Tile, int] = {}
    together = {tile.items: [] for tile in sorted(plan.tiles, key=lambda tile: -tile.items.start)}
    for tile in plan.tiles:
        together[tile.items].append(tile)
    for tiles in together.values():
        for tile in tiles:
            least = plan.depth_to_loss(tile)
            most = max((warm_up[other] + wanted(tile, other) for other in plan.downstream(tile)), default=0)
            enough = max((warm_up[other] for other in plan.downstream(tile)), default=0)
            warm_up[tile] = max(least, enough, min(most, plan.microbatches - 1))
        if any(tile.zero >= 2 for tile in tiles):  # which go through their items together
            warm_up |= dict.fromkeys(tiles, max(warm_up[tile] for tile in tiles))
    ahead = [warm_up[tile] - plan.depth_to_loss(tile) for tile in plan.tiles]
    if not any(ahead):
        return None
    return replace(plan, tiles=tuple(replace(tile, ahead=n) for tile, n in zip(plan.tiles, ahead, strict=True)))


def _seconds(cost: TileCost) -> float:
    """Return what a microbatch takes a tile, there and back."""
    return sum(each.seconds for each in (*cost.forward, *cost.backward))
