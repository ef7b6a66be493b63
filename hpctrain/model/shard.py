"""Who updates what: the state of the optimizer, cut among the ranks that hold the same pieces.

The flat array of each group is cut among its holders, by their shares; each is the owner of its cut in norms and
checkpoints.
"""

from dataclasses import dataclass

import torch

from hpctrain.model.axes import Axis, PendingWork
from hpctrain.model.groups import Following, Group
from hpctrain.plan.holders import ShardGroup
from hpctrain.sharding.intervals import Interval


@dataclass
class Shard:
    """The part of one group's flat array that this rank updates: its own cut, or all of it for zero = 0."""

    group: Group
    holders: Axis
    zero: int
    final_after: int
    """The item after whose backward pass the group's gradients have what a microbatch adds to them."""
    cuts: tuple[Interval, ...]
    updated: Interval
    master: torch.Tensor
    moments: dict[str, torch.Tensor]
    grads: torch.Tensor
    """fp32, of the `updated` elements, summed over the holders after `start_reduce`."""

    @property
    def owned(self) -> Interval:
        """The elements that this rank answers for in norms and checkpoints."""
        return self.cuts[self.holders.rank]

    def start_reduce(self) -> PendingWork:
        """Sum the gradients over the holders, all of whom must call; `grads` is there when the work is done."""
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
        whole[slice(*self.updated)] = self.master
        work = self.holders.start_all_gather(whole, self.cuts)
        return Following([work], lambda: group.weights.copy_(whole))

    def of(self, tensor: torch.Tensor, at: Interval) -> torch.Tensor:
        """Return the given elements of the group's flat array in a tensor that holds the `updated` ones."""
        return tensor[slice(*at.shift(-self.updated.start))]


def make_shard(group: Group, holders: Axis, shard_group: ShardGroup) -> Shard:
    """Make this rank's shard of a group, with zero moments and the weights in use as master weights."""
    cuts = shard_group.cuts(group.size)
    updated = cuts[holders.rank] if shard_group.zero else Interval(0, group.size)
    in_use = group.weights_at(updated)
    master = in_use if in_use.dtype == torch.float32 else in_use.float()
    in_place = holders.size == 1 or shard_group.zero != 1
    grads = group.own_grads() if in_place else torch.zeros_like(master)
    moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
    return Shard(group, holders, shard_group.zero, shard_group.final_after, cuts, updated, master, moments, grads)
