"""Predicts a training step of a plan on a cluster: seconds by part, memory by stage, what had to be assumed. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hpctrain.config.clusters.cluster import Cluster, assumed_figures
from hpctrain.config.errors import PlanError
from hpctrain.plan.holdings import Holding, ShardGroup, holding_of
from hpctrain.plan.schedule import Schedule, in_flight, one_f_one_b, schedules_of
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.arrivals import arrivals
from hpctrain.planner.prediction.memory import StageMemory, memory_of, splits_backward
from hpctrain.planner.prediction.offload import host_shortage, offload_guesses, offloaded_update_seconds
from hpctrain.planner.prediction.simulate import Simulated, simulate
from hpctrain.planner.prices.buffers import largest_message_bytes, waiting_share
from hpctrain.planner.prices.cost import load_guesses, model_flops, update_seconds
from hpctrain.planner.prices.efficiency import Efficiency
from hpctrain.planner.prices.network import ConcurrentRanks
from hpctrain.planner.prices.prices import (
    PASSES,
    Costs,
    GradientExchange,
    PassCost,
    Prices,
    Site,
    TileCost,
    exchange_of,
    least_bucket_bytes,
)
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers

AGREED_BYTES = 24
"""Bytes of the loss, the norm and the stop flag, on which all ranks agree."""


@dataclass(frozen=True)
class Prediction:
    """A step, as predicted."""

    step_seconds: float
    interval_seconds: tuple[float, float]
    breakdown_seconds: dict[str, float]
    """Seconds of each part, as means over all ranks that the plan uses; they add up to the step. `hidden` is negative:
    the overlapped part of messages and of exchanges among holders. `tensor` has only its exposed part."""
    memory: tuple[StageMemory, ...]
    tokens_per_second: float
    mfu: float
    assumed_inputs: tuple[str, ...]
    profiled: tuple[str, ...]
    """The families whose seconds of computing are from a profile of the job."""
    exposed_seconds: dict[str, float]
    """Seconds of each part by a rank's own clock: waits count as part of what is waited for, and nothing is hidden."""

    waterfall_seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the step goes, cause by cause, as `forecast` says; empty where it was not asked."""
    host_shortage: str = ""
    """Says what is offloaded and does not fit in the memory of a node's host; empty where all fits."""

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.memory) and not self.host_shortage


def predict(setup: Setup, plan: Plan, cluster: Cluster) -> Prediction:
    """Return the prediction of one step.

    Raises LaunchError if the plan needs more ranks than there are devices. Raises PlanError where a tile's ranks are of
    other families than it says, or these do not compute in the dtype.
    """
    return Predictor(setup, plan, cluster).predict()


class Predictor:
    """Predicts one plan on one cluster. Each part is computed once, when it is first needed."""

    def __init__(
        self,
        setup: Setup,
        plan: Plan,
        cluster: Cluster,
        efficiencies: Mapping[str, Efficiency] | None = None,
        prices: Prices | None = None,
        like: "Predictor | None" = None,
    ):
        """`efficiencies`, by family, replace the catalogue's.

        `prices` may be those of other plans on the same cluster, whose setups differ in the number of parts alone.
        `like` is a predictor for a plan with the same tiles, whose setup differs in the number of parts alone. What
        both have in common is not computed again.
        """
        self.setup, self.plan, self.cluster = setup, plan, cluster
        self._overlapped_work = setup.bucket_bytes is not None
        self._bucket_bytes = least_bucket_bytes(setup, plan.path_ranks)
        self.prices = prices or Prices(setup, cluster, efficiencies)
        self.network, self._devices = self.prices.network, self.prices.devices
        self.network.check_ranks(len(plan.ranks))
        self._sites: dict[Tile, Site] = {}
        self._holdings: dict[tuple, tuple[Holding, int]] = {}
        self._passes: dict[tuple, dict[str, PassCost]] = {}
        self._peers_by_ranks: dict[tuple[int, ...], tuple[Tile, ...]] = {}
        self._holders: dict[tuple[tuple[int, ...], int], tuple[Tile, ...]] = {}
        self._known_memory: dict[tuple, StageMemory] = {}
        if like is None or like.plan.tiles != plan.tiles:
            self._families = {tile: self._families_of(number, tile) for number, tile in enumerate(plan.tiles)}
        else:
            self._families = like._families
            self._holdings, self._sharers, self._sites = like._holdings, like._sharers, like._sites
            self._exchanges, self._messages = like._exchanges, like._messages
            if like.plan is plan:
                self._schedules, self._equal, self._known_memory = like._schedules, like._equal, like._known_memory

    def _families_of(self, number: int, tile: Tile) -> tuple[str, ...]:
        result = tuple(dict.fromkeys(self.cluster.devices[rank].family for rank in tile.ranks))
        named = tile.family.split("+")
        if set(named) <= set(self.cluster.families) and set(named) != set(result):
            raise PlanError(
                f"tile {number} is for family '{tile.family}', but its ranks {list(tile.ranks)[:8]} are of"
                f" '{'+'.join(result)}' in this cluster; order its ranks as the cluster does, or make a plan for it"
            )
        return result

    @cached_property
    def simulated(self) -> Simulated:
        return self.simulated_at(self.costs)

    def simulated_at(self, costs: Costs) -> Simulated:
        """Return the step of the plan at other prices than its own."""
        return simulate(self.plan, self._schedules, costs)

    @cached_property
    def _schedules(self) -> dict[Tile, Schedule]:
        return schedules_of(self.plan, partial(one_f_one_b, splits_backward=self.setup.splits_backward))

    def predict(self) -> Prediction:
        simulated = self.simulated
        breakdown, exposed = self._mean_parts(simulated.parts), self._mean_parts(simulated.exposed)
        step = simulated.step_seconds
        tokens = self.plan.microbatches * self.plan.rows * self.setup.positions
        families = (self.cluster.devices[rank].family for tile in self.plan.first_tiles for rank in tile.ranks)
        peak = sum(self._devices[family].peak(self.setup.dtype) for family in families)
        used = [self._devices[family] for family in self._used_families]
        error = max(device.error for device in used)
        return Prediction(
            step,
            (step * (1 - error), step * (1 + error)),
            breakdown,
            self.memory,
            tokens / step,
            model_flops(self.setup, tokens) / step / peak,
            self.assumed_inputs,
            tuple(device.name for device in used if device.profile),
            exposed,
            host_shortage=host_shortage(self.plan, self.cluster, self._memory),
        )

    def _mean_parts(self, by_tile: Mapping[Tile, dict[str, float]]) -> dict[str, float]:
        tiles = self.plan.first_tiles
        num_ranks = sum(len(tile.ranks) for tile in tiles)
        return {part: sum(by_tile[t][part] * len(t.ranks) for t in tiles) / num_ranks for part in by_tile[tiles[0]]}

    @property
    def _used_families(self) -> list[str]:
        return list(dict.fromkeys(family for families in self._families.values() for family in families))

    @cached_property
    def assumed_inputs(self) -> tuple[str, ...]:
        """Return which inputs nobody measured or read in a data sheet, by their keys."""
        result, used = assumed_figures(self.cluster), self._used_families
        overlaps = bool(self.setup.overlaps) or self._overlapped_work
        are_profiled = any(self._devices[family].profile for family in used)
        for family in used:
            device, tiles = self._devices[family], [tile for tile, own in self._families.items() if family in own]
            result += device.assumptions(tiles)
            if are_profiled and not device.profile:
                result.append(f"families.{family}: no profile of this job, which other families have")
            if overlaps and device.family.overlap_slowdown is None:
                times = device.overlap_slowdown
                slower = f"makes overlapped computation take {times} times as long" if times > 1 else "slows nothing"
                result.append(f"families.{family}.overlap_slowdown: communication {slower}")
        result += load_guesses(self.setup, (tile.tensor for tile in self.plan.tiles))
        return *result, *offload_guesses(self.plan, self.cluster, self._families)

    # ---- what the simulation needs -----------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> Costs:
        known = {first: self._tile_cost(first) for first in dict.fromkeys(self._equal.values())}
        tiles = {tile: known[first] for tile, first in self._equal.items()}
        largest = max(self.plan.tiles, key=lambda tile: tile.rows.size)
        blocking = self.setup.blocking_share(largest.rank_rows, largest.tensor)
        return Costs(tiles, exchanges=self._gradient_exchanges(), blocking_share=blocking, **self._messages)

    @cached_property
    def _equal(self) -> dict[Tile, Tile]:
        """Return for each tile the first one whose passes take as long."""
        firsts: dict[tuple, Tile] = {}
        result = {}
        for tile in self.plan.tiles:
            kind = tile.items, tile.chunk_rows, self._site(tile), tile.recompute, self._splits(tile), tile.offload
            result[tile] = firsts.setdefault(kind, tile)
        return result

    def _splits(self, tile: Tile) -> bool:
        return splits_backward(self.setup, self.plan, tile)

    @cached_property
    def _messages(self) -> dict[str, Any]:
        """Return what messages between tiles take, and how long all take to agree, as fields of `Costs`."""
        costs = arrivals(self.setup, self.plan, self.network)
        return {
            "messages": {pair: cost.seconds for pair, cost in costs.items()},
            "under_way": {pair: cost.under_way for pair, cost in costs.items()},
            "ports": {pair: cost.ports for pair, cost in costs.items() if cost.ports},
            "agree_seconds": self.network.group_seconds("all_reduce", AGREED_BYTES, self.plan.ranks),
        }

    def _site(self, tile: Tile) -> Site:
        if tile not in self._sites:
            groups = self._holding(tile).shard_groups
            exchanging = next((group.ranks for group in groups if group.zero >= 2), ())
            zero = max((group.zero for group in groups), default=0)
            self._sites[tile] = self.prices.site(tile, zero, exchanging, self._sharers if exchanging else None)
        return self._sites[tile]

    def _tile_cost(self, tile: Tile) -> TileCost:
        passes: dict[str, list[PassCost]] = {"forward": [], "backward": []}
        if self._splits(tile):
            passes |= {"backward_input": [], "backward_weight": []}
        for chunk in range(len(tile.chunk_rows)):
            each = [self._passes_with_peers(tile, layer, chunk) for layer in layers(tile.items)]
            for name, made in passes.items():
                made.append(sum((of_layer[name] for of_layer in each), PassCost(0.0)))
        times = max(self._devices[family].overlap_slowdown for family in self._families[tile])
        before, after = self._alone(tile, tile.chunk_rows[0])
        return TileCost(
            update_seconds=self._update_seconds(tile),
            overlap_slowdown=times,
            exposed_part="data" if tile.tensor.stored_parts == 1 else "tensor",
            before_seconds=before,
            after_seconds=after,
            **{name: tuple(made) for name, made in passes.items()},
        )

    def _peers(self, tile: Tile) -> tuple[Tile, ...]:
        """Return the tiles with which a tile exchanges weights or gradients in every pass (ZeRO 2 and 3), itself
        included. Of equal tiles one is returned."""
        ranks = self._site(tile).data_ranks
        if ranks not in self._peers_by_ranks:
            peers = dict.fromkeys(peer for rank in ranks for peer in self.plan.tiles_of(rank))
            kinds = {(self._site(p), p.items, p.recompute, p.chunk_rows): p for p in peers}
            self._peers_by_ranks[ranks] = tuple(kinds.values())
        return self._peers_by_ranks[ranks]

    def _passes_with_peers(self, tile: Tile, layer: Interval, chunk: int) -> Mapping[str, PassCost]:
        """Return the passes over a layer for one row chunk, as long as the slowest of the tiles that exchange in them.
        These tiles come to the end of every layer together, not only to the end of the step."""
        own, waits = self.layer_passes(tile, layer, tile.chunk_rows[chunk]), {}
        if len(peers := self._peers(tile)) <= 1:
            return own
        for peer in peers:
            rows = peer.chunk_rows
            if peer.contains(layer.start) and chunk < len(rows):
                others = self.layer_passes(peer, layer, rows[chunk])
                for name in PASSES.values() if self._site(tile).zero == 3 else ("backward", "backward_weight"):
                    waits[name] = max(waits.get(name, 0.0), others[name].seconds - own[name].seconds)
        return {
            name: one + PassCost(0.0, data=waits.get(name, 0.0), waited=waits.get(name, 0.0))
            for name, one in own.items()
        }

    def _alone(self, tile: Tile, rows: int) -> tuple[float, float]:
        """Return the seconds of gathers (over z and holders) before the first block computes, and of scatters after the
        last. Those of an embedding are hidden by its own computation."""
        blocks = [layer for layer in layers(tile.items) if self.setup.is_block(layer)]
        if not blocks:
            return 0.0, 0.0
        passes = self.layer_passes(tile, blocks[0], rows)
        return passes["forward"].gathered, passes["backward"].scattered

    def layer_passes(self, tile: Tile, layer: Interval, rows: int) -> dict[str, PassCost]:
        """Return by name (`PASSES`) what each pass over a layer takes a rank of a tile, for so many rows of its own."""
        key = self._site(tile), self.setup.first_equal[slice(*layer)], rows, tile.recompute
        if key not in self._passes:
            what = self._site(tile), layer, rows, tile.recompute, self.setup.tensor_parts
            self._passes[key] = {name: self.prices.price(name, *what) for name in PASSES.values()}
        return self._passes[key]

    @cached_property
    def _sharers(self) -> ConcurrentRanks:
        """All ranks that exchange weights or gradients with other nodes: those of items that are on several nodes."""
        places: dict[Interval, set[int]] = {}
        for tile in self.plan.tiles:
            places.setdefault(tile.items, set()).update(self.cluster.devices[rank].node for rank in tile.ranks)
        nodes: dict[int, set[int]] = {}
        for items, of_tiles in places.items():
            for item in range(*items):
                nodes.setdefault(item, set()).update(of_tiles)
        shared = {items for items in places if any(len(nodes[item]) > 1 for item in range(*items))}
        ranks = (rank for tile in self.plan.tiles if tile.items in shared for rank in tile.ranks)
        return self.network.concurrent(tuple(dict.fromkeys(ranks)))

    def _holding(self, tile: Tile) -> Holding:
        """Return what the first rank of a tile holds; the same for tiles that share items and grid."""
        return self._first_holding(tile)[0]

    def _first_holding(self, tile: Tile) -> tuple[Holding, int]:
        items = tuple(virtual_stage.items for virtual_stage in self.plan.virtual_stages(tile))
        key = items, tile.tensor, tile.zero, tile.state_share, tile.family
        if key not in self._holdings:
            self._holdings[key] = self._holding_of(tile.ranks[0]), tile.ranks[0]
        return self._holdings[key]

    def _holding_of(self, rank: int) -> Holding:
        return holding_of(self.setup.model, self.plan, rank, self._bucket_bytes)

    def _stored(self, group: ShardGroup, tile: Tile) -> int:
        whole = sum(layout.size for layout in group.layouts)
        return whole // tile.tensor.stored_parts + sum(region.size for region in group.regions)

    def _updated(self, tile: Tile) -> int:
        """Return how many weights a rank updates."""
        stored = ((group, self._stored(group, tile)) for group in self._holding(tile).shard_groups)
        return sum(group.cuts(size)[0].size if group.zero else size for group, size in stored)

    def _update_seconds(self, tile: Tile) -> float:
        seconds = offloaded_update_seconds if tile.offload == "optimizer" else update_seconds
        return max(seconds(self.setup, self._devices[f], self._updated(tile)) for f in self._families[tile])

    def _gradient_exchanges(self) -> tuple[GradientExchange, ...]:
        return tuple(itertools.starmap(self._timed, self._exchanges))

    @cached_property
    def _exchanges(self) -> tuple[tuple[ShardGroup, GradientExchange], ...]:
        """Return the exchange of each group, without the times at which gradients are final and weights are needed."""
        result: dict[tuple, tuple[ShardGroup, GradientExchange]] = {}
        for tile in self.plan.tiles:
            self._holding(tile)
        for shards, rank in self._holdings.values():
            known: Counter[tuple] = Counter()  # all holders list what they share in one order
            for group in shards.shard_groups:
                known[group.ranks, group.items] += 1
                key = group.ranks, group.items, known[group.ranks, group.items]
                if len(group.ranks) > 1 and key not in result:
                    result[key] = group, self._exchange(group, self._stored(group, self.plan.tile_of(rank)))
        return tuple(result.values())

    def _exchange(self, group: ShardGroup, stored: int) -> GradientExchange:
        """Return the exchange of a group that stores so many weights."""

        def seconds(operation: str, num_bytes: float) -> float:
            return self.network.holder_seconds(operation, int(num_bytes), group.ranks, self._sharers)

        reduce, gather = exchange_of(self.setup, group.zero, stored, seconds)
        return GradientExchange(self._first_holders(group), reduce, gather)

    def _first_holders(self, group: ShardGroup) -> tuple[Tile, ...]:
        """Return the first tile of each of a group's ranks with one of the items: it needs weights first, and has final
        gradients last. Groups of the same ranks and tiles get one object."""
        key = group.ranks, id(self.plan.users(group.items))
        if key not in self._holders:
            items = group.items
            firsts = (next(t for t in self.plan.tiles_of(r) if any(map(t.contains, items))) for r in group.ranks)
            self._holders[key] = tuple(dict.fromkeys(firsts))
        return self._holders[key]

    def _timed(self, group: ShardGroup, exchange: GradientExchange) -> GradientExchange:
        """Return an exchange with the times at which gradients are final and weights are needed, where it is
        overlapped."""
        if not self._overlapped_work:
            return exchange

        until = self._until

        def seconds(tile: Tile, which: int) -> float:
            first = min(filter(tile.contains, group.items))
            before = next(number for number, layer in enumerate(layers(tile.items)) if first < layer.stop)
            return until[tile][which][before]

        grids = {tile.tensor for tile in exchange.tiles} if not group.regions else set()
        is_early = bool(grids) and all(grid.size == grid.product_parts for grid in grids) and self.setup.gathers_early
        needed = partial(seconds, which=0) if is_early else None
        return replace(exchange, ready_seconds=partial(seconds, which=1), needed_seconds=needed)

    @cached_property
    def _until(self) -> dict[Tile, tuple[list[float], list[float]]]:
        """Return by tile, for each layer, the seconds of the layers before it, in the first forward and the last
        backward pass.

        The forward pass needs the layer's weights after its figure. The layer's gradients are final so long before the
        end of the backward pass, which computes layers from the last to the first.
        """
        known = {}
        for tile in dict.fromkeys(self._equal.values()):
            last, rows = "backward_weight" if self._splits(tile) else "backward", tile.rank_rows // tile.row_chunks
            passes = [self.layer_passes(tile, layer, rows) for layer in layers(tile.items)]
            seconds = ((each[name].seconds for each in passes) for name in ("forward", last))
            forward, backward = (list(itertools.accumulate(each, initial=0.0)) for each in seconds)
            known[tile] = forward, backward
        return {tile: known[first] for tile, first in self._equal.items()}

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """Return the memory that the first rank of each tile needs, for all of its tiles. Equal needs are listed
        once."""
        ranks: dict[int, tuple[StageMemory, list[int]]] = {}
        for tile, stage in self._memory.items():
            ranks.setdefault(id(stage), (stage, []))[1].extend(tile.ranks)
        return tuple(replace(stage, ranks=tuple(own)) for stage, own in ranks.values())

    @property
    def headroom(self) -> dict[Tile, float]:
        """Return by tile the number of further microbatches that fit in memory, with their messages where these
        wait."""
        result = {}
        for tile, stage in self._memory.items():
            kept = in_flight(self.plan, tile)
            each = stage.memory.activations / kept
            each += largest_message_bytes(self.setup, tile) if self._waiting_share(tile) else 0
            headroom = (stage.available_bytes - stage.memory.total) // each if each else math.inf
            result[tile] = headroom if kept + headroom < self.plan.microbatches else math.inf
        return result

    def free_items(self, tile: Tile) -> int:
        """Return the number of further items that fit on a rank of one tile, if each needs as much as the tile's
        own."""
        stage = self._memory[tile]
        own = stage.memory.weights + stage.memory.gradients + stage.memory.moments + stage.memory.activations
        return int((stage.available_bytes - stage.memory.total) * tile.items.size // own)

    @cached_property
    def _memory(self) -> dict[Tile, StageMemory]:
        known, result = self._known_memory, {}
        for tile in self.plan.first_tiles:
            tiles, waiting = self.plan.virtual_stages(tile), self._waiting(tile)
            families = tuple(frozenset(self.cluster.devices[rank].family for rank in ranks) for ranks in tile.by_place)
            key = waiting, families, *((self.plan.warm_up(each), self.plan.equal_work[each]) for each in tiles)
            if key not in known:
                stages = [self._stage_memory(tile, *each, waiting) for each in enumerate(tile.by_place or [tile.ranks])]
                known[key] = max(stages, key=lambda stage: stage.memory.total - stage.available_bytes)
            result[tile] = known[key]
        return result

    def _stage_memory(self, tile: Tile, place: int, ranks: Sequence[int], waiting: int) -> StageMemory:
        """Return the memory of some ranks of a tile, which are at one place along c."""
        families = [self.cluster.devices[rank].family for rank in ranks]
        available = min(self.cluster.families[family].usable_bytes for family in families)
        shards, rank = self._first_holding(tile)
        memory = memory_of(self.setup.at(place), self.network, self.plan, tile, shards, rank, waiting, available)
        if any(self.cluster.families[family].kind == "cpu" for family in families):
            available -= memory.on_host  # a CPU's memory is the host's
        return StageMemory(tile, memory, available, tuple(each.items for each in self.plan.virtual_stages(tile)))

    def _waiting(self, tile: Tile) -> int:
        """Return how many activations wait to be sent when a tile has warmed up."""
        return math.ceil(self._waiting_share(tile) * (in_flight(self.plan, tile) - 1))

    def _waiting_share(self, tile: Tile) -> float:
        if len(self.plan.virtual_stages(tile)) > 1:
            return 0.0
        made = sum(each.seconds for each in self.costs.tiles[tile].forward)
        sent = (self.costs.messages.get((tile, to), 0.0) for to in self.plan.downstream(tile))
        return waiting_share(made, max(sent, default=0.0))
