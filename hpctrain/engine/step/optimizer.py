"""The optimizer over the shards that a rank owns (ZeRO, Rajbhandari et al. 2020), with fp32 master weights.

With `zero = 1` a rank gets the summed gradient of its own shard alone, updates that, and the weights are gathered;
with `zero = 0` everybody sums and updates everything. With 2 the gradients are summed into the shards after each item's
backward pass, with 3 the weights are gathered for each item too.

The way of a gradient, and who has what:

    Weight.accumulate        an operator's backward pass adds to it, where the store has it (model/storage/units)
    Traffic.end_backward     with z, or ZeRO 2 and 3, it is summed into shards layer by layer, as passes go on
    Optimizer.start_reduce   else it is summed over its holders, into `Shard.grads`, after the last backward pass
    Optimizer.squared_norm   each element counts on one rank; all ranks sum the norm with the loss (Pipeline)
    Optimizer.update         masters and moments of the shard change, as the rule says (engine/step/updates); weights in
                             use (`HeldArray.weights`) are gathered
    Saver                    copies masters and moments of the shard for a checkpoint (checkpoint/saving)
"""

from functools import partial

import torch

from hpctrain.config.training.train import Train
from hpctrain.engine.step.host_state import HostState, stretches_of
from hpctrain.engine.step.layout import Layout
from hpctrain.engine.step.loss_scale import LossScale
from hpctrain.engine.step.updates import UPDATES, Updated, UpdateStep, update_balance
from hpctrain.model.parallel.axes import PendingWork
from hpctrain.model.storage.shard import make_shard
from hpctrain.sharding.parameters import Update


class Optimizer:
    """Reduces gradients, clips them, and updates the weights of one rank's store."""

    def __init__(self, layout: Layout, train: Train, loss_scale: LossScale | None = None):
        """`loss_scale` is for runs in which a family computes in fp16; it changes from step to step."""
        self._layout, self._train, self.loss_scale = layout, train, loss_scale
        # Tiles of a rank agree on it.
        host_buffer = layout.accelerator.host_buffer if layout.tiles[0].offload == "optimizer" else None
        self.shards = [
            make_shard(group, holders, shard_group, train.rule, host_buffer)
            for group, holders, shard_group in zip(
                layout.store.groups, layout.groups, layout.holding.shard_groups, strict=True
            )
        ]

        # Views, made once: a step then is a few operations on lists, however many parameters there are.
        self._updated = self._on_device()
        self._host_state = HostState(layout.accelerator, [shard for shard in self.shards if shard.is_on_host])
        self._owned_grads = [
            shard.grads[shard.updated.place_of(each.at)]
            for shard in self.shards
            for each in shard.group.regions(shard.owned)
            if each.counts and not each.parameter.balances
        ]
        self._partial_grads: dict[str, list[torch.Tensor]] = {}
        """Gradients of which each rank along an axis has a part, by axis. They are summed over the axis after all other
        sums. Regions are not among them, since their holders add up all parts at once."""
        for shard in self.shards:
            for each in () if shard.group.in_use is not None else shard.group.regions(shard.updated):
                for axis in layout.holding.part.partial_axes(each.parameter):
                    grads = shard.grads[shard.updated.place_of(each.at)]
                    self._partial_grads.setdefault(axis, []).append(grads)
        self._in_flight: dict[int, PendingWork] = {}
        """Operations that were started and not waited for, by number of the shard."""

    def _on_device(self) -> list[tuple[Updated, Update]]:
        """Return the tensors that this rank updates on its device, by moments and by how they are updated."""
        result: dict[tuple, tuple[Updated, Update]] = {}
        for shard in self.shards:
            for state in () if shard.is_on_host else shard.states:
                for at, kind in stretches_of(shard, state):
                    empty = Updated([], [], {name: [] for name in state.moments})
                    parts, _ = result.setdefault((kind, *state.moments), (empty, kind))
                    parts.masters.append(shard.master[shard.updated.place_of(at)])
                    parts.grads.append(shard.grads[shard.updated.place_of(at)])
                    for name, moments in state.moments.items():
                        parts.moments[name].append(moments[state.at.place_of(at)])
        return list(result.values())

    def load_masters(self) -> None:
        """Take the weights in use as master weights, after they were initialised."""
        for shard in self.shards:
            shard.master.copy_(shard.group.weights_at(shard.updated))

    def start_reduce(self, item: int | None = None) -> None:
        """Start to sum the gradients that are final once a step's last backward pass has passed `item`.

        With None all sums start that have not started yet.

        Tiles go through their items in the same order, so that any two ranks start common sums in the same order (see
        `hpctrain.plan.launch_order`). Only a tied embedding is the first of one tile and the last of another.
        """
        for number, shard in enumerate(self.shards):
            is_final = item is None or (shard.final_after == item and shard.starts_early)
            if is_final and shard.zero < 2 and number not in self._in_flight:  # others are summed after each item
                self._in_flight[number] = shard.start_reduce()

    def reduce(self) -> None:
        """Sum all gradients over the holders of each shard: start the remaining sums, and wait for all.

        All ranks of the plan must call.
        """
        self._layout.store.traffic.collect()
        self.start_reduce()
        for work in self._in_flight.values():
            work.wait()
        self._in_flight.clear()
        for axis, grads in self._partial_grads.items():
            packed = torch.cat([grad.view(-1) for grad in grads])
            getattr(self._layout.axes, axis).all_reduce(packed)
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage] - as torch's own optimizers do
                grads, list(packed.split([grad.numel() for grad in grads]))
            )

    def squared_norm(self) -> torch.Tensor | None:
        """Return this rank's part of the squared global norm, fp64 on its device: each element of the model is counted
        on one rank. None where it counts none."""
        if not self._owned_grads:
            return None
        norms = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage] - as torch's own optimizers do
            self._owned_grads, 2, dtype=torch.float64
        )
        return torch.stack(norms).square().sum()

    def update(self, step: int, norm: float) -> float | None:
        """Clip by the global norm, update, and gather the new weights, or start to. All ranks of the plan must call.

        `norm` is that of the gradients as they are; return it as without the scale of the loss. None where fp16
        overflowed: gradients are forgotten, and weights do not change. Raises TrainingError where a smaller scale is of
        no use.
        """
        scale, value = self.loss_scale, 1.0
        if scale:
            if not scale.judge(norm, step):
                self._layout.store.zero_grads()
                return None
            value = scale.value
            step, norm = step - scale.skipped, norm / value
        clip = self._train.clip_norm
        factor = (clip / norm if clip and norm > clip else 1.0) / value
        if factor != 1.0:
            for shard in self.shards:
                shard.grads.mul_(factor)
        update = partial(self._update_parts, step)
        for parts, kind in self._updated:
            update(parts, kind)
        self._host_state.update(update)
        self.gather_updated()
        self._layout.store.zero_grads()
        if scale:
            scale.grow()
        return norm

    def _update_parts(self, step: int, parts: Updated, kind: Update) -> None:
        update = update_balance if kind == "balance" else UPDATES[self._train.optimizer]
        update(parts, UpdateStep(self._train, step, decays=kind == "decayed"))

    def gather_updated(self) -> None:
        """Bring updated master weights into use on all holders, before their items compute with them.

        All ranks of the plan must call.
        """
        gathered = []
        for shard in self.shards:
            in_use = shard.group.weights_at(shard.updated)
            if in_use.data_ptr() != shard.master.data_ptr() and not shard.is_on_host:
                in_use.copy_(shard.master)
            if shard.zero in (1, 2):
                gathered.append((shard.final_after, shard.start_gather()))
        store = self._layout.store
        for item, work in sorted(gathered, key=lambda pair: pair[0]):
            store.note_gathering(item, work)
        if not store.is_in_place:
            store.await_weights()
        store.refresh()
