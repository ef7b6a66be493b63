"""The flight recorder: this rank's communication, kept in a file that survives the process.

The file is mapped into memory: stored bytes belong to the kernel, which writes them even when the process is killed.
Recording costs a microsecond an operation, no system call, and no lock; see `comm.watchdog.flight` for the layout.
"""

import itertools
import json
import mmap
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

from hpctrain.comm.start.process import process_status, this_machine
from hpctrain.comm.watchdog import flight
from hpctrain.comm.watchdog.flight import COUNTERS_PER_LANE, MAX_LANES, OPERATION_KINDS, RING_AT, RING_SLOTS, SLOT
from hpctrain.config.errors import CommError, describe_os_error

_WORDS_IN_SLOT = SLOT.size // 8
_FIRST_END = (RING_AT + flight.END_IN_SLOT) // 8
_FIRST_COUNTER = flight.COUNTERS_AT // 8
_pack_slot = SLOT.pack_into
_monotonic = time.monotonic


class Recorder:
    """Records operations of one rank; any thread may call `start` and `finish`.

    Without a folder it records in memory alone, for the watchdog's report; `move_to` gives it one later.
    """

    def __init__(self, folder: Path | None, rank: int, size: int, host: str, family: str, attempt: int = 0):
        """`attempt` numbers the starts in a run folder; the same on all ranks."""
        self.folder: Path | None = None
        self.rank, self.size, self.host = rank, size, host
        self._tickets = itertools.count(1)
        self._owners = [0] * RING_SLOTS
        """Ticket of the operation in each slot of the ring."""
        self._in_flight: dict[int, float] = {}
        """Start time of each operation in flight, by ticket."""
        self._codes: dict[str, int] = {}
        self._counters: list[tuple[itertools.count, ...]] = []
        """Counters of collectives, sends and receives for each lane."""
        self._peers: list[int] = []
        """The other rank of each lane of two, else -1."""
        self._keys: list[tuple[str, int]] = []
        """The name of each lane and the checksum of its ranks."""
        self._closed: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        """The lanes that are closed, by key."""
        self._map(mmap.mmap(-1, flight.TOTAL_BYTES))
        texts = (host.encode()[:63], family.encode()[:31], this_machine().encode()[:63])
        start_ticks = process_status(os.getpid()).start_ticks
        identity = (flight.MAGIC, flight.VERSION, rank, size, os.getpid(), start_ticks)
        flight.HEADER.pack_into(self._memory, 0, *identity, attempt, time.time(), _monotonic(), *texts)
        if folder is not None:
            self.move_to(folder)

    def _map(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._doubles, self._words = memoryview(memory).cast("d"), memoryview(memory).cast("Q")

    def move_to(self, folder: Path) -> None:
        """Continue in a file of `folder`, with the records so far. Raises CommError if it cannot be written.

        Operations that other threads record meanwhile may be missing. Any rank may create the folder; rank 0 removes
        the records of an earlier attempt there.
        """
        path = flight.record_path(folder, self.rank)
        partial = path.with_suffix(".partial")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.rank == 0:
                old = [*folder.glob("stacks-*.txt"), folder / flight.LAST_WORD]
                last = flight.record_path(folder, self.size - 1)
                for earlier in (*old, *(path for path in folder.glob("rank-*.bin") if path > last)):
                    earlier.unlink(missing_ok=True)
            with partial.open("w+b") as file:
                # Whole, not sparse: a page for which the disk is full later would be a bus error.
                file.write(self._memory[:])
                file.flush()
                made = mmap.mmap(file.fileno(), flight.TOTAL_BYTES)
            partial.replace(path)  # never into the old file: a process that still has it would see it shrink
        except (OSError, ValueError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
            raise CommError(f"{path}: the flight recorder cannot write: {reason}; choose another run folder") from None
        made[:] = self._memory[:]
        self._map(made)
        self.folder = folder

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        """Record a lane over `ranks`; return its number, for `start`.

        All of them must add it, in the same order as other lanes of the same name and ranks. If one of these is closed,
        it becomes this lane, and the count of its operations continues. So each leg has the lanes of the one before,
        and a rank that is still there is behind.
        """
        checksum = zlib.crc32(",".join(map(str, sorted(ranks))).encode())
        if closed := self._closed[name, checksum]:
            closed.remove(number := min(closed))
            return number
        number = len(self._counters)
        self._keys.append((name, checksum))
        self._counters.append(tuple(itertools.count(1) for _ in range(3)))
        self._peers.append(sum(ranks) - self.rank if len(ranks) == 2 and self.rank in ranks else -1)
        text = flight.write_ranks(ranks)
        if len(text) > flight.MAX_RANKS_TEXT:
            text = text[: text.rindex(",", 0, flight.MAX_RANKS_TEXT)] + ",..."
        self._append(["lane", number, name, text, len(ranks), checksum])
        return number

    def close_group(self, number: int) -> None:
        """Record that no more operations of a lane begin. All of its ranks must call, after as many of them."""
        self._closed[self._keys[number]].append(number)

    def _append(self, entry: list) -> None:
        """Write a line into the table. Where it is full, readers see only the number of the lane or operation."""
        line = json.dumps(entry).encode() + b"\n"
        used = self._words[flight.TABLE_USED_AT // 8]
        if used + len(line) <= flight.TABLE_BYTES:
            at = flight.TABLE_AT + used
            self._memory[at : at + len(line)] = line
            self._words[flight.TABLE_USED_AT // 8] = used + len(line)

    def _add_operation(self, name: str) -> int:
        code = self._codes[name] = len(self._codes) + 1
        self._append(["op", code, name])
        return code

    def start(self, group: int, operation: str, num_bytes: int) -> int:
        """Record that an operation of a lane begins; return the handle for `finish`.

        `operation` is the name of a collective or, on a lane of two ranks, "send" or "receive". Where all slots of the
        ring are in flight it gets none, and a negative handle: the oldest are those that others wait for.
        """
        code = self._codes.get(operation) or self._add_operation(operation)
        kind = OPERATION_KINDS.get(operation, flight.COLLECTIVES)
        sequence, peer = next(self._counters[group][kind]), self._peers[group] if kind else -1
        ticket = next(self._tickets)
        if self._owners[ticket % RING_SLOTS] in self._in_flight:
            others = itertools.islice(self._tickets, RING_SLOTS)
            free = (each for each in others if self._owners[each % RING_SLOTS] not in self._in_flight)
            ticket = next(free, -ticket)
        self._in_flight[ticket] = now = _monotonic()
        if ticket > 0:
            slot = ticket % RING_SLOTS
            self._owners[slot] = ticket
            at = RING_AT + slot * SLOT.size
            lane = min(group, flight.LAST_LANE)
            _pack_slot(self._memory, at, ticket, sequence, lane, code, peer, num_bytes, now, 0.0, ticket)
        if group < MAX_LANES:
            self._words[_FIRST_COUNTER + group * COUNTERS_PER_LANE + kind] = sequence
        return ticket

    def finish(self, handle: int) -> None:
        """Record that the operation of this handle has ended."""
        if self._in_flight.pop(handle, None) is not None and handle > 0:
            self._doubles[_FIRST_END + handle % RING_SLOTS * _WORDS_IN_SLOT] = _monotonic()

    def abandon(self, handle: int) -> None:
        """Record that this rank has left the operation of this handle, which has not ended."""
        if self._in_flight.pop(handle, None) is not None and handle > 0:
            self._doubles[_FIRST_END + handle % RING_SLOTS * _WORDS_IN_SLOT] = -_monotonic()

    @contextmanager
    def recorded(self, group: int, operation: str):
        """Record a block as an operation whose bytes do not matter."""
        handle = self.start(group, operation, 0)
        try:
            yield
        finally:
            self.finish(handle)

    def max_in_flight(self) -> tuple[int, float] | None:
        """Return the handle of the operation that has been in flight longest, and its age in seconds."""
        result = min(list(self._in_flight.items()), key=lambda item: item[1], default=None)
        return None if result is None else (result[0], _monotonic() - result[1])

    def beat(self) -> None:
        """Record a sign of life."""
        self._doubles[flight.ALIVE_AT // 8] = _monotonic()

    def note_phase(self, name: str) -> None:
        """Record the current phase of the run."""
        text = name.encode()[: flight.PHASE_BYTES - 1]
        self._memory[flight.PHASE_AT : flight.PHASE_AT + flight.PHASE_BYTES] = text.ljust(flight.PHASE_BYTES, b"\0")

    def snapshot(self) -> flight.Flight:
        """Return the current records."""
        return flight.parse_flight(self._memory[:])

    def close(self, error: str = "") -> None:
        """Record how the rank ends: in order or, with the text of a printed error, not in order. The first call
        counts."""
        if self._words[flight.STATE_AT // 8] != flight.RUNNING:
            return
        text = error.encode(errors="backslashreplace")[: flight.ERROR_BYTES - 1]
        self._memory[flight.ERROR_AT : flight.ERROR_AT + len(text)] = text
        self.beat()
        self._words[flight.STATE_AT // 8] = flight.FAILED if error else flight.ENDED
        if self.folder is not None:
            self._memory.flush()  # for readers on other nodes
