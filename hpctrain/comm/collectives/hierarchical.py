"""Collectives over domains: groups of ranks that are near each other (a family, a host), of any sizes.

An all-reduce is a reduce-scatter inside each domain, an exchange of shards across domains, and an all-gather inside.
The part of a domain's sum that another domain owns is cut evenly among the ranks, so that all networks share the load.
Each byte crosses between two domains once: 2 (D - 1) / D of the tensor leave a domain in an all-reduce over D equal
ones, however many ranks it has. Domains of different size exchange the intersections of their shards' intervals.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from hpctrain.comm.collectives.flat import Collectives, FlatCollectives, partial_dtype, reduce_in_order
from hpctrain.comm.waiting import Ready, Steps, until_all
from hpctrain.sharding.intervals import Interval, cut_evenly


class HierarchicalCollectives(Collectives):
    """Collectives of a group made of `domains`; each lists positions in the group, in ascending order.

    A tensor is *packed* where the parts of ranks follow each other domain by domain. `owned` lists the parts of a
    packed tensor that each domain's ranks own.
    """

    def __init__(self, inner: Collectives | None, across: FlatCollectives, domains: Sequence[Sequence[int]]):
        """`inner` is this rank's domain's, None where it is alone; `across` is over the whole group.

        An all-reduce by another algorithm than `domains` uses `across` alone, whose transport connects the domains.
        """
        self.rank, self.size, self.algorithm = across.rank, across.size, across.algorithm
        self.name = f"{inner.name if inner else 'alone'} inside, {across.name} across"
        self._inner, self._across, self._transport = inner, across, across.transport
        self._domains = domains
        self._order = tuple(itertools.chain(*domains))
        self._mine = next(i for i, domain in enumerate(domains) if self.rank in domain)
        self._position = domains[self._mine].index(self.rank)
        self._others = [(self._mine + i) % len(domains) for i in range(1, len(domains))]
        """The other domains, beginning with the next one, so that domains do not all send to the same one first."""

    def _owned(self, sizes: Iterable[int]) -> list[list[Interval]]:
        """Return the parts of a packed tensor that each domain's ranks own, from the sizes of their parts in that
        order."""
        intervals = itertools.starmap(Interval, itertools.pairwise(itertools.accumulate(sizes, initial=0)))
        return [list(itertools.islice(intervals, len(domain))) for domain in self._domains]

    def _owned_by(self, cuts: Sequence[Interval]) -> tuple[list[list[Interval]], bool]:
        """Return the parts that ranks own once a tensor is packed, and whether its cuts are packed already."""
        owned = self._owned(cuts[member].size for member in self._order)
        return owned, all(cuts[m] == at for m, at in zip(self._order, itertools.chain(*owned), strict=True))

    def _shares(self, region: Interval, domain: int) -> list[Interval]:
        """Cut a region of the tensor evenly among the ranks of a domain."""
        return [cut.shift(region.start) for cut in cut_evenly(region.size, len(self._domains[domain]))]

    def _meetings(self, domain: int, theirs: Sequence[Interval], own: Interval) -> Iterator[tuple[int, Interval]]:
        """Yield the ranks of another domain whose intervals intersect `own`, and the elements in common."""
        for rank, interval in zip(self._domains[domain], theirs, strict=True):
            common = interval.intersect(own)
            if common.size:
                yield rank, common

    def barrier(self, flat: torch.Tensor) -> Steps:
        yield from self._across.barrier(flat)

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        if self.algorithm(flat.numel() * flat.element_size()) != "domains":
            yield from self._across.all_reduce(flat, op)
            return
        owned = self._owned(cut.size for cut in cut_evenly(flat.numel(), self.size))
        yield from self._reduce_packed(flat, owned, flat[slice(*owned[self._mine][self._position])], op)
        yield from self._gather_packed(flat, owned)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        owned, is_packed = self._owned_by(cuts)
        if not is_packed:
            flat = torch.cat([flat[slice(*cuts[member])] for member in self._order])
        yield from self._reduce_packed(flat, owned, out, op)

    def _reduce_packed(self, flat: torch.Tensor, owned: list[list[Interval]], out: torch.Tensor, op: str) -> Steps:
        mine = owned[self._mine]
        region, own, partial = _region(mine), mine[self._position], partial_dtype(flat.dtype, op)
        parts = [torch.empty(own.size, dtype=partial, device=flat.device) for _ in owned]
        arriving = [
            self._transport.receive(rank, parts[d][slice(*met.shift(-own.start))])
            for d in self._others
            for rank, met in self._meetings(d, self._shares(region, d), own)
        ]
        leaving: list[Ready] = []
        # The other domains' parts are in flight while ours is summed, if MPI moves messages without polls.
        for d in self._others:
            shares = self._shares(_region(owned[d]), self._mine)
            summed = yield from self._reduce_inside(flat, shares, partial, op)
            for rank, met in self._meetings(d, owned[d], shares[self._position]):
                leaving.append(self._transport.send(rank, summed[slice(*met.shift(-shares[self._position].start))]))
        parts[self._mine] = yield from self._reduce_inside(flat, mine, partial, op)
        yield from until_all(arriving, f"the shards of the other {len(self._others)} domains")
        if own.size:
            reduce_in_order(parts, out, op)
        yield from until_all(leaving, f"the other {len(self._others)} domains to take their shards")

    def _reduce_inside(self, flat: torch.Tensor, cuts: Sequence[Interval], dtype: torch.dtype, op: str):
        """Sum a region over this domain, cut among its ranks; return this rank's part in `dtype`."""
        own, region = cuts[self._position], _region(cuts)
        summed = torch.empty(own.size, dtype=dtype, device=flat.device)
        if self._inner is None:
            summed.copy_(flat[slice(*own)])
        elif region.size:
            inside = [cut.shift(-region.start) for cut in cuts]
            yield from self._inner.steps("reduce_scatter", flat[slice(*region)], inside, summed, op)
        return summed

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        owned, is_packed = self._owned_by(cuts)
        if is_packed:
            yield from self._gather_packed(flat, owned)
            return
        packed = torch.empty_like(flat[: sum(cut.size for cut in cuts)])
        packed[slice(*owned[self._mine][self._position])] = flat[slice(*cuts[self.rank])]
        yield from self._gather_packed(packed, owned)
        for member, at in zip(self._order, itertools.chain(*owned), strict=True):
            flat[slice(*cuts[member])] = packed[slice(*at)]

    def _gather_packed(self, flat: torch.Tensor, owned: list[list[Interval]]) -> Steps:
        mine = owned[self._mine]
        shares = {d: self._shares(_region(owned[d]), self._mine) for d in self._others}
        arriving, leaving = [], []
        for d in self._others:
            for rank, met in self._meetings(d, owned[d], shares[d][self._position]):
                arriving.append(self._transport.receive(rank, flat[slice(*met)]))
            for rank, met in self._meetings(d, self._shares(_region(mine), d), mine[self._position]):
                leaving.append(self._transport.send(rank, flat[slice(*met)]))
        yield from self._gather_inside(flat, mine)
        if getattr(self._transport, "is_direct", False):
            # MPI on a device and the library may wait for each other: all messages end before the library continues.
            arriving += leaving
        yield from until_all(arriving, f"the shards of the other {len(self._others)} domains")
        for d in self._others:
            yield from self._gather_inside(flat, shares[d])
        yield from until_all(leaving, f"the other {len(self._others)} domains to take their shards")

    def all_to_all(
        self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, out_cuts: Sequence[Interval]
    ) -> Steps:
        """Exchange parts with each rank itself: inside the domain while messages to the others are in flight."""
        mine = self._domains[self._mine]
        sent, received = (
            [whole[:0] if i in mine else whole[slice(*cut)] for i, cut in enumerate(of)]
            for whole, of in ((flat, cuts), (out, out_cuts))
        )
        arrival = self._across.exchange(sent, received)
        if getattr(self._transport, "is_direct", False):  # as in `_gather_packed`
            yield from arrival
        of_sent, of_received = ([of[member] for member in mine] for of in (cuts, out_cuts))
        if self._inner is None:
            out[slice(*of_received[0])] = flat[slice(*of_sent[0])]
        else:
            yield from self._inner.steps("all_to_all", flat, of_sent, out, of_received)
        yield from arrival

    def _gather_inside(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        """Gather a region that is cut among the ranks of this domain."""
        region = _region(cuts)
        if self._inner is not None and region.size:
            inside = [cut.shift(-region.start) for cut in cuts]
            yield from self._inner.steps("all_gather", flat[slice(*region)], inside)


def _region(cuts: Sequence[Interval]) -> Interval:
    """Return the interval that consecutive intervals cover together."""
    return Interval(cuts[0].start, cuts[-1].stop)
