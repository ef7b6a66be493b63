"""Where weights and gradients of a tile live: a few flat arrays, and views into them.

The units (see `hpctrain.parameters`) whose pieces are exchanged among the same ranks form a group (see
`hpctrain.model.groups`). With z > 1 a rank stores a z-th of each unit and scatters gradients back after each item's
backward pass. The whole unit is in memory that all of z see, filled after each update, where there is such memory;
else it is gathered while an item computes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from hpctrain.holders import Holdings
from hpctrain.intervals import Interval, cut_evenly
from hpctrain.model.axes import Axes, Axis, Work
from hpctrain.model.groups import Group, ShardedUnit, Slabs, UnitArrays, WholeUnits
from hpctrain.parameters import UnitLayout


class Weight:
    """A weight in use: `data` in the compute dtype, and `grad` in fp32, to which a backward pass adds.

    Both are views that are there only while the unit is gathered.
    """

    __slots__ = ("data", "deferred", "grad", "name")

    def __init__(self, name: str):
        self.name = name
        self.data: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.deferred: list[Deferred] | None = None
        """Where additions to `grad` are kept, while a backward pass leaves them for later."""

    def accumulate(self, add: Callable[..., object], *operands: torch.Tensor) -> None:
        """Do `add(grad, *operands)`, which adds to the gradient: now, or once the weight pass comes to it.

        The operands must stay as they are until then. For backward passes, which change `grad` in no other way.
        """
        if self.deferred is None:
            add(self.grad, *operands)
        else:  # detached, or they would keep the graph that they were saved in, and its input and gradient with it
            self.deferred.append(Deferred(self, add, tuple(operand.detach() for operand in operands)))


class Deferred(NamedTuple):
    """What is still to be added to a weight's gradient, with what it takes to do so."""

    weight: Weight
    add: Callable[..., object]
    operands: tuple[torch.Tensor, ...]

    def do(self) -> None:
        self.add(self.weight.grad, *self.operands)


class WholeGradients:
    """Room for the whole gradients of the units of one item at a time, in memory that z exchanges at least cost."""

    def __init__(self, layouts: Iterable[UnitLayout], z: Axis, device: torch.device):
        sizes: Counter[int] = Counter()
        for layout in layouts:
            sizes.update(dict.fromkeys(layout.unit.items, layout.size))
        self._room = z.allocate(max(sizes.values(), default=0), torch.float32, device)
        self._at = self._users = 0

    def take(self, numel: int) -> torch.Tensor:
        """Return zeros; pair with `give_back`."""
        self._users += 1
        self._at += numel
        return self._room[self._at - numel : self._at].zero_()

    def give_back(self) -> None:
        self._users -= 1
        if not self._users:
            self._at = 0


class UnitStore:
    """One unit on one rank: its z-shard of weights and gradients, and its views while gathered."""

    def __init__(
        self,
        layout: UnitLayout,
        axes: Axes,
        weights: torch.Tensor,
        grads: torch.Tensor | None,
        whole: torch.Tensor | None,
        whole_grads: WholeGradients,
        sharded: ShardedUnit | None = None,
    ):
        """`weights` and `grads` are this rank's z-shard; `whole` is the unit in memory that all of z see, if any.

        With `sharded` that has the gradients, and `weights` may be no more than what it has of them.
        """
        self.layout = layout
        self._sharded = sharded
        self._stays = whole is not None or (axes.z.size == 1 and (sharded is None or sharded.keeps_weights))
        self._scatters = axes.z.size > 1 or sharded is not None
        self._z = axes.z
        self._whole, self._whole_grads = whole, whole_grads
        self._cuts = cut_evenly(layout.size, axes.z.size)
        self._shard, self._grad_shard = weights, grads
        self._views: list[tuple[Weight, Interval, tuple[int, ...]]] = []
        self._users = 0

    def weights(self, names: Iterable[str]) -> list[Weight]:
        """Return handles for the named parameters, as few as can be: neighbours with equal trailing dims are one.

        Names that are not in this unit are left out.
        """
        wanted = set(names)
        runs: list[tuple[list[str], Interval, tuple[int, ...]]] = []
        for parameter, box, at in self.layout.placed():
            if parameter.name not in wanted:
                continue
            shape = tuple(interval.size for interval in box)
            if runs and runs[-1][1].stop == at.start and runs[-1][2][1:] == shape[1:]:
                held, where, above = runs[-1]
                runs[-1] = ([*held, parameter.name], Interval(where.start, at.stop), (above[0] + shape[0], *shape[1:]))
            else:
                runs.append(([parameter.name], at, shape))
        found = [(Weight("+".join(held)), where, shape) for held, where, shape in runs]
        self._views += found
        if self._stays:
            whole = self._shard if self._whole is None else self._whole
            self._set_views(found, whole, None if self._scatters else self._grad_shard)
        return [weight for weight, _, _ in found]

    @staticmethod
    def _set_views(views, data: torch.Tensor | None, grad: torch.Tensor | None) -> None:
        for weight, at, shape in views:
            weight.data = None if data is None else data[slice(*at)].view(shape)
            weight.grad = None if grad is None else grad[slice(*at)].view(shape)

    def gather(self) -> None:
        """Make the whole unit available; pair with `release`. All ranks of z, and holders of shards, must call."""
        self._users += 1
        if self._stays or self._users > 1:
            return
        whole = shard = self._sharded.all_weights() if self._sharded else self._shard
        if self._z.size > 1:
            whole = shard.new_empty(self.layout.size)
            whole[slice(*self._cuts[self._z.rank])] = shard
            self._z.all_gather(whole, self._cuts)
        self._set_views(self._views, whole, None)

    def publish(self) -> None:
        """Copy this rank's shard to where all of z see it; nobody may be reading."""
        if self._whole is not None:
            self._whole[slice(*self._cuts[self._z.rank])] = self._shard

    def defer(self, kept: list[Deferred] | None) -> None:
        """Let backward passes keep in a list what they would add to gradients; None: let them add it at once."""
        for weight, _, _ in self._views:
            weight.deferred = kept

    def begin_backward(self) -> None:
        """Make room for the gradient of the whole unit."""
        if self._scatters:
            self._whole_grad = self._whole_grads.take(self.layout.size)
            for weight, at, shape in self._views:
                weight.grad = self._whole_grad[slice(*at)].view(shape)

    def end_backward(self) -> None:
        """Sum the gradient and keep this rank's part. All ranks of z, and holders of shards, must call."""
        if not self._scatters:
            return
        part = self._whole_grad
        if self._z.size > 1:
            part = part.new_empty(self._cuts[self._z.rank].size)
            self._z.reduce_scatter(self._whole_grad, part, self._cuts)
        if self._sharded:
            self._sharded.add_grads(part)
        else:
            self._grad_shard += part
        self._whole_grads.give_back()

    def release(self) -> None:
        self._users -= 1
        if not self._stays and self._users == 0:
            self._set_views(self._views, None, None)


class Store:
    """All weights of one tile on one rank, by the ranks that hold the same."""

    def __init__(self, communicators: Sequence[Axis], held: Holdings, axes: Axes, dtype, device):
        """`communicators` are those of the holdings, in their order. All holders, and all ranks of z, must call."""
        self._z = axes.z
        scattered = [u for h in held.holdings if axes.z.size > 1 or h.zero >= 2 for u in h.layouts]
        scattered += held.cut_units if axes.z.size > 1 else ()
        whole_grads = WholeGradients(scattered, axes.z, device)
        self.groups: list[Group] = []
        self._arrays: list[UnitArrays] = []
        for holders, holding in zip(communicators, held.holdings, strict=True):
            if holding.slabs:
                weights = holders.allocate(sum(slab.size for slab in holding.slabs), dtype, device)
                self.groups.append(Slabs(holding.slabs, axes, weights))
            elif holding.zero >= 2:
                self.groups.append(ShardedUnit(holding, holders, axes, dtype, device))
            else:
                self._arrays.append(UnitArrays(holding.layouts, axes, holders, dtype, device))
                self.groups.append(WholeUnits(self._arrays[-1], axes))
        if held.cut_units:
            self._arrays.append(UnitArrays(held.cut_units, axes, None, dtype, device))
            for group in self.groups:
                if isinstance(group, Slabs):
                    group.attach(self._arrays[-1])
        self._units: list[UnitStore] = []
        for arrays in self._arrays:  # after what is made among holders: ranks of z may have unlike ones
            whole = axes.z.allocate_common(sum(layout.size for layout, _, _ in arrays.placed), dtype, device)
            at_whole = 0
            for layout, shard, at in arrays.placed:
                where = slice(at, at + shard.size)
                unit_whole = None if whole is None else whole[at_whole : at_whole + layout.size]
                weights, grads = arrays.weights[where], arrays.grads[where]
                self._units.append(UnitStore(layout, axes, weights, grads, unit_whole, whole_grads))
                at_whole += layout.size

        for group in self.groups:
            if isinstance(group, ShardedUnit):
                self._units.append(UnitStore(group.layout, axes, group.weights, None, None, whole_grads, group))
        # Those of an item in the order of its parameters, however they are grouped: a product of several is by place.
        self._units.sort(key=lambda unit: (unit.layout.unit.items[0], unit.layout.unit.shared_over_y))
        self._awaited: list[tuple[int, Work]] = []

    @property
    def is_in_place(self) -> bool:
        """Whether items compute with the groups' weights as they are: nothing is to be done by `publish`."""
        return self._z.size == 1 and not any(isinstance(group, Slabs) for group in self.groups)

    def expect(self, item: int, work: Work) -> None:
        """Take note that weights of an item, and maybe of items behind it, are being gathered."""
        self._awaited.append((item, work))

    def await_weights(self, item: int | None = None) -> None:
        """Return when the weights of an item (None: all) are there, and those of the items before it."""
        while self._awaited and (item is None or self._awaited[0][0] <= item):
            self._awaited.pop(0)[1].wait()

    def publish(self) -> None:
        """Bring changed weights of all groups into use, on all of z, whose ranks must all call."""
        for group in self.groups:
            group.spread_weights()
        self._z.barrier()  # the others may still be reading
        for unit in self._units:
            unit.publish()
        self._z.barrier()

    def units_of(self, item: int) -> list[UnitStore]:
        return [unit for unit in self._units if item in unit.layout.unit.items]

    def weights(self, item: int, names: Iterable[str]) -> list[Weight]:
        """Return handles for the named parameters of an item, neighbours as one. Empty if it has none of them."""
        names = list(names)
        return [weight for unit in self.units_of(item) for weight in unit.weights(names)]

    def zero_grads(self) -> None:
        for arrays in self._arrays:
            arrays.grads.zero_()
        for group in self.groups:
            if isinstance(group, ShardedUnit):
                group.own_grads().zero_()
