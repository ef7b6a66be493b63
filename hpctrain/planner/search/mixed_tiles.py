"""Tiles over unlike devices, whose ranks of c have positions by what their devices are worth, and over nodes. Pure."""

from collections.abc import Iterator, Sequence
from itertools import chain

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.prices import Prices
from hpctrain.planner.search.pools import figures_of
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, divisors
from hpctrain.sharding.items import BLOCK

MOST_SHARES = 64
"""Most parts into which half of a row is cut to give each rank a number of them: 1.6 % of a row each."""


def positions_by_worth(predictor: Predictor) -> Iterator[Plan]:
    """Yield plans in which tiles over all families, or over nodes of one, compute whole rows, one at a time, and each
    rank has positions by what its device is worth: the largest tiles first, and of each size first what recomputes the
    least.

    It is for rows that are so long that ranks have enough positions of them, and families that compute in one dtype.
    The plans depend on the ranks that are used, and on nothing else of the predictor's plan.
    """
    plan, cluster, setup = predictor.plan, predictor.cluster, predictor.setup
    by_family: dict[str, list[int]] = {}
    used = sorted(rank for tile in plan.first_tiles for rank in tile.ranks)
    for rank in used:
        by_family.setdefault(cluster.devices[rank].family, []).append(rank)
    dtypes = {dict(setup.by_family).get(family, setup.dtype) for family in by_family}
    batch = plan.microbatches * plan.rows
    for count in divisors(batch) if len(dtypes) == 1 else ():
        size = len(used) // count
        if size not in setup.context_sizes or any(len(ranks) % count for ranks in by_family.values()):
            continue
        families = [family for family, ranks in by_family.items() for _ in range(len(ranks) // count)]
        for recompute in ("none", "selective", "full"):
            grid = TensorGrid(c=size, position_shares=shares_by_worth(predictor.prices, families, recompute))
            tiles = []
            for number in range(count):
                part = Interval(number, number + 1)
                each = (own[slice(*Interval(0, len(own)).part(part, count))] for own in by_family.values())
                ranks, items = tuple(chain(*each)), Interval(0, setup.model.num_items)
                tiles.append(Tile(items, part, ranks, grid, "+".join(by_family), recompute))
            if all(is_over_pools(tile, predictor) for tile in tiles):
                yield Plan(tuple(tiles), batch // count, count, unused=plan.unused)


def is_over_pools(tile: Tile, predictor: Predictor) -> bool:
    """Say whether a tile is over nodes, or over families of unlike figures, which no tensor grid of a pool is."""
    cluster, models = predictor.cluster, predictor.prices.devices
    if len({cluster.devices[rank].node for rank in tile.ranks}) > 1:
        return True
    families = {cluster.devices[rank].family for rank in tile.ranks}
    return len(families) > 1 and len({figures_of(cluster, models[family]) for family in families}) > 1


def shares_by_worth(prices: Prices, families: Sequence[str], recompute: str) -> tuple[int, ...]:
    """Return the shares of devices of some families in the positions of a row: as fast as each computes a block."""
    setup, devices = prices.setup, prices.devices
    cost, seconds = layer_cost(setup, TensorGrid(c=len(families)), BLOCK, 1, recompute), {}
    for family in dict.fromkeys(families):
        works = cost.forward, cost.backward
        seconds[family] = sum(devices[family].work_seconds(work, setup.dtype, setup.engine) for work in works)
    return shares_of([1 / seconds[family] for family in families], setup.positions // 2)


def shares_of(speeds: Sequence[float], units: int) -> tuple[int, ...]:
    """Return a whole share of each of some speeds, in proportion to it and at least 1: their sum divides `units`.

    Nothing where all are equal.
    """
    total = max(n for n in divisors(units) if n <= max(MOST_SHARES, len(speeds)))
    wanted = [speed * total / sum(speeds) for speed in speeds]
    shares = [1] * len(speeds)
    for _ in range(total - len(speeds)):
        shares[max(range(len(speeds)), key=lambda place: wanted[place] - shares[place])] += 1
    return tuple(shares) if len(set(shares)) > 1 else ()
