"""AdamW over the pieces that a rank owns (ZeRO, Rajbhandari et al. 2020), with fp32 master weights.

With `zero = 1` a rank gets the summed gradient of its own shard alone, updates that, and the weights are gathered;
with `zero = 0` everybody sums and updates everything.
"""

import math

import torch

from hpctrain.engine.layout import Layout
from hpctrain.intervals import Interval
from hpctrain.job import Train
from hpctrain.model.shard import Shard, make_shard


def learning_rate(train: Train, step: int) -> float:
    """Return the rate of a step (the first is 0): linear warm-up, then a cosine to the smallest rate."""
    floor = train.learning_rate / 10 if train.min_learning_rate is None else train.min_learning_rate
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    return floor + 0.5 * (train.learning_rate - floor) * (1 + math.cos(math.pi * min(1.0, progress)))


class Optimizer:
    """Reduces gradients, clips them, and updates the weights of one rank's store."""

    def __init__(self, layout: Layout, train: Train):
        self._layout, self._train = layout, train
        self.shards = [
            make_shard(group, holders, layout.tile.zero)
            for group, holders in zip(layout.store.groups, layout.groups, strict=True)
        ]
        self._adam = self._make_adam()

    def _make_adam(self) -> torch.optim.AdamW:
        """Make torch's fused AdamW over views of the shards, whose states are views of the flat moments."""
        runs: dict[bool, list[tuple[Shard, Interval]]] = {True: [], False: []}
        for shard in self.shards:
            for piece in shard.group.pieces(shard.updated):
                same = runs[piece.parameter.decay]
                if same and same[-1][0] is shard and same[-1][1].stop == piece.at.start:
                    same[-1] = (shard, Interval(same[-1][1].start, piece.at.stop))
                else:
                    same.append((shard, piece.at))
        t = self._train
        groups, states = [], []
        for decay, members in runs.items():
            parameters = []
            for shard, at in members:
                parameter = shard.of(shard.master, at)
                parameter.grad = shard.of(shard.grads, at)
                parameters.append(parameter)
                states.append((parameter, {name: shard.of(m, at) for name, m in shard.moments.items()}))
            if parameters:
                groups.append({"params": parameters, "weight_decay": t.weight_decay if decay else 0.0})
        adam = torch.optim.AdamW(groups, lr=t.learning_rate, betas=(t.beta1, t.beta2), eps=t.epsilon, fused=True)
        for parameter, moments in states:
            adam.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        return adam

    def load_masters(self) -> None:
        """Take the weights in use as master weights, after they were initialised."""
        for shard in self.shards:
            shard.master.copy_(shard.group.weights[slice(*shard.updated)])

    def set_steps_done(self, steps: int) -> None:
        """Say how many updates the moments have seen; for resuming."""
        for state in self._adam.state.values():
            state["step"].fill_(steps)

    def reduce(self) -> None:
        """Sum gradients over the holders of each piece. All ranks of the plan must call."""
        for shard in self.shards:
            if shard.grads is shard.group.grads:
                shard.holders.all_reduce(shard.group.grads)
            else:
                shard.holders.reduce_scatter(shard.group.grads, shard.grads, shard.cuts)

    def squared_norm(self) -> float:
        """Return this rank's part of the squared global norm: each element of the model is counted on one rank."""
        total = 0.0
        for shard in self.shards:
            for piece in shard.group.pieces(shard.owned):
                if piece.counts:
                    total += float(torch.linalg.vector_norm(shard.of(shard.grads, piece.at), dtype=torch.float64)) ** 2
        return total

    def update(self, step: int, norm: float) -> None:
        """Clip by the global norm, update, and gather the new weights. All ranks of the plan must call."""
        clip = self._train.clip_norm
        if clip and norm > clip:
            for shard in self.shards:
                shard.grads.mul_(clip / norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self._train, step)
        self._adam.step()
        self.publish()
        self._layout.store.zero_grads()

    def publish(self) -> None:
        """Bring updated master weights into use on all holders. All ranks of the plan must call."""
        for shard in self.shards:
            in_use = shard.group.weights[slice(*shard.updated)]
            if in_use.data_ptr() != shard.master.data_ptr():
                in_use.copy_(shard.master)
            if shard.zero:
                shard.holders.all_gather(shard.group.weights, shard.cuts)
