"""Seconds of passes over layers, in one table for all plans; and the prices that `simulate.py` puts on a plan. Pure."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hpctrain.comm.network import ClusterNetwork, ConcurrentRanks
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.plan.schedule import COMPUTING
from hpctrain.plan.tiling import Tile
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.efficiency import Efficiency
from hpctrain.planner.prices.profiled import device_models
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.prices.work import Exchange, LayerCost, MatrixProduct, PassWork
from hpctrain.sharding.grid import GROUPS, STORED, TensorGrid
from hpctrain.sharding.intervals import Interval

PASSES = {op: op.value.replace(" ", "_") for op in COMPUTING}
"""The field of `TileCost` for each kind of pass."""

PART_COUNTS = 2, 4, 8
"""Into how many parts products next to collectives of a tensor grid may be cut, where a job leaves it open. Each hides
a collective behind a product, and is a message more and a smaller product, so that there is a best number."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass over a tile's items, for one row chunk."""

    compute: float
    tensor: float = 0.0
    """Collectives over the axes of its tensor grid."""
    data: float = 0.0
    """Collectives over the holders of its weights, in ZeRO 2 and 3."""

    gathered: float = 0.0
    """Of the weights that come over z and over holders during computation, all of it."""
    scattered: float = 0.0
    """Of their gradients."""

    def __add__(self, other: "PassCost") -> "PassCost":
        return PassCost(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.data


def slowed_by(overlapped: float, moving: float, times: float) -> float:
    """Return how many seconds longer a rank computes, as its device takes `times` as long while bytes move.

    `overlapped` are the seconds of computing that communication overlaps, `moving` the seconds of communication.
    """
    return min(moving, overlapped * times) * (1 - 1 / times)


@dataclass(frozen=True, eq=False)
class Site:
    """A place where passes run. Its identity is a key."""

    devices: tuple[DeviceModel, ...]
    """Of the ranks, the slowest of which counts."""
    tile: Tile
    """One on these ranks, of whatever items and rows."""
    zero: int = 1
    """The ZeRO stage in which weights are exchanged."""
    data_ranks: tuple[int, ...] = ()
    """Who holds the same weights as the first rank, where these are exchanged in every pass."""
    sharers: ConcurrentRanks | None = None
    """All that are in groups like that."""


def pass_cost(setup: Setup, network: ClusterNetwork, work: PassWork, site: Site) -> PassCost:
    """Return what a pass over one layer takes in a site.

    Of what is overlapped (`setup.overlaps`, and over holders with `setup.bucket_bytes`) the exposed part counts, and by
    how much computing is slower meanwhile:
    - sums behind a product: what is longer than the product;
    - weights and gradients over z and over holders: what outlasts all else, as the next layer's weights come while
      this one computes.
    """
    tile, devices, moved = site.tile, site.devices, {STORED: 0.0, "data": 0.0}
    coming = {"all_gather": 0.0, "reduce_scatter": 0.0}
    overlapped = {axis for axis, is_on in ((STORED, setup.overlaps_weights), ("data", setup.bucket_bytes)) if is_on}
    times, slowed = max(device.overlap_slowdown for device in devices), 0.0
    compute = max(device.work_seconds(work, setup.dtype, setup.stack) for device in devices)
    waited = {"tensor": 0.0, "data": 0.0}
    alone: dict[MatrixProduct, float] = {}  # parts of a product overlap equal ones

    def overlapped_seconds(exchange: Exchange) -> float:
        """Return the seconds of what overlaps a collective over the tensor grid; 0 where nothing does."""
        # A product that is computed again may have the shape of one of a weight, and is not it.
        behind = exchange.behind
        if "tensor" not in setup.overlaps or behind is None or id(behind) not in products:
            return 0.0
        if behind not in alone:
            product = PassWork([behind], passes=work.passes)
            alone[behind] = min(device.work_seconds(product, setup.dtype, setup.stack) for device in devices)
        return alone[behind]

    products = {id(each) for each in work.products}
    axes = {name: tile.axis_ranks(GROUPS[name], tile.ranks[0]) for name in {e.axis for e in work.exchanges} - {"data"}}
    for exchange in work.exchanges:
        part, who = "tensor", (axes.get(exchange.axis, ()), network.concurrent(tile.ranks))
        if exchange.axis == "data":
            part, who = "data", (site.data_ranks, site.sharers)
        seconds = network.group_seconds(exchange.operation, exchange.num_bytes, *who)
        if exchange.axis in overlapped:
            moved[exchange.axis] += seconds
            coming[exchange.operation] += seconds
            continue
        if part == "tensor" and (meanwhile := overlapped_seconds(exchange)):
            hidden = min(seconds, meanwhile)
            longer = slowed_by(hidden, seconds, setup.stack.tensor_slowdown or times)
            slowed, seconds = slowed + longer, max(0.0, seconds - hidden - longer)
        waited[part] += seconds
    moving = sum(moved.values())
    slowed = min(slowed + slowed_by(min(moving, compute), moving, times), compute * (times - 1))
    # One after the other, as they share the links.
    late = max(0.0, moving - compute - slowed - sum(waited.values()))
    of_data = min(late, moved["data"])
    return PassCost(compute + slowed, waited["tensor"] + late - of_data, waited["data"] + of_data, *coming.values())


def gathers_while_summing(grids: Iterable[TensorGrid]) -> bool:
    """Say whether parts have collectives of two groups in flight on any of the grids.

    Positions that y cuts are gathered while outputs are summed over x. On devices the two may wait for each other.
    """
    return any(grid.x > 1 and grid.sequence_parallel for grid in grids)


def part_counts(setup: Setup, grids: Sequence[TensorGrid]) -> tuple[int, ...]:
    """Return the numbers of parts to choose from on some grids: the given one, or 1 and those that may be better."""
    if setup.tensor_parts is not None:
        return (setup.tensor_parts,)
    if "tensor" in setup.overlaps and any(grid.cuts_weights for grid in grids) and not gathers_while_summing(grids):
        return 1, *PART_COUNTS
    return (1,)


class Prices:
    """The seconds of passes over layers on a cluster, computed once for all plans of a search and all predictions."""

    def __init__(
        self,
        setup: Setup,
        cluster: Cluster,
        efficiencies: Mapping[str, Efficiency] | None = None,
        network: ClusterNetwork | None = None,
    ):
        """`efficiencies` are by family, in place of the catalogue's. `network` is in place of the cluster's."""
        self.setup, self._cluster, self.devices = setup, cluster, device_models(cluster, setup, efficiencies)
        self.network = network or setup.stack.network(cluster)
        self._in_parts = lru_cache(None)(lambda parts: replace(setup, tensor_parts=parts))
        self._sites: dict[tuple, Site] = {}
        self._costs: dict[tuple, LayerCost] = {}
        self._passes: dict[tuple, PassCost] = {}

    def site(
        self, tile: Tile, zero: int = 1, data_ranks: tuple[int, ...] = (), sharers: ConcurrentRanks | None = None
    ) -> Site:
        """Return the site of a tile. It is one object for equivalent tiles: by their families, tables of nodes, how
        their ranks are spread, and who exchanges weights with them in every pass."""
        devices = [self._cluster.devices[rank] for rank in tile.ranks]
        nodes = list(dict.fromkeys(device.node for device in devices))
        where = tuple((d.family, d.table, nodes.index(d.node), d.index) for d in devices)
        key = where, tile.tensor, max(1, zero), data_ranks, sharers
        if key not in self._sites:
            models = tuple(self.devices[family] for family in dict.fromkeys(device.family for device in devices))
            self._sites[key] = Site(models, tile, max(1, zero), data_ranks, sharers)
        return self._sites[key]

    def price(self, name: str, site: Site, layer: Interval, rows: int, recompute: str, parts: int | None) -> PassCost:
        """Return what a pass (`PASSES`) over a layer takes a rank, for so many rows of its own, with products cut in
        so many parts."""
        kind, grid = self.setup.first_equal[slice(*layer)], site.tile.tensor
        if not self.setup.is_block(layer):  # is not cut in parts, and keeps what selective recompute drops of blocks
            recompute, parts = "full" if recompute == "full" else "none", 1
        key = name, site, kind, rows, recompute, parts
        if key not in self._passes:
            setup, of = self._in_parts(parts), (grid, kind, rows, recompute, site.zero, parts)
            if of not in self._costs:
                self._costs[of] = layer_cost(setup, grid, layer, rows, recompute, site.zero)
            work = getattr(self._costs[of], name)
            self._passes[key] = pass_cost(setup, self.network, work, site)
        return self._passes[key]


def exchange_of(setup: Setup, zero: int, stored: float, seconds: Callable[[str, float], float]) -> tuple[float, float]:
    """Return what holders of so many weights take at the end of a step to sum gradients, and to gather weights.

    `seconds` says it of an operation and its bytes. ZeRO 2 and 3 sum in every pass, and ZeRO 3 gathers there too.
    """
    reduce = seconds("reduce_scatter" if zero else "all_reduce", stored * setup.gradient_bytes) if zero < 2 else 0.0
    return reduce, seconds("all_gather", stored * setup.item_bytes) if zero in (1, 2) else 0.0


@dataclass(frozen=True)
class GradientExchange:
    """The exchange of gradients and weights among the same ranks in a step."""

    tiles: tuple[Tile, ...]
    reduce_seconds: float
    gather_seconds: float
    ready_seconds: Mapping[Tile, float] = field(default_factory=dict)
    """How long before the end of a tile's last backward pass its gradients are final; 0 where they are not here."""
    needed_seconds: Mapping[Tile, float] | None = None
    """How long after the beginning of a tile's first forward pass it needs the weights; None: they are gathered at the
    end of a step, and nothing runs meanwhile."""


@dataclass(frozen=True)
class TileCost:
    """The seconds of a tile's instructions for one microbatch."""

    forward: tuple[PassCost, ...]
    """For each row chunk."""
    backward: tuple[PassCost, ...]
    update_seconds: float = 0.0
    backward_input: tuple[PassCost, ...] = ()
    """The two parts of `backward`, for schedules that split it."""
    backward_weight: tuple[PassCost, ...] = ()
    overlap_slowdown: float = 1.0
    """How many times as long its ranks compute while they communicate."""
    before_seconds: float = 0.0
    """Before a step's first forward pass, of weights that come while nothing computes."""
    after_seconds: float = 0.0
    """After its last backward pass."""
    alone_on: str = "tensor"
    """The axis of these two."""

    @property
    def seconds(self) -> float:
        """The seconds of a microbatch, there and back."""
        return sum(each.seconds for each in (*self.forward, *self.backward))


@dataclass(frozen=True)
class Costs:
    """All that a simulation needs to know of model and machine."""

    tiles: Mapping[Tile, TileCost]
    """Of each microbatch."""
    messages: Mapping[tuple[Tile, Tile], float]
    """Of an activation, or its gradient, from a tile to another."""
    exchanges: tuple[GradientExchange, ...] = ()
    """In the order in which all ranks exchange them."""
    agree_seconds: float = 0.0
    """Until all ranks agree on the loss and the norm."""
    blocking_share: float = 0.0
    """Of the time of each message, during which its sender computes nothing."""
    leaving: frozenset[tuple[Tile, Tile]] = frozenset()
    """The messages that leave a node: what a rank sends forward and backward shares its NIC."""
