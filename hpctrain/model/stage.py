"""A tile's part of the model: its items in order, forward and backward, one microbatch at a time.

Each item is a graph of its own. That makes it plain when weights are gathered and released, when gradients are
scattered, and what recomputing means: keep the input, run the item again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hpctrain.job import Model
from hpctrain.model.axes import Axes
from hpctrain.model.initialise import fill_initial
from hpctrain.model.store import Store
from hpctrain.model.transformer import Embedding, Head, Item, make_item
from hpctrain.plan import Tile


@dataclass
class Saved:
    """What a microbatch's backward pass needs: for each item its input, and its output unless it is recomputed."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor | None] = field(default_factory=list)
    targets: torch.Tensor | None = None


class Stage:
    """The items of one tile on one rank."""

    def __init__(self, model: Model, tile: Tile, axes: Axes, store: Store):
        self.model, self.tile, self.store = model, tile, store
        self.items: list[Item] = [make_item(model, i, axes, store) for i in range(*tile.items)]

    def initialise(self, seed: int) -> None:
        """Set all weights to their initial values."""
        self.store.await_weights()
        for group in self.store.groups:
            for piece in group.pieces(group.stored):
                values = torch.empty(piece.at.size)
                fill_initial(piece.parameter, piece.box, piece.elements, self.model, seed, values)
                group.weights_at(piece.at).copy_(values)

    @property
    def is_first(self) -> bool:
        return bool(self.items) and isinstance(self.items[0], Embedding)

    @property
    def is_last(self) -> bool:
        return bool(self.items) and isinstance(self.items[-1], Head)

    def forward(self, value: torch.Tensor, targets: torch.Tensor | None, training: bool) -> tuple[torch.Tensor, Saved]:
        """Run all items on token ids (first stage) or hidden states; return hidden states or the summed loss.

        `targets` are for the last stage. Without `training` nothing is saved.
        """
        saved = Saved(targets=targets)
        keep = training and self.tile.recompute == "none"
        for number, item in enumerate(self.items, self.tile.items.start):
            self.store.await_weights(number)
            for unit in item.units:
                unit.gather()
            given = value.detach()
            given.requires_grad_(training and given.is_floating_point())
            with torch.set_grad_enabled(keep):
                value = self._run(item, given, targets)
            if training:
                saved.inputs.append(given)
                saved.outputs.append(value if keep else None)
            for unit in item.units:
                unit.release()
        return value.detach(), saved

    def backward(
        self, saved: Saved, gradient: torch.Tensor, passed: Callable[[int], None] | None = None
    ) -> torch.Tensor | None:
        """Run all items backward from the gradient of the stage's output; return that of its input.

        Gradients of weights are added to the store's; `passed` is told the number of each item whose are. The first
        stage returns None.
        """
        for number, item in reversed(list(enumerate(self.items, self.tile.items.start))):
            given, output = saved.inputs.pop(), saved.outputs.pop()
            for unit in item.units:
                unit.gather()
            if output is None:
                with torch.enable_grad():
                    output = self._run(item, given, saved.targets)
            for unit in item.units:
                unit.begin_backward()
            torch.autograd.backward(output, gradient)
            gradient = given.grad
            for unit in item.units:
                unit.end_backward()
                unit.release()
            if passed is not None:
                passed(number)
        return gradient

    @staticmethod
    def _run(item: Item, value: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        return item.forward(value, targets) if isinstance(item, Head) else item.forward(value)
