"""Regions of units that ranks of different tensor grids hold in common, as flat arrays.

They lie scattered in what the model computes with, are packed for the exchange and spread out after it.
"""

from collections.abc import Iterator, Sequence

import torch

from hpctrain.model.storage.groups import Places
from hpctrain.plan.holdings import Region
from hpctrain.plan.stored import RegionPlaces
from hpctrain.sharding.grid_parts import GridPart
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import Box, UnitLayout, box_size


class PackedRegions(RegionPlaces):
    """Regions of units side by side in a packed array of `size`, and where they are scattered in the units' own."""

    def __init__(self, regions: Sequence[Region], part: GridPart, units: Places):
        """They are of these units."""
        super().__init__(regions)
        self.placed: Sequence[tuple[UnitLayout, Interval, int]] = ()
        self._part = part
        self._offsets: list[tuple[int, int]] = []
        start_of: dict[str, tuple[Box, int]] = {}
        for layout, shard, at in units.placed:
            for parameter, box, placed in layout.placed():
                start_of[parameter.name] = box, at + placed.start - shard.start
        for region in regions:
            box, start = start_of[region.parameter.name]
            width = box_size(box[1:])
            first_row, *columns = (interval.start for interval in box)
            offset = (region.rows.start - first_row) * width + region.columns.start - sum(columns)
            self._offsets.append((width, start + offset))

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[Region, Interval, torch.Tensor]]:
        """Yield each region, its place in the packed array, and its [rows, columns] in the flat one."""
        for (region, at), (width, offset) in zip(self.of_regions, self._offsets, strict=True):
            shape = region.rows.size, region.columns.size
            yield region, at, flat.as_strided(shape, (width, 1), flat.storage_offset() + offset)

    def pack(self, grads: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to the sum of gradients, packed: zeros where another copy in the tile does."""
        packed = grads.new_zeros(self.size)
        for region, at, scattered in self._views(grads):
            if self._part.adds(region.parameter):
                packed[slice(*at)].view(scattered.shape).copy_(scattered)
        return packed

    def spread(self, packed: torch.Tensor, weights: torch.Tensor) -> None:
        """Bring packed weights to where they are used."""
        for _, at, scattered in self._views(weights):
            scattered.copy_(packed[slice(*at)].view(scattered.shape))
