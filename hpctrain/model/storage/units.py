"""One unit on one rank: the handles by which layers use its weights, and how it is gathered and its gradient scattered.

The units (see `sharding.parameters`) of a tile with z > 1 are stored as shards. `hpctrain.model.storage.traffic`
decides when they are gathered.

Where gradients go: `Weight.grad` is this rank's flat array itself, where that has whole units. Else it is a buffer of
`Traffic`; its sum over z is added to the rank's shard or, in ZeRO 2 and 3, summed over holders and added to the shard
of each (`Sharded`). What holders with unlike grids sum is packed first, region by region (`PackedRegions`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from hpctrain.model.parallel.axes import Axis, PendingWork
from hpctrain.model.storage.groups import Sharded
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.parameters import UnitLayout

Addition = Callable[..., object]
"""`add(grad, *operands, overwrite)` adds to a gradient. With `overwrite` the old contents are ignored, and may be no
numbers: writing costs less than filling with zeros and adding."""


class Weight:
    """A weight in use: `data` in the compute dtype, and `grad` in fp32, to which a backward pass adds.

    Both are views. `data` is valid while the unit is gathered. `grad` is valid from `begin_backward` on, or always
    where the rank stores the whole unit.
    """

    __slots__ = ("data", "deferred", "grad", "is_unwritten", "name")

    def __init__(self, name: str):
        self.name = name
        self.data: torch.Tensor = None  # pyright: ignore[reportAttributeAccessIssue] - until it is gathered
        self.grad: torch.Tensor = None  # pyright: ignore[reportAttributeAccessIssue]
        self.deferred: list[Deferred] | None = None
        """The list that collects additions to `grad` while a backward pass defers them; else None."""
        self.is_unwritten = False
        """Whether nothing has been added to `grad` yet: its contents are invalid, and will be overwritten."""

    def accumulate(self, add: Addition, *operands: torch.Tensor) -> None:
        """Add to the gradient: now, or once the weight pass comes to it.

        The operands must stay as they are until then. Backward passes change `grad` by this alone.
        """
        if self.deferred is None:
            self.add(add, operands)
        else:  # detached, or they would keep the graph that they were saved in, and its input and gradient with it
            self.deferred.append(Deferred(self, add, tuple(operand.detach() for operand in operands)))

    def add(self, add: Addition, operands: Iterable[torch.Tensor]) -> None:
        """Add to the gradient now."""
        add(self.grad, *operands, overwrite=self.is_unwritten)
        self.is_unwritten = False


class Deferred(NamedTuple):
    """A deferred addition to a weight's gradient, with its operands."""

    weight: Weight
    addition: Addition
    operands: tuple[torch.Tensor, ...]

    def do(self) -> None:
        self.weight.add(self.addition, self.operands)


class InFlight:
    """Operations started one by one, since each needs the result of the one before."""

    def __init__(self, operations: Iterator[PendingWork], count: int):
        """Each `next` of `operations` starts one operation; after `count` of them another `next` does the rest."""
        self._operations, self._count = operations, count
        self._work: PendingWork | None = None
        self._started = 0

    def bring(self, number: int) -> None:
        """Start the first `number` operations, if there are so many, and complete all but the last of these."""
        while self._started < min(number, self._count):
            self._next()

    def finish(self) -> None:
        """Complete all operations."""
        while not self._started or self._work is not None:
            self._next()

    def _next(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = next(self._operations, None)
        self._started += 1


class UnitStore:
    """One unit on one rank: its z-shard of weights and gradients, and its views while gathered."""

    def __init__(
        self,
        layout: UnitLayout,
        cuts: Sequence[Interval],
        storing: Axis,
        weights: torch.Tensor,
        grads: torch.Tensor,
        whole: torch.Tensor | None,
        sharded: Sharded | None,
    ):
        """The ranks of `storing` have `cuts` of the unit; `whole` is the unit in memory that all of them see, if any.

        `weights` and `grads` are this rank's shard. With `sharded` they are what this rank has of that, maybe less.
        """
        self.layout, self._cuts = layout, cuts
        self._sharded, self._z = sharded, storing
        self.stays = whole is not None or (storing.size == 1 and (sharded is None or sharded.keeps_weights))
        """Whether the whole unit is always there."""
        self.scatters = storing.size > 1 or sharded is not None
        """Whether a backward pass makes gradients of the whole unit, of which shards are kept."""
        over_z = storing.size > 1 and storing.is_overlapped
        over_holders = sharded is not None and sharded.is_overlapped
        self.overlapped_scatters = int(over_z) + int(over_holders)
        """Number of operations of a scatter that are overlapped with computation."""
        self.overlapped_gathers = int(over_z) + int(over_holders and sharded is not None and not sharded.keeps_weights)
        """Number of operations of a gather that are overlapped with computation."""
        self._whole = whole
        self.is_common = whole is not None
        """Whether the whole unit is in memory that all of z see: on all of them or on none."""
        self._shard, self._grad_shard = weights, grads
        self._views: list[tuple[Weight, Interval, tuple[int, ...]]] = []
        self._users = 0
        self.gathering: InFlight | None = None
        self.is_gathered = False

    def weights(self, names: Iterable[str]) -> list[Weight]:
        """Return handles for the named parameters, as few as can be: neighbours with equal trailing dims are one.

        Names that are not in this unit are left out.
        """
        result = [(Weight("+".join(run.names)), run.at, run.shape) for run in self.layout.runs(set(names))]
        self._views += result
        if self.stays:
            whole = self._shard if self._whole is None else self._whole
            self._set_views(result, whole, None if self.scatters else self._grad_shard)
        return [weight for weight, _, _ in result]

    @staticmethod
    def _set_views(views, data: torch.Tensor | None, grad: torch.Tensor | None) -> None:
        for weight, at, shape in views:
            weight.data = None if data is None else data[slice(*at)].view(shape)
            weight.grad = None if grad is None else grad[slice(*at)].view(shape)

    def prefetch(self, distance: int) -> None:
        """Start the overlapped part of a gather, for a unit that is used so many items later."""
        number = self.overlapped_gathers - distance + 1
        if number < 1 or self.stays or self.is_gathered:
            return
        if self.gathering is None:
            self.gathering = InFlight(self._gather(), self.overlapped_gathers)
        self.gathering.bring(number)

    def gather(self) -> None:
        """Make the whole unit available; pair with `release`. All ranks of z, and holders of shards, must call."""
        self._users += 1
        if self.stays or self.is_gathered:
            return
        (self.gathering or InFlight(self._gather(), self.overlapped_gathers)).finish()
        self.gathering = None

    def _gather(self) -> Iterator[PendingWork]:
        whole = shard = self._shard
        if self._sharded and not self._sharded.keeps_weights:
            whole, work = self._sharded.start_gather()
            if self._sharded.is_overlapped:
                yield work
            shard = whole
        if self._z.size > 1:
            whole = shard.new_empty(self.layout.size)
            whole[slice(*self._cuts[self._z.rank])] = shard
            work = self._z.start_all_gather(whole, self._cuts)
            if self._z.is_overlapped:
                yield work
            else:
                work.wait()
        self._set_views(self._views, whole, None)
        self.is_gathered = True

    def share_shard(self) -> None:
        """Copy this rank's shard to the memory that all of z see; no rank may be reading it."""
        if self._whole is not None:
            self._whole[slice(*self._cuts[self._z.rank])] = self._shard

    def defer(self, kept: list[Deferred] | None) -> None:
        """Let backward passes keep in a list what they would add to gradients; None: let them add it at once."""
        for weight, _, _ in self._views:
            weight.deferred = kept

    def begin_backward(self, whole_grad: torch.Tensor) -> None:
        """Let the gradient of the whole unit be computed in a buffer [size of the unit], whatever its contents."""
        self._whole_grad = whole_grad
        for weight, at, shape in self._views:
            weight.grad, weight.is_unwritten = whole_grad[slice(*at)].view(shape), True

    def start_scatter(self) -> InFlight:
        """Start to sum the gradient and to add this rank's part to its shard.

        The buffer of `begin_backward` is needed until the end. All ranks of z, and holders of shards, must call.
        """
        at, end = 0, Interval(self.layout.size, self.layout.size)
        for made in (*sorted(interval for weight, interval, _ in self._views if not weight.is_unwritten), end):
            if at < made.start:  # never written: padding, and weights of other items alone
                self._whole_grad[at : made.start].zero_()
            at = max(at, made.stop)
        scattering = InFlight(self._scatter(self._whole_grad), self.overlapped_scatters)
        scattering.bring(1)
        return scattering

    def _scatter(self, whole_grad: torch.Tensor) -> Iterator[PendingWork]:
        part = whole_grad
        if self._z.size > 1:
            part = part.new_empty(self._cuts[self._z.rank].size)
            work = self._z.start_reduce_scatter(whole_grad, part, self._cuts)
            if self._z.is_overlapped:
                yield work
            else:
                work.wait()
        if not self._sharded:
            self._grad_shard += part
            return
        own, work = self._sharded.start_sum(part)
        if self._sharded.is_overlapped:
            yield work
        self._sharded.grads += own

    def release(self, stays: bool = False) -> None:
        """Release the whole unit where nothing else uses it, unless it `stays`."""
        self._users -= 1
        if not stays:
            self.forget()

    def forget(self) -> None:
        """Release the whole unit, if nothing uses it."""
        if self.is_gathered and self._users == 0:
            self._set_views(self._views, None, None)
            self.is_gathered = False
