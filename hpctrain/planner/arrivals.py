"""What messages between the tiles of a plan take: activations forward, their gradients back. Pure."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hpctrain.comm.network import ClusterNetwork
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.transfers import RowShape, everywhere, gathers, receives
from hpctrain.planner.cost import Setup


def arrivals(setup: Setup, plan: Plan, network: ClusterNetwork) -> dict[tuple[Tile, Tile], float]:
    """Return by source and target the seconds until the target has a microbatch's message."""
    return _Messages(setup, plan, network).all()


def crossing(pairs: Iterable[tuple[Tile, Tile]], network: ClusterNetwork) -> frozenset[tuple[Tile, Tile]]:
    """Return the pairs whose messages leave a node."""
    devices = network.cluster.devices
    return frozenset(pair for pair in pairs if len({frozenset(devices[r].node for r in t.ranks) for t in pair}) > 1)


class _Messages:
    """The messages of a plan; computed once for pairs of tiles with the same intersection."""

    def __init__(self, setup: Setup, plan: Plan, network: ClusterNetwork):
        self._setup, self._plan, self._network = setup, plan, network
        self._nodes = [device.node for device in network.cluster.devices]
        self._ending, self._starting = self._by_node(lambda t: t.items.stop), self._by_node(lambda t: t.items.start)

    def _by_node(self, cut: Callable[[Tile], int]) -> dict[tuple[int, int], list[int]]:
        """Return by node, and by where in the items tiles are cut, the ranks of these tiles."""
        result: dict[tuple[int, int], list[int]] = {}
        for tile in self._plan.tiles:
            for rank in tile.ranks:
                result.setdefault((self._nodes[rank], cut(tile)), []).append(rank)
        return result

    def _flows(self, sender: int, receiver: int, item: int, forward: bool) -> int:
        """Return how many messages share a NIC of one that crosses before an item: replicas send theirs then, too."""
        before, after = (sender, receiver) if forward else (receiver, sender)
        return max(
            self._network.flows(before, self._ending[self._nodes[before], item], after),
            self._network.flows(after, self._starting[self._nodes[after], item], before),
        )

    def all(self) -> dict[tuple[Tile, Tile], float]:
        """Return the messages. What a rank sends to several tiles on other nodes shares its NIC: all come when the last
        one comes."""
        result: dict[tuple[Tile, Tile], float] = {}
        together: dict[tuple[Tile, Tile], float] = {}
        known: dict[tuple, Any] = {}
        for tile, forward in itertools.product(self._plan.tiles, (True, False)):
            before, after = self._plan.upstream(tile), self._plan.downstream(tile)
            sources, targets = (before, after) if forward else (after, before)
            begin, end = (tile.items.start, tile.items.stop) if forward else (tile.items.stop, tile.items.start)
            if sources:
                key = "from", forward, self._meeting((tile, *sources), begin)
                if key not in known:
                    known[key] = self._between(tile, sources, forward)
                for source, seconds in zip(sources, known[key], strict=True):
                    if seconds is not None:
                        result[source, tile] = seconds
            if len(targets) > 1:
                key = "to", forward, self._meeting((tile, *targets), end)
                if key not in known:
                    known[key] = self._sending(targets, forward, tile)
                together.update({(tile, target): known[key] for target in targets})
        crosses = crossing(result, self._network)
        return {pair: max(s, together.get(pair, 0.0)) if pair in crosses else s for pair, s in result.items()}

    def _sending(self, targets: Sequence[Tile], forward: bool, source: Tile) -> float:
        """Return how long the busiest rank of a tile sends to other nodes, were it alone."""
        sent: dict[int, float] = {}
        for target in targets:
            for rank in target.ranks:
                for sender, num_bytes in self._transfers(target, rank, forward):
                    if sender in source.ranks and self._nodes[sender] != self._nodes[rank]:
                        sent[sender] = sent.get(sender, 0.0) + self._network.seconds(sender, rank, num_bytes, 1)
        return max(sent.values(), default=0.0)

    def _meeting(self, tiles: Sequence[Tile], item: int) -> tuple:
        """Return what messages between tiles depend on: their grids and rows, how their ranks are spread, and which
        others on their nodes have messages before the same item."""
        ranks = [rank for tile in tiles for rank in tile.ranks]
        devices = [self._network.cluster.devices[rank] for rank in ranks]
        nodes = {node: number for number, node in enumerate(dict.fromkeys(device.node for device in devices))}
        first = dict(zip(reversed(ranks), reversed(range(len(ranks))), strict=True))
        where = tuple((d.table, nodes[d.node], d.index, first[r]) for d, r in zip(devices, ranks, strict=True))
        rows = tuple(tile.rows.shift(-tiles[0].rows.start) for tile in tiles)
        devices = self._network.cluster.devices
        overlapped = tuple(
            tuple(devices[rank].index for rank in at.get((node, item), ()))
            for node in nodes
            for at in (self._ending, self._starting)
        )
        return where, overlapped, rows, tuple(tile.tensor for tile in tiles)

    def _between(self, tile: Tile, sources: Sequence[Tile], forward: bool) -> list[float | None]:
        """Return for each source what its messages take; None where it sends nothing."""
        result: dict[Tile, float] = {}
        like = len(sources) == 1 and (sources[0].rows, sources[0].tensor) == (tile.rows, tile.tensor)
        # between equal tiles each rank receives from its counterpart alone: the ends represent all
        for rank in {tile.ranks[0], tile.ranks[-1]} if like else tile.ranks:
            for source, seconds in self._arriving(tile, sources, rank, forward).items():
                result[source] = max(result.get(source, 0.0), seconds)
        return [result.get(source) for source in sources]

    def _arriving(self, tile: Tile, sources: Sequence[Tile], rank: int, forward: bool) -> dict[Tile, float]:
        """Return by source what it takes until a rank has what it is sent of a microbatch."""
        source_of = {sender: source for source in sources for sender in source.ranks}
        arriving: dict[Tile, float] = {}
        shared: dict[Tile, float] = {}  # what comes from other nodes comes by one NIC
        for sender, num_bytes in self._transfers(tile, rank, forward):
            source = source_of[sender]
            if sender == rank:  # a tile of its own
                arriving[source] = 0.0
                continue
            item = tile.items.start if forward else tile.items.stop
            flows = self._flows(sender, rank, item, forward)
            arriving[source] = arriving.get(source, 0.0) + self._network.seconds(sender, rank, num_bytes, flows)
            if self._nodes[sender] != self._nodes[rank]:
                shared[source] = shared.get(source, 0.0) + self._network.seconds(sender, rank, num_bytes, 1)
        together = sum(shared.values())
        arriving |= {source: max(arriving[source], together) for source in shared}
        if gathers(self._plan, tile, forward, self._near(tile)):
            row = RowShape(self._setup.positions, self._setup.model.hidden_size)
            _, _, z = tile.coordinate(rank)
            num_elements = tile.rows_at(z).size * row.positions * (row.hidden_size // tile.tensor.x)
            num_bytes = num_elements * self._setup.item_bytes
            overlapped = self._network.crowd(tile.ranks)
            gather = self._network.group_seconds("all_gather", num_bytes, tile.axis_ranks("y", rank), overlapped)
            arriving = {source: seconds + gather for source, seconds in arriving.items()}  # as if it came so much later
        return arriving

    def _transfers(self, tile: Tile, rank: int, forward: bool) -> Iterator[tuple[int, float]]:
        """Yield who sends a rank of a tile how many bytes of a microbatch."""
        row = RowShape(self._setup.positions, self._setup.model.hidden_size)
        for transfer in receives(self._plan, tile, rank, row, forward, self._near(tile)):
            yield transfer.sender, transfer.num_elements * self._setup.item_bytes / self._parts(tile)

    def _parts(self, tile: Tile) -> int:
        # What software of its own cuts over y is sent so, and not gathered; of our engine the grids say it.
        return tile.tensor.y if self._setup.stack.sequence_parallel else 1

    def _near(self, tile: Tile) -> Callable[[int, int], bool]:
        return self._network.is_near if self._setup.stack.gathers_parts and self._parts(tile) == 1 else everywhere
