"""Prices the messages between the tiles of a plan: activations forward, their gradients back. Pure."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.transfers import RowShape, common_parts, everywhere, gathers, receives
from hpctrain.planner.prices.network import ClusterNetwork, Port
from hpctrain.planner.prices.setup import Setup


class MessageCost(NamedTuple):
    """The seconds of a microbatch's message from one tile to another."""

    seconds: float
    """Seconds until the target has it."""
    under_way: float = 0.0
    """Seconds of these after its last byte has left, when the next one may leave: latency, and what gathers it."""


def arrivals(setup: Setup, plan: Plan, network: ClusterNetwork) -> dict[tuple[Tile, Tile], MessageCost]:
    """Return by source and target what a microbatch's message takes."""
    return _Messages(setup, plan, network).all()


def crossing(pairs: Iterable[tuple[Tile, Tile]], network: ClusterNetwork) -> frozenset[tuple[Tile, Tile]]:
    """Return the pairs whose messages leave a node."""
    devices = network.cluster.devices
    nodes = lru_cache(None)(lambda ranks: frozenset(devices[rank].node for rank in ranks))
    return frozenset(pair for pair in pairs if nodes(pair[0].ranks) != nodes(pair[1].ranks))


class _Part(NamedTuple):
    """A message of one rank to another, by the places of these among the sources and in the tile."""

    source: int
    sender: int
    receiver: int
    num_bytes: float


class _Arrival(NamedTuple):
    """The messages that bring a tile its part of a microbatch: activations (forward) or gradients."""

    tile: Tile
    sources: tuple[Tile, ...]
    forward: bool
    kind: "_Kind"

    def messages(self) -> Iterator[tuple[_Part, int, int]]:
        """Yield each message with the ranks that send and receive it."""
        for part in self.kind.parts:
            yield part, self.sources[part.source].ranks[part.sender], self.tile.ranks[part.receiver]


class _Kind:
    """Arrivals at equal tiles, whose ranks are in equal places of their nodes: they have the same messages."""

    def __init__(self, parts: list[_Part], gather_seconds: float):
        self.parts, self.gather_seconds = parts, gather_seconds
        self.by_flows: dict[tuple[float, ...], dict[int, MessageCost]] = {}
        """What the message of each source takes, by the flows that share the NICs of each part."""


class _Messages:
    """The messages of a plan.

    Those of all replicas that cross the same place between items in the same direction are in flight at once. They
    share the NICs that they leave and enter by max-min fairly: until a message is there, a NIC has passed as many bytes
    of each of the others, or all of those that are smaller.
    """

    def __init__(self, setup: Setup, plan: Plan, network: ClusterNetwork):
        self._setup, self._plan, self._network = setup, plan, network
        self._row = RowShape(setup.positions, setup.model.hidden_size)
        self._kinds: dict[tuple, _Kind] = {}
        self._passed: dict[tuple[int, bool, Port], Counter[float]] = {}
        """How many messages of each size a NIC passes at once, by the place between items where they cross, and the
        direction."""
        self._known: dict[tuple, float] = {}

    def all(self) -> dict[tuple[Tile, Tile], MessageCost]:
        """Return the messages."""
        every = []
        for tile, forward in itertools.product(self._plan.tiles, (True, False)):
            if sources := self._plan.upstream(tile) if forward else self._plan.downstream(tile):
                every.append(_Arrival(tile, sources, forward, self._kind(tile, sources, forward)))
        passing = [self._ports(arrival) for arrival in every]
        for arrival, ports in zip(every, passing, strict=True):
            for part, of_part in zip(arrival.kind.parts, ports, strict=True):
                for port, _ in of_part:
                    self._passed.setdefault(port, Counter())[part.num_bytes] += 1
        result: dict[tuple[Tile, Tile], MessageCost] = {}
        for arrival, ports in zip(every, passing, strict=True):
            kind = arrival.kind
            flows = tuple(self._flows(*pair) for pair in zip(ports, kind.parts, strict=True))
            if flows not in kind.by_flows:
                kind.by_flows[flows] = self._costs(arrival, flows)
            for source, cost in kind.by_flows[flows].items():
                result[arrival.sources[source], arrival.tile] = cost
        return result

    def _ports(self, arrival: _Arrival) -> list[list[tuple[tuple[int, bool, Port], float]]]:
        """Return for each part of an arrival the ports that it passes and how fast these are, as `_passed` names
        them."""
        crosses = arrival.tile.items.start if arrival.forward else arrival.tile.items.stop
        return [
            [((crosses, arrival.forward, port), times) for port, times in self._network.ports(sender, receiver)]
            for _, sender, receiver in arrival.messages()
        ]

    def _costs(self, arrival: _Arrival, flows: Sequence[float]) -> dict[int, MessageCost]:
        """Return what it takes until the last rank of a tile has what it is sent, by the source's place."""
        result: dict[int, MessageCost] = {}
        inside: dict[tuple[int, int], MessageCost] = {}
        for (part, sender, receiver), shared in zip(arrival.messages(), flows, strict=True):
            latency = self._network.latency_seconds(sender, receiver)
            if shared:
                cost = MessageCost(self._network.seconds(sender, receiver, part.num_bytes, shared), latency)
                result[part.source] = max(result.get(part.source, cost), cost)
            elif sender != receiver:  # one after the other, by the receiver's link
                seconds, key = self._network.seconds(sender, receiver, part.num_bytes), (part.source, part.receiver)
                inside[key] = MessageCost(inside.get(key, MessageCost(0.0)).seconds + seconds, latency)
            else:
                result.setdefault(part.source, MessageCost(0.0))
        for (source, _), cost in inside.items():
            result[source] = max(result.get(source, cost), cost)
        gather = arrival.kind.gather_seconds  # as if it came so much later
        return {source: MessageCost(seconds + gather, late + gather) for source, (seconds, late) in result.items()}

    def _flows(self, ports: Sequence[tuple[tuple[int, bool, Port], float]], part: _Part) -> float:
        """Return how many messages like a part share its NICs; 0 where it passes none."""
        most = 0.0
        for port, times_as_fast in ports:
            key = port, part.num_bytes
            if key not in self._known:
                passed = self._passed[port]
                self._known[key] = sum(min(size, part.num_bytes) * n for size, n in passed.items()) / part.num_bytes
            most = max(most, self._known[key] / times_as_fast)
        return max(1.0, most) if ports else 0.0

    def _gather_seconds(self, tile: Tile, forward: bool) -> float:
        """Return what the ranks of a tile take to gather over y what each of them was sent a part of."""
        if not gathers(self._plan, tile, forward, self._near(tile), self._row):
            return 0.0
        own = common_parts(tile, self._row)
        num_bytes = max(common.tokens.size * common.features.size for common in own) * self._setup.item_bytes
        groups = (common.ranks for common in own)
        concurrent = self._network.concurrent(tile.ranks)
        return max(self._network.group_seconds("all_gather", num_bytes, group, concurrent) for group in groups)

    def _kind(self, tile: Tile, sources: tuple[Tile, ...], forward: bool) -> _Kind:
        """Return what the ranks of a tile are sent of a microbatch, and gather; once for tiles in equivalent places."""
        ranks = [rank for each in (tile, *sources) for rank in each.ranks]
        devices, start = self._network.cluster.devices, tile.rows.start
        nodes = _numbered([devices[rank].node for rank in ranks])
        rows = tuple((each.rows.start - start, each.rows.stop - start) for each in (tile, *sources))
        grids = tuple(each.tensor for each in (tile, *sources))
        key = _numbered(ranks), nodes, tuple(map(self._network.place, ranks)), rows, grids, forward
        if key not in self._kinds:
            parts = [
                _Part(*place, receiver, transfer.num_elements * self._setup.item_bytes / self._position_parts(tile))
                for receiver, rank in enumerate(tile.ranks)
                for transfer in receives(self._plan, tile, rank, self._row, forward, self._near(tile))
                for place in [_place(transfer.sender, sources)]
            ]
            self._kinds[key] = _Kind(parts, self._gather_seconds(tile, forward))
        return self._kinds[key]

    def _position_parts(self, tile: Tile) -> int:
        # What y cuts without the grid saying so is sent so, and not gathered.
        return self._setup.position_parts(tile.tensor) // tile.tensor.position_parts

    def _near(self, tile: Tile) -> Callable[[int, int], bool]:
        gathers_parts = self._setup.engine.gathers_parts and self._position_parts(tile) == 1
        return self._network.is_near if gathers_parts else everywhere


def _numbered(values: Sequence[int]) -> tuple[int, ...]:
    """Return the values numbered in the order in which they first occur: equal tuples have equal patterns."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(numbers[value] for value in values)


def _place(rank: int, tiles: Sequence[Tile]) -> tuple[int, int]:
    """Return which of some tiles has a rank, and its place there."""
    return next((number, tile.ranks.index(rank)) for number, tile in enumerate(tiles) if rank in tile.ranks)
