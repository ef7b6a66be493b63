"""Predicts a training step of a plan on a cluster: seconds by part, memory by stage, what had to be guessed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.cluster import Cluster, guessed_figures
from hpctrain.errors import PlanError
from hpctrain.holders import Holdings, holdings_of
from hpctrain.intervals import cut_evenly
from hpctrain.plan import Plan, Tile
from hpctrain.planner.catalogue import Efficiency
from hpctrain.planner.cost import Setup, Work, item_cost, model_flops, update_seconds
from hpctrain.planner.devices import DeviceModel
from hpctrain.planner.memory import Memory, memory_of
from hpctrain.planner.network import ClusterNetwork
from hpctrain.planner.simulate import PARTS, Costs, PassCost, Sharing, Simulated, TileCost, simulate
from hpctrain.schedule import Instruction, one_f_one_b
from hpctrain.transfers import receives

# How far a step may be from its prediction, two times out of three: as benchmarks/predictor.py finds it for devices
# that were measured, and for those of a data sheet.
MEASURED_ERROR, DATASHEET_ERROR = 0.05, 0.15


@dataclass(frozen=True)
class StageMemory:
    """What a rank of a tile needs, and has."""

    tile: Tile
    memory: Memory
    available_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.available_bytes


@dataclass(frozen=True)
class Prediction:
    """A step, as predicted."""

    step_seconds: float
    interval_seconds: tuple[float, float]
    breakdown_seconds: dict[str, float]
    """The mean over all ranks that the plan uses; adds up to the step. `hidden` is negative: communication that nobody
    waits for."""
    memory: tuple[StageMemory, ...]
    tokens_per_second: float
    mfu: float
    guessed: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.memory)


def predict(setup: Setup, plan: Plan, cluster: Cluster, interleave: int = 1) -> Prediction:
    """Return the prediction of one step.

    `interleave` is of other software: how many pieces of the model each rank of a pipeline has in turn (Narayanan et
    al. 2021), which makes its bubble as many times shorter.

    Raises LaunchError if the plan needs more ranks than there are devices, PlanError where a tile's ranks are of other
    families than it says, or these do not compute in the dtype.
    """
    return Predictor(setup, plan, cluster).predict(interleave)


def pass_cost(
    setup: Setup,
    network: ClusterNetwork,
    devices: Sequence[DeviceModel],
    work: Work,
    tile: Tile,
    data_ranks: Sequence[int],
    on_node: Sequence[int],
) -> PassCost:
    """Return what a pass over one item takes on a tile whose ranks have such `devices`, the slowest of which counts.

    `data_ranks` hold the same weights as the tile's first rank, on whose node are `on_node`.
    """
    compute = max(work.seconds(device, setup.dtype, setup.stack) for device in devices)
    tensor = data = 0.0
    rank = tile.ranks[0]
    for exchange in work.exchanges:
        what = exchange.operation, exchange.num_bytes
        if exchange.axis == "data":
            data += network.group_seconds(*what, data_ranks, on_node)
        else:
            tensor += network.group_seconds(*what, tile.axis_ranks(exchange.axis, rank), tile.ranks)
    return PassCost(compute, tensor, data)


class Predictor:
    """What is known of one plan on one cluster."""

    def __init__(
        self, setup: Setup, plan: Plan, cluster: Cluster, efficiencies: Mapping[str, Efficiency] | None = None
    ):
        """`efficiencies` are by family, in place of the catalogue's."""
        self.setup, self.plan, self.cluster = setup, plan, cluster
        self.network = ClusterNetwork(cluster, setup.stack.link_share)
        self.network.check_ranks(len(plan.ranks))
        fitted = efficiencies or {}
        self._devices = {n: DeviceModel(n, family, fitted.get(n)) for n, family in cluster.families.items()}
        self._families = {tile: self._families_of(number, tile) for number, tile in enumerate(plan.tiles)}
        self._on_node: dict[int, list[int]] = {}
        for rank in plan.ranks:
            self._on_node.setdefault(cluster.devices[rank].node, []).append(rank)

    def _families_of(self, number: int, tile: Tile) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(self.cluster.devices[rank].family for rank in tile.ranks))
        named = tile.family.split("+")
        if set(named) <= set(self.cluster.families) and set(named) != set(found):
            raise PlanError(
                f"tile {number} is for family '{tile.family}', but its ranks {list(tile.ranks)[:8]} are of"
                f" '{'+'.join(found)}' in this cluster; order its ranks as the cluster does, or make a plan for it"
            )
        return found

    def predict(self, interleave: int) -> Prediction:
        simulated = simulate(self.plan, self._schedules(), self.costs)
        breakdown = self._mean_parts(simulated)
        step = simulated.step_seconds + self.setup.stack.step_seconds
        breakdown["optimizer"] += self.setup.stack.step_seconds
        if interleave > 1:
            saved = breakdown["bubble"] * (1 - 1 / interleave)
            breakdown["bubble"] -= saved
            step -= saved
        tokens = self.plan.microbatches * self.plan.rows * self.setup.positions
        peak = sum(self._device(rank).peak(self.setup.dtype) for tile in self.plan.tiles for rank in tile.ranks)
        error = MEASURED_ERROR if self._is_measured else DATASHEET_ERROR
        return Prediction(
            step,
            (step * (1 - error), step * (1 + error)),
            breakdown,
            self.memory,
            tokens / step,
            model_flops(self.setup, tokens) / step / peak,
            self.guessed,
        )

    def _schedules(self) -> dict[Tile, tuple[Instruction, ...]]:
        """Return each tile's instructions, made once for tiles that have the same."""
        made: dict[tuple, tuple[Instruction, ...]] = {}
        found = {}
        for tile in self.plan.tiles:
            ends = bool(self.plan.upstream(tile)), bool(self.plan.downstream(tile))
            key = self.plan.depth_to_loss(tile), ends, tile.substeps
            if key not in made:
                made[key] = one_f_one_b(self.plan, tile)
            found[tile] = made[key]
        return found

    def _mean_parts(self, simulated: Simulated) -> dict[str, float]:
        num_ranks = sum(len(tile.ranks) for tile in self.plan.tiles)
        return {
            part: sum(simulated.parts[tile][part] * len(tile.ranks) for tile in self.plan.tiles) / num_ranks
            for part in PARTS
        }

    @property
    def _used_families(self) -> list[str]:
        return list(dict.fromkeys(family for families in self._families.values() for family in families))

    @property
    def _is_measured(self) -> bool:
        return all(self.cluster.families[family].products for family in self._used_families)

    @cached_property
    def guessed(self) -> tuple[str, ...]:
        """Return which inputs nobody measured or read in a data sheet."""
        figures = guessed_figures(self.cluster)
        return tuple(figures + [guess for family in self._used_families for guess in self._devices[family].guesses])

    def _device(self, rank: int) -> DeviceModel:
        return self._devices[self.cluster.devices[rank].family]

    # ---- what the simulation needs -----------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> Costs:
        tiles, known = {}, {}
        for tile in self.plan.tiles:
            pieces = tuple(cut_evenly(max(tile.rows_at(z).size for z in range(tile.tensor.z)), tile.substeps))
            key = (tile.items, tuple(p.size for p in pieces), tile.tensor, tile.recompute, self._place(tile))
            if key not in known:
                known[key] = self._tile_cost(tile, [piece.size for piece in pieces])
            tiles[tile] = known[key]
        blocking = self.setup.stack.blocking_sends
        return Costs(tiles, self._messages(), self._sharings(), self._agree_seconds(), blocking)

    def _place(self, tile: Tile) -> tuple:
        """Return what makes tiles alike: their families, on which tables of nodes, and how their ranks are spread."""
        devices = [self.cluster.devices[rank] for rank in tile.ranks]
        nodes = list(dict.fromkeys(device.node for device in devices))
        where = tuple((d.table, nodes.index(d.node), d.index) for d in devices)
        return self._families[tile], where, self._held(tile).holdings and self._zero_groups(tile)

    def _zero_groups(self, tile: Tile) -> tuple[int, ...]:
        return next((h.ranks for h in self._held(tile).holdings if h.zero >= 2), ())

    def _tile_cost(self, tile: Tile, pieces: list[int]) -> TileCost:
        forward, backward = [], []
        for rows in pieces:
            costs = {}
            for item in range(*tile.items):
                like = item if item in (0, self.setup.model.num_items - 1) else 1
                if like not in costs:
                    zero = max((h.zero for h in self._held(tile).holdings), default=0)
                    cost = item_cost(self.setup, tile.tensor, item, rows, tile.recompute, zero)
                    costs[like] = [self._pass(tile, work) for work in (cost.forward, cost.backward)], 0
                costs[like] = costs[like][0], costs[like][1] + 1
            for passes, i in ((forward, 0), (backward, 1)):
                passes.append(
                    PassCost(*(sum(getattr(c[i], part) * n for c, n in costs.values()) for part in vars(PassCost(0))))
                )
        return TileCost(tuple(forward), tuple(backward), self._update_seconds(tile))

    def _pass(self, tile: Tile, work: Work) -> PassCost:
        devices = [self._devices[family] for family in self._families[tile]]
        groups = self._zero_groups(tile), self._on_same_node(tile.ranks[0])
        return pass_cost(self.setup, self.network, devices, work, tile, *groups)

    def _on_same_node(self, rank: int) -> list[int]:
        return self._on_node[self.cluster.devices[rank].node]

    def _held(self, tile: Tile) -> Holdings:
        """Return what the first rank of a tile holds; the same for tiles that share items and grid."""
        return self._first_held(tile)[0]

    def _first_held(self, tile: Tile) -> tuple[Holdings, int]:
        key = tile.items, tile.tensor, tile.zero, tile.state_share, tile.family
        if key not in self._holdings:
            self._holdings[key] = holdings_of(self.setup.model, self.plan, tile.ranks[0]), tile.ranks[0]
        return self._holdings[key]

    def _held_by(self, tile: Tile, rank: int) -> Holdings:
        """Return what one rank of a tile holds."""
        held, first = self._first_held(tile)
        return held if rank == first else holdings_of(self.setup.model, self.plan, rank)

    @cached_property
    def _holdings(self) -> dict[tuple, tuple[Holdings, int]]:
        return {}

    def _stored(self, holding, z: int) -> int:
        return sum(layout.size for layout in holding.layouts) // z + sum(slab.size for slab in holding.slabs)

    def _update_seconds(self, tile: Tile) -> float:
        held = self._held(tile)
        updated = 0
        for holding in held.holdings:
            stored = self._stored(holding, tile.tensor.z)
            updated += holding.cuts(stored)[0].size if holding.zero else stored
        return max(update_seconds(self.setup, self._devices[f], updated) for f in self._families[tile])

    def _sharings(self) -> tuple[Sharing, ...]:
        found: dict[tuple, Sharing] = {}
        for tile in self.plan.tiles:
            self._held(tile)
        for held, rank in self._holdings.values():
            for number, holding in enumerate(held.holdings):
                if len(holding.ranks) == 1 or (holding.ranks, number) in found:
                    continue
                tile, beside = self.plan.tile_of(rank), self._on_same_node(holding.ranks[0])
                stored = self._stored(holding, tile.tensor.z)
                reduced = stored * self.setup.stack.gradient_bytes
                reduce = gather = 0.0
                if holding.zero < 2:
                    operation = "reduce_scatter" if holding.zero else "all_reduce"
                    reduce = self.network.group_seconds(operation, reduced, holding.ranks, beside)
                if holding.zero in (1, 2):
                    gather = self.network.group_seconds(
                        "all_gather", stored * self.setup.item_bytes, holding.ranks, beside
                    )
                tiles = tuple(dict.fromkeys(self.plan.tile_of(r) for r in holding.ranks))
                found[holding.ranks, number] = Sharing(tiles, reduce, gather)
        return tuple(found.values())

    def _agree_seconds(self) -> float:
        return self.network.group_seconds("all_reduce", 24, self.plan.ranks, ())

    def _messages(self) -> dict[tuple[Tile, Tile], float]:
        found: dict[tuple[Tile, Tile], float] = {}
        for tile in self.plan.tiles:
            for forward in (True, False):
                sources = self.plan.upstream(tile) if forward else self.plan.downstream(tile)
                like = len(sources) == 1 and (sources[0].rows, sources[0].tensor) == (tile.rows, tile.tensor)
                # of tiles that are alike each rank hears of its counterpart alone: the ends stand for all
                for rank in {tile.ranks[0], tile.ranks[-1]} if like else tile.ranks if sources else ():
                    self._receive_one(found, tile, rank, forward)
        return found

    def _receive_one(self, found: dict, tile: Tile, rank: int, forward: bool) -> None:
        element = self.setup.positions * self.setup.item_bytes
        arriving: dict[Tile, float] = {}
        for piece in receives(self.plan, rank, self.setup.model.hidden_size, forward):
            source = self.plan.tile_of(piece.sender)
            num_bytes = piece.rows.size * piece.features.size * element
            flows = self.network.flows(piece.sender, source.ranks)
            seconds = self.network.seconds(piece.sender, rank, num_bytes, flows)
            arriving[source] = arriving.get(source, 0.0) + seconds
        for source, seconds in arriving.items():
            found[source, tile] = max(found.get((source, tile), 0.0), seconds)

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Return for each tile what its first rank needs; those that are alike once."""
        found: dict[tuple, StageMemory] = {}
        for tile in self.plan.tiles:
            available = min(self.cluster.families[f].memory_bytes for f in self._families[tile])
            key = (tile.items, tile.rows.size, tile.tensor, tile.recompute, tile.zero, tile.family, tile.substeps)
            if key not in found:
                held = self._held_by(tile, tile.ranks[0])
                found[key] = StageMemory(tile, memory_of(self.setup, self.plan, tile, held, tile.ranks[0]), available)
        return tuple(found.values())
