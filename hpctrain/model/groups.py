"""Groups of ranks that hold the same, as one flat array: it is reduced, updated and gathered in one large message.

Whole units are such an array already, and the model computes with views of it; regions of units are in
`hpctrain.model.regions`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hpctrain.model.axes import Axes, Axis, Following, PendingWork
from hpctrain.plan.holders import ShardGroup
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.parameters import Box, Parameter, UnitLayout


@dataclass(frozen=True)
class StoredRegion:
    """Consecutive elements of one box of a parameter in a group's flat array."""

    parameter: Parameter
    box: Box
    elements: Interval
    """Within the flattened box."""
    at: Interval
    """Within the group's flat array."""
    counts: bool
    """Whether this copy is the one for norms and checkpoints, where x or y do not cut the parameter."""


def weight_array(holders: Axis, size: int, dtype: torch.dtype, device, exchanged: torch.dtype | None) -> torch.Tensor:
    """Return zeros [size] for weights. Where all holders compute in one dtype (`exchanged` is None) it is memory that
    suits their collectives, and all of them must call."""
    return torch.zeros(size, dtype=dtype, device=device) if exchanged else holders.allocate(size, dtype, device)


class UnitArrays:
    """This rank's z-shards of some units, side by side: `weights` in the compute dtype, `grads` in fp32."""

    def __init__(self, layouts: Sequence[UnitLayout], axes: Axes, holders: Axis | None, dtype, device, exchanged=None):
        """The arrays are in memory that suits the collectives of `holders`, all of whom must call. They exchange
        weights in the dtype `exchanged`."""
        self.exchanged: torch.dtype = exchanged or dtype
        shards = [cut_evenly(layout.size, axes.z.size)[axes.z.rank] for layout in layouts]
        total = sum(shard.size for shard in shards)
        if holders:
            self.weights = weight_array(holders, total, dtype, device, exchanged)
            self.grads = holders.allocate(total, torch.float32, device)
        else:
            self.weights = torch.zeros(total, dtype=dtype, device=device)
            self.grads = torch.zeros(total, dtype=torch.float32, device=device)
        self.placed: list[tuple[UnitLayout, Interval, int]] = []
        """Of each unit its layout, the shard of it that is here, and where in the arrays."""
        at = 0
        for layout, shard in zip(layouts, shards, strict=True):
            self.placed.append((layout, shard, at))
            at += shard.size


class Group:
    """Ranks that hold the same elements, as one flat array of `size`."""

    def __init__(self, size: int, weights: torch.Tensor, stored: Interval | None = None):
        self.size = size
        self.weights = weights
        self.exchanged = weights.dtype
        """In which dtype weights go between the ranks: another one where these compute in different dtypes."""
        self.stored = stored or Interval(0, size)
        """The elements that `weights` has on this rank."""

    def weights_at(self, at: Interval) -> torch.Tensor:
        return self.weights[slice(*at.shift(-self.stored.start))]

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        """Yield what lies in an interval of the flat array, parameter by parameter, in order."""
        raise NotImplementedError

    def own_grads(self) -> torch.Tensor:
        """Return what this rank adds to the sum of gradients, fp32."""
        raise NotImplementedError

    def spread_weights(self) -> None:
        """Bring `weights` to where the model computes with them, where that is somewhere else."""


class WholeUnits(Group):
    """The group of ranks that hold the same units by the same tensor grid."""

    def __init__(self, arrays: UnitArrays, axes: Axes):
        super().__init__(arrays.weights.numel(), arrays.weights)
        self.exchanged = arrays.exchanged
        self._placed, self._grads = arrays.placed, arrays.grads
        self._coordinate = (axes.x.rank, axes.y.rank)

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        return _unit_regions(self._placed, self._coordinate, within)

    def own_grads(self) -> torch.Tensor:
        return self._grads


class Sharded(Group):
    """A group of ranks that exchange one item while it computes: they keep gradients as shards only (ZeRO 2), or
    weights too (ZeRO 3)."""

    def __init__(self, shard_group: ShardGroup, holders: Axis, size: int, dtype, device, exchanged=None):
        """`size` is of what they hold together; they exchange weights in the dtype `exchanged`."""
        self.holders, self.cuts = holders, shard_group.cuts(size)
        self.item = shard_group.final_after
        own = self.cuts[holders.rank]
        self.keeps_weights = shard_group.zero < 3
        if self.keeps_weights:
            super().__init__(size, weight_array(holders, size, dtype, device, exchanged))
        else:
            super().__init__(size, torch.zeros(own.size, dtype=dtype, device=device), own)
        self.exchanged = exchanged or dtype
        self._grads = torch.zeros(own.size, dtype=torch.float32, device=device)

    @property
    def is_overlapped(self) -> bool:
        return self.holders.is_overlapped

    def own_grads(self) -> torch.Tensor:
        """Return the sum over all holders of what this rank owns."""
        return self._grads

    def start_sum(self, grads: torch.Tensor) -> tuple[torch.Tensor, PendingWork]:
        """Sum the group's gradients over all holders, all of whom must call; return this rank's own shard of them,
        which is there when the work is done."""
        own = torch.empty_like(self._grads)
        return own, self.holders.start_reduce_scatter(grads, own, self.cuts)

    def add(self, own: torch.Tensor) -> None:
        self._grads += own

    def start_gather(self) -> tuple[torch.Tensor, PendingWork]:
        """Return the weights of which each holder has a part, which are there when the work is done.

        All holders must call.
        """
        sent = self.weights.new_empty(self.size, dtype=self.exchanged)
        sent[slice(*self.stored)] = self.weights
        work = self.holders.start_all_gather(sent, self.cuts)
        if self.exchanged == self.weights.dtype:
            return sent, work
        whole = self.weights.new_empty(self.size)
        work = Following([work], lambda: whole.copy_(sent))
        if not self.is_overlapped:
            work.wait()
        return whole, work


class ShardedUnit(Sharded):
    """The group of ranks that hold one unit, by the same tensor grid, as shards."""

    is_equivalent = True
    """Whether all holders have the same tensor grid."""

    def __init__(self, shard_group: ShardGroup, holders: Axis, axes: Axes, dtype, device, exchanged=None):
        (self.layout,) = shard_group.layouts
        shard = cut_evenly(self.layout.size, axes.z.size)[axes.z.rank]
        super().__init__(shard_group, holders, shard.size, dtype, device, exchanged)
        self._placed, self._coordinate = [(self.layout, shard, 0)], (axes.x.rank, axes.y.rank)

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        return _unit_regions(self._placed, self._coordinate, within)


def _unit_regions(placed_units, coordinate: tuple[int, int], within: Interval) -> Iterator[StoredRegion]:
    for layout, shard, at in placed_units:
        for parameter, box, placed in layout.placed():
            stored = placed.intersect(shard).shift(at - shard.start).intersect(within)
            if stored.size:
                elements = stored.shift(shard.start - at - placed.start)
                yield StoredRegion(parameter, box, elements, stored, parameter.counts_at(*coordinate))
