"""The network of a described cluster as its rehearsal sees it: ports, paths of messages, flows. Pure.

Messages are a fluid: flows share ports max-min fairly (Bertsekas and Gallager 1992, section 6.5.2). A port is one
direction of a NIC or of a device's link. A flow's rate is what its narrowest port leaves to it, and what it cannot use
there is left to the others. Rates change only when a flow starts or ends, so whoever looks at the state brings it up to
date from one such event to the next; how often anybody looks changes nothing.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.links import link_between, nic_of


class Path(NamedTuple):
    """The ports that a message passes from one rank to another, and its latency."""

    ports: tuple[int, ...]
    latency_seconds: float


@dataclass(frozen=True)
class PretendedNetwork:
    """The links, NICs and fabrics of a rehearsal's ranks. The inside of a fabric is never a bottleneck.

    Devices are numbered by rank, then NICs node by node. Port 2 n leads out of number n, port 2 n + 1 into it. After
    these come the ports of pairs of devices that have a link of their own, one for each direction.
    """

    cluster: Cluster
    dilation: float = 1.0
    """All times are this many times as long as described."""

    @property
    def num_ranks(self) -> int:
        return self.cluster.num_devices

    @cached_property
    def _nics(self) -> dict[tuple[int, str, int], int]:
        """The number of each NIC, by node, fabric, and place among the node's NICs of that fabric."""
        keys = [
            (node, fabric, place)
            for node, table in sorted(self._tables.items())
            for fabric, nics in self.cluster.nodes[table].nics_by_fabric.items()
            for place in range(len(nics))
        ]
        return {key: self.num_ranks + number for number, key in enumerate(keys)}

    @cached_property
    def _tables(self) -> dict[int, int]:
        return {device.node: device.table for device in self.cluster.devices}

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], int]:
        """The port from each device to each other one of its node, where nodes are fully connected."""
        of_node: dict[int, list[int]] = {}
        for device in self.cluster.devices:
            if self.cluster.nodes[device.table].fully_connected:
                of_node.setdefault(device.node, []).append(device.rank)
        pairs = (pair for ranks in of_node.values() for pair in itertools.permutations(ranks, 2))
        return {pair: number for number, pair in enumerate(pairs, start=2 * (self.num_ranks + len(self._nics)))}

    @cached_property
    def bandwidths(self) -> tuple[float, ...]:
        """The ports' bandwidths in bytes per second of this rehearsal, dilated."""
        cluster, result = self.cluster, []
        for device in cluster.devices:
            result += 2 * [cluster.nodes[device.table].link_bytes_per_second or 1.0]  # a single device has no link
        for node, fabric, place in self._nics:
            nic = cluster.nodes[self._tables[node]].nics_by_fabric[fabric][place]
            most = cluster.fabrics[fabric].bytes_per_second or math.inf
            result += [min(nic.send_bytes_per_second, most), min(nic.receive_bytes_per_second, most)]
        result += [result[2 * source] for source, _ in self._pairs]
        return tuple(value / self.dilation for value in result)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """List the paths of all pairs, by `source * num_ranks + target`."""
        return tuple(self._path(*pair) for pair in itertools.product(range(self.num_ranks), repeat=2))

    def _path(self, source: int, target: int) -> Path:
        here, there = self.cluster.devices[source], self.cluster.devices[target]
        if here.node == there.node:
            own = self._pairs.get((source, target))
            ports = () if source == target else (2 * source, 2 * target + 1) if own is None else (own,)
            return Path(ports, (self.cluster.nodes[here.table].link_latency_seconds or 0.0) * self.dilation)
        fabric = link_between(self.cluster, source, target).fabric or ""
        ports = (2 * self._number(source, fabric), 2 * self._number(target, fabric) + 1)
        return Path(ports, self.cluster.fabrics[fabric].latency_seconds * self.dilation)

    def _number(self, rank: int, fabric: str) -> int:
        """Return the number of the NIC by which a rank enters a fabric that its node has."""
        nic = nic_of(self.cluster, rank, fabric)
        assert nic is not None
        return self._nics[self.cluster.devices[rank].node, fabric, nic[0]]


NUM_SCALARS, NUM_FIELDS = 8, 7
CLOCK, NEXT_END, NUM_ACTIVE, SLOWDOWN = range(4)
NOBODY = -1.0
# How many sets of flows each process remembers the rates of: collectives come back to the same ones.
REMEMBERED_RATES = 1024


def max_min_rates(paths: Iterable[Sequence[int]], bandwidths: Sequence[float]) -> list[float]:
    """Return the rate of each flow, given the ports that it passes and those ports' bandwidths, by progressive filling.

    The sum over a port is at most its bandwidth, and each flow passes a full port on which nobody is faster.
    """
    paths = list(paths)
    rates = [math.inf] * len(paths)
    crossing: dict[int, set[int]] = {}
    for flow, path in enumerate(paths):
        for port in path:
            crossing.setdefault(port, set()).add(flow)
    free = {port: bandwidths[port] for port in crossing}
    while crossing:
        share, fullest = min((free[port] / len(flows), port) for port, flows in crossing.items())
        for flow in list(crossing[fullest]):
            rates[flow] = share
            for port in paths[flow]:
                free[port] -= share
                crossing[port].discard(flow)
                if not crossing[port]:
                    del crossing[port]
    return rates


class FlowNetwork:
    """The flows of a network, in slots that the caller assigns; times in seconds, sizes in bytes.

    All state is in `memory`, which may be shared by processes: the methods that change it must be called by one at a
    time; `left` and `earliest_end` read single doubles and may be called at any time.
    """

    def __init__(self, bandwidths: Sequence[float], paths: Sequence[Sequence[int]], memory: "memoryview[float]"):
        """`paths` lists the ports of every path that flows take; `memory` is `num_doubles` doubles."""
        self._bandwidths, self._paths = bandwidths, paths
        self._narrowest = [min((bandwidths[port] for port in path), default=math.inf) for path in paths]
        self._rates_of = functools.lru_cache(REMEMBERED_RATES)(self._compute_rates)
        self._scalars = memory[:NUM_SCALARS]
        num_slots = (len(memory) - NUM_SCALARS) // NUM_FIELDS
        bounds = [NUM_SCALARS + i * num_slots for i in range(NUM_FIELDS + 1)]
        fields = [memory[bounds[i] : bounds[i + 1]] for i in range(NUM_FIELDS)]
        self._active, self._path, self._remaining, self._rate, self._follower, self._earliest, self._left = fields

    @staticmethod
    def num_doubles(num_slots: int) -> int:
        return NUM_SCALARS + NUM_FIELDS * num_slots

    def reset(self) -> None:
        """Empty it. One process calls, before any other uses it."""
        self._scalars[CLOCK], self._scalars[NEXT_END], self._scalars[NUM_ACTIVE] = 0.0, math.inf, 0.0
        self._scalars[SLOWDOWN] = 1.0

    @property
    def clock(self) -> float:
        """The time of the last start or end."""
        return self._scalars[CLOCK]

    @property
    def next_end(self) -> float:
        """Return when the next flow ends if none starts before; infinity without flows. May be past."""
        return self._scalars[NEXT_END]

    @property
    def slowdown(self) -> float:
        """Return the factor by which everything takes longer than by the bandwidths."""
        return self._scalars[SLOWDOWN]

    def slow_down(self, times: float, now: float) -> None:
        """Let everything take `times` as long from now on, what is in flight too."""
        self.advance(now)
        flows = self._flows()
        self._drain(flows, max(now, self.clock))
        self._scalars[SLOWDOWN] *= times
        self._share(flows, [])

    def left(self, slot: int) -> float:
        """Return when the flow's last byte left its port; infinity as long as `advance` has not seen that it did."""
        return self._left[slot]

    def earliest_end(self, slot: int) -> float:
        """Return a time before which the flow cannot end, if no flow that starts by then yields bandwidth to it."""
        left = self._left[slot]
        return left if left < math.inf else max(self._earliest[slot], self.next_end)

    def start(self, slot: int, path: int, num_bytes: float, now: float, behind: int | None = None) -> bool:
        """Start a flow in a free slot: now, or at the time of the last start or end, if that is later.

        One `behind` another starts when that has left; one at most may be behind it. Return whether it has started.
        """
        self.advance(now)
        self._path[slot], self._remaining[slot] = path, num_bytes
        self._follower[slot], self._earliest[slot], self._left[slot] = NOBODY, 0.0, math.inf
        if behind is not None and self._left[behind] == math.inf:
            self._follower[behind] = slot
            return False
        flows = self._flows()
        self._drain(flows, max(now, self.clock))  # another process may have seen a later time
        self._share([*flows, slot], [slot])
        return True

    def advance(self, now: float) -> None:
        """Process all starts and ends of flows until `now`."""
        while (end := self.next_end) <= now:
            flows = self._flows()
            clock = self.clock
            ended = [slot for slot in flows if clock + self._remaining[slot] / self._rate[slot] <= end]
            self._drain(flows, end)
            for slot in ended:
                self._left[slot] = end
            followers = [int(self._follower[slot]) for slot in ended if self._follower[slot] != NOBODY]
            self._share([slot for slot in flows if slot not in ended] + followers, followers)

    def _flows(self) -> list[int]:
        return [int(slot) for slot in self._active[: int(self._scalars[NUM_ACTIVE])]]

    def _drain(self, flows: Iterable[int], now: float) -> None:
        """Advance the given flows to `now`, before which none of them ends."""
        elapsed = now - self.clock
        for slot in flows:
            self._remaining[slot] -= self._rate[slot] * elapsed
        self._scalars[CLOCK] = now

    def _share(self, flows: Sequence[int], started: Sequence[int]) -> None:
        """Give all flows their rates from now on."""
        clock = self.clock
        for slot in started:
            narrowest = self._narrowest[int(self._path[slot])] / self.slowdown
            self._earliest[slot] = clock + self._remaining[slot] / narrowest
        paths = [int(self._path[slot]) for slot in flows]
        rates = self._rates_of(tuple(sorted(paths)))
        next_end = math.inf
        for position, (slot, path) in enumerate(zip(flows, paths, strict=True)):
            self._active[position] = slot
            self._rate[slot] = rate = rates[path] / self.slowdown
            next_end = min(next_end, clock + max(0.0, self._remaining[slot]) / rate)
        self._scalars[NUM_ACTIVE], self._scalars[NEXT_END] = len(flows), next_end

    def _compute_rates(self, paths: tuple[int, ...]) -> dict[int, float]:
        """Return the rate of the flows on each path: those of the same path are equal."""
        return dict(zip(paths, max_min_rates([self._paths[path] for path in paths], self._bandwidths), strict=True))
