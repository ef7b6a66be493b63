"""Weights and gradients of a tile live in a few flat arrays, and layers have views into them.

The units whose boxes are exchanged among the same ranks form a group (see `hpctrain.model.storage.groups`). Units and
boxes are explained in `hpctrain.sharding.parameters`; tiles, holders and shard groups in docs/concepts.md. With z > 1 a
rank stores a z-th of each unit and scatters gradients back after each layer's backward pass. The whole unit is in
memory that all of z see, filled after each update, where there is such memory; else it is gathered for a layer (when,
says `hpctrain.model.storage.traffic`).
"""

from collections.abc import Collection, Iterable, Sequence

import torch

from hpctrain.model.parallel.axes import Axes, Axis, PendingWork
from hpctrain.model.storage.groups import (
    HeldArray,
    PlacedUnits,
    Sharded,
    UnitArrays,
    weight_array,
)
from hpctrain.model.storage.regions import PackedRegions
from hpctrain.model.storage.traffic import Traffic
from hpctrain.model.storage.units import Deferred, UnitStore, Weight
from hpctrain.plan.holdings import Holding
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
        self._z = axes.storing
        self.groups: list[HeldArray] = []
        self.arrays: list[UnitArrays] = []
        cut = PlacedUnits(holding.cut_units, holding.part)
        wires = exchanged or [None] * len(communicators)
        for holders, shard_group, wire in zip(communicators, holding.shard_groups, wires, strict=True):
            units = PlacedUnits(shard_group.layouts, holding.part)
            if shard_group.zero >= 2:
                self.groups.append(Sharded(shard_group, holders, units, dtype, device, wire))
                continue
            places = PackedRegions(shard_group.regions, holding.part, cut) if shard_group.regions else units
            group = HeldArray(places, weight_array(holders, places.size, dtype, device, wire), wire)
            self.groups.append(group)
            if not places.is_packed:
                group.grads = holders.allocate(units.size, torch.float32, device)
                self.arrays.append(UnitArrays(units, group.weights, group.grads))
        if cut.placed:
            zeros = torch.zeros(cut.size, dtype=dtype, device=device)
            self.arrays.append(UnitArrays(cut, zeros, torch.zeros(cut.size, dtype=torch.float32, device=device)))
            for group in self.groups:
                if group.places.is_packed:
                    _, group.in_use, group.grads = self.arrays[-1]
        self.units: list[UnitStore] = []
        for arrays in self.arrays:  # after what is made among holders: ranks of z may have different ones
            placed = arrays.units.placed
            whole = self._z.allocate_common(sum(layout.size for layout, _, _ in placed), dtype, device)
            at_whole = 0
            for layout, shard, at in placed:
                where = slice(at, at + shard.size)
                unit_whole = None if whole is None else whole[at_whole : at_whole + layout.size]
                self.units.append(UnitStore(layout, axes, arrays.weights[where], arrays.grads[where], unit_whole))
                at_whole += layout.size
        for group in self.groups:
            if isinstance(group, Sharded):
                self.units.append(UnitStore(group.layout, axes, group.weights, None, None, group))
        # Those of an item in the order of its parameters, however they are grouped: a product of several is by place.
        self.units.sort(key=lambda unit: (unit.layout.unit.items[0], unit.layout.unit.shared_heads))
        items = {item for unit in self.units for item in unit.layout.unit.items}
        self.traffic = Traffic({item: self.units_of(item) for item in items}, self._z, device, keep_gathered)
        self._awaited: list[tuple[int, PendingWork]] = []

    @property
    def is_in_place(self) -> bool:
        """True where items compute with the groups' weights as they are: `refresh` has nothing to do."""
        packed = any(group.places.is_packed for group in self.groups)
        return self._z.size == 1 and not packed

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
        for arrays in self.arrays:
            arrays.grads.zero_()
        for group in self.groups:
            if isinstance(group, Sharded):
                group.grads.zero_()
