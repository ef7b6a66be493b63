"""Rows by turns: what whole rows of one microbatch cannot give to replicas, those of a whole step can. Pure."""

from collections.abc import Sequence

from hpctrain.intervals import Interval
from hpctrain.rows import Rows


def spread(totals: Sequence[int], microbatches: int) -> list[Rows]:
    """Return for each replica rows that add up to its total over `microbatches`.

    All microbatches have the same number of rows: the totals must add up to a multiple of `microbatches`. A replica's
    numbers of rows differ by one at most, and change as seldom as can be: a pipeline is held up where they grow.

    Each replica always has the whole part of its mean, and one row more in some microbatches. These are dealt out to
    one replica after the other, round and round the step (McNaughton's wrap-around rule, 1959).
    """
    assert sum(totals) % microbatches == 0, (totals, microbatches)
    sizes = [[total // microbatches] * microbatches for total in totals]
    dealt = 0
    for own, total in zip(sizes, totals, strict=True):
        for place in range(dealt, dealt + total % microbatches):
            own[place % microbatches] += 1
        dealt += total % microbatches
    phases: list[list[Interval]] = [[] for _ in totals]
    for cut in zip(*sizes, strict=True):
        at = 0
        for size, rows in zip(cut, phases, strict=True):
            rows.append(Interval(at, at + size))
            at += size
    return [Rows(tuple(each)) for each in phases]
