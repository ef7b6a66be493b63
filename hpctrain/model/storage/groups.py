"""Groups of ranks that hold the same, as one flat array: it is reduced, updated and gathered in one large message.

The z-shards of whole units are such an array already, and the model computes with views of it. Regions of units are
packed for the exchange, and spread out after it (`hpctrain.model.storage.regions`).
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from hpctrain.model.parallel.axes import Axis, Following, PendingWork
from hpctrain.plan.holdings import ShardGroup
from hpctrain.plan.stored import StoredRegion, UnitPlaces
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import UnitLayout


class Places(Protocol):
    """The places of what a group holds: in its flat array, and in the arrays that the model computes with."""

    size: int
    """Number of elements of the flat array."""
    placed: Sequence[tuple[UnitLayout, Interval, int]]
    """For each whole unit its layout, the shard of it on this rank, and the position in the flat array."""

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        """Yield what lies in an interval of the flat array, parameter by parameter, in order."""
        ...

    def pack(self, grads: torch.Tensor) -> torch.Tensor:
        """Return what this rank adds to the sum of gradients, as a flat array."""
        ...

    def spread(self, packed: torch.Tensor, weights: torch.Tensor) -> None:
        """Copy weights from the flat array to the arrays that the model computes with."""
        ...


class PlacedUnits(UnitPlaces):
    """Places of whole units, in which the model computes with the flat array as it is."""

    def pack(self, grads: torch.Tensor) -> torch.Tensor:
        return grads

    def spread(self, packed: torch.Tensor, weights: torch.Tensor) -> None:
        """Do nothing: the weights are where they are used."""


class HeldArray:
    """The elements that the same ranks hold, as one flat array of `size`."""

    def __init__(
        self,
        places: Places,
        weights: torch.Tensor,
        grads: torch.Tensor,
        exchanged: torch.dtype | None = None,
        stored: Interval | None = None,
        in_use: torch.Tensor | None = None,
    ):
        self.places, self.size, self.weights = places, places.size, weights
        self.grads = grads
        """This rank's gradients, fp32: those of the model's arrays or, in a sharded group, its shard of the sum."""
        self.exchanged = exchanged or weights.dtype
        """Dtype in which ranks exchange weights; it differs from that of `weights` where ranks compute in different
        dtypes."""
        self.stored = stored or Interval(0, self.size)
        """The interval of the flat array that `weights` holds on this rank."""
        self.in_use = in_use
        """The weights that the model computes with, where the group packs regions of them; else None."""

    def weights_at(self, at: Interval) -> torch.Tensor:
        return self.weights[self.stored.place_of(at)]

    def regions(self, within: Interval) -> Iterator[StoredRegion]:
        """Yield what lies in an interval of the flat array, parameter by parameter, in order."""
        return self.places.regions(within)

    def own_grads(self) -> torch.Tensor:
        """Return what this rank adds to the sum of gradients, fp32."""
        return self.places.pack(self.grads)

    def spread_weights(self) -> None:
        """Bring `weights` to where the model computes with them, where that is somewhere else."""
        if self.in_use is not None:
            self.places.spread(self.weights, self.in_use)


class Sharded(HeldArray):
    """A group of ranks that exchange one unit during the passes. They keep gradients only as shards (ZeRO 2), or
    weights too (ZeRO 3)."""

    def __init__(self, shard_group: ShardGroup, holders: Axis, places: PlacedUnits, dtype, device, exchanged=None):
        """They exchange weights in the dtype `exchanged`."""
        ((self.layout, _, _),) = places.placed
        self.holders, self.cuts = holders, shard_group.cuts(places.size)
        own = self.cuts[holders.rank]
        grads = torch.zeros(own.size, dtype=torch.float32, device=device)
        self.keeps_weights = shard_group.zero < 3
        if self.keeps_weights:
            super().__init__(places, torch.zeros(places.size, dtype=dtype, device=device), grads, exchanged)
        else:
            super().__init__(places, torch.zeros(own.size, dtype=dtype, device=device), grads, exchanged, own)

    @property
    def is_overlapped(self) -> bool:
        return self.holders.is_overlapped

    def own_grads(self) -> torch.Tensor:
        """Return the sum over all holders of what this rank owns."""
        return self.grads

    def start_sum(self, grads: torch.Tensor) -> tuple[torch.Tensor, PendingWork]:
        """Start to sum the gradients of the unit's z-shard over all holders; return this rank's part, and the work.

        The part is valid when the work has ended. All holders must call.
        """
        own = torch.empty_like(self.grads)
        return own, self.holders.start_reduce_scatter(grads, own, self.cuts)

    def start_gather(self) -> tuple[torch.Tensor, PendingWork]:
        """Start to gather weights of which each holder has a part; they are valid when the work has ended.

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
