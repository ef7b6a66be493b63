"""A predicted step in detail: its spans, and a waterfall from devices that are all busy to the step. Pure.

The first part of the waterfall is the seconds of a step if all devices of the cluster always computed. They compute as
fast as in the plan, and what it computes again is not counted. Each cause has the seconds by which the step is shorter
without that cause alone, by `simulate`. Waits for messages hide uneven work and bubbles, and would count twice with
them: these two are of a step whose messages take no time. Two causes may still hide each other, or both save the same
seconds. The part `interaction` is that difference, so that the parts add up to the step.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import fsum
from typing import Self

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.planner.prediction.simulate import PredictedSpan, Simulated
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.prices import PASSES, PassCost, TileCost
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import ONE_RANK
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK, layers

BUSY = "all devices busy"
CAUSES = (
    "whole items and rows",
    "bubble",
    "messages",
    "gradients",
    "weights",
    "tensor",
    "optimizer",
    "recompute and offload",
    "unused devices",
)
INTERACTION = "interaction"
BACKWARD = tuple(name for name in PASSES.values() if name != "forward")

LEAST_SHARE = 5e-4
"""Smallest share of a step for which a part is shown."""

TileChange = Callable[[Tile, TileCost], TileCost]


@dataclass(frozen=True)
class Forecast:
    """A predicted step in detail. Each tile represents its ranks, as in `Plan.first_tiles`."""

    prediction: Prediction
    """The prediction with its waterfall."""
    spans: dict[Tile, list[PredictedSpan]]
    exposed: dict[Tile, dict[str, float]]
    """Seconds by part for each tile; they add up to the step."""

    @classmethod
    def of(cls, predictor: Predictor) -> Self:
        """Return the details of the step of a predictor."""
        prediction = replace(predictor.predict(), waterfall_seconds=waterfall(predictor))
        return cls(prediction, predictor.simulated.spans, predictor.simulated.exposed)


def forecast(setup: Setup, plan: Plan, cluster: Cluster) -> Forecast:
    """Return the prediction of one step with its details. Raises as `predict`."""
    return Forecast.of(Predictor(setup, plan, cluster))


def waterfall(predictor: Predictor) -> dict[str, float]:
    """Return the seconds of each part of a predicted step, in the order of the waterfall; they add up to the step.

    - `whole items and rows`: tiles take unequally long, since items and rows are cut whole. Work that moves from one to
      another takes its collectives along.
    - `bubble`: what even the rank that waits the least waits for others.
    - `messages` between tiles, `gradients` and `weights` among their holders, `tensor` grids: what they delay, and by
      how much they slow computing. ZeRO 3 gathers weights in backward passes too, and that counts as gradients.
    - `unused devices`: the step is longer than with their share of the work given to them.
    """
    plan, costs, step = predictor.plan, predictor.costs, predictor.simulated.step_seconds
    kept = tuple(replace(tile, recompute="none", offload="none") for tile in plan.tiles)
    plain = predictor
    if kept != plan.tiles:
        plain = Predictor(predictor.setup, replace(plan, tiles=kept), predictor.cluster, prices=predictor.prices)
    plain_costs = dict(zip(plan.tiles, (plain.costs.tiles[tile] for tile in kept), strict=True))
    ranks = {tile: plan.virtual_stages(tile) for tile in plan.first_tiles}
    flops = lru_cache(None)(partial(_row_flops, predictor.setup))
    work = {first: fsum(tile.rows.size * flops(tile.items) for tile in tiles) for first, tiles in ranks.items()}
    speed = {first: work[first] / _busy_seconds(tiles, plain_costs) for first, tiles in ranks.items()}
    used, unused = fsum(speed.values()), _unused_speed(predictor, speed)
    own = {first: fsum(_seconds_apart(costs.tiles[tile]) for tile in tiles) for first, tiles in ranks.items()}
    together = fsum(work.values()) / fsum(work[first] / own[first] for first in ranks)
    even = {tile: together / own[first] for first, tiles in ranks.items() for tile in tiles}

    def step_with(change: TileChange | None = None, **others) -> Simulated:
        """Return the step at changed prices."""
        changed, known = costs.tiles, {}
        if change:
            kinds = {tile: (id(cost), even[tile], tile.tensor) for tile, cost in costs.tiles.items()}
            known = {kind: change(tile, costs.tiles[tile]) for kind, tile in {k: t for t, k in kinds.items()}.items()}
            changed = {tile: known[kind] for tile, kind in kinds.items()}
        return predictor.simulated_at(replace(costs, tiles=changed, **others))

    def saved(*changed, **others) -> float:
        """Return by how much a step is shorter at changed prices."""
        return step - step_with(*changed, **others).step_seconds

    exchanges = costs.exchanges
    at_once = {"messages": dict.fromkeys(costs.messages, 0.0), "blocking_share": 0.0, "under_way": {}, "ports": {}}
    without_messages = step_with(**at_once)
    evened = step_with(lambda tile, cost: _scaled(cost, even[tile], 0.0), **at_once)
    seconds = (
        without_messages.step_seconds - evened.step_seconds,
        min(parts["bubble"] for parts in without_messages.parts.values()),
        step - without_messages.step_seconds,
        saved(_without("data", BACKWARD), exchanges=tuple(replace(each, reduce_seconds=0.0) for each in exchanges)),
        saved(_without("data", ["forward"]), exchanges=tuple(replace(each, gather_seconds=0.0) for each in exchanges)),
        saved(_without("tensor", PASSES.values())),
        saved(lambda _, cost: replace(cost, update_seconds=0.0), agree_seconds=0.0),
        step - plain.simulated.step_seconds,
        saved(lambda _, cost: _scaled(cost, used / (used + unused), used / (used + unused))) if unused else 0.0,
    )
    parts = {BUSY: plan.microbatches * fsum(work.values()) / (used + unused), **dict(zip(CAUSES, seconds, strict=True))}
    return parts | {INTERACTION: step - fsum(parts.values())}


def _busy_seconds(tiles: Collection[Tile], costs: Mapping[Tile, TileCost]) -> float:
    """Return the seconds that a rank computes for a microbatch, by what communication does not slow."""
    passes = (each for tile in tiles for each in (*costs[tile].forward, *costs[tile].backward))
    return fsum(each.compute - each.slowed for each in passes)


def _row_flops(setup: Setup, items: Interval) -> float:
    """Return the FLOP of the products of some items' forward pass, for each row: their share of the work."""
    costs = (layer_cost(setup, ONE_RANK, layer, 1, "none", 1) for layer in layers(items))
    products = (product for cost in costs for product in cost.forward.products)
    return fsum(2.0 * each.m * each.k * each.n * each.batch * each.share for each in products)


def _unused_speed(predictor: Predictor, speed: Mapping[Tile, float]) -> float:
    """Return the FLOP of forward passes in a second that unused devices would do: as much as others of their family,
    or else what a block takes one of them alone."""
    devices, used = predictor.cluster.devices, {rank for tile in speed for rank in tile.ranks}
    idle = [device for device in devices if device.rank not in used]
    by_family: dict[str, float] = {}
    for tile, own in speed.items():
        family = devices[tile.ranks[0]].family
        by_family[family] = max(by_family.get(family, 0.0), own / len(tile.ranks))
    rows = max(1, predictor.plan.rows // len(used))
    for device in {device.family: device for device in idle}.values():
        if device.family not in by_family:
            alone = Tile(BLOCK, Interval(0, rows), (device.rank,), family=device.family)
            site = predictor.prices.site(alone)
            try:
                passes = [
                    predictor.prices.price(name, site, BLOCK, rows, "none", 1) for name in ("forward", "backward")
                ]
            except PlanError:  # it does not compute in the dtype
                by_family[device.family] = 0.0
                continue
            by_family[device.family] = rows * _row_flops(predictor.setup, BLOCK) / fsum(each.compute for each in passes)
    return fsum(by_family[device.family] for device in idle)


def _seconds_apart(cost: TileCost) -> float:
    """Return the seconds of a tile for a microbatch, without its waits for slower tiles that exchange with it."""
    return fsum(one.seconds - one.waited for one in (*cost.forward, *cost.backward))


def _scaled(cost: TileCost, times: float, waits: float) -> TileCost:
    """Return the cost of a tile with so many times as much work, that waits so many times as long for others."""

    def scaled(one: PassCost) -> PassCost:
        data = (one.data - one.waited) * times + one.waited * waits
        return replace(one, compute=one.compute * times, tensor=one.tensor * times, data=data)

    return replace(cost, **{name: tuple(map(scaled, getattr(cost, name))) for name in PASSES.values()})


def _without(part: str, passes: Collection[str]) -> TileChange:
    """Return what removes the communication of a part, "tensor" or "data", from some passes of a tile, and how much it
    slows them."""

    def change(tile: Tile, cost: TileCost) -> TileCost:
        is_slowing = (part == "tensor") == (tile.tensor.size > 1)

        def quick(one: PassCost) -> PassCost:
            return replace(one, compute=one.compute - is_slowing * one.slowed, **{part: one.waited * (part == "data")})

        changed = {name: tuple(map(quick, getattr(cost, name))) for name in passes}
        if cost.exposed_part == part:
            ends = {"before_seconds": "forward", "after_seconds": "backward"}
            changed |= {end: 0.0 for end, name in ends.items() if name in passes}
        return replace(cost, **changed)

    return change


def format_waterfall(parts: Mapping[str, float]) -> str:
    """Return the parts of a waterfall in one line, as shares of the step."""
    step = fsum(parts.values())
    shown = {part: seconds / step for part, seconds in parts.items() if abs(seconds) >= LEAST_SHARE * step}
    return ", ".join(f"{part} {share:.1%}" for part, share in shown.items())
