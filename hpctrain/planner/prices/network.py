"""Seconds of messages and collectives on a described cluster, and the algorithms that collectives take. Pure.

The planner prices with it and groups choose by it: the same links, the same overhead, the same decision.

A group on one node, or with one rank on each node, communicates flat. A group with several families, or with several
ranks on several nodes, communicates by domains (`comm/collectives/hierarchical.py`): reduce-scatter inside, exchange of
shards across, all-gather inside. Ranks of a node that use the same NIC at the same time share it. Groups of the same
shape have the same times, which are computed once.

Flat algorithms are those of Thakur, Rabenseifner and Gropp (2005): a message of n bytes takes latency + n / bandwidth.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from hpctrain.comm.operations import row_of
from hpctrain.comm.topology import (
    MOST_DOUBLED_BYTES,
    SEGMENT_BYTES,
    Topology,
    candidates,
    places_of,
    segments_in_flight,
)
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.links import PairLink, link_between, message_seconds, nic_of, slowest_links
from hpctrain.config.errors import LaunchError

KEPT = 1 << 16
LATENCIES_IN_FLIGHT = 4
"""The latencies between the time a long message is posted and the time its memory is free again: MPI asks, the receiver
answers, bytes move, their arrival is confirmed."""
MOST_UNDER_WAY_BYTES = 256 << 20
"""What a rank of a group posts at most for that, to all peers together: it is pinned memory, for each direction. A link
that needs more is not filled: of 1 GB, as at 100 ms and 2.5 GB/s, it carries a quarter at a time."""
LEAST_SECONDS = 1e-12
"""Least latency of a link in seconds: those without one, as of ranks that share a device, count as having this."""


def _scratch_of_exchange(num_bytes: int, num_ranks: int, segments: int = 1) -> int:
    """Return the bytes that a rank receives at once from the others, when a tensor is reduced by exchange."""
    return min(num_bytes // num_ranks, segments * SEGMENT_BYTES) * (num_ranks - 1)


class GroupShape(NamedTuple):
    """All that the times of a group's collectives depend on, while concurrent groups communicate too. Links are
    numbers."""

    size: int
    links: tuple[int, ...]
    """Links between neighbours, each kind once. The slowest of them decides the time of a flat collective."""
    flows: int = 1
    """Largest number of ranks, of this group and of concurrent ones, that share the NIC of one of these links."""
    domains: tuple["GroupShape", ...] = ()
    """The shapes of its domains, each once; empty where the group communicates flat."""
    num_domains: int = 0
    across: tuple["InterDomainLinks", ...] = ()
    """Links by which domains send to the others, each kind of domain once."""


class InterDomainLinks(NamedTuple):
    """The links by which the ranks of one domain send to the other domains."""

    size: int
    """Number of ranks of the domain that sends."""
    links: tuple[tuple[int, int, int], ...]
    """Each link, the number of domains that it leads to, and the number of flows that share it."""


class OnNode(NamedTuple):
    ranks: list[int]
    indices: tuple[int, ...]
    """The numbers of their devices on the node."""


@dataclass(frozen=True, eq=False)
class ConcurrentRanks:
    """Ranks that communicate at the same time. Objects are compared by identity, as there may be thousands of ranks."""

    of_node: dict[int, OnNode]
    of_family: dict[str, int]
    """The number of these ranks in each family."""


class Port(NamedTuple):
    """One direction of a NIC."""

    node: int
    fabric: str
    nic: int
    """Number of the NIC among the node's NICs of that fabric."""
    leaves: bool


class ClusterNetwork:
    """The links of a cluster, and what messages and collectives take on them."""

    def __init__(self, cluster: Cluster, link_share: float = 1.0):
        """`link_share` is the share of a data sheet's bandwidth that collectives reach, see
        `config.clusters.links.message_seconds`."""
        self.cluster, self._share = cluster, link_share
        self._topology = Topology(places_of(cluster), shares_memory=False)
        self._numbers: dict[PairLink, int] = {}
        self._numbered: list[PairLink] = []
        self._places = [(device.table, device.index) for device in cluster.devices]
        """The table and the place on a node of each rank's device: they decide about its links and its NICs."""
        self._number_of_places: dict[tuple, int] = {}
        self._ports_of_places: dict[tuple, tuple[tuple[str, int, float], ...]] = {}
        self._on_nodes: dict[tuple, GroupShape] = {}
        """The shapes of groups inside of nodes, by the places of their ranks."""
        self._shape = lru_cache(KEPT)(self._shape_of)
        self._domains = lru_cache(KEPT)(self._domains_of)
        self.concurrent = lru_cache(KEPT)(self._concurrent_of)
        self._seconds_by = lru_cache(KEPT)(self._compute_seconds)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a plan of more ranks than there are devices. Raises LaunchError."""
        if num_ranks > self.cluster.num_devices:
            raise LaunchError(
                f"the plan is for {num_ranks} ranks, and the cluster has {self.cluster.num_devices} devices"
                f" ({self.cluster.describe()}); make a plan for {self.cluster.num_devices} or fewer"
            )

    # ---- messages ----------------------------------------------------------------------------------------------------

    def place(self, rank: int) -> tuple[int, int]:
        """Return the table and the place on a node of a rank's device, which decide about its links and its NICs."""
        return self._places[rank]

    def _number(self, source: int, target: int) -> int:
        """Return the number of the link between two ranks. It is looked up once for all pairs in equal places."""
        devices = self.cluster.devices
        is_near = source != target and devices[source].node == devices[target].node
        key = self._places[source], source != target and self._places[target], is_near
        number = self._number_of_places.get(key)
        if number is None:
            link = link_between(self.cluster, source, target)
            if link not in self._numbers:
                self._numbers[link] = len(self._numbered)
                self._numbered.append(link)
            number = self._number_of_places[key] = self._numbers[link]
        return number

    def _nic(self, rank: int, fabric: str) -> int:
        """Return the number of the NIC by which a rank enters a fabric."""
        table, index = self._places[rank]
        return index % len(self.cluster.nodes[table].nics_by_fabric[fabric])

    @cached_property
    def _is_even(self) -> bool:
        """Say whether nodes' own links, as groups use them, are no faster than those between nodes."""
        links = slowest_links(self.cluster, of_groups=True)
        speeds = {where: link.message_bytes_per_second for where, link in links.items()}
        return len(speeds) < 2 or speeds["inside"] <= speeds["across"]

    def is_near(self, one: int, other: int) -> bool:
        """Say whether a message between two ranks stays where links are fast. All ranks get the same answer.

        That is inside one node, or anywhere if nodes' own links are no faster than those between nodes.
        """
        return self._is_even or self._topology.are_together(one, other)

    def ports(self, source: int, target: int) -> tuple[tuple[Port, float], ...]:
        """Return the ports by which a message leaves a node and enters another one. Inside a node there are none.

        Each port comes with its bandwidth, as a multiple of the narrower one's.
        """
        here, there = self.cluster.devices[source].node, self.cluster.devices[target].node
        if here == there:
            return ()
        key = self._places[source], self._places[target]
        if key not in self._ports_of_places:
            fabric = self._numbered[self._number(source, target)].fabric
            assert fabric is not None, "nodes reach each other by a fabric"
            most, bandwidths = self.cluster.fabrics[fabric].bytes_per_second or math.inf, []
            for rank, leaves in ((source, True), (target, False)):
                number, nic = nic_of(self.cluster, rank, fabric)  # pyright: ignore[reportGeneralTypeIssues] - both have one
                bandwidth = nic.send_bytes_per_second if leaves else nic.receive_bytes_per_second
                bandwidths.append((fabric, number, min(bandwidth, most)))
            narrowest = min(bandwidth for *_, bandwidth in bandwidths)
            self._ports_of_places[key] = tuple((*nic, bandwidth / narrowest) for *nic, bandwidth in bandwidths)
        (fabric, number, times), (_, other, as_fast) = self._ports_of_places[key]
        return (Port(here, fabric, number, True), times), (Port(there, fabric, other, False), as_fast)

    def seconds(self, source: int, target: int, num_bytes: float, flows: float = 1) -> float:
        """Return the seconds of a message while `flows` messages like it use the same NIC."""
        return self._message_seconds(self._number(source, target), num_bytes, flows)

    def latency_seconds(self, source: int, target: int) -> float:
        """Return the part of a message's seconds in which others may follow it: the time that a byte is under way."""
        return self._numbered[self._number(source, target)].latency_seconds

    def bytes_under_way(self, ranks: Sequence[int]) -> int:
        """Return the bytes that a rank of a group must have posted to each peer, for a full link.

        Its peers share the link, but inside of a fully connected node. Across domains it has about one peer in each of
        the others.
        """
        shape = self._shape(tuple(ranks), None)
        peers = (shape.num_domains or shape.size) - 1

        def to_each(link: PairLink) -> int:
            under_way = int(LATENCIES_IN_FLIGHT * link.latency_seconds * link.message_bytes_per_second)
            return under_way if link.fully_connected and not shape.domains else under_way // peers

        most = max(to_each(self._numbered[number]) for number in shape.links)
        return min(most, MOST_UNDER_WAY_BYTES // peers)

    def _message_seconds(self, number: int, num_bytes: float, flows: float) -> float:
        link = self._numbered[number]
        if link.between == "device":
            return 0.0
        return message_seconds(link, int(num_bytes), flows, self.share_of(link))

    def share_of(self, link: PairLink) -> float:
        """Return the share of a data sheet's bandwidth that a link gives."""
        return self._share

    def flows(self, rank: int, ranks: Iterable[int], target: int) -> int:
        """Return how many of some ranks share the NIC by which `rank` sends to `target`, at least 1.

        All of them count as sending by that fabric.
        """
        device, fabric = self.cluster.devices[rank], self._numbered[self._number(rank, target)].fabric
        if fabric is None:
            return 1
        own = self._nic(rank, fabric)
        others = (r for r in ranks if self.cluster.devices[r].node == device.node)
        return max(1, sum(self._nic(r, fabric) == own for r in others))

    def describe_choice(self, ranks: Sequence[int]) -> str:
        """Say which algorithm all-reduces of a group take, by their size."""
        if len(ranks) < 2:
            return "none, for a single rank"
        sizes = [1 << power for power in range(3, MOST_DOUBLED_BYTES.bit_length() + 1)]
        resolved = itertools.groupby(sizes, lambda num_bytes: self.algorithm("all_reduce", num_bytes, ranks))
        result = [(name, max(of_name)) for name, of_name in resolved]
        summary = [f"{name} up to {num_bytes:,} bytes" for name, num_bytes in result[:-1]]
        return f"all-reduces of {len(ranks)} ranks by {', '.join([*summary, result[-1][0]])}"

    # ---- collectives -------------------------------------------------------------------------------------------------

    def group_seconds(
        self, operation: str, num_bytes: float, ranks: Sequence[int], concurrent: ConcurrentRanks | None = None
    ) -> float:
        """Return the seconds of a collective of `num_bytes` (the whole tensor's bytes).

        Assumes that `concurrent` ranks run the same collective at once, in groups of this shape; None: the group is
        alone. Raises CommError for an operation that no group has.
        """
        row_of(operation)
        ranks, num_bytes = tuple(ranks), int(num_bytes)
        if len(ranks) < 2 or not num_bytes:
            return 0.0
        algorithm = self.algorithm(operation, num_bytes, ranks)
        return self._seconds_by(algorithm, operation, num_bytes, self._shape(ranks, concurrent))

    def holder_seconds(
        self, operation: str, num_bytes: float, ranks: Sequence[int], concurrent: ConcurrentRanks | None = None
    ) -> float:
        """Return the seconds of one sum of gradients, or one gather of weights, among ranks that hold the same weights.

        Search and prediction ask it for each of these, and for nothing else. See `group_seconds`.
        """
        return self.group_seconds(operation, num_bytes, ranks, concurrent)

    def algorithm(self, operation: str, num_bytes: int, ranks: Sequence[int], by_domains: bool = True) -> str:
        """Return the algorithm that takes the least time: domains, exchange or doubling.

        Assumes that the group is alone, as its ranks do not know which others communicate. Without `by_domains` only
        the flat algorithms count.
        """
        shape = self._shape(tuple(ranks), None)
        options = candidates(operation, num_bytes, shape.size, by_domains and bool(shape.domains))
        if len(options) == 1:
            return options[0]
        return min(options, key=lambda option: self._seconds_by(option, operation, num_bytes, shape))

    def scratch_bytes(self, operation: str, num_bytes: int, ranks: Sequence[int], rank: int) -> int:
        """Return the scratch bytes of a sum of `num_bytes` on ranks like `rank`, in addition to the whole tensor and
        the result.

        Operations that sum nothing need none. Of several domains with such a rank the smallest counts: its ranks have
        the most each. Makers' libraries may need less.
        """
        num_ranks, row = len(ranks), row_of(operation)
        if num_ranks < 2 or not row.is_sum:
            return 0
        algorithm = self.algorithm(operation, num_bytes, ranks)
        if algorithm == "doubling":
            return 2 * num_bytes
        if algorithm != "domains":
            return _scratch_of_exchange(num_bytes, num_ranks, segments_in_flight(self.bytes_under_way(ranks)))
        domains, is_packed = self._domains(tuple(ranks))
        family = self.cluster.devices[rank].family
        own = min(size for size, families in domains if family in families)
        inside = _scratch_of_exchange(num_bytes * max(size for size, _ in domains) // num_ranks, own)
        packed = 0 if is_packed or row.phases else num_bytes
        return packed + len(domains) * num_bytes // num_ranks + num_bytes // own + inside

    def _domains_of(self, ranks: tuple[int, ...]) -> tuple[list[tuple[int, set[str]]], bool]:
        """Return the size and the families of each domain of a group, and whether the domains' ranks follow each other
        in it."""
        domains, devices = self._topology.route(ranks).domains, self.cluster.devices
        is_packed = tuple(itertools.chain(*domains)) == tuple(range(len(ranks)))
        return [(len(domain), {devices[ranks[place]].family for place in domain}) for domain in domains], is_packed

    def _shape_of(self, ranks: tuple[int, ...], concurrent: ConcurrentRanks | None) -> GroupShape:
        """Return the shape of a group, while `concurrent` ranks run the same collective in groups of this shape.

        The family with the fewest concurrent ranks for such groups limits the number of groups.
        """
        own = self._concurrent_of(ranks)
        every = concurrent or own
        num_groups = min(-(-every.of_family.get(f, n) // n) for f, n in own.of_family.items())
        known: dict[tuple, int] = {}

        def flows(rank: int, target: int) -> int:
            device = self.cluster.devices[rank]
            mine = own.of_node[device.node]
            all_of_node = every.of_node.get(device.node, mine)
            like = device.table, device.index, self._number(rank, target), mine.indices, all_of_node.indices
            if like not in known:
                alone = self.flows(rank, mine.ranks, target)
                known[like] = min(self.flows(rank, all_of_node.ranks, target), num_groups * alone)
            return known[like]

        return self._with_flows(ranks, flows)

    def _concurrent_of(self, ranks: tuple[int, ...]) -> ConcurrentRanks:
        of_node: dict[int, list[int]] = {}
        of_family: dict[str, int] = {}
        for rank in ranks:
            device = self.cluster.devices[rank]
            of_node.setdefault(device.node, []).append(rank)
            of_family[device.family] = of_family.get(device.family, 0) + 1
        devices = self.cluster.devices
        return ConcurrentRanks(
            {n: OnNode(r, tuple(devices[rank].index for rank in r)) for n, r in of_node.items()}, of_family
        )

    def _with_flows(self, ranks: tuple[int, ...], flows: Callable[[int, int], int]) -> GroupShape:
        """Return the shape of a group, or of a domain in one. `flows` returns how many flows share a rank's NIC to a
        target."""
        route, neighbours = self._topology.route(ranks), list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
        links = tuple(dict.fromkeys(self._number(*pair) for pair in neighbours))
        flat = GroupShape(len(ranks), links, max(flows(*pair) for pair in neighbours))
        if route.kind != "hierarchical":
            return flat
        domains = [tuple(ranks[position] for position in domain) for domain in route.domains]
        sources: dict[tuple, tuple[int, ...]] = {}
        for domain, other in zip(domains, (*domains[1:], domains[0]), strict=True):
            table = self.cluster.devices[domain[0]].table
            sources.setdefault((table, len(domain), max(flows(rank, other[0]) for rank in domain)), domain)
        across = (self._across(domain, domains, flows) for domain in sources.values())
        equivalent = tuple(dict.fromkeys(self._of_domain(domain, flows) for domain in domains))
        return flat._replace(domains=equivalent, num_domains=len(domains), across=tuple(dict.fromkeys(across)))

    def _across(
        self, domain: tuple[int, ...], domains: Sequence[tuple[int, ...]], flows: Callable[[int, int], int]
    ) -> InterDomainLinks:
        targets: dict[int, list[int]] = {}
        for other in domains:
            if other is not domain:
                targets.setdefault(self._number(domain[0], other[0]), []).append(other[0])
        shared = {link: max(flows(rank, to[0]) for rank in domain) for link, to in targets.items()}
        return InterDomainLinks(len(domain), tuple((link, len(to), shared[link]) for link, to in targets.items()))

    def _of_domain(self, ranks: tuple[int, ...], flows: Callable[[int, int], int]) -> GroupShape:
        """Return the shape of a domain. One that needs no NIC has the same shape in any group."""
        devices = self.cluster.devices
        if any(devices[rank].node != devices[ranks[0]].node for rank in ranks):
            return self._with_flows(ranks, flows)
        places = tuple(self._places[rank] for rank in ranks)
        if places not in self._on_nodes:
            self._on_nodes[places] = self._shape(ranks, None)
        return self._on_nodes[places]

    def _compute_seconds(self, algorithm: str, operation: str, num_bytes: int, shape: GroupShape) -> float:
        """Return the seconds of a collective by an algorithm."""
        if algorithm == "domains":
            return self._by_domains(operation, num_bytes, shape)
        message_bytes = max(num_bytes, 1) if algorithm == "doubling" else num_bytes // shape.size + 1
        peers = shape.size - 1 if algorithm != "doubling" else 1
        link, bandwidth = self._slowest(shape.links, message_bytes, shape.flows, peers)
        return self.flat_seconds(algorithm, operation, num_bytes, shape.size, link, bandwidth)

    def flat_seconds(
        self, algorithm: str, operation: str, num_bytes: int, num_ranks: int, link: PairLink, bandwidth: float
    ) -> float:
        """Return the seconds of an exchange or a doubling, whose slowest link is `link` and gives it so much
        bandwidth."""
        latency = max(link.latency_seconds, LEAST_SECONDS)
        if algorithm == "doubling":
            rounds = (num_ranks - 1).bit_length() + (2 if num_ranks & (num_ranks - 1) else 0)
            return rounds * (latency + num_bytes / bandwidth)
        once = latency + (num_ranks - 2) * link.overhead_seconds
        share = num_bytes * (num_ranks - 1) / num_ranks / bandwidth
        return row_of(operation).transfers * (once + share)

    def _inside_seconds(self, operation: str, num_bytes: int, shape: GroupShape) -> float:
        """Return the seconds of a phase of a collective, or of an all-to-all, inside a domain."""
        if shape.size == 1:
            return 0.0
        return self._seconds_by("domains" if shape.domains else "exchange", operation, num_bytes, shape)

    def _by_domains(self, operation: str, num_bytes: int, shape: GroupShape) -> float:
        if phases := row_of(operation).phases:
            return sum(self._seconds_by("domains", phase, num_bytes, shape) for phase in phases)
        # Inside a domain one region after the other: each domain owns one, as large as it has ranks. Across domains one
        # exchange of shards: those of the larger domain's region, or all of the smaller one's ranks, are sent by few.
        # An all-to-all sends a part to each rank of the others.
        count, is_pairwise = shape.num_domains, row_of(operation).is_pairwise
        one = every = 0.0
        for size, links in shape.across:
            others = (shape.size - size) / (count - 1)  # ranks of each other domain
            region = num_bytes * size // shape.size + 1
            sent_bytes, receivers = region / size * max(1.0, others / size), 1.0
            if is_pairwise:
                sent_bytes, receivers = num_bytes // shape.size + 1, others
            of_fabric: dict[str | None, float] = {}  # each fabric has NICs of its own
            for link, to, flows in links:
                messages = to * receivers
                one = max(one, self._message_seconds(link, sent_bytes, flows))
                fabric = self._numbered[link].fabric
                sent = self._message_seconds(link, messages * sent_bytes, flows)
                sent += (messages - 1) * self._numbered[link].overhead_seconds
                of_fabric[fabric] = of_fabric.get(fabric, 0.0) + sent
            every = max(every, *of_fabric.values())
        across = self._fabrics(shape._replace(links=(), domains=()))
        is_shared = any(across & self._fabrics(domain) for domain in shape.domains)  # the same NICs do both
        result = 0.0
        for domain in shape.domains:
            own = self._inside_seconds(operation, num_bytes * domain.size // shape.size + 1, domain)
            region = num_bytes * (shape.size - domain.size) // (count - 1) // shape.size + 1
            other = 0.0 if is_pairwise else self._inside_seconds(operation, region, domain)
            others = (count - 1) * other
            if is_shared:
                seconds = own + others + every
            elif operation == "reduce_scatter":  # each is sent while the next one is summed; its own comes last
                seconds = max(others + own, other + every, others + one)
            else:  # its own overlaps the exchange; the others follow it
                seconds = max(own, every) + others
            result = max(result, seconds)
        return result

    def _fabrics(self, shape: GroupShape) -> set[str]:
        """Return the fabrics by which ranks of a group reach each other."""
        links = {*shape.links, *(link for across in shape.across for link, _, _ in across.links)}
        result = {fabric for link in links if (fabric := self._numbered[link].fabric) is not None}
        return result.union(*map(self._fabrics, shape.domains))

    def _slowest(self, links: tuple[int, ...], num_bytes: int, flows: int, peers: int = 1) -> tuple[PairLink, float]:
        """Return the slowest of some links for a message of `num_bytes`, and its bandwidth after the latency.

        A rank that sends to several `peers` at once, and has a link to each, has the bandwidth of all of these.
        """

        def at_once(number: int) -> int:
            return peers if self._numbered[number].fully_connected else 1

        seconds = {number: self._message_seconds(number, num_bytes, flows) for number in links}
        slowest = max(links, key=lambda number: seconds[number] / at_once(number))
        link = self._numbered[slowest]
        moving = max(seconds[slowest] - max(link.latency_seconds, LEAST_SECONDS), 1e-15)
        return link, num_bytes / moving * at_once(slowest)
