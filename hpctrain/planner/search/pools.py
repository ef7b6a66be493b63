"""Devices that are equal, whatever they are called: what a search assigns stages to. Pure.

A *pool* is the devices of one family on nodes with the same NICs. One family behind two fabrics is two pools, so that
what replicas exchange stays inside a fabric; two families whose figures are the same are one. Nodes are equal, so only
how many devices each has matters: a search never looks at pairs of ranks.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.config.clusters.cluster import Cluster, Nodes
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.profiled import device_models
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid


@dataclass(frozen=True, eq=False)
class Pool:
    """Devices that are equal."""

    name: str
    """Name of the family or families, and of their fabric where that distinguishes pools."""
    families: tuple[str, ...]
    device: DeviceModel
    nodes: tuple[tuple[int, ...], ...]
    """The ranks of its devices, node by node."""

    @property
    def num_devices(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def memory_bytes(self) -> int:
        """Return what a plan may fill of one device."""
        return self.device.family.usable_bytes

    @cached_property
    def largest_node(self) -> int:
        """Return the number of devices of the node that has the most."""
        return max(map(len, self.nodes))

    @cached_property
    def _slots(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {}

    def slots(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the slots of tensor grids of `size` ranks, which are their ranks: none leaves its node."""
        if size not in self._slots:
            starts = ((ranks, i * size) for ranks in self.nodes for i in range(len(ranks) // size))
            self._slots[size] = tuple(ranks[start : start + size] for ranks, start in starts)
        return self._slots[size]

    @cached_property
    def _equivalent(self) -> dict[tuple[int, int, int], list[int]]:
        return {}

    def first_equivalent(self, first: int, size: int, replicas: int, stages: int = 1) -> int:
        """Return the first slot of the first stage that lies on nodes as the one that begins with slot `first` does.

        All stages have so many replicas of `size` ranks. They lie alike in equal places of nodes with as many slots; on
        one node of one family all places are equal. Of several `stages` in a row all lie alike.
        """
        key = size, replicas, stages
        if key not in self._equivalent:
            ends = list(itertools.accumulate((len(ranks) // size for ranks in self.nodes), initial=0))
            seen: dict[tuple[int, ...], int] = {}
            result = self._equivalent[key] = []
            for start in range(0, ends[-1] - stages * replicas + 1, replicas):
                node, last = bisect_right(ends, start), bisect_left(ends, start + stages * replicas)
                place = 0 if node == last and len(self.families) == 1 else start - ends[node - 1]
                like = place, *(end - ends[node - 1] for end in ends[node : last + 1])
                result.append(seen.setdefault(like, start))
        return self._equivalent[key][first // replicas]

    def grids(self, context_sizes: Iterable[int] = ()) -> list[TensorGrid]:
        """Return all tensor grids that fit on a node, small ones first.

        Those of y alone are there with c of some sizes too: it cuts rows that are so long that there are few, which x
        and z do not help. Ranks of c gather keys and values, or exchange heads.
        """
        most = self.largest_node
        sizes = (each for each in itertools.product(range(1, most + 1), repeat=3) if math.prod(each) <= most)
        grids = list(itertools.starmap(TensorGrid, sizes))
        for c, exchanges in itertools.product(context_sizes, (False, True)):
            grids += [TensorGrid(y=y, c=c, exchanges_heads=exchanges) for y in range(1, most // c + 1)]
        return sorted(grids, key=lambda grid: (grid.size, grid.x, grid.z, grid.c))


def pools_of(cluster: Cluster, families: Sequence[str], setup: Setup | None = None) -> tuple[Pool, ...]:
    """Return the devices of some families, those that are equal together, in the order of their first ranks.

    With a `setup` they have what its profiles say of them, by which they may be different.
    """
    models = device_models(cluster, setup)
    result: dict[tuple, dict[int, list[int]]] = {}
    named: dict[tuple, list[str]] = {}
    for device in cluster.devices:
        if device.family not in families:
            continue
        key = figures_of(cluster, models[device.family]), _nics(cluster.nodes[device.table])
        result.setdefault(key, {}).setdefault(device.node, []).append(device.rank)
        if device.family not in named.setdefault(key, []):
            named[key].append(device.family)
    pools = []
    for key, nodes in result.items():
        name = "+".join(named[key])
        if sum(named[key] == others for others in named.values()) > 1:
            name += f" on {'+'.join(sorted({nic[0] for nic in key[1][0]})) or 'no fabric'}"
        pools.append(Pool(name, tuple(named[key]), models[named[key][0]], tuple(map(tuple, nodes.values()))))
    return tuple(pools)


def figures_of(cluster: Cluster, device: DeviceModel) -> str:
    """Return all that is said of a family but its name, also by the links that it has, and by its profile."""
    name, links = device.name, []
    for link in cluster.links:
        if name in link.families:
            others = sorted("" if family == name else family for family in link.families)
            links.append(f"{others} {link.model_dump(exclude={'families'})}")
    profile = device.profile.model_dump(exclude={"family"}) if device.profile else ""
    return f"{device.family.model_dump()} {sorted(links)} {profile}"


def _nics(nodes: Nodes) -> tuple:
    nics = tuple((n.fabric, n.count, n.send_bytes_per_second, n.receive_bytes_per_second) for n in nodes.nics)
    return nics, nodes.link_latency_seconds, nodes.link_bytes_per_second, nodes.fully_connected
