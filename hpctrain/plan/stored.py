"""Stored regions: which elements of which parameters lie where in the flat array of a shard group. Pure.

The engine's arrays, checkpoints, and the planner's count of what moves between two plans ask the same places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.plan.holdings import Holding, Rectangle, Region
from hpctrain.sharding.grid_parts import GridPart
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import Box, Parameter, UnitLayout, whole_rows


@dataclass(frozen=True)
class StoredRegion:
    """Consecutive elements of one box of a parameter in a group's flat array."""

    parameter: Parameter
    box: Box
    elements: Interval
    """The interval in the flattened box."""
    at: Interval
    """The interval in the group's flat array."""
    counts: bool
    """Whether this copy counts in norms and checkpoints, where axes do not cut the parameter."""


class UnitPlaces:
    """Places of a rank's z-shards of whole units in its flat array of `size`, where they follow each other."""

    def __init__(self, layouts: Sequence[UnitLayout], part: GridPart):
        placed, self.size = [], 0
        for layout in layouts:
            shard = part.stored(layout)
            placed.append((layout, shard, self.size))
            self.size += shard.size
        self.placed: Sequence[tuple[UnitLayout, Interval, int]] = placed
        self._part = part

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        """Yield what lies in an interval of the flat array, parameter by parameter, in order."""
        for layout, shard, at in self.placed:
            for parameter, box, placed in layout.placed():
                stored = placed.intersect(shard).shift(at - shard.start).intersect(within)
                if stored.size:
                    elements = stored.shift(shard.start - at - placed.start)
                    yield StoredRegion(parameter, box, elements, stored, self._part.counts(parameter))


class RegionPlaces:
    """Places of regions of units, one after the other in a packed array of `size`."""

    def __init__(self, regions: Sequence[Region]):
        self.size, self.of_regions = 0, []
        for region in regions:
            self.of_regions.append((region, Interval(self.size, self.size + region.size)))
            self.size += region.size

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        """Yield what lies in an interval of the packed array. Each element has one owner, so that all count."""
        for region, placed in self.of_regions:
            at = placed.intersect(within)
            if at.size:
                yield StoredRegion(region.parameter, region.box, at.shift(-placed.start), at, counts=True)


def state_of(holding: Holding, rank: int, is_owned: bool) -> Iterator[tuple[Parameter, Rectangle]]:
    """Yield the rectangles of parameters whose masters and moments a rank updates; `is_owned`: only those that it owns
    in norms and checkpoints, which has each element once over all ranks."""
    for group in holding.shard_groups:
        places = RegionPlaces(group.regions) if group.regions else UnitPlaces(group.layouts, holding.part)
        updates_all = not (is_owned or group.zero)
        within = Interval(0, places.size) if updates_all else group.cuts(places.size)[group.ranks.index(rank)]
        for region in places.regions(within):
            if region.counts or not is_owned:
                for rows, columns, _ in whole_rows(region.parameter, region.box, region.elements):
                    yield region.parameter, (rows, Interval(columns.start, columns.stop))
