"""Which operations are in flight, who is in them and who is missing: from the flight records of all ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpctrain.comm.watchdog.flight import COLLECTIVES, MATCHING, RECEIVES, SENDS, Flight, Operation, RecordedLane

# Operations for which every rank of the lane gives the same number of bytes.
SAME_BYTES = frozenset({"all_reduce", "broadcast", "barrier"})
Key = tuple[str, int, int]
Lanes = Mapping[tuple[int, Key], RecordedLane]


@dataclass(frozen=True)
class Wait:
    """Ranks in an operation, and those of its lane that have not entered it."""

    operation: Operation
    """As the rank has it that has been in it longest."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    differing: tuple[tuple[int, Operation], ...] = ()
    """Ranks that entered another operation, or one of another size, under the same number."""


def detect_waits(flights: Mapping[int, Flight]) -> list[Wait]:
    """Return what is in flight anywhere; the longest first."""
    lanes = {(rank, lane.key): lane for rank, flight in flights.items() for lane in flight.lanes}
    collectives: dict[tuple[Key, int], dict[int, Operation]] = {}
    waits = []
    for rank, flight in flights.items():
        heads: dict[Key, Operation] = {}  # what is queued behind another operation of its lane waits for that alone
        for operation in flight.in_flight:
            heads.setdefault(operation.lane.key, operation)
        for key, operation in heads.items():
            if operation.name in MATCHING:
                is_there = _matching_entered(flights.get(operation.peer), lanes, rank, operation) >= operation.sequence
                waits.append(Wait(operation, (rank,), () if is_there else (operation.peer,)))
            else:
                collectives.setdefault((key, operation.sequence), {})[rank] = operation
    members: dict[Key, set[int]] = {}
    for (rank, key), lane in lanes.items():
        members.setdefault(key, set(lane.members)).add(rank)  # a long list of ranks may have been cut short
    for (key, sequence), inside in collectives.items():
        missing = {
            r for r in members.get(key, ()) if r not in inside and _entered(lanes, r, key, COLLECTIVES) < sequence
        }
        usual, differing = _differing(inside | _finished(flights, members.get(key, ()), key, sequence))
        oldest = min(
            (o for o in inside.values() if _kind(o) == usual), key=_start, default=min(inside.values(), key=_start)
        )
        waits.append(Wait(oldest, tuple(sorted(inside)), tuple(sorted(missing)), differing))
    return sorted(waits, key=lambda wait: wait.operation.start)


def _start(operation: Operation) -> float:
    return operation.start


def _entered(lanes: Lanes, rank: int, key: Key, kind: int) -> int:
    lane = lanes.get((rank, key))
    return lane.entered[kind] if lane else 0


def _matching_entered(peer: Flight | None, lanes: Lanes, rank: int, operation: Operation) -> int:
    """Return how many operations `peer` has entered that are the other end of those of `rank`."""
    if peer is None:
        return 0
    key, name = operation.lane.key, MATCHING[operation.name]
    ours = [o.sequence for o in peer.operations if (o.lane.key, o.name, o.peer) == (key, name, rank)]
    if operation.lane.num_ranks == 2:  # its counters know even what has left the ring
        ours.append(_entered(lanes, peer.rank, key, SENDS if name == "send" else RECEIVES))
    return max(ours, default=0)


def _finished(flights: Mapping[int, Flight], ranks: Iterable[int], key: Key, sequence: int) -> dict[int, Operation]:
    """Return, by rank, the collective that it has finished under this number."""
    return {
        rank: operation
        for rank in ranks
        if rank in flights
        for operation in flights[rank].operations
        if operation.end is not None and operation.kind == COLLECTIVES
        if operation.sequence == sequence and operation.lane.key == key
    }


def _kind(operation: Operation) -> tuple[str, int]:
    return operation.name, operation.num_bytes if operation.name in SAME_BYTES else 0


def _differing(entered: Mapping[int, Operation]) -> tuple[tuple[str, int], tuple[tuple[int, Operation], ...]]:
    """Return what most entered, and the ranks that entered something else."""
    kinds = [_kind(entered[rank]) for rank in sorted(entered)]
    usual = max(kinds, key=kinds.count)
    return usual, tuple((rank, entered[rank]) for rank in sorted(entered) if _kind(entered[rank]) != usual)
