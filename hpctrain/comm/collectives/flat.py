"""Collectives of ranks that are all equally far from each other, over any transport.

Names as in the literature (Thakur, Rabenseifner, Gropp 2005): `exchange` sends each rank its part directly, `doubling`
is recursive doubling of whole tensors, for small ones. Every element is reduced in an order that depends on ranks
alone, by one rank or by each of them: the result is the same bits on every rank.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpctrain.comm.topology import SEGMENT_BYTES, segments_in_flight
from hpctrain.comm.transports.transport import Transport
from hpctrain.comm.waiting import Steps, until_all
from hpctrain.sharding.intervals import Interval, cut_evenly

HALF = (torch.bfloat16, torch.float16)


def partial_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which partial results travel: sums of half precision are fp32 until they are complete."""
    return torch.float32 if op == "sum" and dtype in HALF else dtype


def reduce_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """Reduce `parts` (same shape and dtype) first to last into `out`, which may be one of them.

    Half precision is summed in fp32. Where `out` has another dtype the result is rounded once, at the end.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    if partial_dtype(parts[0].dtype, op) != parts[0].dtype:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    usable = out.dtype == parts[0].dtype and not any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = out if usable else torch.empty_like(parts[0])
    combine(parts[0], parts[1], out=total)
    for part in parts[2:]:
        combine(total, part, out=total)
    if total is not out:
        out.copy_(total)


def section_of(cut: Interval, start: int, size: int) -> Interval:
    """Return `size` elements of a cut from `start` on; fewer, or none, at its end."""
    return Interval(min(cut.start + start, cut.stop), min(cut.start + start + size, cut.stop))


class Collectives:
    """Collectives on flat tensors, as steps that all ranks of the group must take.

    A class has a method for each operation that it does itself. A class around others overrides `steps` alone, and
    passes all operations on. Where ranks have devices, `StreamedCollectives` returns events of the launched ones.
    """

    name: str
    rank: int
    size: int

    def steps(self, operation: str, flat: torch.Tensor, *arguments: Any) -> Steps:
        """Return the steps of an operation of `hpctrain.comm.operations`, by the method of its name.

        The arguments are the cuts of the tensor, the output, its cuts and the reduction: those of them that the
        operation has. A barrier has an empty tensor.
        """
        return getattr(self, operation)(flat, *arguments)


class FlatCollectives(Collectives):
    """Collectives as steps. Tensors are contiguous and flat, in memory that the transport accepts."""

    def __init__(self, transport: Transport, algorithm: Callable[[int], str], bytes_under_way: int = 0):
        """`algorithm` names the algorithm of an all-reduce by its bytes: every name but `doubling` means an
        exchange. `bytes_under_way` are those that must be posted to a peer for a full link."""
        self.name, self.rank, self.size = transport.name, transport.rank, transport.size
        self.transport, self.algorithm = transport, algorithm
        self._segments_in_flight = segments_in_flight(bytes_under_way)

    def _others(self) -> list[int]:
        """Return the other ranks, from the next one on, so that ranks do not all send to the same one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _awaited(self, peer: int) -> str:
        return f"rank {peer} of {self.size}"

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Steps:
        """Send each other rank its tensor of `sent`, and receive that of `received` from it, in this call. Return the
        steps until all have arrived. Empty tensors are skipped."""
        ready = [self.transport.receive(i, received[i]) for i in self._others() if received[i].numel()]
        ready += [self.transport.send(i, sent[i]) for i in self._others() if sent[i].numel()]
        return until_all(ready, f"the other {self.size - 1} ranks")

    def barrier(self, flat: torch.Tensor) -> Steps:
        """Dissemination (Hensgen, Finkel, Manber 1988): after round k each rank has heard of 2^k others."""
        token, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        distance = 1
        while distance < self.size:
            source = (self.rank - distance) % self.size
            received = self.transport.receive(source, heard)
            sent = self.transport.send((self.rank + distance) % self.size, token)
            yield from until_all([received, sent], self._awaited(source))
            distance *= 2

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        if self.algorithm(flat.numel() * flat.element_size()) == "doubling":
            yield from self._doubling(flat, op)
            return
        cuts = cut_evenly(flat.numel(), self.size)
        yield from self.reduce_scatter(flat, cuts, flat[slice(*cuts[self.rank])], op)
        yield from self.all_gather(flat, cuts)

    def _doubling(self, flat: torch.Tensor, op: str) -> Steps:
        """Recursive doubling. Each rank beyond a power of two has a partner that works for it."""
        total = flat.to(partial_dtype(flat.dtype, op), copy=True)
        theirs = torch.empty_like(total)
        power = 1 << (self.size.bit_length() - 1)
        partner = self.rank ^ power
        if self.rank >= power:
            yield from until_all([self.transport.send(partner, total)], self._awaited(partner))
            yield from until_all([self.transport.receive(partner, total)], self._awaited(partner))
        else:
            if partner < self.size:
                yield from self._combine(partner, total, theirs, op, send=False)
            distance = 1
            while distance < power:
                yield from self._combine(self.rank ^ distance, total, theirs, op)
                distance *= 2
            if partner < self.size:
                yield from until_all([self.transport.send(partner, total)], self._awaited(partner))
        flat.copy_(total)

    def _combine(self, partner: int, total: torch.Tensor, theirs: torch.Tensor, op: str, send: bool = True) -> Steps:
        ready = [self.transport.receive(partner, theirs)]
        if send:
            ready.append(self.transport.send(partner, total))
        yield from until_all(ready, self._awaited(partner))
        reduce_in_order([total, theirs] if self.rank < partner else [theirs, total], total, op)

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        """Reduce by segments. As many are in flight as a far link has under way, where one could not fill it."""
        step = max(1, SEGMENT_BYTES // flat.element_size())
        starts = range(0, max(cut.size for cut in cuts), step)
        scratch = deque(
            flat.new_empty(self.size - 1, min(step, max(1, cuts[self.rank].size)))
            for _ in range(min(self._segments_in_flight, len(starts)))
        )
        in_flight: deque[tuple[Steps, torch.Tensor, list[torch.Tensor], torch.Tensor]] = deque()
        for start in starts:
            sent = [flat[slice(*section_of(cut, start, step))] for cut in cuts]
            size, parts = sent[self.rank].numel(), scratch.popleft()
            of_ranks = [part[:size] for part in parts]
            of_ranks.insert(self.rank, sent[self.rank])
            in_flight.append((self.exchange(sent, of_ranks), parts, of_ranks, out[start : start + size]))
            while in_flight and (not scratch or start == starts[-1]):
                arrival, parts, of_ranks, reduced = in_flight.popleft()
                yield from arrival
                scratch.append(parts)
                if reduced.numel():
                    reduce_in_order(of_ranks, reduced, op)

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        parts = [flat[slice(*cut)] for cut in cuts]
        yield from self.exchange([parts[self.rank]] * self.size, parts)

    def all_to_all(
        self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, out_cuts: Sequence[Interval]
    ) -> Steps:
        sent, received = ([whole[slice(*cut)] for cut in of] for whole, of in ((flat, cuts), (out, out_cuts)))
        arrival = self.exchange(sent, received)
        received[self.rank].copy_(sent[self.rank])
        yield from arrival


class SilentCollectives(Collectives):
    """Collectives without communication, for a group of one, or for one rank of many that runs alone.

    They fill the same memory as real collectives, with numbers that can be computed with. Sums are this rank's part
    alone. Instead of the parts of other ranks this rank's part is repeated.
    """

    def __init__(self, rank: int, size: int):
        self.name = "silent" if size > 1 else "alone"
        self.rank, self.size = rank, size

    def barrier(self, flat: torch.Tensor) -> Steps:
        yield from ()

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        yield from ()

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        out.copy_(flat[slice(*cuts[self.rank])])
        yield from ()

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        own = flat[slice(*cuts[self.rank])]
        if 0 < (size := own.numel()) < flat.numel():
            own = own.clone()
            times, rest = divmod(flat.numel(), size)
            flat[: times * size].view(times, size).copy_(own.expand(times, size))
            flat[times * size :] = own[:rest]
        yield from ()

    def all_to_all(
        self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, out_cuts: Sequence[Interval]
    ) -> Steps:
        own = flat[slice(*cuts[self.rank])]
        for cut in out_cuts:
            out[slice(*cut)] = own.repeat(cut.size // max(own.numel(), 1) + 1)[: cut.size] if own.numel() else 0
        yield from ()
