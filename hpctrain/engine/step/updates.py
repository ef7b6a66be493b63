# pyright: reportPrivateImportUsage=false
"""The update of each optimizer: new masters and moments from gradients, in place.

What an update keeps and moves is said by its rule in `hpctrain.config.training.optimizers`, under the same name.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from hpctrain.config.training.train import Train


class Updated(NamedTuple):
    """Parts of shards with the same update, as flat tensors; each list has one fp32 tensor for each part."""

    masters: list[torch.Tensor]
    grads: list[torch.Tensor]
    """Gradients; the update may overwrite them."""
    moments: dict[str, list[torch.Tensor]]


class UpdateStep(NamedTuple):
    """The number of an update, and whether its weights decay."""

    train: Train
    number: int
    """Number of updates before this one."""
    decays: bool
    """Whether the weights have weight decay."""

    @property
    def rate(self) -> float:
        return self.train.rate(self.number)

    @property
    def weight_decay(self) -> float:
        return self.train.weight_decay if self.decays else 0.0


def update_by_adamw(parts: Updated, step: UpdateStep) -> None:
    """Update by AdamW (Loshchilov and Hutter 2019), in torch's fused kernel."""
    masters, train = parts.masters, step.train
    done = torch.full((len(masters),), float(step.number), device=masters[0].device)  # torch adds one
    adamw(
        masters,
        parts.grads,
        parts.moments["exp_avg"],
        parts.moments["exp_avg_sq"],
        max_exp_avg_sqs=[],
        state_steps=list(done.unbind()),
        fused=True,
        amsgrad=False,
        beta1=train.beta1,
        beta2=train.beta2,
        lr=step.rate,
        weight_decay=step.weight_decay,
        eps=train.epsilon,
        maximize=False,
    )


def update_by_lion(parts: Updated, step: UpdateStep) -> None:
    """Update by the sign of an interpolation (Lion, Chen et al. 2023, arXiv 2302.06675), without other memory.

    The paper's c = beta1 m + (1 - beta1) g is taken from the new moment n = beta2 m + (1 - beta2) g, which has m in it:
    c = (beta1 n + (beta2 - beta1) g) / beta2, of which the sign alone counts. It replaces the gradient.
    """
    masters, grads, moments, train = parts.masters, parts.grads, parts.moments["exp_avg"], step.train
    torch._foreach_lerp_(moments, grads, 1 - train.beta2)
    torch._foreach_lerp_(grads, moments, train.beta1 / train.beta2)
    torch._foreach_sign_(grads)
    torch._foreach_mul_(masters, 1 - step.rate * step.weight_decay)
    torch._foreach_add_(masters, grads, alpha=-step.rate)


def update_balance(parts: Updated, step: UpdateStep) -> None:
    """Lower the biases of experts with too many tokens in a step, and raise the others (Wang et al. 2024,
    arXiv 2408.15664). What is added to their gradients is by how much the load of an expert is too large."""
    torch._foreach_sign_(parts.grads)
    torch._foreach_add_(parts.masters, parts.grads, alpha=-step.train.balance_rate)


UPDATES: dict[str, Callable[[Updated, UpdateStep], None]] = {"adamw": update_by_adamw, "lion": update_by_lion}
"""The update functions, by the name of the rule."""
