"""The layout of a rank's flight record on disk, and its reader; hpctrain.comm.watchdog.recorder writes it.

A record is one file a rank, `RUN/flight/rank-00003.bin`, in the byte order of its machine:

    header      who, where, since when; in which part of the run; how it ended; its last sign of life
    ring        the last RING_SLOTS operations
    counters    for each lane how many collectives, sends and receives were entered
    table       JSON lines: ["lane", number, name, ranks, number of ranks, checksum of ranks], ["op", number, name]

A rank can be killed between any two stores. So a slot has its ticket first and last, and text is written before the
length that makes it count. What follows from an impossible value is left out.
"""

import functools
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.comm.operations import OPERATIONS
from hpctrain.comm.start.process import process_status, this_machine
from hpctrain.config.errors import CommError, describe_os_error
from hpctrain.config.paths import open_file, read_bytes

MAGIC, VERSION = b"hpcfly\r\n", 1
# magic, version, rank, size, pid, process start (clock ticks since boot), attempt, wall and monotonic clock at start
# (seconds), host, family, machine
HEADER = struct.Struct("@8sIiiiQQdd64s32s64s")
PHASE_AT, PHASE_BYTES = 384, 64
STATE_AT, ALIVE_AT, TABLE_USED_AT, ERROR_AT, RING_AT = 512, 520, 528, 536, 1536
RUNNING, ENDED, FAILED = range(3)
ERROR_BYTES = RING_AT - ERROR_AT
RING_SLOTS = 256
# ticket, sequence, lane, operation, peer (-1: none), bytes, start, end, ticket. Times are monotonic seconds. The end of
# what is in flight is 0; of what was abandoned it is minus that time.
SLOT = struct.Struct("@QQHHiQddQ")
END_IN_SLOT = 40
MAX_LANES = 512
LAST_LANE = (1 << 16) - 1  # the last number that a slot can have: all lanes after it are this one there
COLLECTIVES, SENDS, RECEIVES = range(3)
COUNTERS_PER_LANE = 4  # one to spare: whole cache lines
COUNTERS_AT = RING_AT + RING_SLOTS * SLOT.size
TABLE_AT = COUNTERS_AT + MAX_LANES * COUNTERS_PER_LANE * 8
TOTAL_BYTES = 64 * 1024
TABLE_BYTES = TOTAL_BYTES - TABLE_AT
MAX_RANKS_TEXT = 1000
MOST_RANKS = 1_000_000
FOLDER = "flight"
LAST_WORD = "last-word.json"
# Operations of lanes of two ranks, and what the other rank does meanwhile. All others are collectives.
MATCHING = {name: row.matching for name, row in OPERATIONS.items() if row.matching}
OPERATION_KINDS = {"send": SENDS, "receive": RECEIVES}


@dataclass(frozen=True)
class RecordedLane:
    """A lane as one rank has recorded it."""

    number: int
    name: str
    ranks: str
    """The ranks, such as "0-3,8"; ends in "..." where the text was too long for the record."""
    num_ranks: int
    checksum: int
    occurrence: int = 0
    """Number of earlier lanes with this name and these ranks."""
    entered: tuple[int, int, int] = (0, 0, 0)
    """Numbers of collectives, sends and receives that the rank has entered."""

    @property
    def key(self) -> tuple[str, int, int]:
        """The identity of this lane, the same on all of its ranks."""
        return self.name, self.checksum, self.occurrence

    @property
    def members(self) -> tuple[int, ...]:
        return parse_ranks(self.ranks)

    def __str__(self) -> str:
        return f"{self.name} [{self.ranks}]" if len(self.ranks) < 60 else f"{self.name} [{self.num_ranks} ranks]"


@dataclass(frozen=True)
class RecordedOperation:
    """One operation; times in seconds of the wall clock of its rank's host."""

    ticket: int
    lane: RecordedLane
    sequence: int
    """Number of the operation, from 1, among the lane's collectives, sends or receives."""
    name: str
    num_bytes: int
    start: float
    end: float | None
    """Time of the end; None: it has not ended."""
    peer: int = -1
    abandoned: float | None = None
    """Time at which its rank left it, without its end."""

    @property
    def kind(self) -> int:
        return OPERATION_KINDS.get(self.name, COLLECTIVES)


@dataclass(frozen=True)
class Flight:
    """The record of one rank."""

    rank: int
    size: int
    host: str
    family: str
    pid: int
    process_start: int
    machine: str
    attempt: int
    started: float
    state: int
    """RUNNING, ENDED (in order) or FAILED (with `error`, which was printed)."""
    error: str
    phase: str
    """The phase of the run that the rank was in."""
    alive: float
    """Time of the last sign of life, in seconds of the wall clock."""
    lanes: tuple[RecordedLane, ...]
    operations: tuple[RecordedOperation, ...]
    """The recorded operations, the oldest first."""

    @property
    def in_flight(self) -> tuple[RecordedOperation, ...]:
        """The operations that have not ended. An abandoned one counts until the rank begins another."""
        newest = max((operation.start for operation in self.operations), default=0.0)
        return tuple(o for o in self.operations if o.end is None and not (o.abandoned and o.abandoned < newest))

    def process_is_gone(self) -> bool | None:
        """Return whether the process has ended; None on another machine than its own, where nobody can know."""
        if self.machine != this_machine():
            return None
        return process_status(self.pid).start_ticks != self.process_start

    def shortened(self, count: int) -> "Flight":
        """Return the record with the last `count` operations and all in flight, to be sent to other ranks."""
        old = [operation for operation in self.in_flight if operation in self.operations[:-count]]
        return replace(self, operations=(*old, *self.operations[-count:]))


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05}.bin"


def read_flight(path: Path) -> Flight:
    """Read a record, also one that is being written or was cut short. Raises CommError if it is no record."""
    try:
        with open_file(path) as file:
            return parse_flight(file.read(TOTAL_BYTES), str(path))
    except OSError as error:
        raise CommError(f"{path}: cannot be read: {describe_os_error(error)}") from None


def read_flights(folder: Path) -> dict[int, Flight]:
    """Read the records of the newest attempt in a folder, by rank; other files are left out."""
    flights = []
    for path in sorted(folder.glob("rank-*.bin")):
        try:
            flights.append(read_flight(path))
        except CommError:
            continue
    if not flights:
        return {}
    newest = max(flights, key=lambda flight: flight.started)
    return {f.rank: f for f in flights if (f.attempt, f.size) == (newest.attempt, newest.size)}


def claim_last_word(folder: Path, note: Mapping) -> bool:
    """Write a note on how the run ended, unless there is one; return whether this call has written it.

    A rank that prints an error leaves an empty note. A guardian names the rank that died first.
    """
    try:
        with (folder / LAST_WORD).open("x") as file:
            json.dump(note, file)
    except FileExistsError:
        return False
    except OSError:  # where the folder cannot be written, the message is printed all the same
        return True
    return True


def read_first_death(folder: Path) -> tuple[int, float] | None:
    """Return the rank that a guardian saw die first, and when (seconds of the wall clock); None if none did."""
    try:
        note = json.loads(read_bytes(folder / LAST_WORD))
        rank, time = int(note["rank"]), float(note["time"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return (rank, time) if 0 <= rank < MOST_RANKS and math.isfinite(time) else None


def parse_flight(data: bytes, what: str = "flight record") -> Flight:
    """Read a record from its bytes. Raises CommError if they are no record."""
    data = bytes(data).ljust(TOTAL_BYTES, b"\0")
    magic, version, rank, size, pid, process_start, attempt, wall, monotonic, *texts = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise CommError(f"{what}: not a flight record of version {VERSION}")
    if not 0 <= rank < size <= MOST_RANKS or not (math.isfinite(wall) and math.isfinite(monotonic)):
        raise CommError(f"{what}: is damaged: rank {rank} of {size}, begun at {wall}")
    host, family, machine = map(_text, texts)
    offset = wall - monotonic
    lanes, names = _read_table(data)
    operations = []
    for fields in SLOT.iter_unpack(data[RING_AT:COUNTERS_AT]):
        ticket, sequence, lane, code, peer, num_bytes, start, end, again = fields
        if ticket and ticket == again and math.isfinite(start + end):  # else the slot was not written completely
            known = lanes.get(lane) or RecordedLane(lane, f"{lane}", "...", 0, 0)
            finished, abandoned = offset + end if end > 0 else None, offset - end if end < 0 else None
            name = names.get(code, f"operation {code}")
            operations.append(
                RecordedOperation(ticket, known, sequence, name, num_bytes, offset + start, finished, peer, abandoned)
            )
    operations.sort(key=lambda operation: operation.ticket)
    (state,), (alive,) = struct.unpack_from("@Q", data, STATE_AT), struct.unpack_from("@d", data, ALIVE_AT)
    times = [wall, *(o.start for o in operations), *(o.end for o in operations if o.end)]
    if alive:
        times.append(offset + alive)
    error, phase = _text(data[ERROR_AT:RING_AT]), _text(data[PHASE_AT : PHASE_AT + PHASE_BYTES])
    identity = (rank, size, host, family, pid, process_start, machine, attempt, wall)
    return Flight(*identity, state, error, phase, max(times), tuple(lanes.values()), tuple(operations))


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")


def _read_table(data: bytes) -> tuple[dict[int, RecordedLane], dict[int, str]]:
    lanes: dict[int, RecordedLane] = {}
    names: dict[int, str] = {}
    seen: dict[tuple[str, int], int] = {}
    (used,) = struct.unpack_from("@Q", data, TABLE_USED_AT)
    counters = struct.unpack_from(f"@{MAX_LANES * COUNTERS_PER_LANE}Q", data, COUNTERS_AT)
    for line in data[TABLE_AT : TABLE_AT + min(used, TABLE_BYTES)].splitlines():
        try:
            kind, number, name, *more = json.loads(line)
            if kind == "op":
                names[int(number)] = str(name)
                continue
            ranks, num_ranks, checksum = str(more[0]), int(more[1]), int(more[2])
            parse_ranks(ranks)
            at = int(number) * COUNTERS_PER_LANE
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError):  # a damaged line
            continue
        occurrence = seen[str(name), checksum] = seen.get((str(name), checksum), -1) + 1
        entered = counters[at : at + 3] if 0 <= at < len(counters) else (0, 0, 0)
        lanes[int(number)] = RecordedLane(int(number), str(name), ranks, num_ranks, checksum, occurrence, entered)
    return lanes, names


def write_ranks(ranks: Iterable[int]) -> str:
    """Format ranks compactly, in ascending order: "0-3,8" or, for every 8th, "0-56:8"."""
    ranks = sorted(set(ranks))
    parts, at = [], 0
    while at < len(ranks):
        stop, step = at + 1, ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 0
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        if stop - at == 2 and step > 1:  # not a series: the second rank may begin one
            stop = at + 1
        span = f"{ranks[at]}-{ranks[stop - 1]}" if stop - at > 1 else f"{ranks[at]}"
        parts.append(f"{span}:{step}" if stop - at > 1 and step > 1 else span)
        at = stop
    return ",".join(parts)


@functools.lru_cache(maxsize=4096)
def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a text of `write_ranks`; of a text that was cut short those that it names.

    Raises ValueError for other texts.
    """
    ranks: list[int] = []
    for part in text.split(","):
        if part and part != "...":
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            if int(last or first) >= MOST_RANKS:
                raise ValueError(f"'{part}' is no range of ranks")
            ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(ranks)
