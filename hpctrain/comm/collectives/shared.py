"""The shared-memory route: ranks of one host exchange through memory that all of them see.

No message is matched and nobody needs to make progress for anybody else: a rank copies its part into its own slot,
says so by raising a counter, and reads the slots of the others. Reductions are done by ourselves, in the order of ranks
and in fp32 for half precision. So the result is the same on every rank and in every run.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch

from hpctrain.comm.collectives.flat import Collectives, reduce_in_order, section_of
from hpctrain.comm.transports import window as windows
from hpctrain.comm.transports.members import Members
from hpctrain.comm.transports.window import NoRoomError, SharedWindow
from hpctrain.comm.waiting import Condition, Steps
from hpctrain.sharding.intervals import Interval, cut_evenly

# Most bytes of each of a rank's two slots (`_next_slot`). Slots of a few ranks stay in the cache at this size.
# Large enough that ranks which share cores synchronise rarely: each time they wait for the scheduler.
SLOT_BYTES = 2 * 1024 * 1024
MIN_SLOT_BYTES = 64 * 1024
# The slots of a group take at most this share of the free shared memory, which leaves room for later groups.
SHARE_OF_SLOTS = 1 / 16
ANNOUNCED = 0
"""Index of the window's counter that announces a rank's progress."""
NUM_CHUNKS = 1, 2
"""Indices of the counters that say how many chunks a rank sends, for each slot that the first one may go through."""
# A large allocation in shared memory must leave this share of the free bytes to others.
SHARE_LEFT_FREE = 0.5
# Below this size each rank reduces the whole tensor, which takes one announcement less.
SMALL_BYTES = 8 * 1024
# Number of cached views of slots: making one takes longer than copying a small message.
KEPT_VIEWS = 1024


class SharedCollectives(Collectives):
    """Collectives of a group of ranks on one host, as steps. Tensors are contiguous, flat and on the host."""

    name = "shared memory"

    def __init__(self, members: Members, ranks_on_host: int):
        """All ranks must call. `ranks_on_host` is the number of ranks of all groups that share the host's memory."""
        self._ranks_on_host = max(ranks_on_host, members.size)
        self.rank, self.size = members.rank, members.size
        self._members = members
        headroom = int(windows.free_bytes() * SHARE_OF_SLOTS / (2 * self._ranks_on_host))
        fitting = members.combine(headroom, min) // MIN_SLOT_BYTES * MIN_SLOT_BYTES
        self._slot_bytes = min(SLOT_BYTES, max(MIN_SLOT_BYTES, fitting))
        self._window = SharedWindow(members, 2 * self._slot_bytes)
        self._regions: list[SharedWindow] = []
        self._announced = 0
        self._slot = 0
        self._view = lru_cache(KEPT_VIEWS)(self._make_view)

    def allocate_common(self, num_bytes: int) -> torch.Tensor | None:
        """Return zeroed bytes that all ranks of the group share; None where shared memory is too small for all.

        No collective may use them. All ranks must call with the same size.
        """
        parts_on_host = self._ranks_on_host // self.size
        enough = windows.free_bytes() * (1 - SHARE_LEFT_FREE) >= num_bytes * parts_on_host
        if not self._members.combine(enough, all):
            return None
        try:
            region = SharedWindow(self._members, 0 if self.rank else num_bytes)
        except NoRoomError:  # other groups took it meanwhile
            return None
        self._regions.append(region)
        return region.bytes[0]

    def _announce(self) -> Steps:
        """Announce that this rank has reached the next point, and wait until all have."""
        window = self._window
        self._announced = value = self._announced + 1
        window.publish(ANNOUNCED, value)
        for other, counter in enumerate(window.counters):
            if counter[ANNOUNCED] < value:
                yield Condition(lambda c=counter: c[ANNOUNCED] >= value, f"rank {other} of {self.size}")
        window.fence()

    def _next_slot(self) -> int:
        """Return which of a rank's two slots is next; all ranks alternate between the same ones.

        Two suffice. The third chunk goes into the slot of the first. By then all ranks have announced the second chunk,
        and so have read the first; but for the sums of an all-reduce, which lie in own cuts (`_put`).
        """
        self._slot ^= 1
        return self._slot

    def _make_view(self, rank: int, slot: int, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a slot of a rank."""
        first, item = slot * self._slot_bytes, dtype.itemsize
        return self._window.bytes[rank][first + start * item : first + stop * item].view(dtype)

    def barrier(self, flat: torch.Tensor) -> Steps:
        yield from self._announce()

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        """Each rank reduces its cut of a chunk. One announcement says that, and that the next chunk can be read."""
        if flat.numel() * flat.element_size() <= SMALL_BYTES:
            slot = self._next_slot()
            parts = [self._view(rank, slot, flat.dtype, 0, flat.numel()) for rank in range(self.size)]
            parts[self.rank].copy_(flat)
            yield from self._announce()
            reduce_in_order(parts, flat, op)
            return
        num_chunks = -(-flat.numel() // (self._slot_bytes // flat.element_size()))
        chunks = flat.split(-(-flat.numel() // num_chunks))
        cuts = [slice(*cut) for cut in cut_evenly(chunks[0].numel(), self.size)]  # the last chunk's are shorter
        own = cuts[self.rank]
        slots = self._put(chunks[0], own)
        yield from self._announce()
        for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
            copies, result = slots, slots[self.rank][own]
            # The own cut is in no slot before. Others read the result there after the next announcement.
            parts = [chunk[own] if rank == self.rank else copy[own] for rank, copy in enumerate(copies)]
            reduce_in_order(parts, result, op)
            chunk[own].copy_(result)
            if following is not None:
                slots = self._put(following, own)
            yield from self._announce()
            for other, cut in enumerate(cuts):
                if other != self.rank:
                    chunk[cut].copy_(copies[other][cut])

    def _put(self, chunk: torch.Tensor, own: slice) -> list[torch.Tensor]:
        """Copy all of a chunk but this rank's own cut into the next slot. Return the slots of all ranks.

        All ranks have read what was there, except a sum in the own cut: somebody may still read it. So all chunks of a
        tensor have the same cuts.
        """
        slot = self._next_slot()
        slots = [self._view(rank, slot, chunk.dtype, 0, chunk.numel()) for rank in range(self.size)]
        for part in (slice(own.start), slice(own.stop, None)):
            slots[self.rank][part].copy_(chunk[part])
        return slots

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        step = self._slot_bytes // flat.element_size() // self.size
        for start in range(0, max(cut.size for cut in cuts), step):
            sections = [section_of(cut, start, step) for cut in cuts]
            slot = self._next_slot()
            for i, section in enumerate(sections):
                if i != self.rank and section.size:
                    at = i * step
                    self._view(self.rank, slot, flat.dtype, at, at + section.size).copy_(flat[slice(*section)])
            yield from self._announce()
            section = sections[self.rank]
            if section.size:
                at = self.rank * step
                parts = [self._view(rank, slot, flat.dtype, at, at + section.size) for rank in range(self.size)]
                parts[self.rank] = flat[slice(*section)]
                reduce_in_order(parts, out[start : start + section.size], op)

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        step = self._slot_bytes // flat.element_size()
        for start in range(0, max(cut.size for cut in cuts), step):
            slot = self._next_slot()
            sections = [section_of(cut, start, step) for cut in cuts]
            own = sections[self.rank]
            if own.size:
                self._view(self.rank, slot, flat.dtype, 0, own.size).copy_(flat[slice(*own)])
            yield from self._announce()
            for other, section in enumerate(sections):
                if other != self.rank and section.size:
                    flat[slice(*section)].copy_(self._view(other, slot, flat.dtype, 0, section.size))

    def all_to_all(
        self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, out_cuts: Sequence[Interval]
    ) -> Steps:
        """Exchange parts through slots, of which each has a section for each rank. No rank knows the sizes of others'
        parts: each says how many chunks its own need, and all take as many as the one that needs the most."""
        out[slice(*out_cuts[self.rank])] = flat[slice(*cuts[self.rank])]
        step = self._slot_bytes // flat.element_size() // self.size
        sizes = [0 if i == self.rank else cut.size for i, cut in enumerate(cuts)]
        start, num_chunks = 0, max(1, -(-max(sizes) // step))
        while start < num_chunks * step:
            slot = self._next_slot()
            for i, cut in enumerate(cuts):
                section = section_of(cut, start, step)
                if i != self.rank and section.size:
                    at = i * step
                    self._view(self.rank, slot, flat.dtype, at, at + section.size).copy_(flat[slice(*section)])
            if not start:
                self._window.counters[self.rank][NUM_CHUNKS[slot]] = num_chunks
            yield from self._announce()
            if not start:
                num_chunks = max(counter[NUM_CHUNKS[slot]] for counter in self._window.counters)
            for other, cut in enumerate(out_cuts):
                section, at = section_of(cut, start, step), self.rank * step
                if other != self.rank and section.size:
                    out[slice(*section)] = self._view(other, slot, flat.dtype, at, at + section.size)
            start += step

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        """Release this rank's views; the others keep theirs."""
        self._view.cache_clear()
        for window in (*self._regions, self._window):
            window.close()
