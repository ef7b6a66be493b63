"""Seconds of passes over layers, in one table for all plans; and the prices that `simulate.py` puts on a plan. Pure."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.plan.schedule import COMPUTING
from hpctrain.plan.tiling import Tile
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.efficiency import Efficiency
from hpctrain.planner.prices.network import ClusterNetwork, ConcurrentRanks
from hpctrain.planner.prices.profiled import device_models
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.prices.work import Exchange, LayerCost, MatrixProduct, PassWork
from hpctrain.sharding.grid import GROUPS, TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import item_parameters

PASSES = {op: op.value.replace(" ", "_") for op in COMPUTING}
"""The field of `TileCost` for each kind of pass."""

PART_COUNTS = 2, 4, 8
"""Numbers of parts into which products next to collectives of a tensor grid may be cut, where a job leaves it open.
Each part hides a collective behind a product. Each also adds a message and makes products smaller, so there is a best
number."""
MOST_BUCKETS = 32
"""Approximate maximum number of buckets of a rank's gradients, where their sums are overlapped."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass over a tile's items, for one row chunk."""

    compute: float
    tensor: float = 0.0
    """Exposed seconds of collectives over the axes of the tensor grid."""
    data: float = 0.0
    """Exposed seconds of collectives over the holders of the weights, in ZeRO 2 and 3."""

    gathered: float = 0.0
    """Seconds of overlapped gathers of weights, over z and over holders; the hidden part counts too."""
    scattered: float = 0.0
    """Seconds of overlapped scatters of gradients, over z and over holders; the hidden part counts too."""
    slowed: float = 0.0
    """The part of `compute` that communication adds to it, as it slows what it overlaps."""
    waited: float = 0.0
    """The part of `data` in which a rank waits for slower ranks that exchange with it."""

    def __add__(self, other: "PassCost") -> "PassCost":
        return PassCost(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def seconds(self) -> float:
        return self.compute + self.tensor + self.data


def slowed_by(overlapped: float, moving: float, times: float) -> float:
    """Return how many seconds communication adds to computing, which takes `times` as long while bytes move."""
    return min(moving, overlapped * times) * (1 - 1 / times)


@dataclass(frozen=True, eq=False)
class Site:
    """A place where passes run. Its identity is a key."""

    devices: tuple[DeviceModel, ...]
    """Models of the ranks' devices; the slowest one counts."""
    tile: Tile
    """A tile on these ranks; its items and rows do not matter."""
    zero: int = 1
    """The ZeRO stage in which weights are exchanged."""
    data_ranks: tuple[int, ...] = ()
    """Ranks that hold the same weights as the first rank, where these are exchanged in every pass."""
    sharers: ConcurrentRanks | None = None
    """All ranks that are in groups like `data_ranks`, and exchange at the same time."""
    by_place: tuple[tuple[DeviceModel, ...], ...] = ()
    """The same as `devices` of the ranks at each place along c, where these have unequal shares of the positions."""


def pass_cost(setup: Setup, network: ClusterNetwork, work: PassWork, site: Site) -> PassCost:
    """Return the cost of a pass over one layer at a site.

    Overlapped communication (`setup.overlaps`, and over holders `setup.bucket_bytes`) counts by its exposed part, and
    by how much it slows computing:
    - sums that overlap a product: what outlasts the product;
    - weights and gradients over z and over holders: what outlasts all else, as the next layer's weights arrive while
      this layer computes.
    """
    tile, devices, moved = site.tile, site.devices, {"tensor": 0.0, "data": 0.0}
    coming = {"weights": 0.0, "gradients": 0.0}
    overlapped = {"tensor": setup.overlaps_weights, "data": bool(setup.bucket_bytes)}
    times, slowed = max(device.overlap_slowdown for device in devices), 0.0
    compute = max(device.work_seconds(work, setup.dtype, setup.engine) for device in devices)
    waited = {"tensor": 0.0, "data": 0.0}
    alone: dict[tuple[MatrixProduct, ...], float] = {}  # the parts of a product are equal, so one is priced

    def overlapped_seconds(exchange: Exchange) -> float:
        """Return the seconds of the products that overlap a collective over the tensor grid; 0 where none do."""
        # Compared by identity: a recomputed product may have the same shape as the dW product, without being it.
        behind, switch = exchange.behind, "tensor" if exchange.axis in GROUPS else exchange.axis
        if switch not in setup.overlaps or any(id(each) not in products for each in behind):
            return 0.0
        if behind not in alone:
            meanwhile = PassWork([*behind], passes=work.passes)
            alone[behind] = min(device.work_seconds(meanwhile, setup.dtype, setup.engine) for device in devices)
        return alone[behind]

    products = {id(each) for each in work.products}
    axes = {name: setup.group_ranks(tile, name) for name in {e.axis for e in work.exchanges} - {"data"}}
    for exchange in work.exchanges:
        part, who = "tensor", (axes.get(exchange.axis, ()), network.concurrent(tile.ranks))
        if exchange.axis == "data":
            part, who = "data", (site.data_ranks, site.sharers)
        price = network.holder_seconds if exchange.purpose in coming else network.group_seconds
        seconds = price(exchange.operation, exchange.num_bytes, *who)
        if exchange.purpose in coming and overlapped[part]:
            moved[part] += seconds
            coming[exchange.purpose] += seconds
            continue
        if part == "tensor" and (meanwhile := overlapped_seconds(exchange)):
            hidden = min(seconds, meanwhile)
            longer = slowed_by(hidden, seconds, setup.tensor_slowdown(times))
            slowed, seconds = slowed + longer, max(0.0, seconds - hidden - longer)
        waited[part] += seconds
    moving = sum(moved.values())
    slowed = min(slowed + slowed_by(min(moving, compute), moving, times), compute * (times - 1))
    # Collectives run one after the other, as they share the links.
    late = max(0.0, moving - compute - slowed - sum(waited.values()))
    of_data = min(late, moved["data"])
    return PassCost(
        compute=compute + slowed,
        tensor=waited["tensor"] + late - of_data,
        data=waited["data"] + of_data,
        gathered=coming["weights"],
        scattered=coming["gradients"],
        slowed=slowed,
    )


def gathers_while_summing(grids: Iterable[TensorGrid]) -> bool:
    """Say whether parts have collectives of two groups in flight on any of the grids.

    Cut positions are gathered while outputs are summed over x. On devices the two may wait for each other.
    """
    return any(grid.x > 1 and grid.sequence_parts > 1 for grid in grids)


def part_counts(setup: Setup, grids: Sequence[TensorGrid]) -> tuple[int, ...]:
    """Return the numbers of parts to choose from on some grids: the given one, or 1 and those that may be better."""
    if setup.tensor_parts is not None:
        return (setup.tensor_parts,)
    if "tensor" in setup.overlaps and any(grid.overlaps_parts for grid in grids) and not gathers_while_summing(grids):
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
        """`efficiencies`, by family, replace the catalogue's. `network` replaces the cluster's."""
        self.setup, self._cluster, self.devices = setup, cluster, device_models(cluster, setup, efficiencies)
        self.network = network or setup.network(cluster)
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
            models, *by_place = (self._models_of(ranks) for ranks in (tile.ranks, *tile.by_place))
            self._sites[key] = Site(models, tile, max(1, zero), data_ranks, sharers, tuple(by_place))
        return self._sites[key]

    def _models_of(self, ranks: Sequence[int]) -> tuple[DeviceModel, ...]:
        families = dict.fromkeys(self._cluster.devices[rank].family for rank in ranks)
        return tuple(self.devices[family] for family in families)

    def price(self, name: str, site: Site, layer: Interval, rows: int, recompute: str, parts: int | None) -> PassCost:
        """Return what a pass (`PASSES`) over a layer takes a rank, for so many rows of its own, with products cut in
        so many parts."""
        kind, grid = self.setup.first_equal[slice(*layer)], site.tile.tensor
        if not self.setup.is_block(layer):  # is not cut in parts, and keeps what selective recompute drops of blocks
            recompute, parts = "full" if recompute == "full" else "none", 1
        key = name, site, kind, rows, recompute, parts
        if key not in self._passes:
            costs = []
            for place, at in enumerate([replace(site, devices=devices) for devices in site.by_place] or [site]):
                setup, of = self._in_parts(parts).at(place), (grid, kind, rows, recompute, site.zero, parts, place)
                if of not in self._costs:
                    self._costs[of] = layer_cost(setup, grid, layer, rows, recompute, site.zero)
                work = getattr(self._costs[of], name)
                costs.append(pass_cost(setup, self.network, work, at))
            self._passes[key] = max(costs, key=lambda cost: cost.seconds)
        return self._passes[key]


def least_bucket_bytes(setup: Setup, parts: int) -> int | None:
    """Return the least bytes of gradients that are summed at once, where sums are overlapped; None where they are not.

    Each rank has one of about so many `parts` of the model, in about `MOST_BUCKETS` buckets at the most.
    """
    if not setup.bucket_bytes:
        return setup.bucket_bytes
    model = setup.model
    whole = 4 * sum(math.prod(p.shape) for item in range(model.num_items) for p in item_parameters(model, item))
    return max(setup.bucket_bytes, whole // parts // MOST_BUCKETS)


def exchange_of(
    setup: Setup, zero: int, stored: float, seconds: Callable[[str, float], float], count: int = 1
) -> tuple[float, float]:
    """Return the seconds at the end of a step to sum gradients and to gather weights, for holders that store so many
    weights, in `count` exchanges one after the other.

    `seconds` returns the time of an operation on so many bytes. ZeRO 2 and 3 sum in every pass, and ZeRO 3 gathers
    there too.
    """
    each = stored / count
    reduce = seconds("reduce_scatter" if zero else "all_reduce", each * setup.gradient_bytes) if zero < 2 else 0.0
    return count * reduce, count * seconds("all_gather", each * setup.item_bytes) if zero in (1, 2) else 0.0


@dataclass(frozen=True)
class GradientExchange:
    """The exchange of gradients and weights among the same ranks in a step."""

    tiles: tuple[Tile, ...]
    reduce_seconds: float
    gather_seconds: float
    ready_seconds: Callable[[Tile], float] | None = None
    """Returns the seconds before the end of a tile's last backward pass at which its gradients are final. None: nothing
    is overlapped, and sums start after the passes."""
    needed_seconds: Callable[[Tile], float] | None = None
    """Returns the seconds after the start of a tile's first forward pass at which it needs the weights. None: weights
    are gathered at the end of a step, and nothing overlaps that."""


@dataclass(frozen=True)
class TileCost:
    """The seconds of a tile's instructions for one microbatch."""

    forward: tuple[PassCost, ...]
    """Cost of the forward pass of each row chunk."""
    backward: tuple[PassCost, ...]
    update_seconds: float = 0.0
    backward_input: tuple[PassCost, ...] = ()
    """Cost of the first part of `backward`, for schedules that split it; `backward_weight` is the second."""
    backward_weight: tuple[PassCost, ...] = ()
    overlap_slowdown: float = 1.0
    """Factor by which computing takes longer while its ranks communicate."""
    before_seconds: float = 0.0
    """Seconds of gathering weights before a step's first forward pass, while nothing computes."""
    after_seconds: float = 0.0
    """Seconds of scattering gradients after a step's last backward pass, while nothing computes."""
    exposed_part: str = "tensor"
    """The part of the breakdown to which `before_seconds` and `after_seconds` belong: "tensor" or "data"."""

    @property
    def seconds(self) -> float:
        """The seconds of a microbatch, forward and backward."""
        return sum(each.seconds for each in (*self.forward, *self.backward))


@dataclass(frozen=True)
class Costs:
    """All that a simulation needs to know of model and machine."""

    tiles: Mapping[Tile, TileCost]
    """Costs of each tile for a microbatch."""
    messages: Mapping[tuple[Tile, Tile], float]
    """Seconds of the message with a microbatch's activation, or its gradient, from one tile to another."""
    exchanges: tuple[GradientExchange, ...] = ()
    """Exchanges of gradients and weights, in the order in which all ranks run them."""
    agree_seconds: float = 0.0
    """Seconds until all ranks agree on the loss and the norm."""
    blocking_share: float = 0.0
    """Share of each message's time during which its sender computes nothing."""
    under_way: Mapping[tuple[Tile, Tile], float] = field(default_factory=dict)
    """Seconds of each message in which the next one may leave: a message occupies its wire for its bytes alone."""
    ports: Mapping[tuple[Tile, Tile], Mapping[int, float]] = field(default_factory=dict)
    """Ports of nodes that messages pass and share with those of other places in the pipeline, by number. Each has the
    share of a message's seconds for which it is busy. Ports that the same messages pass have one number."""
