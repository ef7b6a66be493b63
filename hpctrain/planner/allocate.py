"""Batch allocation of heterogeneous ZeRO (Poplar, arXiv 2408.12596): how many rows each replica takes, and how. Pure.

A replica is a device with the whole model. How long it takes for some rows at once is any function that does not fall;
how many at once fit is known too. Replicas whose rows do not fit go through them in several pieces.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hpctrain.errors import PlanError

Seconds = Callable[[int], float]
"""Of so many rows, one at least; more never take less."""


@dataclass(frozen=True)
class Replica:
    """One device. Those that are alike should have the same `seconds`: what follows from it is computed once."""

    seconds: Seconds
    """Of so many rows at once."""
    largest_rows: int
    """At once."""


@dataclass(frozen=True)
class Allocation:
    """What the replicas do in a step."""

    microbatches: int
    """As many as divide the rows and pieces of all replicas."""
    rows: tuple[int, ...]
    """Of each replica in each microbatch."""
    substeps: tuple[int, ...]
    """In how many pieces each goes through them."""
    seconds: float
    """Of the step."""


def share_rows(num_rows: int, seconds: Sequence[Seconds], least: int = 1) -> list[int]:
    """Return how many rows each takes, `least` or more, so that the slowest is as fast as can be.

    Exact: rows are given one by one to who would then be done first. Raises PlanError if there are too few.
    """
    if num_rows < least * len(seconds):
        one = "one is" if least == 1 else f"{least} are"
        raise PlanError(f"{num_rows} rows of a microbatch are too few for {len(seconds)} replicas; {one} the least")
    rows = [least] * len(seconds)
    waiting = [(of(least + 1), i) for i, of in enumerate(seconds)]
    heapq.heapify(waiting)
    for _ in range(num_rows - least * len(seconds)):
        _, i = waiting[0]
        rows[i] += 1
        heapq.heapreplace(waiting, (seconds[i](rows[i] + 1), i))
    return rows


def allocate(replicas: Sequence[Replica], global_batch: int) -> Allocation:
    """Return the fastest allocation for ZeRO 0 and 1, whose replicas meet at the end of a step alone.

    Exact: no other rows, in whatever even pieces that fit, have an earlier end of the last replica. Raises PlanError.
    """
    _check_room(replicas)
    pieces = {replica: _Pieces(replica) for replica in replicas}
    rows = share_rows(global_batch, [pieces[replica].seconds for replica in replicas])
    best = [pieces[replica].best(size) for replica, size in zip(replicas, rows, strict=True)]
    return _made(rows, [count for _, count in best], max(seconds for seconds, _ in best))


class _Pieces:
    """In how many pieces one replica goes through its rows fastest."""

    def __init__(self, replica: Replica):
        self._largest = replica.largest_rows
        self._seconds = np.array([0.0, *(replica.seconds(rows) for rows in range(1, replica.largest_rows + 1))])
        self.best = lru_cache(None)(self._best)

    def seconds(self, rows: int) -> float:
        return self.best(rows)[0]

    def _best(self, rows: int) -> tuple[float, int]:
        """Return the seconds and the number of pieces; of equally fast ones the fewest."""
        counts = np.arange(-(-rows // self._largest), rows + 1)
        small, larger = np.divmod(rows, counts)  # rows of a piece, and how many pieces have one more
        seconds = larger * self._seconds[small + (larger > 0)] + (counts - larger) * self._seconds[small]
        fastest = int(np.argmin(seconds))
        return float(seconds[fastest]), int(counts[fastest])


def allocate_in_step(replicas: Sequence[Replica], global_batch: int, exchange_seconds: float = 0.0) -> Allocation:
    """Return the fastest allocation for ZeRO 2 and 3, whose replicas exchange in every forward and backward pass.

    All take as many pieces, and each of these rounds lasts as long as the largest piece of the slowest takes, and
    `exchange_seconds`. Exact, by a search over how long a round lasts: for each number of rounds the shortest one in
    which all replicas together get through as many rows as they must. Raises PlanError.
    """
    _check_room(replicas)
    tables = {r: [r.seconds(rows) for rows in range(1, r.largest_rows + 1)] for r in replicas}
    slowest_row = max(table[0] for table in tables.values())
    lasting = np.unique([seconds for table in tables.values() for seconds in table if seconds >= slowest_row])
    # How many rows all get through in a round that lasts so long.
    through = sum(np.searchsorted(tables[replica], lasting, side="right") for replica in replicas)
    found = []
    for rounds in range(1, global_batch // len(replicas) + 1):
        shortest = int(np.searchsorted(through, -(-global_batch // rounds)))
        if shortest < len(lasting):
            found.append((rounds * (float(lasting[shortest]) + exchange_seconds), rounds))
    if not found:
        raise PlanError(
            f"{global_batch} rows of a step cannot be shared by {len(replicas)} replicas that exchange as they compute:"
            " one row of each in each round is the least, and the fastest may be out of room; set train.global_batch"
            " to more, or use fewer replicas"
        )
    seconds, rounds = min(found)

    def of_largest_piece(replica: Replica) -> Seconds:
        table = tables[replica]
        return lambda rows: table[size - 1] if (size := -(-rows // rounds)) <= len(table) else math.inf

    rows = share_rows(global_batch, [of_largest_piece(replica) for replica in replicas], least=rounds)
    return _made(rows, [rounds] * len(replicas), seconds)


def _check_room(replicas: Sequence[Replica]) -> None:
    without = [number for number, replica in enumerate(replicas) if replica.largest_rows < 1]
    if without:
        raise PlanError(
            f"replica {without[0]} (and {len(without) - 1} more) has no room for the whole model with one row; cut the"
            " model among several devices (plan.pipeline, plan.tensor), or set plan.zero higher"
        )


def _made(rows: Sequence[int], pieces: Sequence[int], seconds: float) -> Allocation:
    common = math.gcd(*itertools.chain(rows, pieces))
    return Allocation(common, tuple(r // common for r in rows), tuple(p // common for p in pieces), seconds)
