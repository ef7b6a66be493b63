"""Rows by turns: what whole rows of one microbatch cannot give to replicas, those of several can. Pure."""

import math
from collections.abc import Sequence

from hpctrain.intervals import Interval
from hpctrain.rows import Rows

GOLDEN = (math.sqrt(5) - 1) / 2


def spread(totals: Sequence[int], period: int) -> list[Rows]:
    """Return for each replica rows by turns that add up to its total over `period` microbatches.

    All microbatches have the same number of rows: the totals must add up to a multiple of `period`. A replica's numbers
    of rows differ by one at most, and those with one more are spread over the period.

    Each replica always has the whole part of its mean, and one row more in some microbatches. These are dealt out to
    one replica after the other, round and round the period, so that each microbatch is dealt as often as any other; and
    in steps of a golden section, so that those that one replica gets lie far apart.
    """
    assert sum(totals) % period == 0, (totals, period)
    step = min((n for n in range(1, period + 1) if math.gcd(n, period) == 1), key=lambda n: abs(n - GOLDEN * period))
    sizes = [[total // period] * period for total in totals]
    dealt = 0
    for own, total in zip(sizes, totals, strict=True):
        for i in range(dealt, dealt + total % period):
            own[i * step % period] += 1
        dealt += total % period
    phases: list[list[Interval]] = [[] for _ in totals]
    for microbatch in range(period):
        at = 0
        for own, rows in zip(sizes, phases, strict=True):
            rows.append(Interval(at, at + own[microbatch]))
            at += own[microbatch]
    return [Rows(tuple(each)) for each in phases]
