"""The shared-memory route: ranks of one node exchange through memory that all of them see.

No message is matched and nobody needs to make progress for anybody else: a rank copies its part into its own slot,
says so by raising a counter, and reads the slots of the others. Reductions are done by ourselves, in the order of
ranks and in fp32 for half precision, so that the result is the same on every rank and in every run.
"""

import os
from collections.abc import Sequence

import numpy as np
import torch

from hpctrain.comm.waiting import wait_until
from hpctrain.errors import CommError
from hpctrain.intervals import Interval, cut_evenly

# Two slots a rank are used in turn: who writes the third chunk knows that all have read the first, because all have
# announced the second. 512 KiB keeps the slots of a few ranks inside the shared cache.
SLOT_BYTES = 512 * 1024
HEADER_BYTES = 4096
# Where POSIX shared memory lives on Linux. Beyond its size a write is a bus error, so nothing large is put there unless
# it leaves this share of what is free to others.
SHARED_MEMORY = "/dev/shm"
SHARE_LEFT_FREE = 0.5
# Below this, everybody reduces everything: one announcement instead of two.
SMALL_BYTES = 8 * 1024


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous host tensor as its bytes, without copying."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    return tensor.reshape(-1).view(torch.uint8)


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """Reduce `parts` (same shape and dtype) first to last into `out`; half precision is summed in fp32."""
    if out.dtype in (torch.bfloat16, torch.float16) and op == "sum":
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def _chunk(cut: Interval, scale: int, start: int, size: int) -> Interval:
    """Return the `size` units from `start` on of a cut whose elements are `scale` units; less at its end."""
    first, last = cut.start * scale, cut.stop * scale
    return Interval(min(first + start, last), min(first + start + size, last))


class SharedWindow:
    """Memory of every rank of a group, seen by all of them: a header of counters, then bytes."""

    def __init__(self, mpi, comm, num_bytes: int, timeout_seconds: float):
        self.rank, self.size = comm.rank, comm.size
        self.timeout_seconds = timeout_seconds
        self._comm = comm
        self._window = mpi.Win.Allocate_shared(HEADER_BYTES + num_bytes, 1, comm=comm)
        memory = [np.frombuffer(self._window.Shared_query(i)[0], dtype=np.uint8) for i in range(self.size)]
        self.counters = [m[:64].view(np.int64) for m in memory]
        self.bytes = [torch.from_numpy(m[HEADER_BYTES:]) for m in memory]
        self.counters[self.rank][:] = 0
        self.abandoned = False
        self._window.Lock_all(mpi.MODE_NOCHECK)  # what `Sync` needs; never ends but with the window
        comm.Barrier()

    def fence(self) -> None:
        """Order memory accesses on processors that would reorder them."""
        self._window.Sync()

    def await_counter(self, rank: int, index: int, value: int, what: str) -> None:
        counter = self.counters[rank]
        if counter[index] < value:
            wait_until(lambda: counter[index] >= value, lambda: what, self.timeout_seconds)
        self.fence()

    def close(self) -> None:
        """Free it; a second call, and one after `abandoned`, does nothing."""
        if not self.abandoned:
            self.abandoned = True
            self.counters, self.bytes = [], []
            self._window.Unlock_all()
            self._window.Free()
            self._comm.Free()


class SharedCollectives:
    """Collectives of a group of ranks on one node. Tensors are contiguous and on the host."""

    name = "shared memory"

    def __init__(self, mpi, comm, timeout_seconds: float):
        self._window = SharedWindow(mpi, comm, 2 * SLOT_BYTES, timeout_seconds)
        self.rank, self.size = comm.rank, comm.size
        self._mpi, self._comm, self._timeout_seconds = mpi, comm, timeout_seconds
        self._regions: list[SharedWindow] = []
        self._announced = 0
        self._half = 0

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
        self.barrier()
        return region.bytes[0]

    def _add_region(self, num_bytes: int, bytes_on_host: int) -> SharedWindow | None:
        enough = torch.tensor([_free_bytes(SHARED_MEMORY) * SHARE_LEFT_FREE >= bytes_on_host])
        self.all_reduce(enough, "min")
        if not enough:
            return None
        self._regions.append(SharedWindow(self._mpi, self._comm.Dup(), num_bytes, self._timeout_seconds))
        return self._regions[-1]

    def _everywhere(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """Return, by rank, the memory of each that corresponds to a tensor in allocated memory; None if it is not."""
        for region in self._regions:
            start = flat.data_ptr() - region.bytes[self.rank].data_ptr()
            stop = start + flat.numel() * flat.element_size()
            if start >= 0 and stop <= region.bytes[self.rank].numel():
                return [memory[start:stop].view(flat.dtype) for memory in region.bytes]
        return None

    def _announce(self, what: str) -> None:
        """Say that this rank has come so far, and wait until all have."""
        window = self._window
        self._announced += 1
        window.fence()
        window.counters[self.rank][0] = self._announced
        for other in range(self.size):
            window.await_counter(other, 0, self._announced, f"rank {other} of {self.size} in {what}")

    def _slots(self) -> list[torch.Tensor]:
        self._half ^= 1
        start = self._half * SLOT_BYTES
        return [memory[start : start + SLOT_BYTES] for memory in self._window.bytes]

    def barrier(self) -> None:
        self._announce("barrier")

    def all_reduce(self, flat: torch.Tensor, op: str) -> None:
        if (seen := self._everywhere(flat)) is not None:
            cuts = cut_evenly(flat.numel(), self.size)
            own = flat[slice(*cuts[self.rank])]
            own.copy_(self._reduce_seen(seen, torch.empty_like(own), cuts[self.rank], op))  # `own` is one of its parts
            self._gather_seen(seen, cuts)
            return
        step = SLOT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            self._all_reduce_chunk(flat[start : start + step], op)

    def _all_reduce_chunk(self, chunk: torch.Tensor, op: str) -> None:
        size_bytes = chunk.numel() * chunk.element_size()
        slots = [slot[:size_bytes].view(chunk.dtype) for slot in self._slots()]
        slots[self.rank].copy_(chunk)
        self._announce("all_reduce")
        if size_bytes <= SMALL_BYTES:
            sum_in_order(slots, chunk, op)
            return
        cuts = cut_evenly(chunk.numel(), self.size)
        own = slice(*cuts[self.rank])
        sum_in_order([slot[own] for slot in slots], chunk[own], op)
        slots[self.rank][own].copy_(chunk[own])
        self._announce("all_reduce")
        for other, cut in enumerate(cuts):
            if other != self.rank:
                chunk[slice(*cut)].copy_(slots[other][slice(*cut)])

    def _reduce_seen(self, seen: list[torch.Tensor], out: torch.Tensor, cut: Interval, op: str) -> torch.Tensor:
        self._announce("reduce_scatter")
        if cut.size:
            sum_in_order([tensor[slice(*cut)] for tensor in seen], out, op)
        return out

    def _gather_seen(self, seen: list[torch.Tensor], cuts: Sequence[Interval]) -> None:
        self._announce("all_gather")
        for other, cut in enumerate(cuts):
            if other != self.rank:
                seen[self.rank][slice(*cut)].copy_(seen[other][slice(*cut)])
        self._announce("all_gather")  # nobody reads this rank's memory any longer

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[Interval], out: torch.Tensor) -> None:
        if (seen := self._everywhere(flat)) is not None:
            self._reduce_seen(seen, out, cuts[self.rank], "sum")
            self._announce("reduce_scatter")
            return
        step = SLOT_BYTES // flat.element_size() // self.size
        for start in range(0, max(cut.size for cut in cuts), step):
            pieces = [_chunk(cut, 1, start, step) for cut in cuts]
            slots = [slot.view(flat.dtype) for slot in self._slots()]
            for i, piece in enumerate(pieces):
                if i != self.rank:
                    slots[self.rank][i * step : i * step + piece.size].copy_(flat[slice(*piece)])
            self._announce("reduce_scatter")
            own = pieces[self.rank]
            if own.size:
                at = self.rank * step
                parts = [slot[at : at + own.size] for slot in slots]
                parts[self.rank] = flat[slice(*own)]
                sum_in_order(parts, out[start : start + own.size], "sum")

    def all_gather(self, flat: torch.Tensor, cuts: Sequence[Interval]) -> None:
        if (seen := self._everywhere(flat)) is not None:
            self._gather_seen(seen, cuts)
            return
        data = as_bytes(flat)
        scale = flat.element_size()
        for start in range(0, max(cut.size for cut in cuts) * scale, SLOT_BYTES):
            slots = self._slots()
            pieces = [_chunk(cut, scale, start, SLOT_BYTES) for cut in cuts]
            own = pieces[self.rank]
            slots[self.rank][: own.size].copy_(data[slice(*own)])
            self._announce("all_gather")
            for other, piece in enumerate(pieces):
                if other != self.rank and piece.size:
                    data[slice(*piece)].copy_(slots[other][: piece.size])

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        data = as_bytes(flat)
        for start in range(0, data.numel(), SLOT_BYTES):
            chunk = data[start : start + SLOT_BYTES]
            slot = self._slots()[root][: chunk.numel()]
            if self.rank == root:
                slot.copy_(chunk)
            self._announce("broadcast")
            if self.rank != root:
                chunk.copy_(slot)

    def abandon(self) -> None:
        for window in (self._window, *self._regions):
            window.abandoned = True

    def close(self) -> None:
        for window in (*self._regions, self._window):
            window.close()


def _free_bytes(path: str) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


class SharedChannel:
    """A two-way channel between two ranks of one node: for each way a ring of slots in the sender's memory.

    A send copies and returns; it waits only if `depth` messages are under way. The receiver needs nothing from the
    sender while it computes.
    """

    def __init__(self, mpi, comm, num_bytes: int, depth: int, timeout_seconds: float):
        self._slot_bytes = -(-num_bytes // 64) * 64
        self._depth = depth
        self._window = SharedWindow(mpi, comm, self._slot_bytes * depth, timeout_seconds)
        self._me, self._peer = comm.rank, 1 - comm.rank
        self._sent = self._received = 0

    def send(self, tensor: torch.Tensor) -> None:
        """Copy a contiguous host tensor into the channel."""
        window, data = self._window, as_bytes(tensor)
        if data.numel() > self._slot_bytes:
            raise CommError(f"a message of {data.numel()} bytes on a channel made for {self._slot_bytes}")
        window.await_counter(self._peer, 1, self._sent - self._depth + 1, "the receiver to take an earlier message")
        start = self._sent % self._depth * self._slot_bytes
        window.bytes[self._me][start : start + data.numel()].copy_(data)
        self._sent += 1
        window.fence()
        window.counters[self._me][0] = self._sent

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous host tensor with the next message, which must have its size."""
        window, data = self._window, as_bytes(tensor)
        window.await_counter(self._peer, 0, self._received + 1, "a message from the other end of a channel")
        start = self._received % self._depth * self._slot_bytes
        data.copy_(window.bytes[self._peer][start : start + data.numel()])
        self._received += 1
        window.fence()
        window.counters[self._me][1] = self._received

    def abandon(self) -> None:
        self._window.abandoned = True

    def close(self) -> None:
        self._window.close()
