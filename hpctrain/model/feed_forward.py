"""The feed-forward part of a block: two products with an activation between them, or a mixture of experts.

It knows its block weakly, since a circle of both would keep the weights of a trainer that is gone.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol
from weakref import proxy

import torch

from hpctrain.architectures.description import Experts, Mlp
from hpctrain.model.operators.activation import activate
from hpctrain.model.operators.experts import BalanceLoss, ExpertMixture, add_balance_loss, choose, scores_of, weights_of
from hpctrain.model.operators.linear import Linear
from hpctrain.model.operators.running import Kernels, run_eagerly
from hpctrain.model.parallel.axes import ONE_RANK, Axes, Axis
from hpctrain.model.recompute import Dropping
from hpctrain.model.storage.units import Weight
from hpctrain.sharding.parameters import BLOCK_PRODUCTS, SHARED_PRODUCTS


class FeedForwardBlock(Protocol):
    """The part of a block (`transformer.py`) that its feed-forward part uses."""

    axes: Axes
    kernels: Kernels
    dropping: Dropping | None

    def weights(self, *suffixes: str) -> list[Weight]: ...

    def make_product(self, names: Iterable[str], input_axis: Axis, output_axis: Axis) -> Linear: ...

    def linear(self, layer: Linear, x: torch.Tensor) -> torch.Tensor: ...

    def computed_in(
        self, operator: str, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor: ...


FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""Returns what the feed-forward part adds, of normed hidden states."""


class Dense:
    """Two linear layers. The first is column-parallel in y, the second row-parallel."""

    def __init__(self, block: FeedForwardBlock, mlp: Mlp, names: tuple[tuple[str, ...], ...] = BLOCK_PRODUCTS[2:]):
        x, y = block.axes.x, block.axes.y
        self._block, self._mlp = proxy(block), mlp
        self._up, self._down = block.make_product(names[0], x, y), block.make_product(names[1], y, x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        block = self._block
        up = block.linear(self._up, x)
        inner = self._activated(up)
        if block.dropping:
            block.dropping.drop(inner, self._activated, up)
        return block.linear(self._down, inner)

    def _activated(self, up: torch.Tensor) -> torch.Tensor:
        mlp = self._mlp
        activation = partial(activate, activation=mlp.activation, is_gated=mlp.gated, run=self._block.kernels.run)
        return self._block.computed_in("activation", activation, up)


class WithExperts:
    """A router, the experts that it chooses for each token, and maybe one that computes every token."""

    def __init__(self, block: FeedForwardBlock, experts: Experts):
        self._block, self._experts = proxy(block), experts
        self._router = Linear(block.weights("router.weight"), block.weights("router.bias"), ONE_RANK, ONE_RANK)
        names = "experts.up.weight", "experts.down.weight", "experts.up.bias", "experts.down.bias", "router.balance"
        weights = [weight for name in names for weight in block.weights(name)]
        # A rank's pairs change with every choice where y cuts experts, and kernels are compiled for each shape.
        activation = partial(activate, activation=experts.activation, is_gated=True, run=run_eagerly)
        weakly = proxy(block)
        self.mixture = ExpertMixture(
            experts, weights, block.axes, lambda up: weakly.computed_in("activation", activation, up)
        )
        self._shared = Dense(block, experts, SHARED_PRODUCTS) if experts.shared_inner else None
        self.balance_loss: BalanceLoss | None = None
        """The auxiliary loss of training, where there is one."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        block, experts = self._block, self._experts
        scores = scores_of(block.linear(self._router, x), experts)
        balance = self.mixture.balance
        chosen = choose(scores, experts, balance.data if balance else None)
        if self.balance_loss and torch.is_grad_enabled():
            scores = add_balance_loss(scores, chosen, self.balance_loss)
        weights = weights_of(scores, chosen, experts)
        added = block.computed_in("linear", lambda x: self.mixture(x, weights, chosen), x)
        return added + self._shared(x) if self._shared else added


FEED_FORWARD: dict[type[Mlp], Callable[[FeedForwardBlock, Any], FeedForward]] = {Mlp: Dense, Experts: WithExperts}
"""Modules of feed-forward parts, by what describes them."""
