"""The state of the optimizer, cut among the ranks that hold the same parameters.

The flat array of each group is cut among its holders, by their shares; each is the owner of its cut in norms and
checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpctrain.config.training.optimizers import OptimizerRule
from hpctrain.model.parallel.axes import Axis, Following, PendingWork
from hpctrain.model.storage.groups import HeldArray
from hpctrain.plan.holdings import ShardGroup
from hpctrain.sharding.intervals import Interval


@dataclass(frozen=True)
class ShardState:
    """The moments of consecutive elements of a shard, whose parameters have the same ones."""

    at: Interval
    """The interval in the group's flat array."""
    moments: dict[str, torch.Tensor]
    """Moments by name, fp32 [at.size]."""


@dataclass
class Shard:
    """The part of one group's flat array that this rank updates: its own cut, or all of it for zero = 0."""

    group: HeldArray
    holders: Axis
    zero: int
    final_after: int
    """The item whose backward pass is the last to add to the group's gradients in a micro-batch."""
    starts_early: bool
    """Whether the sum over holders may start as soon as gradients are final: all holders start sums in the same
    order."""
    cuts: tuple[Interval, ...]
    updated: Interval
    master: torch.Tensor
    states: tuple[ShardState, ...]
    """States of all `updated` elements, in order."""
    grads: torch.Tensor
    """Gradients of the `updated` elements, fp32, summed over the holders after `start_reduce`."""
    is_on_host: bool
    """Whether moments, and masters that are not the weights in use, are in host memory. They must go through the device
    for an update."""

    @property
    def owned(self) -> Interval:
        """The interval that this rank owns in norms and checkpoints."""
        return self.cuts[self.holders.rank]

    @property
    def has_master_in_use(self) -> bool:
        """Say whether the master weights are the weights in use."""
        return self.group.weights.dtype == torch.float32

    def start_reduce(self) -> PendingWork:
        """Start to sum the gradients over the holders; `grads` is valid when the work has ended. All holders must
        call."""
        grads = self.group.own_grads()
        if self.grads is grads:
            return self.holders.start_all_reduce(grads)
        return self.holders.start_reduce_scatter(grads, self.grads, self.cuts)

    def start_gather(self) -> PendingWork:
        """Bring the updated weights to all holders, all of whom must call; they are in use when the work is done."""
        group = self.group
        if group.exchanged == group.weights.dtype:
            return self.holders.start_all_gather(group.weights, self.cuts)
        whole = group.weights.new_empty(group.size, dtype=group.exchanged)
        whole[slice(*self.updated)].copy_(self.master, non_blocking=True)  # what is in host memory is pinned there
        work = self.holders.start_all_gather(whole, self.cuts)
        return Following([work], lambda: group.weights.copy_(whole))


def make_shard(
    group: HeldArray,
    holders: Axis,
    shard_group: ShardGroup,
    rule: OptimizerRule,
    host_buffer: Callable[[int], torch.Tensor] | None = None,
) -> Shard:
    """Make this rank's shard of a group, with zero moments and the weights in use as master weights.

    With `host_buffer`, which returns uint8 host memory of so many bytes, moments lie there, and so do masters that are
    not the weights in use.
    """
    cuts = shard_group.cuts(group.size)
    updated = cuts[holders.rank] if shard_group.zero else Interval(0, group.size)
    in_use = group.weights_at(updated)

    def zeros(size: int) -> torch.Tensor:
        if host_buffer is None:
            return torch.zeros(size, dtype=torch.float32, device=in_use.device)
        return host_buffer(4 * size).view(torch.float32).zero_()

    master = in_use if in_use.dtype == torch.float32 else zeros(updated.size).copy_(in_use)
    in_place = holders.size == 1 or shard_group.zero != 1
    grads = group.own_grads() if in_place else torch.zeros(updated.size, dtype=torch.float32, device=in_use.device)
    states = tuple(
        ShardState(at, {name: zeros(at.size) for name in names}) for at, names in _equal_moments(group, updated, rule)
    )
    when = shard_group.zero, shard_group.final_after, not shard_group.is_tied
    return Shard(group, holders, *when, cuts, updated, master, states, grads, host_buffer is not None)


def _equal_moments(group: HeldArray, updated: Interval, rule: OptimizerRule) -> list[tuple[Interval, tuple[str, ...]]]:
    """Cut the elements that a rank updates where other moments begin; return the names of these with each part."""
    parts: list[tuple[Interval, tuple[str, ...]]] = []
    for region in group.regions(updated):
        names = rule.moments(region.parameter.shape)
        if parts and parts[-1][1] == names:
            continue
        if parts:
            parts[-1] = Interval(parts[-1][0].start, region.at.start), parts[-1][1]
        parts.append((Interval(region.at.start if parts else updated.start, updated.stop), names))
    return parts
