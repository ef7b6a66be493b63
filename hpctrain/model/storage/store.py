"""Weights and gradients of a tile live in a few flat arrays, and layers have views into them.

The units whose boxes are exchanged among the same ranks form a group (see `hpctrain.model.storage.groups`). Units and
boxes are explained in `hpctrain.sharding.parameters`; tiles, holders and shard groups in docs/concepts.md. With z > 1 a
rank stores a z-th of each unit and scatters gradients back after each layer's backward pass. The whole unit is in
memory that all of z see, filled after each update, where there is such memory; else it is gathered for a layer (when,
says `hpctrain.model.storage.traffic`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from hpctrain.model.parallel.axes import Axes, Axis, PendingWork
from hpctrain.model.storage.groups import HeldArray, PlacedUnits, Sharded
from hpctrain.model.storage.regions import PackedRegions
from hpctrain.model.storage.traffic import Traffic
from hpctrain.model.storage.units import Deferred, UnitStore, Weight
from hpctrain.plan.holdings import Holding, ShardGroup
from hpctrain.sharding.grid_parts import GridPart
from hpctrain.sharding.intervals import Interval


class Store:
    """All weights of one tile on one rank, by the ranks that hold the same."""

    def __init__(
        self,
        communicators: Sequence[Axis],
        holding: Holding,
        axes: Axes,
        dtype: torch.dtype,
        device: torch.device,
        keep_gathered: Collection[int] = (),
        exchanged: Sequence[torch.dtype | None] = (),
    ):
        """`communicators` are those of the shard groups, in their order. All holders, and all ranks of z, must call.

        `exchanged` has for each of them the dtype of exchanged weights; None where all its ranks compute in one dtype.
        Weights of the items `keep_gathered` stay gathered until they change.
        """
        self._z, part = axes.storing, holding.part
        cut = PlacedUnits(holding.cut_units, part)
        zeros, grads = (torch.zeros(cut.size, dtype=each, device=device) for each in (dtype, torch.float32))
        of_regions = HeldArray(cut, zeros, grads)
        wires = exchanged or [None] * len(communicators)
        self.groups = [
            _held_array(shard_group, holders, part, of_regions, dtype, wire)
            for shard_group, holders, wire in zip(holding.shard_groups, communicators, wires, strict=True)
        ]
        sharded = [group for group in self.groups if isinstance(group, Sharded)]
        others = [group for group in self.groups if group.in_use is None and group not in sharded]
        self.arrays = [*others, of_regions, *sharded]
        """The arrays that the model computes with."""
        # After what is made among holders: ranks of z may have different ones.
        self.units = [unit for array in self.arrays for unit in self._units_in(array, part)]
        # Those of an item in the order of its parameters, however they are grouped: a product of several is by place.
        self.units.sort(key=lambda unit: (unit.layout.unit.items[0], unit.layout.unit.shared_heads))
        items = {item for unit in self.units for item in unit.layout.unit.items}
        self.traffic = Traffic({item: self.units_of(item) for item in items}, self._z, device, keep_gathered)
        self._awaited: list[tuple[int, PendingWork]] = []

    def _units_in(self, array: HeldArray, part: GridPart) -> Iterator[UnitStore]:
        """Yield the units of an array, with memory that all of z see. All of z must call."""
        placed, sharded = array.places.placed, array if isinstance(array, Sharded) else None
        size = sum(layout.size for layout, _, _ in placed)
        whole = None
        if size and not sharded:
            whole = self._z.allocate_common(size, array.weights.dtype, array.weights.device)
        at_whole = 0
        for layout, shard, at in placed:
            own = slice(at, at + shard.size)
            unit_whole = None if whole is None else whole[at_whole : at_whole + layout.size]
            cuts = part.stored_cuts(layout)
            yield UnitStore(layout, cuts, self._z, array.weights[own], array.grads[own], unit_whole, sharded)
            at_whole += layout.size

    @property
    def is_in_place(self) -> bool:
        """True where items compute with the groups' weights as they are: `refresh` has nothing to do."""
        return self._z.size == 1 and all(group.in_use is None for group in self.groups)

    def note_gathering(self, item: int, work: PendingWork) -> None:
        """Record that weights of an item, and maybe of later items, are being gathered."""
        self._awaited.append((item, work))

    def await_weights(self, item: int | None = None) -> None:
        """Wait until the weights of an item (None: all), and of the items before it, have been gathered."""
        while self._awaited and (item is None or self._awaited[0][0] <= item):
            self._awaited.pop(0)[1].wait()

    def refresh(self) -> None:
        """Bring changed weights of all groups into use, on all of z, whose ranks must all call."""
        for group in self.groups:
            group.spread_weights()
        self.traffic.forget()
        if any(unit.is_common for unit in self.units):
            self._z.barrier()  # other ranks may still be reading
            for unit in self.units:
                unit.share_shard()
            self._z.barrier()

    def units_of(self, item: int) -> list[UnitStore]:
        return [unit for unit in self.units if item in unit.layout.unit.items]

    def weights(self, item: int, names: Iterable[str]) -> list[Weight]:
        """Return handles for the named parameters of an item, neighbours as one. Empty if it has none of them."""
        names = list(names)
        return [weight for unit in self.units_of(item) for weight in unit.weights(names)]

    def defer(self, items: Interval, kept: list[Deferred] | None) -> None:
        """Do what `UnitStore.defer` does, for all units of some items."""
        for item in range(*items):
            for unit in self.units_of(item):
                unit.defer(kept)

    def zero_grads(self) -> None:
        for array in self.arrays:
            array.grads.zero_()


def _held_array(
    shard_group: ShardGroup, holders: Axis, part: GridPart, of_regions: HeldArray, dtype, wire: torch.dtype | None
) -> HeldArray:
    """Make the array of a shard group, whose regions are of units in the array `of_regions`."""
    device = of_regions.weights.device
    units = PlacedUnits(shard_group.layouts, part)
    if shard_group.zero >= 2:
        return Sharded(shard_group, holders, units, dtype, device, wire)
    if not shard_group.regions:
        weights = torch.zeros(units.size, dtype=dtype, device=device)
        return HeldArray(units, weights, torch.zeros(units.size, device=device), wire)
    places = PackedRegions(shard_group.regions, part, of_regions.places)
    weights = torch.zeros(places.size, dtype=dtype, device=device)
    return HeldArray(places, weights, of_regions.grads, wire, in_use=of_regions.weights)
