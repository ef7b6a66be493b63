"""Memory that all ranks of one host see: a header of counters, then bytes, for every rank of a group."""

import os

import numpy as np
import torch

HEADER_BYTES = 4096
NUM_COUNTERS = 8
# Where POSIX shared memory lives on Linux. Beyond its size a write is a bus error.
SHARED_MEMORY = "/dev/shm"


def free_bytes(path: str = SHARED_MEMORY) -> int:
    result = os.statvfs(path)
    return result.f_bavail * result.f_frsize


class SharedWindow:
    """One such memory. Made by all ranks of `comm`, which it owns and frees."""

    def __init__(self, mpi, comm, num_bytes: int):
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm
        self._window = mpi.Win.Allocate_shared(HEADER_BYTES + num_bytes, 1, comm=comm)
        memory = [np.frombuffer(self._window.Shared_query(i)[0], dtype=np.uint8) for i in range(self.size)]
        # A memoryview reads and writes a counter in a fifth of the time that a numpy array takes.
        self.counters = [m[: 8 * NUM_COUNTERS].data.cast("q") for m in memory]
        self.bytes = [torch.from_numpy(m[HEADER_BYTES:]) for m in memory]
        for i in range(NUM_COUNTERS):
            self.counters[self.rank][i] = 0
        self._open = True
        self._window.Lock_all(mpi.MODE_NOCHECK)  # what `fence` needs; never ends but with the window
        comm.Barrier()

    def fence(self) -> None:
        """Order memory accesses on processors that would reorder them."""
        self._window.Sync()

    def publish(self, index: int, value: int) -> None:
        """Set a counter of this rank after everything that it wrote before."""
        self._window.Sync()
        self.counters[self.rank][index] = value

    def abandon(self) -> None:
        """Leave without the others: `close` will do nothing."""
        self._open = False

    def close(self) -> None:
        """Free it. All ranks must call; a second call does nothing."""
        if self._open:
            self._open = False
            self.counters, self.bytes = [], []
            self._window.Unlock_all()
            self._window.Free()
            self._comm.Free()
