"""Prices the messages between the tiles of a plan: activations forward, their gradients back. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.transfers import RowShape, common_parts, everywhere, gathers, receives
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup


class MessageCost(NamedTuple):
    """The seconds of a microbatch's message from one tile to another."""

    seconds: float
    """Seconds until the target has it."""
    under_way: float = 0.0
    """Seconds of these after its last byte has left, when the next one may leave: latency, and what gathers it."""
    ports: Mapping[int, float] = MappingProxyType({})
    """Ports that other messages pass too, as in `Costs.ports`."""


def arrivals(setup: Setup, plan: Plan, network: ClusterNetwork) -> dict[tuple[Tile, Tile], MessageCost]:
    """Return by source and target what a microbatch's message takes."""
    return _Messages(setup, plan, network).all()


class _Part(NamedTuple):
    """A message of one rank to another, by the places of these among the sources and in the tile."""

    source: int
    sender: int
    receiver: int
    num_bytes: float
    ports: tuple[tuple[int, tuple, float], ...]
    """The ports that it passes: the place of the node among those of the arrival, which of its ports, and how fast that
    is."""


class _Arrival(NamedTuple):
    """The messages that bring a tile its part of a microbatch: activations (forward) or gradients."""

    tile: Tile
    sources: tuple[Tile, ...]
    forward: bool
    kind: "_Kind"
    nodes: tuple[int, ...]
    """The nodes of its ranks, in the order of places."""

    def crossings(self) -> Iterator[tuple[int, bool, int]]:
        """Yield for each node the place between items where the messages cross, their direction, and the node."""
        crosses = self.tile.items.start if self.forward else self.tile.items.stop
        return ((crosses, self.forward, node) for node in self.nodes)


class _Kind:
    """Arrivals at equal tiles, whose ranks are in equal places of their nodes: they have the same messages."""

    def __init__(self, parts: list[_Part], gather_seconds: float):
        self.parts, self.gather_seconds = parts, gather_seconds
        self.by_traffic: dict[tuple[Traffic, ...], dict[int, tuple[MessageCost, dict[tuple[int, tuple], float]]]] = {}
        """What the message of each source takes, by what else passes the nodes of the arrival, and the share of its
        seconds for which each port is busy."""


Traffic = frozenset[tuple[tuple[_Kind, int], int]]
"""How many arrivals of each kind pass a node at once, in each place of the arrival."""


class _Messages:
    """The messages of a plan.

    Those of all replicas that cross the same place between items in the same direction are in flight at once. They
    share the NICs that they leave and enter by max-min fairly: until a message is there, a NIC has passed as many bytes
    of each of the others, or all of those that are smaller. Arrivals of one kind that pass nodes of equal traffic take
    equally long, and are priced once.
    """

    def __init__(self, setup: Setup, plan: Plan, network: ClusterNetwork):
        self._setup, self._plan, self._network = setup, plan, network
        self._row = RowShape(setup.positions, setup.model.hidden_size)
        self._kinds: dict[tuple, _Kind] = {}
        devices = network.cluster.devices
        # The node of each of some ranks, and their places.
        self._where = lru_cache(None)(lambda ranks: ([devices[r].node for r in ranks], [*map(network.place, ranks)]))
        self._passed = lru_cache(None)(_passed)

    def all(self) -> dict[tuple[Tile, Tile], MessageCost]:
        """Return the messages."""
        incoming = []
        for tile, forward in itertools.product(self._plan.tiles, (True, False)):
            if sources := self._plan.upstream(tile) if forward else self._plan.downstream(tile):
                incoming.append(self._arrival(tile, sources, forward))
        passing: dict[tuple[int, bool, int], Counter[tuple[_Kind, int]]] = {}
        for arrival in incoming:
            for place, key in enumerate(arrival.crossings()):
                passing.setdefault(key, Counter())[arrival.kind, place] += 1
        interned: dict[Traffic, Traffic] = {}
        traffic: dict[tuple[int, bool, int], Traffic] = {}
        for key, arrivals_there in passing.items():
            equal = frozenset(arrivals_there.items())
            traffic[key] = interned.setdefault(equal, equal)
        result: dict[tuple[Tile, Tile], MessageCost] = {}
        passed: dict[tuple[Tile, Tile], dict[tuple, float]] = {}
        for arrival in incoming:
            met, costs = tuple(traffic[key] for key in arrival.crossings()), arrival.kind.by_traffic
            if met not in costs:
                costs[met] = self._costs(arrival, met)
            for number, (cost, ports) in costs[met].items():
                pair = arrival.sources[number], arrival.tile
                result[pair] = cost
                passed[pair] = {(arrival.nodes[place], *port): share for (place, port), share in ports.items()}
        return {pair: result[pair]._replace(ports=ports) for pair, ports in self._shared(passed).items()}

    def _costs(
        self, arrival: _Arrival, traffic: Sequence[Traffic]
    ) -> dict[int, tuple[MessageCost, dict[tuple[int, tuple], float]]]:
        """Return what it takes until the last rank of a tile has what it is sent, by the source's place, and the share
        of that for which each port is busy."""
        result: dict[int, MessageCost] = {}
        inside: dict[tuple[int, int], MessageCost] = {}
        busy: dict[int, dict[tuple[int, tuple], float]] = {}
        for part in arrival.kind.parts:
            sender, receiver = arrival.sources[part.source].ranks[part.sender], arrival.tile.ranks[part.receiver]
            latency = self._network.latency_seconds(sender, receiver)
            if part.ports:
                flows = self._flows(part, traffic)
                most = max(1.0, *flows)
                cost = MessageCost(self._network.seconds(sender, receiver, part.num_bytes, most), latency)
                result[part.source] = max(result.get(part.source, cost), cost, key=lambda each: each.seconds)
                of_source = busy.setdefault(part.source, {})
                for (place, port, _), share in zip(part.ports, flows, strict=True):
                    seconds = (cost.seconds - latency) * share / most
                    of_source[place, port] = max(of_source.get((place, port), 0.0), seconds)
            elif sender != receiver:  # one after the other, by the receiver's link
                seconds, key = self._network.seconds(sender, receiver, part.num_bytes), (part.source, part.receiver)
                inside[key] = MessageCost(inside.get(key, MessageCost(0.0)).seconds + seconds, latency)
            else:
                result.setdefault(part.source, MessageCost(0.0))
        for (source, _), cost in inside.items():
            result[source] = max(result.get(source, cost), cost, key=lambda each: each.seconds)
        gather = arrival.kind.gather_seconds  # as if it came so much later
        costs = {}
        for source, (seconds, late, _) in result.items():
            moving = max(seconds - late, 1e-12)
            shares = {port: min(1.0, taken / moving) for port, taken in busy.get(source, {}).items()}
            costs[source] = MessageCost(seconds + gather, late + gather), shares
        return costs

    def _flows(self, part: _Part, traffic: Sequence[Traffic]) -> list[float]:
        """Return how many messages like a part share each of its ports, as if that were no faster than the others."""
        flows = []
        for place, port, times_as_fast in part.ports:
            sizes = self._passed(traffic[place])[port]
            shared = math.fsum(min(size, part.num_bytes) * n for size, n in sizes.items()) / part.num_bytes
            flows.append(shared / times_as_fast)
        return flows

    def _gather_seconds(self, tile: Tile, forward: bool) -> float:
        """Return what the ranks of a tile take to gather over y what each of them was sent a part of."""
        if not gathers(self._plan, tile, forward, self._near(tile), self._row):
            return 0.0
        parts = common_parts(tile, self._row)
        num_bytes = max(common.tokens.size * common.features.size for common in parts) * self._setup.item_bytes
        groups = (common.ranks for common in parts)
        concurrent = self._network.concurrent(tile.ranks)
        return max(self._network.group_seconds("all_gather", num_bytes, group, concurrent) for group in groups)

    def _shared(
        self, passed: Mapping[tuple[Tile, Tile], Mapping[tuple, float]]
    ) -> dict[tuple[Tile, Tile], dict[int, float]]:
        """Return of the ports that messages pass those that others pass too, by number: the same messages of equivalent
        pipelines, one number."""
        plan, kinds, kind_of = self._plan, {}, {}
        for form, tiles in zip(plan.forms, plan.pipelines, strict=True):
            works = form, tuple(map(plan.equal_work.__getitem__, tiles))
            kind_of |= dict.fromkeys(tiles, kinds.setdefault(works, len(kinds)))
        users: dict[tuple, set[tuple]] = {}
        for (source, target), ports in passed.items():
            for port in ports:
                users.setdefault(port, set()).add((source.items, target.items, kind_of[source]))
        places = {port: frozenset(by) for port, by in users.items() if len({each[:2] for each in by}) > 1}
        numbers = {by: number for number, by in enumerate(dict.fromkeys(places.values()))}
        result = {}
        for pair, ports in passed.items():
            shared: dict[int, float] = {}
            for port, share in ports.items():
                if by := places.get(port):
                    shared[numbers[by]] = max(shared.get(numbers[by], 0.0), share)
            result[pair] = dict(sorted(shared.items()))  # equal pipelines compare equal
        return result

    def _arrival(self, tile: Tile, sources: tuple[Tile, ...], forward: bool) -> _Arrival:
        """Return what the ranks of a tile are sent of a microbatch, and gather; once for tiles in equivalent places."""
        start, nodes, places = tile.rows.start, [], []
        for each in (tile, *sources):
            of_tile = self._where(each.ranks)
            nodes += of_tile[0]
            places += of_tile[1]
        rows = tuple((each.rows.start - start, each.rows.stop - start) for each in (tile, *sources))
        grids = tuple(each.tensor for each in (tile, *sources))
        ranks = _numbered([rank for each in (tile, *sources) for rank in each.ranks])
        distinct = tuple(dict.fromkeys(nodes))
        key = ranks, _numbered(nodes), tuple(places), rows, grids, forward
        if key not in self._kinds:
            each_bytes = self._setup.item_bytes / self._position_parts(tile)
            parts = [
                _Part(*_place(transfer.sender, sources), receiver, transfer.num_elements * each_bytes, ports)
                for receiver, rank in enumerate(tile.ranks)
                for transfer in receives(self._plan, tile, rank, self._row, forward, self._near(tile))
                for passed in [self._network.ports(transfer.sender, rank)]
                for ports in [tuple((distinct.index(port.node), port[1:], times) for port, times in passed)]
            ]
            self._kinds[key] = _Kind(parts, self._gather_seconds(tile, forward))
        return _Arrival(tile, sources, forward, self._kinds[key], distinct)

    def _position_parts(self, tile: Tile) -> int:
        # What y cuts without the grid saying so is sent so, and not gathered.
        return self._setup.sequence_parts(tile.tensor) // tile.tensor.sequence_parts

    def _near(self, tile: Tile) -> Callable[[int, int], bool]:
        gathers_parts = self._setup.engine.gathers_parts and self._position_parts(tile) == 1
        return self._network.is_near if gathers_parts else everywhere


def _passed(traffic: Traffic) -> dict[tuple, Counter[float]]:
    """Return how many messages of each size pass each port of a node at once."""
    result: dict[tuple, Counter[float]] = {}
    for (kind, node_place), count in traffic:
        for part in kind.parts:
            for place, port, _ in part.ports:
                if place == node_place:
                    result.setdefault(port, Counter())[part.num_bytes] += count
    return result


def _numbered(values: Sequence[int]) -> tuple[int, ...]:
    """Return the values numbered in the order in which they first occur: equal tuples have equal patterns."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(numbers[value] for value in values)


def _place(rank: int, tiles: Sequence[Tile]) -> tuple[int, int]:
    """Return which of some tiles has a rank, and its place there."""
    return next((number, tile.ranks.index(rank)) for number, tile in enumerate(tiles) if rank in tile.ranks)
