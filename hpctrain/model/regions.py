"""Regions of units that ranks of different tensor grids hold in common, as flat arrays.

They lie scattered in what the model computes with, are packed for the exchange and spread out after it.
"""

from collections.abc import Iterator, Sequence

import torch

from hpctrain.model.axes import Axes, Axis, Following, PendingWork
from hpctrain.model.groups import Group, Sharded, StoredRegion, UnitArrays
from hpctrain.plan.holders import Region, ShardGroup
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.parameters import Box, UnitLayout, box_size


class PackedRegions:
    """Regions of units side by side in a packed array of `size`, and where they are scattered in the units' own."""

    def __init__(self, regions: Sequence[Region], axes: Axes):
        self._axes = axes
        self._regions: list[tuple[Region, Interval]] = []
        at = 0
        for region in regions:
            self._regions.append((region, Interval(at, at + region.size)))
            at += region.size
        self.size = at

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        """Yield what lies in an interval of the packed array. Each element has one owner, so that all count."""
        for region, placed in self._regions:
            at = placed.intersect(within)
            if at.size:
                yield StoredRegion(region.parameter, region.box, at.shift(-placed.start), at, counts=True)

    def attach_views(self, placed_units: Sequence[tuple[UnitLayout, Interval, int]]) -> None:
        """Take note where the regions are in a flat array of z-shards: of each unit its layout, the shard of it that is
        there, and where."""
        start_of: dict[str, tuple[Box, int]] = {}
        for layout, shard, at in placed_units:
            for parameter, box, placed in layout.placed():
                start_of[parameter.name] = box, at + placed.start - shard.start
        self._offsets: list[tuple[int, int]] = []
        for region, _ in self._regions:
            box, start = start_of[region.parameter.name]
            width = box_size(box[1:])
            first_row, *columns = (interval.start for interval in box)
            offset = (region.rows.start - first_row) * width + region.columns.start - sum(columns)
            self._offsets.append((width, start + offset))

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[Region, Interval, torch.Tensor]]:
        """Yield each region, its place in the packed array, and its [rows, columns] in the flat one."""
        for (region, at), (width, offset) in zip(self._regions, self._offsets, strict=True):
            shape = region.rows.size, region.columns.size
            yield region, at, flat.as_strided(shape, (width, 1), flat.storage_offset() + offset)

    def pack(self, grads: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to the sum of gradients, packed: zeros where another copy in the tile does."""
        packed = grads.new_zeros(self.size)
        for region, at, scattered in self._views(grads):
            has_part = self._axes.sequence_parallel and region.parameter.is_whole_on_y
            if region.parameter.counts_at(self._axes.x.rank, 0 if has_part else self._axes.y.rank):
                packed[slice(*at)].view(scattered.shape).copy_(scattered)
        return packed

    def spread(self, packed: torch.Tensor, weights: torch.Tensor) -> None:
        """Bring packed weights to where they are used."""
        for _, at, scattered in self._views(weights):
            scattered.copy_(packed[slice(*at)].view(scattered.shape))


class CutRegions(Group):
    """The group of ranks that hold the same regions, by different tensor grids."""

    def __init__(self, regions: PackedRegions, weights: torch.Tensor, exchanged: torch.dtype | None = None):
        super().__init__(weights.numel(), weights)
        self.exchanged = exchanged or weights.dtype
        self._regions = regions

    def attach(self, arrays: UnitArrays) -> None:
        """Locate the regions in the arrays of the units that they are of."""
        self._regions.attach_views(arrays.placed)
        self._arrays = arrays

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        return self._regions.regions(within)

    def own_grads(self) -> torch.Tensor:
        return self._regions.pack(self._arrays.grads)

    def spread_weights(self) -> None:
        self._regions.spread(self.weights, self._arrays.weights)


class ShardedRegions(Sharded):
    """The group of ranks that hold the same regions of one item, by different tensor grids, as shards."""

    def __init__(self, shard_group: ShardGroup, holders: Axis, axes: Axes, dtype, device, exchanged=None):
        self.packed = PackedRegions(shard_group.regions, axes)
        super().__init__(shard_group, holders, self.packed.size, dtype, device, exchanged)
        self._in_use: torch.Tensor | None = None

    def attach(self, placed: tuple[UnitLayout, Interval, int], weights: torch.Tensor | None) -> None:
        """Locate the regions in the z-shard of their unit; `weights` are those in use, where they stay."""
        self.packed.attach_views([placed])
        self._in_use = weights

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        return self.packed.regions(within)

    def spread_weights(self) -> None:
        if self._in_use is not None:
            self.packed.spread(self.weights, self._in_use)


class CutUnit:
    """One unit that ranks of different tensor grids hold: its z-shard here, all whose regions are kept as shards.

    To the unit it is what `ShardedUnit` is where grids are equal.
    """

    is_equivalent = False

    def __init__(self, layout: UnitLayout, groups: Sequence[ShardedRegions], axes: Axes, dtype, device):
        """`groups` have all regions of the shard, in the order in which all ranks exchange them."""
        self.layout, self._groups = layout, groups
        shard = cut_evenly(layout.size, axes.z.size)[axes.z.rank]
        self._size, self._dtype, self._device = shard.size, dtype, device
        self.keeps_weights = groups[0].keeps_weights
        self.is_overlapped = groups[0].is_overlapped
        self.weights = torch.zeros(shard.size, dtype=dtype, device=device) if self.keeps_weights else None
        for group in groups:
            group.attach((layout, shard, 0), self.weights)

    def start_sum(self, grads: torch.Tensor) -> tuple[list[torch.Tensor], PendingWork]:
        """Do what `Sharded.start_sum` does, for each group."""
        started = [group.start_sum(group.packed.pack(grads)) for group in self._groups]
        return [own for own, _ in started], Following([work for _, work in started])

    def add(self, own: list[torch.Tensor]) -> None:
        for group, part in zip(self._groups, own, strict=True):
            group.add(part)

    def start_gather(self) -> tuple[torch.Tensor, PendingWork]:
        """Do what `Sharded.start_gather` does, for the whole z-shard."""
        shard = torch.zeros(self._size, dtype=self._dtype, device=self._device)  # padding is in no region
        started = [group.start_gather() for group in self._groups]

        def spread() -> None:
            for group, (packed, _) in zip(self._groups, started, strict=True):
                group.packed.spread(packed, shard)

        work = Following([work for _, work in started], spread)
        if not self.is_overlapped:
            work.wait()
        return shard, work
