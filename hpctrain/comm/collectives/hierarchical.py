"""Collectives over domains: groups of ranks that are near each other (a family, a host), of any sizes.

Reduce-scatter inside each domain, exchange of shards across, all-gather inside. Each domain's sum of what another one
owns is cut evenly among its ranks, so that every rank's network carries its part. Each byte crosses between two
domains once: 2 (D - 1) / D of the tensor leave a domain in an all-reduce over D equal ones, however many ranks it has.
Domains of different size exchange the intersections of their shards' intervals.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from hpctrain.comm.reduction import partial_dtype, reduce_in_order
from hpctrain.comm.routes.transport import Transport
from hpctrain.comm.steps import Ready, Steps, until_all
from hpctrain.sharding.intervals import Interval, cut_evenly


class Collectives(Protocol):
    """What every route offers: collectives on flat tensors, as steps, that all ranks of the group must take."""

    name: str
    rank: int
    size: int

    def barrier(self) -> Steps: ...

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps: ...

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps: ...

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps: ...

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps: ...

    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Steps: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class HierarchicalCollectives:
    """Collectives of a group made of `domains`; each lists positions in the group, in ascending order."""

    def __init__(
        self,
        inner: Collectives | None,
        across: Collectives,
        transport: Transport,
        domains: Sequence,
        choose: Callable[[str, int], str],
    ):
        """`inner` is this rank's domain's, None where it is alone; `across` is over the whole group.

        An all-reduce that `choose` does not name `domains` is that of `across`. `across` and `transport` may share one
        communicator of MPI.
        """
        self.rank, self.size = transport.rank, transport.size
        self.name = f"{inner.name if inner else 'alone'} inside, {transport.name} across"
        self._inner, self._across, self._transport = inner, across, transport
        self._choose = choose
        self._domains = [tuple(domain) for domain in domains]
        self._mine = next(i for i, domain in enumerate(self._domains) if self.rank in domain)
        self._place = self._domains[self._mine].index(self.rank)

    def _regions(self, cuts: Sequence[Interval]) -> tuple[list[Interval], list[list[Interval]]]:
        """Return what each domain's ranks own of a tensor packed domain by domain, together and one by one."""
        at = 0
        owned = []
        for domain in self._domains:
            of_domain = []
            for member in domain:
                of_domain.append(Interval(at, at + cuts[member].size))
                at += cuts[member].size
            owned.append(of_domain)
        return [Interval(of_domain[0].start, of_domain[-1].stop) for of_domain in owned], owned

    def _is_packed(self, cuts: Sequence[Interval]) -> bool:
        _, owned = self._regions(cuts)
        placed = zip(self._domains, owned, strict=True)
        return all(cuts[m] == at for domain, of_domain in placed for m, at in zip(domain, of_domain, strict=True))

    def _packed_evenly(self, size: int) -> list[Interval]:
        """Cut a tensor of `size` elements evenly among all ranks, so that it is packed."""
        cuts = dict(zip((m for domain in self._domains for m in domain), cut_evenly(size, self.size), strict=True))
        return [cuts[i] for i in range(self.size)]

    def _others(self) -> list[int]:
        """The other domains, each starting after itself, so that not all send to the same one first."""
        count = len(self._domains)
        return [(self._mine + i) % count for i in range(1, count)]

    def _meetings(self, region: Interval, theirs: Sequence[Interval], own: Interval) -> Iterator[tuple[int, Interval]]:
        """Yield the places in another domain whose intervals intersect `own`, and the elements in common."""
        for place, interval in enumerate(theirs):
            common = interval.shift(region.start).intersect(own)
            if common.size:
                yield place, common

    def barrier(self) -> Steps:
        yield from self._across.barrier()

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        if self._choose("all_reduce", flat.numel() * flat.element_size()) != "domains":
            yield from self._across.all_reduce(flat, op)
            return
        cuts = self._packed_evenly(flat.numel())
        yield from self._reduce_packed(flat, cuts, flat[slice(*cuts[self.rank])], op)
        yield from self._gather_packed(flat, cuts)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        if not self._is_packed(cuts):
            flat = torch.cat([flat[slice(*cuts[member])] for domain in self._domains for member in domain])
        yield from self._reduce_packed(flat, cuts, out, op)

    def _reduce_packed(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        regions, owned = self._regions(cuts)
        region, own = regions[self._mine], owned[self._mine][self._place]
        partial = partial_dtype(flat.dtype, op)
        parts: list[torch.Tensor] = []
        arriving: list[Ready] = []
        for d, domain in enumerate(self._domains):
            parts.append(torch.empty(own.size, dtype=partial, device=flat.device))
            if d != self._mine:
                for place, met in self._meetings(region, cut_evenly(region.size, len(domain)), own):
                    section = parts[d][slice(*met.shift(-own.start))]
                    arriving.append(self._transport.receive(domain[place], section))
        leaving: list[Ready] = []
        for d in self._others():  # theirs is in flight while ours is summed
            share, summed = yield from self._reduce_inside(flat, regions[d], None, partial, op)
            for place, met in self._meetings(Interval(0, 0), owned[d], share):
                leaving.append(self._transport.send(self._domains[d][place], summed[slice(*met.shift(-share.start))]))
        _, parts[self._mine] = yield from self._reduce_inside(flat, region, owned[self._mine], partial, op)
        yield from until_all(arriving, f"the shards of the other {len(self._domains) - 1} domains")
        if own.size:
            reduce_in_order(parts, out, op)
        yield from until_all(leaving, f"the other {len(self._domains) - 1} domains to take their shards")

    def _reduce_inside(self, flat: torch.Tensor, region: Interval, owned: list[Interval] | None, dtype, op: str):
        """Sum a region over this domain; return which elements this rank has then (even shares if not said), and them.

        They are of the dtype of partial results.
        """
        num_ranks = len(self._domains[self._mine])
        cuts = [i.shift(-region.start) for i in owned] if owned else list(cut_evenly(region.size, num_ranks))
        share = cuts[self._place]
        summed = torch.empty(share.size, dtype=dtype, device=flat.device)
        if self._inner is None:
            summed.copy_(flat[slice(*share.shift(region.start))])
        elif region.size:
            yield from self._inner.reduce_scatter(flat[slice(*region)], cuts, summed, op)
        return share.shift(region.start), summed

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        if self._is_packed(cuts):
            yield from self._gather_packed(flat, cuts)
            return
        _, owned = self._regions(cuts)
        packed = torch.empty_like(flat[: sum(cut.size for cut in cuts)])
        packed[slice(*owned[self._mine][self._place])] = flat[slice(*cuts[self.rank])]
        yield from self._gather_packed(packed, cuts)
        for domain, of_domain in zip(self._domains, owned, strict=True):
            for member, at in zip(domain, of_domain, strict=True):
                flat[slice(*cuts[member])] = packed[slice(*at)]

    def _gather_packed(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        regions, owned = self._regions(cuts)
        region, own = regions[self._mine], owned[self._mine][self._place]
        num_ranks = len(self._domains[self._mine])
        shares = [cut_evenly(r.size, num_ranks) for r in regions]
        arriving, leaving = [], []
        for d in self._others():
            domain = self._domains[d]
            share = shares[d][self._place].shift(regions[d].start)
            for place, met in self._meetings(Interval(0, 0), owned[d], share):
                arriving.append(self._transport.receive(domain[place], flat[slice(*met)]))
            for place, met in self._meetings(region, cut_evenly(region.size, len(domain)), own):
                leaving.append(self._transport.send(domain[place], flat[slice(*met)]))
        yield from self._gather_inside(flat, region, [i.shift(-region.start) for i in owned[self._mine]])
        if getattr(self._transport, "is_direct", False):  # while a library waits, messages may: all have left before
            arriving += leaving
        yield from until_all(arriving, f"the shards of the other {len(self._domains) - 1} domains")
        for d in self._others():
            yield from self._gather_inside(flat, regions[d], shares[d])
        yield from until_all(leaving, f"the other {len(self._domains) - 1} domains to take their shards")

    def _gather_inside(self, flat: torch.Tensor, region: Interval, cuts: Sequence[Interval]) -> Steps:
        if self._inner is not None and region.size:
            yield from self._inner.all_gather(flat[slice(*region)], cuts)

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        """Inside the root's domain first; then each of its ranks sends its shares, and the others gather."""
        source = next(i for i, domain in enumerate(self._domains) if root in domain)
        senders = self._domains[source]
        if self._mine == source:
            if self._inner is not None:
                yield from self._inner.broadcast(flat, senders.index(root))
            own = cut_evenly(flat.numel(), len(senders))[self._place]
            leaving = []
            for d, domain in enumerate(self._domains):
                if d != source:
                    for place, met in self._meetings(Interval(0, 0), cut_evenly(flat.numel(), len(domain)), own):
                        leaving.append(self._transport.send(domain[place], flat[slice(*met)]))
            yield from until_all(leaving, "the other domains to take their shares")
            return
        shares = cut_evenly(flat.numel(), len(self._domains[self._mine]))
        arriving = [
            self._transport.receive(senders[place], flat[slice(*met)])
            for place, met in self._meetings(
                Interval(0, 0), cut_evenly(flat.numel(), len(senders)), shares[self._place]
            )
        ]
        yield from until_all(arriving, f"the shares of rank {root}'s domain")
        yield from self._gather_inside(flat, Interval(0, flat.numel()), shares)

    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Steps:
        yield from self._across.all_to_all(sent, received)

    def abandon(self) -> None:
        if self._inner is not None:
            self._inner.abandon()
        self._transport.abandon()

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._transport.close()
