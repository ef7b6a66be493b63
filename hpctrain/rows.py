"""Which rows of each microbatch a tile computes: the same ones of all microbatches, or others by turns."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hpctrain.intervals import Interval


@dataclass(frozen=True)
class Rows:
    """Of microbatch m the rows `phases[m % period]`.

    Whole rows seldom fit the speeds of devices; 5 and 6 by turns are five and a half. Phases that only repeat earlier
    ones are left out, so that equal rows are equal objects.
    """

    phases: tuple[Interval, ...]

    def __post_init__(self) -> None:
        size = len(self.phases)
        period = next(p for p in range(1, size + 1) if size % p == 0 and self.phases[:p] * (size // p) == self.phases)
        object.__setattr__(self, "phases", self.phases[:period])

    def __hash__(self) -> int:
        return self._hash  # of tiles, which are keys everywhere

    @cached_property
    def _hash(self) -> int:
        return hash(self.phases)

    @property
    def period(self) -> int:
        return len(self.phases)

    @cached_property
    def hull(self) -> Interval:
        """The rows from the first to the last of any microbatch."""
        return Interval(min(phase.start for phase in self.phases), max(phase.stop for phase in self.phases))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many rows there are in each phase."""
        return tuple(phase.size for phase in self.phases)

    @property
    def mean(self) -> float:
        """How many rows of a microbatch there are on the mean."""
        return sum(self.sizes) / self.period

    def of(self, microbatch: int) -> Interval:
        return self.phases[microbatch % self.period]

    def most(self, consecutive: int = 1) -> int:
        """Return the most rows that `consecutive` microbatches, one after the other, have together."""
        return most_of(self.sizes, consecutive)

    def may_meet(self, other: "Rows") -> bool:
        """Say whether some rows are in both, if maybe not of the same microbatch: a look at the bounds alone."""
        return self.hull.start < other.hull.stop and other.hull.start < self.hull.stop

    def meet(self, other: "Rows", microbatches: int) -> tuple[bool, ...]:
        """Say for each of so many microbatches whether some rows are in both."""
        return tuple(self.of(m).intersect(other.of(m)).size > 0 for m in range(microbatches))

    def listed(self) -> list:
        """Return plain lists as in plan files, such as `[0, 5]`, or by turns `[[0, 5], [0, 6, 3]]`.

        The third number is of how many microbatches, one after the other, the rows are.
        """
        if self.period == 1:
            return list(self.phases[0])
        runs = [(phase, len(list(run))) for phase, run in itertools.groupby(self.phases)]
        return [[*phase, times] if times > 1 else [*phase] for phase, times in runs]

    def __str__(self) -> str:
        return str(self.listed())


def most_of(sizes: Sequence[int], consecutive: int) -> int:
    """Return the most that `consecutive` neighbours of a sequence without end, which repeats `sizes`, add up to."""
    whole, rest = divmod(consecutive, len(sizes))
    turns = [*sizes, *sizes]
    return whole * sum(sizes) + max(sum(turns[i : i + rest]) for i in range(len(sizes)))


def common_period(rows: Sequence[Rows]) -> int:
    """Return after how many microbatches all of them are as before."""
    return math.lcm(*{each.period for each in rows})
