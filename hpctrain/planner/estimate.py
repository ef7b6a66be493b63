"""How long a step takes, by a closed form of computation and bubble; what is communicated is not weighed. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hpctrain.intervals import Interval, cut_evenly
from hpctrain.job import Model
from hpctrain.parameters import item_parameters
from hpctrain.plan import Plan, Tile, joined
from hpctrain.planner.curves import FamilyCurves

# What the small products of a microbatch cost beside those of its rows: some 300 tokens' time for rows of 2,048.
ROWS_LOST = 0.15
RECOMPUTED = 4 / 3  # as long as without: another forward pass


@dataclass(frozen=True)
class Work:
    """What is to be planned: a model's items by their cost, and the rows of a step."""

    model: Model
    positions: int
    global_batch: int

    @cached_property
    def _block(self) -> int:
        """Return the multiplications of a block for one token, forward."""
        matrices = sum(math.prod(p.shape) for p in item_parameters(self.model, 1) if p.decay)
        return matrices + self.model.hidden_size * self.positions  # causal: half of the products with keys and values

    @property
    def flops(self) -> float:
        """Of one row of one block, forward and back."""
        return 6.0 * self.positions * self._block

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Return the operations of each item on one row, in blocks: products by their weights, and attention's own."""
        head = self.model.hidden_size * self.model.vocab_size
        return 0.0, *[1.0] * self.model.num_layers, head / self._block

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Return how many parameters each item has."""
        items = range(self.model.num_items)
        return tuple(sum(math.prod(p.shape) for p in item_parameters(self.model, item)) for item in items)

    def cost(self, items: Interval) -> float:
        return sum(self.costs[slice(*items)])


def estimate(
    work: Work, plan: Plan, speeds: Mapping[str, float], curves: Mapping[str, FamilyCurves] | None = None
) -> float:
    """Return the time of a step: that of the slowest of the pipelines that share no messages.

    Of each one its slowest tile for every microbatch, and the rest of the longest path once. An estimate of computation
    and bubble, from above where paths are unlike; communication is left out.

    By speeds in the time of one row of one block at speed 1, by `curves`, which go before them, in seconds.
    """

    def seconds(tile: Tile, rows: int) -> float:
        again = RECOMPUTED if tile.recompute == "full" else 1.0
        if curves is None:
            return work.cost(tile.items) * (rows + ROWS_LOST * tile.substeps) * again / speeds[tile.family]
        of = curves[tile.family]
        return sum(of.seconds(tile.items, piece.size) for piece in cut_evenly(rows, tile.substeps)) * again

    path: dict[Tile, float] = {}
    for tile in sorted(plan.tiles, key=lambda tile: -tile.items.start):
        ahead = max((path[other] for other in plan.downstream(tile)), default=0.0)
        path[tile] = seconds(tile, tile.rows.size) + ahead
    steps = []
    for tiles in joined(plan):
        slowest = max(seconds(tile, tile.rows.size) for tile in tiles)
        steps.append(slowest * (plan.microbatches - 1) + max(path[tile] for tile in tiles))
    return max(steps)
