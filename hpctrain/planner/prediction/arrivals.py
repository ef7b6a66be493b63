"""Prices the messages between the tiles of a plan: activations forward, their gradients back. Pure."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    return frozenset(pair for pair in pairs if len({frozenset(devices[r].node for r in t.ranks) for t in pair}) > 1)


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
    parts: list[_Part]

    @property
    def crosses(self) -> tuple[int, bool]:
        """The place between items where it crosses, and the direction."""
        return (self.tile.items.start if self.forward else self.tile.items.stop), self.forward

    def messages(self) -> Iterator[tuple[_Part, int, int]]:
        """Yield each message with the ranks that send and receive it."""
        for part in self.parts:
            yield part, self.sources[part.source].ranks[part.sender], self.tile.ranks[part.receiver]


class _Messages:
    """The messages of a plan.

    Those of all replicas that cross the same place between items in the same direction are in flight at once. They
    share the NICs that they leave and enter by max-min fairly: until a message is there, a NIC has passed as many bytes
    of each of the others, or all of those that are smaller.
    """

    def __init__(self, setup: Setup, plan: Plan, network: ClusterNetwork):
        self._setup, self._plan, self._network = setup, plan, network
        self._row = RowShape(setup.positions, setup.model.hidden_size)
        self._parts_of: dict[tuple, list[_Part]] = {}
        self._passed: dict[tuple[tuple[int, bool], Port], Counter[float]] = {}
        """How many messages of each size a NIC passes at once, by where they cross."""
        self._known: dict[tuple, float] = {}

    def all(self) -> dict[tuple[Tile, Tile], MessageCost]:
        """Return the messages."""
        every = []
        for tile, forward in itertools.product(self._plan.tiles, (True, False)):
            if sources := self._plan.upstream(tile) if forward else self._plan.downstream(tile):
                every.append(_Arrival(tile, sources, forward, self._parts(tile, sources, forward)))
        for arrival in every:
            for part, sender, receiver in arrival.messages():
                for port, _ in self._network.ports(sender, receiver):
                    self._passed.setdefault((arrival.crosses, port), Counter())[part.num_bytes] += 1
        result: dict[tuple[Tile, Tile], MessageCost] = {}
        for arrival in every:
            gather = self._gather_seconds(arrival)
            for source, (seconds, under_way) in self._costs(arrival).items():
                # as if it came so much later
                result[arrival.sources[source], arrival.tile] = MessageCost(seconds + gather, under_way + gather)
        return result

    def _costs(self, arrival: _Arrival) -> dict[int, MessageCost]:
        """Return what it takes until the last rank of a tile has what it is sent, by the source's place."""
        result: dict[int, MessageCost] = {}
        inside: dict[tuple[int, int], MessageCost] = {}
        for part, sender, receiver in arrival.messages():
            latency = self._network.latency_seconds(sender, receiver)
            if flows := self._flows(arrival.crosses, self._network.ports(sender, receiver), part.num_bytes):
                cost = MessageCost(self._network.seconds(sender, receiver, part.num_bytes, flows), latency)
                result[part.source] = max(result.get(part.source, cost), cost)
            elif sender != receiver:  # one after the other, by the receiver's link
                seconds, key = self._network.seconds(sender, receiver, part.num_bytes), (part.source, part.receiver)
                inside[key] = MessageCost(inside.get(key, MessageCost(0.0)).seconds + seconds, latency)
            else:
                result.setdefault(part.source, MessageCost(0.0))
        for (source, _), cost in inside.items():
            result[source] = max(result.get(source, cost), cost)
        return result

    def _flows(self, crosses: tuple[int, bool], ports: tuple[tuple[Port, float], ...], num_bytes: float) -> float:
        """Return how many messages like one of so many bytes share its NICs; 0 where it passes none."""
        most = 0.0
        for port, times_as_fast in ports:
            key = crosses, port, num_bytes
            if key not in self._known:
                passed = self._passed[crosses, port]
                self._known[key] = sum(min(size, num_bytes) * n for size, n in passed.items()) / num_bytes
            most = max(most, self._known[key] / times_as_fast)
        return max(1.0, most) if ports else 0.0

    def _gather_seconds(self, arrival: _Arrival) -> float:
        """Return what the ranks of a tile take to gather over y what each of them was sent a part of."""
        tile = arrival.tile
        if not gathers(self._plan, tile, arrival.forward, self._near(tile), self._row):
            return 0.0
        own = common_parts(tile, self._row)
        num_bytes = max(common.tokens.size * common.features.size for common in own) * self._setup.item_bytes
        groups = (common.ranks for common in own)
        concurrent = self._network.concurrent(tile.ranks)
        return max(self._network.group_seconds("all_gather", num_bytes, group, concurrent) for group in groups)

    def _parts(self, tile: Tile, sources: tuple[Tile, ...], forward: bool) -> list[_Part]:
        """Return what the ranks of a tile are sent of a microbatch; once for tiles in equivalent places."""
        ranks = [rank for each in (tile, *sources) for rank in each.ranks]
        nodes = [self._network.cluster.devices[rank].node for rank in ranks]
        rows = tuple(each.rows.shift(-tile.rows.start) for each in (tile, *sources))
        grids = tuple(each.tensor for each in (tile, *sources))
        key = _numbered(ranks), _numbered(nodes), rows, grids, forward
        if key not in self._parts_of:
            self._parts_of[key] = [
                _Part(*place, receiver, transfer.num_elements * self._setup.item_bytes / self._position_parts(tile))
                for receiver, rank in enumerate(tile.ranks)
                for transfer in receives(self._plan, tile, rank, self._row, forward, self._near(tile))
                for place in [_place(transfer.sender, sources)]
            ]
        return self._parts_of[key]

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
