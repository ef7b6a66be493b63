"""Memory that all ranks of one host see: for each rank of a group a header of counters, then bytes."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch

from hpctrain.comm.start.launcher import host_memory_bytes
from hpctrain.comm.start.process import MORE_MEMORY, PREFIX, SHARED_MEMORY
from hpctrain.comm.transports.members import Members, on_all
from hpctrain.config.errors import CommError, RankLossError

T = TypeVar("T")

HEADER_BYTES = 4096
NUM_COUNTERS = 8


class NoRoomError(CommError):
    """Shared memory has too little room for a request; other routes may do without."""


def free_bytes(path: str | os.PathLike = SHARED_MEMORY) -> int:
    """Return the free bytes of shared memory."""
    result = os.statvfs(path)
    return result.f_bavail * result.f_frsize if result.f_blocks else host_memory_bytes()  # without a limit


def share_files(members: Members, num_bytes: int, open_file: Callable[[str, int], T]) -> list[T]:
    """Return the results of `open_file` for the new files of all ranks, by rank; it gets each path and size.

    All members must call, each with the size of its own file. Files lose their names as soon as all have opened them.
    So a killed rank leaves nothing behind, except in that moment (`hpctrain.comm.start.process`). Their bytes are
    reserved, since a write beyond the free space is a bus error. Where one rank cannot make or open a file, all raise
    CommError; for lack of room they raise NoRoomError.
    """
    with ExitStack() as names:

        def make_own() -> str:
            descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=SHARED_MEMORY)
            names.callback(os.close, descriptor)  # open until others have it: what nobody has open is taken for litter
            names.callback(os.unlink, path)
            try:
                if num_bytes:
                    os.posix_fallocate(descriptor, 0, num_bytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise NoRoomError(
                    f"{num_bytes / 1e6:,.1f} MB are needed, and {free_bytes() / 1e6:,.1f} MB are free; {MORE_MEMORY}"
                ) from None
            return path

        try:
            files = members.allgather((on_all(members, make_own), num_bytes))
            return on_all(members, lambda: [open_file(path, size) for path, size in files])
        except RankLossError:
            raise
        except CommError as error:
            raise type(error)(f"ranks of one host cannot share memory in {SHARED_MEMORY}: {error}") from error.__cause__


class SharedWindow:
    """Memory of one group that all ranks of the host see, zeroed. All members make it; one thread at a time uses it."""

    def __init__(self, members: Members, num_bytes: int):
        self.rank, self.size = members.rank, members.size
        # Mapped without an open file descriptor, since a process has few of these.
        map_file = partial(torch.from_file, shared=True, dtype=torch.uint8)
        memory = share_files(members, HEADER_BYTES + num_bytes, lambda path, size: map_file(path, size=size))
        # A memoryview reads and writes a counter in a fifth of the time that a numpy array takes.
        self.counters = [m[: 8 * NUM_COUNTERS].numpy().data.cast("q") for m in memory]
        self.bytes = [m[HEADER_BYTES:] for m in memory]
        self._lock = threading.Lock()
        self._lock.acquire()

    def fence(self) -> None:
        """Keep this rank's earlier reads and writes before its later ones.

        Processors of some makers (aarch64, POWER) reorder accesses to memory. To unlock is a release: earlier accesses
        are visible first. To lock is an acquire: later accesses are done later. A release is not moved behind an
        acquire that follows it, so the two in this order keep both sides apart. CPython does both by atomic
        instructions (semaphores of the C library, or its own mutex), also for a lock without contention. On x86 they
        are full fences, which streaming stores need too.
        """
        self._lock.release()
        self._lock.acquire()

    def publish(self, index: int, value: int) -> None:
        """Set a counter of this rank after everything that it has written."""
        self.fence()
        self.counters[self.rank][index] = value

    def close(self) -> None:
        """Release this rank's view, when the last tensor over it is gone. The other ranks keep theirs."""
        self.counters, self.bytes = [], []
