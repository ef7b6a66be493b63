"""How long messages and collectives take on a described cluster, by the routes that hpctrain.comm takes. Pure.

A group on one node, or with one rank on each, communicates flat; one with several families, or several ranks on several
nodes, domain by domain: reduce-scatter inside, exchange of shards across, all-gather inside (`comm/hierarchy.py`).
Ranks of a node that go through the same NIC at the same time share it.
"""

from collections.abc import Sequence
from functools import lru_cache

from hpctrain.cluster import Cluster
from hpctrain.comm.costs import cheapest_flat, flat_seconds
from hpctrain.comm.topology import Topology, places_of
from hpctrain.errors import LaunchError
from hpctrain.job import Link
from hpctrain.links import PairLink, link_between, links_of, message_seconds, nic_of

MESSAGE_OVERHEAD_SECONDS = 0.0
"""That each further message under way costs its sender; 0: links' latencies have the software's share."""
KEPT = 1 << 16


class ClusterNetwork:
    """The links of a cluster, and what collectives take on them. `link_share` is of a link's bandwidth."""

    def __init__(self, cluster: Cluster, link_share: float = 1.0):
        self.cluster, self._share = cluster, link_share
        self._topology = Topology(places_of(cluster), shares_memory=False)
        self._links = links_of(cluster)
        self.link = lru_cache(KEPT)(self._link)
        self.collective_seconds = lru_cache(KEPT)(self._collective_seconds)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a plan of more ranks than there are devices. Raises LaunchError."""
        if num_ranks > self.cluster.num_devices:
            raise LaunchError(
                f"the plan is for {num_ranks} ranks, and the cluster has {self.cluster.num_devices} devices"
                f" ({self.cluster.describe()}); make a plan for {self.cluster.num_devices} or fewer"
            )

    def _link(self, source: int, target: int) -> PairLink:
        return link_between(self.cluster, source, target)

    def is_near(self, one: int, other: int) -> bool:
        """Say whether a message between two ranks stays where links are fast, as all ranks will say of it."""
        return self._topology.is_near(one, other, self._links)

    def seconds(self, source: int, target: int, num_bytes: float, flows: int = 1) -> float:
        """Return what a message takes with `flows` like it through the same NIC."""
        link = self.link(source, target)
        if link.between == "device":
            return 0.0
        whole = message_seconds(link, int(num_bytes), flows)
        return link.latency_seconds + max(whole - link.latency_seconds, 0.0) / self._share

    def flows(self, rank: int, ranks: Sequence[int], target: int) -> int:
        """Return how many of some ranks share the NIC by which this one sends to `target`, if all of them send by that
        fabric: at least 1."""
        device, fabric = self.cluster.devices[rank], self.link(rank, target).fabric
        if fabric is None:
            return 1
        own = nic_of(self.cluster, rank, fabric)[0]
        others = (r for r in ranks if self.cluster.devices[r].node == device.node)
        return max(1, sum(nic_of(self.cluster, r, fabric)[0] == own for r in others))

    def group_seconds(self, operation: str, num_bytes: float, ranks: Sequence[int], beside: Sequence[int]) -> float:
        """Return what a collective takes while the other ranks `beside` do the same in groups of their own."""
        if len(ranks) < 2:
            return 0.0
        node = self.cluster.devices[ranks[0]].node
        own = {rank for rank in ranks if self.cluster.devices[rank].node == node}
        others = [rank for rank in beside if rank not in own]
        elsewhere = next((rank for rank in ranks if rank not in own), ranks[0])
        flows = self.flows(ranks[0], [ranks[0], *others], elsewhere)
        return self.collective_seconds(operation, int(num_bytes), tuple(ranks), flows)

    def _collective_seconds(self, operation: str, num_bytes: int, ranks: tuple[int, ...], flows: int = 1) -> float:
        """Return what a collective of `num_bytes` (the whole tensor's) takes.

        `flows`: how many groups like this one do the same through each NIC at the same time.
        """
        if len(ranks) == 1 or not num_bytes:
            return 0.0
        route = self._topology.route(ranks)
        if route.kind != "hierarchical":
            return self._flat(operation, num_bytes, ranks, flows)
        domains = [tuple(ranks[position] for position in domain) for domain in route.domains]
        inside = max(self._inside(operation, num_bytes, domain, flows) for domain in domains)
        across = max(self._across(num_bytes, domains, i, flows) for i in range(len(domains)))
        return inside + across * (2 if operation == "all_reduce" else 1)

    def _inside(self, operation: str, num_bytes: int, domain: tuple[int, ...], flows: int) -> float:
        parts = ("reduce_scatter", "all_gather") if operation == "all_reduce" else (operation,)
        return sum(self._collective_seconds(part, num_bytes, domain, flows) for part in parts)

    def _across(self, num_bytes: int, domains: list[tuple[int, ...]], index: int, flows: int) -> float:
        """Return the time of one exchange of shards: each rank sends, of what its domain summed, what others own."""
        domain = domains[index]
        other = domains[(index + 1) % len(domains)]
        leaving = num_bytes * (len(domains) - 1) / len(domains) / len(domain)
        return self.seconds(domain[0], other[0], leaving, flows * self.flows(domain[0], domain, other[0]))

    def _flat(self, operation: str, num_bytes: int, ranks: tuple[int, ...], flows: int) -> float:
        link = self._slowest(ranks, num_bytes // len(ranks) + 1, flows)
        algorithm = cheapest_flat(operation, num_bytes, len(ranks), link, MESSAGE_OVERHEAD_SECONDS)
        return flat_seconds(operation, algorithm, num_bytes, len(ranks), link, MESSAGE_OVERHEAD_SECONDS)

    def _slowest(self, ranks: tuple[int, ...], num_bytes: int, flows: int) -> Link:
        """Return the slowest link between neighbours, as a line through messages of no bytes and of `num_bytes`."""
        pairs = {self.link(a, b): (a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)}
        source, target = max(pairs.values(), key=lambda pair: self.seconds(*pair, num_bytes, flows))
        latency = max(self.link(source, target).latency_seconds, 1e-12)
        seconds = self.seconds(source, target, num_bytes, flows)
        return Link(latency_seconds=latency, bandwidth_bytes_per_second=num_bytes / max(seconds - latency, 1e-15))
