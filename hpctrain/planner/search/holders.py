"""Ranks that hold the same weights, as a search places them: on which nodes they lie, and what they exchange. Pure."""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.planner.prices.network import ClusterNetwork, ConcurrentRanks
from hpctrain.planner.search.pools import Pool


class HolderGroup(NamedTuple):
    """The replicas of a stage: slots of a pool that follow each other."""

    pool: int
    size: int
    """Number of ranks of a slot, which is a tensor grid."""
    replicas: int
    first_slot: int = 0


class Holders(NamedTuple):
    """The ranks with the same weights, where these are exchanged in every pass."""

    zero: int = 1
    groups: tuple[HolderGroup, ...] = ()

    @classmethod
    def of_stage(cls, own: HolderGroup, zero: int, sharing: tuple[HolderGroup, ...] = ()) -> "Holders":
        """Return the holders of a stage's weights: its `own` replicas, or those `sharing`, which are of several
        pipelines."""
        groups = sharing or ((own,) if own.replicas > 1 else ())
        return cls(zero, groups) if zero >= 2 and groups else ALONE


ALONE = Holders()


class HolderPlaces:
    """The ranks of groups of holders on one cluster, and the seconds of what they exchange."""

    def __init__(self, network: ClusterNetwork, cluster: Cluster, pools: Sequence[Pool]):
        self._network, self._cluster, self._pools = network, cluster, pools
        # Each caches the method of the same name with an underscore before it.
        self.exact_seconds = lru_cache(None)(self._exact_seconds)
        self.concurrent = lru_cache(None)(self._concurrent)
        self.are_apart = lru_cache(None)(self._are_apart)

    def ranks(self, groups: Sequence[HolderGroup]) -> list[int]:
        """Return the first rank of each holder."""
        slots = (self._pools[pool].slots(size)[first : first + count] for pool, size, count, first in groups)
        return [slot[0] for of_group in slots for slot in of_group]

    def sharers(self, groups: Sequence[HolderGroup]) -> ConcurrentRanks:
        """Return the ranks that exchange at the same time as those of groups of holders."""
        (pool, size, replicas, _), *others = groups
        in_node = self._pools[pool].largest_node // size
        is_even = not replicas % in_node or not in_node % replicas  # all stages are inside nodes, or on whole ones
        return self.concurrent(tuple(group[:2] for group in groups), 0 if others or is_even else replicas)

    def _concurrent(self, grids: tuple[tuple[int, int], ...], replicas: int = 0) -> ConcurrentRanks:
        """Return the ranks of all slots for tensor grids; these are (pool, ranks of one).

        With `replicas` those of the stages of so many that are on several nodes: others exchange by no NIC.
        """
        slots = [slot for pool, size in grids for slot in self._pools[pool].slots(size)]
        if replicas:
            devices = self._cluster.devices
            stages = (slots[start : start + replicas] for start in range(0, len(slots) - replicas + 1, replicas))
            several = (each for each in stages if devices[each[0][0]].node != devices[each[-1][0]].node)
            slots = list(itertools.chain(*several))
        return self._network.concurrent(tuple(itertools.chain(*slots)))

    def seconds(self, groups: tuple[HolderGroup, ...], num_bytes: int, operation: str) -> float:
        """Return about the seconds of an exchange among holders, such as a reduce-scatter of `num_bytes`.

        The estimate ranks plans. Between powers of two it is a line.
        """
        if num_bytes < 1:
            return 0.0
        power = num_bytes.bit_length() - 1
        low, high = (self.exact_seconds(groups, 1 << n, operation) for n in (power, power + 1))
        return low + (high - low) * (num_bytes / (1 << power) - 1)

    def _exact_seconds(self, groups: tuple[HolderGroup, ...], num_bytes: int, operation: str) -> float:
        return self._network.holder_seconds(operation, num_bytes, self.ranks(groups), self.sharers(groups))

    def first_equivalent(self, groups: tuple[HolderGroup, ...]) -> tuple[HolderGroup, ...]:
        """Return the first groups of holders that lie on nodes as these do; these where pools share nodes, since
        it matters which nodes both are on."""
        if not self.are_apart(tuple(group.pool for group in groups)):
            return groups
        return tuple(
            each._replace(first_slot=self._pools[each.pool].first_equivalent(each.first_slot, each.size, each.replicas))
            for each in groups
        )

    def _are_apart(self, pools: tuple[int, ...]) -> bool:
        """Say whether no node has devices of two of these pools."""
        nodes = [self._cluster.devices[ranks[0]].node for pool in pools for ranks in self._pools[pool].nodes]
        return len(nodes) == len(set(nodes))
