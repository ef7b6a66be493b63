"""How long messages and collectives take on a described cluster, by the routes that hpctrain.comm takes. Pure.

A group on one node, or with one rank on each, communicates flat; one with several families, or several ranks on several
nodes, domain by domain: reduce-scatter inside, exchange of shards across, all-gather inside (`comm/hierarchy.py`).
Ranks of a node that go through the same NIC at the same time share it. A group is reckoned with by its form: what is
alike in it counts once, and groups that are alike have their times in common.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hpctrain.cluster import Cluster
from hpctrain.comm.topology import Topology, places_of
from hpctrain.errors import LaunchError
from hpctrain.job import Link
from hpctrain.links import PairLink, link_between, links_of, message_seconds, nic_of

MESSAGE_OVERHEAD_SECONDS = 0.0
"""That each further message under way costs its sender; 0: links' latencies have the software's share."""
KEPT = 1 << 16
MOST_DOUBLED_BYTES = 1 << 20
"""Of a tensor: doubling has two more copies of it, others need room for a part; beyond, rounds are cheap."""


class Form(NamedTuple):
    """Of a group, and of those beside it: all that its collectives' times depend on. Links are by number."""

    size: int
    links: tuple[int, ...]
    """Between neighbours, for who communicates flat; those that are alike once."""
    flows: int = 1
    """How many ranks then share a NIC, those of groups beside included."""
    domains: tuple["Form", ...] = ()
    """For who does it by domains; those that are alike once."""
    num_domains: int = 0
    across: tuple["Across", ...] = ()
    """How domains exchange with all others; those that are alike once."""


class Across(NamedTuple):
    size: int
    """Of the domain that sends."""
    links: tuple[tuple[int, int, int], ...]
    """By which it sends: to how many domains, and how many ranks share a NIC."""


class OnNode(NamedTuple):
    ranks: list[int]
    indices: tuple[int, ...]
    """Of their devices on it."""


@dataclass(frozen=True, eq=False)
class Crowd:
    """Ranks that communicate at the same time. Its identity is its key: there may be thousands."""

    of_node: dict[int, OnNode]
    of_family: dict[str, int]
    """How many they are."""


class ClusterNetwork:
    """The links of a cluster, and what messages and collectives take on them."""

    def __init__(self, cluster: Cluster, link_share: float = 1.0):
        """`link_share` is what collectives reach of a data sheet's bandwidth: see `hpctrain.links.efficiency`."""
        self.cluster, self._share = cluster, link_share
        self._topology = Topology(places_of(cluster), shares_memory=False)
        self._links = links_of(cluster)
        self._numbers: dict[PairLink, int] = {}
        self._numbered: list[PairLink] = []
        self._number = lru_cache(KEPT)(self._number_of_link)
        self._nic = lru_cache(KEPT)(lambda rank, fabric: nic_of(cluster, rank, fabric)[0])
        self._form = lru_cache(KEPT)(self._form_of)
        self.crowd = lru_cache(KEPT)(self._crowd_of)
        self._seconds_of = lru_cache(KEPT)(self._collective_seconds)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a plan of more ranks than there are devices. Raises LaunchError."""
        if num_ranks > self.cluster.num_devices:
            raise LaunchError(
                f"the plan is for {num_ranks} ranks, and the cluster has {self.cluster.num_devices} devices"
                f" ({self.cluster.describe()}); make a plan for {self.cluster.num_devices} or fewer"
            )

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _number_of_link(self, source: int, target: int) -> int:
        link = link_between(self.cluster, source, target)
        if link not in self._numbers:
            self._numbers[link] = len(self._numbered)
            self._numbered.append(link)
        return self._numbers[link]

    def is_near(self, one: int, other: int) -> bool:
        """Say whether a message between two ranks stays where links are fast, as all ranks will say of it."""
        return self._topology.is_near(one, other, self._links)

    def seconds(self, source: int, target: int, num_bytes: float, flows: int = 1) -> float:
        """Return what a message takes with `flows` like it through the same NIC."""
        return self._message_seconds(self._number(source, target), num_bytes, flows)

    def _message_seconds(self, number: int, num_bytes: float, flows: int) -> float:
        link = self._numbered[number]
        if link.between == "device":
            return 0.0
        return message_seconds(link, int(num_bytes), flows, self._share)

    def flows(self, rank: int, ranks: Iterable[int], target: int) -> int:
        """Return how many of some ranks share the NIC by which this one sends to `target`, if all of them send by that
        fabric: at least 1."""
        device, fabric = self.cluster.devices[rank], self._numbered[self._number(rank, target)].fabric
        if fabric is None:
            return 1
        own = self._nic(rank, fabric)
        others = (r for r in ranks if self.cluster.devices[r].node == device.node)
        return max(1, sum(self._nic(r, fabric) == own for r in others))

    # ---- collectives -------------------------------------------------------------------------------------------------

    def group_seconds(
        self, operation: str, num_bytes: float, ranks: Sequence[int], beside: Crowd | None = None
    ) -> float:
        """Return what a collective of `num_bytes` (the whole tensor's) takes, while all ranks `beside` do the same in
        groups like this one, which is one of them."""
        if len(ranks) < 2:
            return 0.0
        return self._seconds_of(operation, int(num_bytes), self._form(tuple(ranks), beside))

    def least_byte_seconds(
        self, operation: str, sizes: Sequence[int], ranks: Sequence[int], beside: Crowd | None = None
    ) -> float:
        """Return what one more byte takes at the least, of tensors of some sizes, ascending; see `group_seconds`."""
        form = self._form(tuple(ranks), beside)
        return least_slope(sizes, [self._collective_seconds(operation, num_bytes, form) for num_bytes in sizes])

    def _form_of(self, ranks: tuple[int, ...], beside: Crowd | None) -> Form:
        """Return the form of a group.

        There are as many groups at once as its families have ranks for beside it: those that have none take turns.
        """
        own = self._crowd_of(ranks)
        every = beside or own
        num_groups = min(-(-every.of_family.get(f, n) // n) for f, n in own.of_family.items())
        known: dict[tuple, int] = {}

        def flows(rank: int, target: int) -> int:
            device = self.cluster.devices[rank]
            mine = own.of_node[device.node]
            all_of_node = every.of_node.get(device.node, mine)
            like = device.table, device.index, self._number(rank, target), mine.indices, all_of_node.indices
            if like not in known:
                most = num_groups * self.flows(rank, mine.ranks, target)
                known[like] = min(self.flows(rank, all_of_node.ranks, target), most)
            return known[like]

        return self._with_flows(ranks, flows)

    def _crowd_of(self, ranks: tuple[int, ...]) -> Crowd:
        of_node: dict[int, list[int]] = {}
        of_family: dict[str, int] = {}
        for rank in ranks:
            device = self.cluster.devices[rank]
            of_node.setdefault(device.node, []).append(rank)
            of_family[device.family] = of_family.get(device.family, 0) + 1
        devices = self.cluster.devices
        return Crowd({n: OnNode(r, tuple(devices[rank].index for rank in r)) for n, r in of_node.items()}, of_family)

    def _with_flows(self, ranks: tuple[int, ...], flows: Callable[[int, int], int]) -> Form:
        """Return the form of a group, or of a domain in one, whose ranks send so many flows to a target."""
        route = self._topology.route(ranks)
        if route.kind != "hierarchical":
            neighbours = list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))
            links = tuple(dict.fromkeys(self._number(*pair) for pair in neighbours))
            return Form(len(ranks), links, max(flows(*pair) for pair in neighbours))
        domains = [tuple(ranks[position] for position in domain) for domain in route.domains]
        sources: dict[tuple, tuple[int, ...]] = {}
        for domain, other in zip(domains, (*domains[1:], domains[0]), strict=True):
            table = self.cluster.devices[domain[0]].table
            sources.setdefault((table, len(domain), max(flows(rank, other[0]) for rank in domain)), domain)
        across = (self._across(domain, domains, flows) for domain in sources.values())
        alike = tuple(dict.fromkeys(self._of_domain(domain, flows) for domain in domains))
        return Form(len(ranks), (), 1, alike, len(domains), tuple(dict.fromkeys(across)))

    def _across(
        self, domain: tuple[int, ...], domains: Sequence[tuple[int, ...]], flows: Callable[[int, int], int]
    ) -> Across:
        targets: dict[int, list[int]] = {}
        for other in domains:
            if other is not domain:
                targets.setdefault(self._number(domain[0], other[0]), []).append(other[0])
        shared = {link: max(flows(rank, to[0]) for rank in domain) for link, to in targets.items()}
        return Across(len(domain), tuple((link, len(to), shared[link]) for link, to in targets.items()))

    def _of_domain(self, ranks: tuple[int, ...], flows: Callable[[int, int], int]) -> Form:
        """Return the form of a domain; of one that needs no NIC it is the same for whatever group."""
        is_on_node = len({self.cluster.devices[rank].node for rank in ranks}) == 1
        return self._form(ranks, None) if is_on_node else self._with_flows(ranks, flows)

    def _collective_seconds(self, operation: str, num_bytes: int, form: Form) -> float:
        if form.size == 1 or not num_bytes:
            return 0.0
        if not form.domains:
            return self._flat(operation, num_bytes, form)
        if operation == "all_reduce":
            return sum(self._seconds_of(part, num_bytes, form) for part in ("reduce_scatter", "all_gather"))
        # Inside part by part, one for each domain; across one exchange of shards: each rank sends, of what its domain
        # summed, what others own.
        count = form.num_domains
        part = num_bytes // count + 1
        inside = max(self._seconds_of(operation, part, domain) for domain in form.domains)
        one = every = 0.0
        for size, links in form.across:
            of_fabric: dict[str | None, float] = {}  # each by NICs of its own
            for link, to, flows in links:
                one = max(one, self._message_seconds(link, part / size, flows))
                fabric = self._numbered[link].fabric
                sent = self._message_seconds(link, to * part / size, flows)
                of_fabric[fabric] = of_fabric.get(fabric, 0.0) + sent
            every = max(every, *of_fabric.values())
        across = self._fabrics(form._replace(domains=()))
        if any(across & self._fabrics(domain) for domain in form.domains):  # whose NICs have to do both
            return count * inside + every
        if operation == "reduce_scatter":  # each part leaves when it is summed, while the next one is; its own last
            return max(count * inside, inside + every, (count - 1) * inside + one)
        return max(inside, every) + (count - 1) * inside  # its own part meanwhile, the others when all are there

    def _fabrics(self, form: Form) -> set[str]:
        """Return the fabrics by which ranks of a group reach each other."""
        links = {*form.links, *(link for across in form.across for link, _, _ in across.links)}
        found = {fabric for link in links if (fabric := self._numbered[link].fabric) is not None}
        return found.union(*map(self._fabrics, form.domains))

    def _flat(self, operation: str, num_bytes: int, form: Form) -> float:
        link = self._slowest(form.links, num_bytes // form.size + 1, form.flows)
        algorithm = cheapest_flat(operation, num_bytes, form.size, link, MESSAGE_OVERHEAD_SECONDS)
        return flat_seconds(operation, algorithm, num_bytes, form.size, link, MESSAGE_OVERHEAD_SECONDS)

    def _slowest(self, links: tuple[int, ...], num_bytes: int, flows: int) -> Link:
        """Return the slowest of some links, as a line through messages of no bytes and of `num_bytes`."""
        seconds = [self._message_seconds(number, num_bytes, flows) for number in links]
        slowest = max(seconds)
        latency = max(self._numbered[links[seconds.index(slowest)]].latency_seconds, 1e-12)
        return Link(latency_seconds=latency, bandwidth_bytes_per_second=num_bytes / max(slowest - latency, 1e-15))


def least_slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Return the least slope between neighbours of ascending places."""
    ends = itertools.pairwise(zip(places, values, strict=True))
    return min((after - before) / (right - left) for (left, before), (right, after) in ends)


def flat_seconds(operation: str, algorithm: str, num_bytes: int, num_ranks: int, link: Link, overhead: float):
    """Return what a flat collective of `num_bytes` (the whole tensor's) over `num_ranks` takes, in seconds."""
    latency, share = link.latency_seconds, num_bytes * (num_ranks - 1) / num_ranks / link.bandwidth_bytes_per_second
    passes = 2 if operation == "all_reduce" else 1
    match algorithm:
        case "doubling":
            whole = num_bytes / link.bandwidth_bytes_per_second
            rounds = (num_ranks - 1).bit_length() + (2 if num_ranks & (num_ranks - 1) else 0)
            return rounds * (latency + overhead + whole)
        case "ring":
            return passes * ((num_ranks - 1) * (latency + overhead) + share)
        case _:
            return passes * (latency + (num_ranks - 1) * overhead + share)


def cheapest_flat(operation: str, num_bytes: int, num_ranks: int, link: Link, overhead: float) -> str:
    """Return the algorithm that takes the least time: exchange, ring, or for small all-reduces doubling."""
    may_double = operation == "all_reduce" and num_bytes <= MOST_DOUBLED_BYTES
    candidates = ["exchange", "ring"] + (["doubling"] if may_double else [])
    return min(candidates, key=lambda a: flat_seconds(operation, a, num_bytes, num_ranks, link, overhead))
