"""Plans in which each device has the whole model, and rows by its speed curve (Poplar, arXiv 2408.12596). Pure."""

import math
from collections.abc import Mapping, Sequence

from hpctrain.cluster import ITEM_BYTES, Cluster
from hpctrain.comm.network import ClusterNetwork
from hpctrain.intervals import Interval
from hpctrain.job import Model
from hpctrain.parameters import item_parameters
from hpctrain.plan import Plan, Tile
from hpctrain.planner.allocate import Allocation, Replica, allocate, allocate_in_step
from hpctrain.planner.curves import FamilyCurves

GRADIENT_BYTES = 4  # fp32


def replicas_plan(
    model: Model,
    families: Mapping[int, str],
    curves: Mapping[str, FamilyCurves],
    global_batch: int,
    zero: int,
    exchange_seconds: float = 0.0,
) -> tuple[Plan, float]:
    """Return the plan in which each rank is a replica, and the seconds of its step.

    `families` are by rank; `exchange_seconds` as in `allocate_in_step`. Raises PlanError where a device has no room for
    a row, or there are too few rows.
    """
    items = Interval(0, model.num_items)
    of_family = {
        family: Replica(lambda rows, of=of: of.seconds(items, rows), of.largest_rows) for family, of in curves.items()
    }
    replicas = [of_family[family] for family in families.values()]
    if zero >= 2:
        found: Allocation = allocate_in_step(replicas, global_batch, exchange_seconds)
    else:
        found = allocate(replicas, global_batch)
    tiles = []
    at = 0
    for (rank, family), size, pieces in zip(families.items(), found.rows, found.substeps, strict=True):
        tiles.append(Tile(items, Interval(at, at + size), (rank,), family=family, zero=zero, substeps=pieces))
        at += size
    updated = max(curves[family].update_seconds for family in families.values())
    return Plan(tuple(tiles), found.microbatches, at), found.seconds + updated


def exchange_seconds(cluster: Cluster, model: Model, ranks: Sequence[int], zero: int, dtype: str) -> float:
    """Return what replicas exchange in one forward and backward pass: gradients item by item, for ZeRO 3 weights too.

    As if nothing of it were hidden.
    """
    if zero < 2 or len(ranks) < 2:
        return 0.0
    network, total = ClusterNetwork(cluster), 0.0
    ranks = tuple(ranks)
    for item in range(model.num_items):
        size = sum(math.prod(p.shape) for p in item_parameters(model, item))
        total += network.group_seconds("reduce_scatter", size * GRADIENT_BYTES, ranks)
        if zero == 3:
            total += 2 * network.group_seconds("all_gather", size * ITEM_BYTES[dtype], ranks)
    return total
