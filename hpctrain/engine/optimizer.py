"""AdamW over the pieces that a rank owns (ZeRO, Rajbhandari et al. 2020), with fp32 master weights.

With `zero = 1` a rank gets the summed gradient of its own shard alone, updates that, and the weights are gathered;
with `zero = 0` everybody sums and updates everything. With 2 the gradients are summed into the shards after each item's
backward pass, with 3 the weights are gathered for each item too.
"""

import math

import torch

from hpctrain.engine.layout import Layout
from hpctrain.job import Train
from hpctrain.model.axes import Work
from hpctrain.model.shard import Shard, make_shard

CHUNK = 1 << 15  # elements that stay in a processor's cache


def learning_rate(train: Train, step: int) -> float:
    """Return the rate of a step (the first is 0): linear warm-up, then a cosine to the smallest rate."""
    floor = train.learning_rate / 10 if train.min_learning_rate is None else train.min_learning_rate
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return floor + 0.5 * (train.learning_rate - floor) * (1 + math.cos(math.pi * min(1.0, progress)))


def adamw(weight, grad, exp_avg, exp_avg_sq, train: Train, step: int, weight_decay: float) -> None:
    """Update weight and moments in place (AdamW, Loshchilov and Hutter 2019); all fp32, of one dim.

    On the host goes through in chunks that stay in the cache over all operations. `step` 0 is the first.
    """
    chunk = CHUNK if weight.device.type == "cpu" else weight.numel()
    rate = learning_rate(train, step)
    step_size = rate / (1 - train.beta1 ** (step + 1))
    root_correction = math.sqrt(1 - train.beta2 ** (step + 1))
    for w, g, m, v in zip(*(t.split(chunk) for t in (weight, grad, exp_avg, exp_avg_sq)), strict=True):
        m.lerp_(g, 1 - train.beta1)
        v.mul_(train.beta2).addcmul_(g, g, value=1 - train.beta2)
        if weight_decay:
            w.mul_(1 - rate * weight_decay)
        w.addcdiv_(m, v.sqrt().div_(root_correction).add_(train.epsilon), value=-step_size)


class Optimizer:
    """Reduces gradients, clips them, and updates the weights of one rank's store."""

    def __init__(self, layout: Layout, train: Train):
        self._layout, self._train = layout, train
        self.shards = [
            make_shard(group, holders, holding)
            for group, holders, holding in zip(layout.store.groups, layout.groups, layout.held.holdings, strict=True)
        ]

        self._under_way: dict[int, Work] = {}
        """By number of the shard, what was started and not waited for."""

    def load_masters(self) -> None:
        """Take the weights in use as master weights, after they were initialised."""
        for shard in self.shards:
            shard.master.copy_(shard.group.weights_at(shard.updated))

    def start_reduce(self, item: int) -> None:
        """Start to sum the gradients that are final when the last backward pass of a step has gone through an item.

        Tiles go through their items in the same order, so that any two ranks start what they share in the same one.
        """
        for number, shard in enumerate(self.shards):
            if shard.final_after == item:
                self._start_reduce(number, shard)

    def _start_reduce(self, number: int, shard: Shard) -> None:
        if shard.zero < 2 and number not in self._under_way:  # others are summed after each item's backward pass
            self._under_way[number] = shard.start_reduce()

    def reduce(self) -> None:
        """Have gradients summed over the holders of each piece: start what was not, wait for all.

        All ranks of the plan must call.
        """
        self._layout.store.traffic.collect()
        for number, shard in enumerate(self.shards):
            self._start_reduce(number, shard)
        for work in self._under_way.values():
            work.wait()
        self._under_way.clear()

    def squared_norm(self) -> float:
        """Return this rank's part of the squared global norm: each element of the model is counted on one rank."""
        total = 0.0
        for shard in self.shards:
            for piece in shard.group.pieces(shard.owned):
                if piece.counts:
                    total += float(torch.linalg.vector_norm(shard.of(shard.grads, piece.at), dtype=torch.float64)) ** 2
        return total

    def update(self, step: int, norm: float) -> None:
        """Clip by the global norm, update, and gather the new weights, or start to. All ranks of the plan must call."""
        clip = self._train.clip_norm
        if clip and norm > clip:
            for shard in self.shards:
                shard.grads.mul_(clip / norm)
        for shard in self.shards:
            for piece in shard.group.pieces(shard.updated):
                weight_decay = self._train.weight_decay if piece.parameter.decay else 0.0
                tensors = (shard.master, shard.grads, shard.moments["exp_avg"], shard.moments["exp_avg_sq"])
                adamw(*(shard.of(tensor, piece.at) for tensor in tensors), self._train, step, weight_decay)
        self.publish()
        self._layout.store.zero_grads()

    def publish(self) -> None:
        """Bring updated master weights into use on all holders, before the items compute with them that they are of.

        All ranks of the plan must call.
        """
        gathered = []
        for shard in self.shards:
            in_use = shard.group.weights_at(shard.updated)
            if in_use.data_ptr() != shard.master.data_ptr():
                in_use.copy_(shard.master)
            if shard.zero in (1, 2):
                gathered.append((shard.final_after, shard.holders.start_all_gather(shard.group.weights, shard.cuts)))
        store = self._layout.store
        for item, work in sorted(gathered, key=lambda pair: pair[0]):
            store.note_gathering(item, work)
        if not store.is_in_place:
            store.await_weights()
        store.publish()
