"""Identifies the ranks that keep the others waiting: pure functions on the flight records of all ranks."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpctrain.comm.operations import OPERATIONS
from hpctrain.comm.watchdog.flight import (
    COLLECTIVES,
    ENDED,
    FAILED,
    MATCHING,
    OPERATION_KINDS,
    Flight,
    RecordedLane,
    RecordedOperation,
    read_first_death,
    read_flights,
    write_ranks,
)

SAME_BYTES = frozenset(name for name, row in OPERATIONS.items() if row.has_same_bytes)
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Wait:
    """An operation in flight, the ranks that wait in it, and those of its lane that have not entered it."""

    operation: RecordedOperation
    """The operation as recorded by the rank that has been in it longest."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    differing: tuple[tuple[int, RecordedOperation], ...] = ()
    """Ranks that entered another operation, or another size, with the same sequence number."""


def detect_waits(flights: Mapping[int, Flight]) -> list[Wait]:
    """Return the operations in flight on any rank; the longest first."""
    lanes = {(rank, lane.key): lane for rank, flight in flights.items() for lane in flight.lanes}
    members: dict[Key, set[int]] = {}
    for (rank, key), lane in lanes.items():
        members.setdefault(key, set(lane.members)).add(rank)  # a long list of ranks may have been cut short
    waits = []
    collectives: dict[tuple[Key, int], dict[int, RecordedOperation]] = {}
    for rank, flight in flights.items():
        heads: dict[Key, RecordedOperation] = {}  # later operations of a lane wait for its first one alone
        for operation in flight.in_flight:
            heads.setdefault(operation.lane.key, operation)
        for key, operation in heads.items():
            if operation.kind == COLLECTIVES:
                collectives.setdefault((key, operation.sequence), {})[rank] = operation
            else:
                is_there = _has_entered(lanes.get((operation.peer, key)), operation)
                waits.append(Wait(operation, (rank,), () if is_there else (operation.peer,)))
    for (key, sequence), inside in collectives.items():
        oldest = min(inside.values(), key=lambda operation: operation.start)
        others = members.get(key, set()) - set(inside)
        missing = sorted(rank for rank in others if not _has_entered(lanes.get((rank, key)), oldest))
        usual, differing = _differing(inside | _finished(flights, others, key, sequence))
        shown = min(inside.values(), key=lambda operation: (_signature(operation) != usual, operation.start))
        waits.append(Wait(shown, tuple(sorted(inside)), tuple(missing), differing))
    return sorted(waits, key=lambda wait: wait.operation.start)


def _has_entered(lane: RecordedLane | None, operation: RecordedOperation) -> bool:
    """Say whether the rank with this lane has entered an operation of others, or the other end of a message."""
    kind = OPERATION_KINDS.get(MATCHING.get(operation.name, ""), COLLECTIVES)
    return lane is not None and lane.entered[kind] >= operation.sequence


def _finished(
    flights: Mapping[int, Flight], ranks: Iterable[int], key: Key, sequence: int
) -> dict[int, RecordedOperation]:
    """Return by rank the collective that it has finished with this sequence number."""
    return {
        rank: operation
        for rank in ranks
        if rank in flights
        for operation in flights[rank].operations
        if operation.end is not None and operation.kind == COLLECTIVES
        if operation.sequence == sequence and operation.lane.key == key
    }


def _signature(operation: RecordedOperation) -> tuple[str, int]:
    """Return the properties of a collective that all ranks should have in common."""
    return operation.name, operation.num_bytes if operation.name in SAME_BYTES else 0


def _differing(
    entered: Mapping[int, RecordedOperation],
) -> tuple[tuple[str, int], tuple[tuple[int, RecordedOperation], ...]]:
    """Return the signature that most ranks entered, and the ranks that entered something else."""
    signatures = [_signature(entered[rank]) for rank in sorted(entered)]
    usual = max(signatures, key=signatures.count)
    return usual, tuple((rank, entered[rank]) for rank in sorted(entered) if _signature(entered[rank]) != usual)


SHOWN_RANKS = 32
SHOWN_OPERATIONS = 3
# A rank whose last sign of life is this much older than the newest of all stopped before the others.
SILENCE_SECONDS = 3.0
# In a live run shorter waits are not reported.
USUAL_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class Diagnosis:
    """The conclusion from the records: the ranks to blame, in sentences, and the state of all ranks."""

    culprits: tuple[int, ...]
    sentences: tuple[str, ...]
    """Sentences, one for each culprit or group of them; never empty."""
    table: tuple[str, ...]
    """A line for each rank: its state and its last operations."""


@dataclass(frozen=True)
class Evidence:
    """The recorded state of all `size` ranks at one time (`now`, seconds of the wall clock)."""

    flights: Mapping[int, Flight]
    size: int
    now: float
    gone: frozenset[int] = frozenset()
    """Ranks whose processes have ended without an error message while others live."""
    silent: frozenset[int] = frozenset()
    """Ranks that were asked and did not answer."""
    first_death: int | None = None
    is_live: bool = True
    """Whether ages count back from now ("ago"), or from the last sign of life of any rank ("before the end")."""
    shortest_wait: float = 0.0
    """Seconds; shorter waits do not count."""
    hosts: Sequence[str] = ()
    """Host of each rank, used for ranks without a record."""

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        return tuple(w for w in detect_waits(self.flights) if self.now - w.operation.start >= self.shortest_wait)

    def name(self, rank: int) -> str:
        host = self.host(rank)
        return f"rank {rank} (host {host})" if host else f"rank {rank}"

    def host(self, rank: int) -> str:
        flight = self.flights.get(rank)
        return flight.host if flight else self.hosts[rank] if 0 <= rank < len(self.hosts) else ""

    def names(self, ranks: Collection[int]) -> str:
        if len(ranks) == 1:
            return self.name(*ranks)
        hosts = sorted({self.host(rank) for rank in ranks} - {""})
        summary = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
        return f"ranks {write_ranks(ranks)} (host{'s' * (len(hosts) > 1)} {summary})"

    def age(self, time: float) -> str:
        return f"{max(self.now - time, 0):.1f} s " + ("ago" if self.is_live else "before the end")

    def last_operation(self, rank: int) -> str:
        flight = self.flights.get(rank)
        if flight is None:
            return "it left no record"
        if not flight.operations:
            return "it has recorded no operation"
        last = max(flight.operations, key=_recency)
        if last.end is not None:
            state = f"finished {self.age(last.end)}"
        elif last.abandoned is not None:
            state = f"begun {self.age(last.start)} and abandoned {self.age(last.abandoned)}"
        else:
            state = f"begun {self.age(last.start)} and in flight"
        return f"its last was {describe(last)}, {state}"


def describe(operation: RecordedOperation, brief: bool = False) -> str:
    """Describe an operation, such as `all_reduce number 17 on lane data [0-3], 4.2 MB`."""
    number, peer = operation.sequence, ""
    if operation.name in MATCHING and operation.peer >= 0:
        peer = f" {'to' if operation.name == 'send' else 'from'} {operation.peer}"
    size = f", {format_bytes(operation.num_bytes)}" if operation.num_bytes else ""
    if brief:
        return f"{operation.name} {number}{peer} on {operation.lane.name}{size}"
    return f"{operation.name} number {number}{peer} on lane {operation.lane}{size}"


def _recency(operation: RecordedOperation) -> tuple[bool, float]:
    left = operation.end or operation.abandoned
    return left is None, left or operation.start


def format_bytes(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def diagnose(evidence: Evidence) -> Diagnosis:
    """Identify the ranks that the others wait for, or that ended first; return the report."""
    result = (
        _deaths(evidence) + _failures(evidence) or _losses(evidence) or _mismatches(evidence) or _absences(evidence)
    )
    result = result or _silences(evidence) or _standstill(evidence)
    culprits = tuple(dict.fromkeys(rank for ranks, _ in result for rank in ranks))
    return Diagnosis(culprits, tuple(text for _, text in result), tuple(make_table(evidence, culprits)))


Findings = list[tuple[tuple[int, ...], str]]


def _failures(evidence: Evidence) -> Findings:
    errors: dict[str, list[int]] = {}
    for flight in evidence.flights.values():
        if flight.state == FAILED:
            errors.setdefault(flight.error, []).append(flight.rank)
    return [(tuple(ranks), f"{evidence.names(ranks)} reported: {error}") for error, ranks in errors.items()]


def _deaths(evidence: Evidence) -> Findings:
    if (first := evidence.first_death) is None:
        return []
    text = f"{evidence.name(first)} was killed or crashed, the first to end without a word"
    return [((first,), f"{text}; {evidence.last_operation(first)}")]


def _losses(evidence: Evidence) -> Findings:
    """Report ranks that are dead, or do not answer."""
    result: Findings = []
    for ranks, one, many in (
        (evidence.gone, "is gone: its process ended without a word", "are gone: their processes ended without a word"),
        (evidence.silent - evidence.gone, "does not answer: it is {}", "do not answer: they are {}"),
    ):
        if ranks:
            text = (many if len(ranks) > 1 else one).format("gone, or stuck in a call that holds Python's lock")
            result.append((tuple(sorted(ranks)), f"{evidence.names(ranks)} {text}; {_absence(evidence, ranks)}"))
    return result


def _mismatches(evidence: Evidence) -> Findings:
    result: Findings = []
    for wait in evidence.waits:
        for rank, operation in wait.differing:
            usual = f"{wait.operation.name}, {format_bytes(wait.operation.num_bytes)}"
            text = f"{evidence.name(rank)} entered {describe(operation)}, where others of the lane entered {usual}"
            result.append(((rank,), text))
    return result


def _absences(evidence: Evidence) -> Findings:
    """Report ranks that others wait for and that wait for nobody; or else a circle of ranks that wait for each
    other."""
    awaited = {rank for wait in evidence.waits for rank in wait.missing}
    waiting = {rank for wait in evidence.waits if wait.missing for rank in wait.waiting}
    roots = awaited - waiting
    if roots:
        groups: dict[int, list[int]] = {}  # ranks that are missing in the same operation are reported together
        for rank in sorted(roots):
            groups.setdefault(next(i for i, w in enumerate(evidence.waits) if rank in w.missing), []).append(rank)
        return [(tuple(ranks), f"{evidence.names(ranks)} {_absence(evidence, ranks)}") for ranks in groups.values()]
    if not awaited:
        return []
    circle = [wait for wait in evidence.waits if wait.missing]
    summary = [
        f"{evidence.names(w.waiting)} in {describe(w.operation)} for {write_ranks(w.missing)}" for w in circle[:8]
    ]
    return [(tuple(sorted(awaited)), "ranks wait for each other: " + "; ".join(summary))]


def _absence(evidence: Evidence, ranks: Collection[int]) -> str:
    """Return the operation that these ranks have not entered, their last ones, and how many ranks wait, in words."""
    wait = next((wait for wait in evidence.waits if set(ranks) & set(wait.missing)), None)
    last = evidence.last_operation(min(ranks))
    if len(ranks) > 1:
        last = last.replace("its last", f"the last of rank {min(ranks)}").replace("it ", f"rank {min(ranks)} ", 1)
    if wait is None:
        return last
    operation, matching = wait.operation, ""
    if operation.name in MATCHING:
        matching = f"the {MATCHING[operation.name]} for "
    have, them = ("have", "them") if len(ranks) > 1 else ("has", "it")
    count = len(wait.waiting)
    waits = f"{count} ranks wait" if count > 1 else f"{evidence.name(wait.waiting[0])} waits"
    return f"{have} not entered {matching}{describe(operation)}; {last}; {waits} for {them}"


def _silences(evidence: Evidence) -> Findings:
    """Report ranks whose last sign of life is much older than that of others."""
    alive = {rank: flight.alive for rank, flight in evidence.flights.items() if flight.state != ENDED}
    newest = max(alive.values(), default=0.0)
    early = [rank for rank, time in alive.items() if newest - time > SILENCE_SECONDS]
    if not early or evidence.is_live:
        return []
    first = min(early, key=lambda rank: alive[rank])
    seconds = newest - alive[first]
    return [
        ((first,), f"{evidence.name(first)} stopped {seconds:.1f} s before others; {evidence.last_operation(first)}")
    ]


def _standstill(evidence: Evidence) -> Findings:
    if evidence.waits:
        wait = evidence.waits[0]
        summary = (
            f"{evidence.names(wait.waiting)} in {describe(wait.operation)}, begun {evidence.age(wait.operation.start)}"
        )
        return [((), f"{summary}: nobody is missing there, the transfer itself makes no progress")]
    return [((), "no rank waited for another one")]


def make_table(evidence: Evidence, first: Iterable[int] = ()) -> list[str]:
    """Return a line a rank: its state and its last operations, the newest first; `first` are shown in any case."""
    named = list(dict.fromkeys(first))
    order = dict.fromkeys([*named, *range(min(evidence.size, SHOWN_RANKS + len(named)))])
    shown = sorted(list(order)[:SHOWN_RANKS])
    rows = [(evidence.name(rank), _state(evidence, rank), _operations(evidence, rank)) for rank in shown]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{name:{widths[0]}}  {state:{widths[1]}}  {summary}".rstrip() for name, state, summary in rows]
    if evidence.size > len(shown):
        lines.append(f"... and {evidence.size - len(shown):,} more ranks")
    return lines


def _state(evidence: Evidence, rank: int) -> str:
    flight = evidence.flights.get(rank)
    if rank == evidence.first_death:
        return "died first"
    if rank in evidence.gone:
        return "gone"
    if rank in evidence.silent:
        return "no answer"
    if flight is None:
        return "no record"
    if flight.state != 0:
        return "ended" if flight.state == ENDED else "reported"
    return "waits" if flight.in_flight else "works"


def _operations(evidence: Evidence, rank: int) -> str:
    flight = evidence.flights.get(rank)
    if flight is None or not flight.operations:
        return "no operation" if flight else ""
    newest = sorted(flight.operations, key=_recency, reverse=True)
    summary = []
    for operation in newest[:SHOWN_OPERATIONS]:
        age = evidence.age(operation.end or operation.abandoned or operation.start)
        state = "done" if operation.end else "abandoned" if operation.abandoned else "begun"
        summary.append(f"{describe(operation, brief=True)}, {state} {age}")
    return " | ".join(summary)


def post_mortem(folder: Path, now: float) -> tuple[str, Diagnosis] | None:
    """Return the state of a run that did not end in order, from its folder of records; None where there is none.

    `now` is seconds of the wall clock, for runs that are still in flight.
    """
    flights = read_flights(folder)
    if not flights:
        return None
    size = next(iter(flights.values())).size
    states = [flight.state for flight in flights.values()]
    if len(flights) == size and all(state == ENDED for state in states):
        return None
    running = {rank: f.process_is_gone() for rank, f in flights.items() if f.state not in (ENDED, FAILED)}
    gone = frozenset(rank for rank, is_gone in running.items() if is_gone)
    is_live = any(is_gone is False for is_gone in running.values())
    if not is_live:
        now = max(flight.alive for flight in flights.values())
        gone = frozenset()  # all have ended: which was the first is another question
    is_in_flight = is_live and not gone and FAILED not in states
    shortest = USUAL_WAIT_SECONDS if is_in_flight else 0.0
    first_death = None
    if not is_live and (death := read_first_death(folder)):
        first_death, died = death
        now = max(now, died)
    evidence = Evidence(flights, size, now, gone, frozenset(), first_death, is_live, shortest)
    phases = " or ".join(dict.fromkeys(flight.phase for flight in flights.values() if flight.phase))
    if is_in_flight:
        state = "in flight"
    elif any(is_gone is None for is_gone in running.values()):
        state = "not ended in order, or still in flight on other machines"
    else:
        state = "not ended in order"
    return f"{state}, {size} ranks" + (f", in {phases}" if phases else ""), diagnose(evidence)
