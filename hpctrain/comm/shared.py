"""The shared-memory route: ranks of one host exchange through memory that all of them see.

No message is matched and nobody needs to make progress for anybody else: a rank copies its part into its own slot,
says so by raising a counter, and reads the slots of the others. Tensors in memory from `allocate` are read where they
are, without slots. Reductions are done by ourselves, in the order of ranks and in fp32 for half precision, so that the
result is the same on every rank and in every run.
"""

from collections.abc import Sequence

import torch

from hpctrain.comm import window as windows
from hpctrain.comm.reduction import as_bytes, reduce_in_order, window_of
from hpctrain.comm.steps import Pending, Steps
from hpctrain.comm.window import SharedWindow
from hpctrain.intervals import Interval, cut_evenly

# Two slots a rank are used in turn: who writes the third chunk knows that all have read the first, because all have
# announced the second. 512 KiB keeps the slots of a few ranks inside the shared cache.
SLOT_BYTES = 512 * 1024
# Nothing large is put into shared memory unless it leaves this share of what is free to others.
SHARE_LEFT_FREE = 0.5
# Below this, everybody reduces everything: one announcement instead of two.
SMALL_BYTES = 8 * 1024


class SharedCollectives:
    """Collectives of a group of ranks on one host, as steps. Tensors are contiguous, flat and on the host."""

    name = "shared memory"

    def __init__(self, mpi, comm):
        """`comm` is the group's, and owned from now on. All ranks must call."""
        self.rank, self.size = comm.rank, comm.size
        self._mpi, self._comm = mpi, comm
        self._window = SharedWindow(mpi, comm.Dup(), 2 * SLOT_BYTES)
        self._regions: list[SharedWindow] = []
        self._announced = 0
        self._half = 0
        self._open = True

    def allocate(self, num_bytes: int, ranks_on_host: int) -> torch.Tensor | None:
        """Return zeroed bytes that the others of the group see; None where shared memory is too small for all.

        Collectives on tensors inside them need no copies through slots. All ranks must call with the same size.
        """
        region = self._add_region(num_bytes, num_bytes * max(ranks_on_host, self.size))
        return None if region is None else region.bytes[self.rank].zero_()

    def allocate_common(self, num_bytes: int, ranks_on_host: int) -> torch.Tensor | None:
        """Return zeroed bytes that are the same memory on every rank, or None as `allocate`. All ranks must call."""
        groups = max(ranks_on_host, self.size) // self.size
        region = self._add_region(num_bytes if self.rank == 0 else 0, num_bytes * groups)
        if region is None:
            return None
        if self.rank == 0:
            region.bytes[0].zero_()
        self._comm.Barrier()
        return region.bytes[0]

    def _add_region(self, num_bytes: int, bytes_on_host: int) -> SharedWindow | None:
        enough = windows.free_bytes() * (1 - SHARE_LEFT_FREE) >= bytes_on_host
        if not self._comm.allreduce(enough, op=self._mpi.LAND):
            return None
        self._regions.append(SharedWindow(self._mpi, self._comm.Dup(), num_bytes))
        return self._regions[-1]

    def _everywhere(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """Return, by rank, the memory of each that corresponds to a tensor in allocated memory; None if it is not."""
        for region in self._regions:
            start = flat.data_ptr() - region.bytes[self.rank].data_ptr()
            stop = start + flat.numel() * flat.element_size()
            if start >= 0 and stop <= region.bytes[self.rank].numel():
                return [memory[start:stop].view(flat.dtype) for memory in region.bytes]
        return None

    def _announce(self) -> Steps:
        """Say that this rank has come so far, and wait until all have."""
        window = self._window
        self._announced += 1
        value = self._announced
        window.publish(0, value)
        for other in range(self.size):
            counter = window.counters[other]
            if counter[0] < value:
                yield Pending(lambda c=counter: c[0] >= value, f"rank {other} of {self.size}")
        window.fence()

    def _slots(self) -> list[torch.Tensor]:
        self._half ^= 1
        start = self._half * SLOT_BYTES
        return [memory[start : start + SLOT_BYTES] for memory in self._window.bytes]

    def barrier(self) -> Steps:
        yield from self._announce()

    def all_reduce(self, flat: torch.Tensor, op: str) -> Steps:
        if (seen := self._everywhere(flat)) is not None:
            cuts = cut_evenly(flat.numel(), self.size)
            own = flat[slice(*cuts[self.rank])]
            yield from self._announce()
            reduce_in_order([tensor[slice(*cuts[self.rank])] for tensor in seen], own, op)
            yield from self._gather_seen(seen, cuts)
            return
        step = SLOT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            yield from self._all_reduce_chunk(flat[start : start + step], op)

    def _all_reduce_chunk(self, chunk: torch.Tensor, op: str) -> Steps:
        size_bytes = chunk.numel() * chunk.element_size()
        slots = [slot[:size_bytes].view(chunk.dtype) for slot in self._slots()]
        slots[self.rank].copy_(chunk)
        yield from self._announce()
        if size_bytes <= SMALL_BYTES:
            reduce_in_order(slots, chunk, op)
            return
        cuts = cut_evenly(chunk.numel(), self.size)
        own = slice(*cuts[self.rank])
        reduce_in_order([slot[own] for slot in slots], chunk[own], op)
        slots[self.rank][own].copy_(chunk[own])
        yield from self._announce()
        for other, cut in enumerate(cuts):
            if other != self.rank:
                chunk[slice(*cut)].copy_(slots[other][slice(*cut)])

    def _gather_seen(self, seen: list[torch.Tensor], cuts: Sequence[Interval]) -> Steps:
        yield from self._announce()
        for other, cut in enumerate(cuts):
            if other != self.rank:
                seen[self.rank][slice(*cut)].copy_(seen[other][slice(*cut)])
        yield from self._announce()  # nobody reads this rank's memory any longer

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor, op: str) -> Steps:
        own = cuts[self.rank]
        if (seen := self._everywhere(flat)) is not None:
            yield from self._announce()
            if own.size:
                reduce_in_order([tensor[slice(*own)] for tensor in seen], out, op)
            yield from self._announce()
            return
        step = SLOT_BYTES // flat.element_size() // self.size
        for start in range(0, max(cut.size for cut in cuts), step):
            pieces = [window_of(cut, start, step) for cut in cuts]
            slots = [slot.view(flat.dtype) for slot in self._slots()]
            for i, piece in enumerate(pieces):
                if i != self.rank:
                    slots[self.rank][i * step : i * step + piece.size].copy_(flat[slice(*piece)])
            yield from self._announce()
            piece = pieces[self.rank]
            if piece.size:
                at = self.rank * step
                parts = [slot[at : at + piece.size] for slot in slots]
                parts[self.rank] = flat[slice(*piece)]
                reduce_in_order(parts, out[start : start + piece.size], op)

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> Steps:
        if (seen := self._everywhere(flat)) is not None:
            yield from self._gather_seen(seen, cuts)
            return
        step = SLOT_BYTES // flat.element_size()
        for start in range(0, max(cut.size for cut in cuts), step):
            slots = [slot.view(flat.dtype) for slot in self._slots()]
            pieces = [window_of(cut, start, step) for cut in cuts]
            own = pieces[self.rank]
            slots[self.rank][: own.size].copy_(flat[slice(*own)])
            yield from self._announce()
            for other, piece in enumerate(pieces):
                if other != self.rank and piece.size:
                    flat[slice(*piece)].copy_(slots[other][: piece.size])

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        data = as_bytes(flat)
        for start in range(0, data.numel(), SLOT_BYTES):
            chunk = data[start : start + SLOT_BYTES]
            slot = self._slots()[root][: chunk.numel()]
            if self.rank == root:
                slot.copy_(chunk)
            yield from self._announce()
            if self.rank != root:
                chunk.copy_(slot)

    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Steps:
        """Rank i's `sent[j]` becomes rank j's `received[i]`; flat tensors of the same dtype, any sizes."""
        step = SLOT_BYTES // sent[0].element_size() // self.size
        longest = torch.tensor([max(tensor.numel() for tensor in (*sent, *received))])
        yield from self.all_reduce(longest, "max")
        for start in range(0, int(longest), step):
            slots = [slot.view(sent[0].dtype) for slot in self._slots()]
            for other, tensor in enumerate(sent):
                piece = tensor[start : start + step]
                slots[self.rank][other * step : other * step + piece.numel()].copy_(piece)
            yield from self._announce()
            for other, tensor in enumerate(received):
                piece = tensor[start : start + step]
                piece.copy_(slots[other][self.rank * step : self.rank * step + piece.numel()])

    def abandon(self) -> None:
        self._open = False
        for window in (self._window, *self._regions):
            window.abandon()

    def close(self) -> None:
        for window in (*self._regions, self._window):
            window.close()
        if self._open:
            self._open = False
            self._comm.Free()
