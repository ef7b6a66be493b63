"""Memory that all ranks of one host see: a header of counters, then bytes, for every rank of a group."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch

from hpctrain.comm.start.launcher import host_memory_bytes
from hpctrain.comm.start.process import MORE_MEMORY, PREFIX, SHARED_MEMORY
from hpctrain.comm.transports.members import Members, on_all
from hpctrain.config.errors import CommError

T = TypeVar("T")

HEADER_BYTES = 4096
NUM_COUNTERS = 8


class NoRoomError(CommError):
    """Shared memory has no room for what is asked of it; other ways may do without."""


def free_bytes(path: str | os.PathLike = SHARED_MEMORY) -> int:
    """Return what is free of shared memory."""
    result = os.statvfs(path)
    return result.f_bavail * result.f_frsize if result.f_blocks else host_memory_bytes()  # without a limit


def share_files(members: Members, num_bytes: int, open_file: Callable[[str, int], T]) -> list[T]:
    """Return what `open_file` makes of the new files of all ranks, by rank, each given its path and its bytes.

    All members must call, each with the size of its own file. Files lose their names as soon as all have opened
    them: nothing is left of a rank that is killed, but in that moment (`hpctrain.comm.start.process`). Their bytes are
    reserved, since a write beyond what is free is a bus error. Where one rank cannot make or open a file, all raise
    CommError; where that is for lack of room, NoRoomError.
    """
    with ExitStack() as names:

        def make_own() -> str:
            descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=SHARED_MEMORY)
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
            finally:
                os.close(descriptor)
            return path

        try:
            files = members.allgather((on_all(members, make_own), num_bytes))
            return on_all(members, lambda: [open_file(path, size) for path, size in files])
        except CommError as error:
            raise type(error)(f"ranks of one host cannot share memory in {SHARED_MEMORY}: {error}") from error.__cause__


class SharedWindow:
    """One such memory, zeroed. Made by all members; used by one thread at a time."""

    def __init__(self, members: Members, num_bytes: int):
        self.rank, self.size = members.rank, members.size
        memory = share_files(members, HEADER_BYTES + num_bytes, _map_file)
        # A memoryview reads and writes a counter in a fifth of the time that a numpy array takes.
        self.counters = [m[: 8 * NUM_COUNTERS].numpy().data.cast("q") for m in memory]
        self.bytes = [m[HEADER_BYTES:] for m in memory]
        self._lock = threading.Lock()
        self._lock.acquire()

    def fence(self) -> None:
        """Keep what this rank reads and writes before from moving behind what it does after, and the reverse.

        Processors of some makers (aarch64, POWER) reorder accesses to memory. To unlock is a release: what came before
        is visible first. To lock is an acquire: what comes after is done later. A release is not moved behind an
        acquire that follows it, so the two in this order keep both sides apart. CPython does both by atomic
        instructions (semaphores of the C library, or its own mutex), also where nobody else has the lock. On x86 they
        are full fences, which streaming stores need too.
        """
        self._lock.release()
        self._lock.acquire()

    def publish(self, index: int, value: int) -> None:
        """Set a counter of this rank after everything that it wrote before."""
        self.fence()
        self.counters[self.rank][index] = value

    def close(self) -> None:
        """Give this rank's view of it back, when the last tensor over it is gone. Others keep theirs."""
        self.counters, self.bytes = [], []


def _map_file(path: str, num_bytes: int) -> torch.Tensor:
    """Return the bytes of a file, mapped without a descriptor that stays open, of which a process has few."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
