"""A tile's part of the model: its layers in order, forward and backward, one microbatch at a time.

Each layer is a graph of its own. That makes it plain when weights are gathered and released, when gradients are
scattered, and what full recomputing means: keep the input, run the layer again. Selective recomputing is of operators
inside of a layer (`recompute.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hpctrain.config.job import Model
from hpctrain.model.initialise import fill_initial
from hpctrain.model.operators.attention import Documents
from hpctrain.model.recompute import End
from hpctrain.model.storage.store import Store
from hpctrain.model.storage.units import Deferred
from hpctrain.model.transformer import Block, Embedding, Head, LayerContext, LayerModule
from hpctrain.plan.tiling import Tile
from hpctrain.sharding.items import layers


@dataclass
class Saved:
    """The tensors that a microbatch's backward pass needs: for each layer its input, and its output unless the layer is
    recomputed whole."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor | None] = field(default_factory=list)
    targets: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    """The summed loss, on the last stage. It is valid after the backward pass, since the head may compute it there."""
    documents: Documents | None = None
    """Documents that attention must stay inside, or None."""
    deferred: deque[list[Deferred]] = field(default_factory=deque)
    """Additions to gradients of weights that a split backward pass has deferred: for each layer, the last first."""

    def forget_masks(self) -> None:
        """Drop the masks of a pass: recomputing in the backward pass makes its own."""
        if self.documents:
            self.documents.forget_masks()


def initialise(store: Store, model: Model, seed: int, num_threads: int = 1) -> None:
    """Set all weights of a rank to their initial values, which at least so many threads draw."""
    store.await_weights()
    for group in store.groups:
        for region in group.regions(group.stored):
            values = torch.empty(region.at.size)
            fill_initial(region.parameter, region.box, region.elements, model, seed, values, num_threads)
            group.weights_at(region.at).copy_(values)


class LayerTracer(Protocol):
    """A recorder of what each layer computes, and when."""

    def now(self) -> float:
        """Return the time by its clock, in seconds."""
        ...

    def computed(self, name: object, since: float) -> None:
        """Record that something was computed from `since` until now."""
        ...


class Stage:
    """The items of one tile on one rank."""

    def __init__(self, tile: Tile, context: LayerContext, tracer: LayerTracer | None = None):
        self.tile, self.store, self._tracer = tile, context.store, tracer
        self.layers: list[LayerModule] = []
        for items in layers(tile.items):
            kind = Embedding if items.start == 0 else Head if items.stop == context.model.num_items else Block
            self.layers.append(kind(items, context, tile.recompute))

    @property
    def is_first(self) -> bool:
        return bool(self.layers) and isinstance(self.layers[0], Embedding)

    @property
    def is_last(self) -> bool:
        return bool(self.layers) and isinstance(self.layers[-1], Head)

    def forward(
        self, value: torch.Tensor, targets: torch.Tensor | None, training: bool, documents: Documents | None = None
    ) -> tuple[torch.Tensor, Saved]:
        """Run all layers on token ids (first stage) or hidden states; return hidden states or the summed loss.

        `targets` are for the last stage; with `documents` attention stays inside of them.
        Without `training` nothing is saved, and the loss is there at once; see `Saved.loss`.
        """
        saved = Saved(targets=targets, documents=documents)
        traffic = self.store.traffic
        keeps_graph = training and self.tile.recompute != "full"
        for layer in self._traced(self.layers, "forward"):
            items = layer.items
            self.store.await_weights(items.stop - 1)
            traffic.gather(items)
            given = value.detach()
            given.requires_grad_(training and given.is_floating_point())
            with torch.set_grad_enabled(keeps_graph):
                value = self._run(layer, given, saved)
            if training:
                saved.inputs.append(given)
                saved.outputs.append(value if keeps_graph else None)
            traffic.release(items)
        result = value.detach()
        saved.loss = result if self.is_last else None
        saved.forget_masks()
        if keeps_graph:  # its place in the graph alone is needed: its numbers are sent, and freed before the graph
            value.data = value.new_empty(()).expand(value.shape)
        return result, saved

    def _traced(self, layers: Iterable[LayerModule], what: str) -> Iterator[LayerModule]:
        """Yield layers. The time between one layer and the next is a span of the trace, if there is one."""
        tracer = self._tracer
        if tracer is None:
            yield from layers
            return
        for layer in layers:
            since = tracer.now()
            yield layer
            tracer.computed(f"{layer.name} {what}", since)

    def backward(
        self, saved: Saved, gradient: torch.Tensor | None, passed: Callable[[int], None] | None = None
    ) -> torch.Tensor | None:
        """Run all layers backward from the gradient of the stage's output; return that of its input.

        Gradients of weights are added to the store's; `passed` is called with the number of each item whose
        gradients are there; for scattered ones that may be after this call (see `Traffic.collect`). The first stage
        returns None.
        """
        traffic = self.store.traffic
        for layer in self._traced(reversed(self.layers), "backward"):
            items = layer.items
            traffic.gather(items)
            traffic.begin_backward(items)
            gradient = self._differentiate(layer, saved, gradient)  # pyright: ignore[reportArgumentType] - None at the end
            traffic.end_backward(items, passed)
            traffic.release(items)
        saved.forget_masks()
        return gradient

    def backward_input(self, saved: Saved, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient of the stage's input as `backward` does; what is to be added to those of weights is kept
        in `saved`: of each product both operands."""
        for layer in self._traced(reversed(self.layers), "backward input"):
            items = layer.items
            kept: list[Deferred] = []
            self.store.traffic.gather(items)
            self.store.defer(items, kept)
            gradient = self._differentiate(layer, saved, gradient)  # pyright: ignore[reportArgumentType] - None at the end
            self.store.defer(items, None)
            self.store.traffic.release(items)
            saved.deferred.append(kept)
        saved.forget_masks()
        return gradient

    def backward_weight(self, saved: Saved, passed: Callable[[int], None] | None = None) -> None:
        """Add to the gradients of weights what `backward_input` has kept, in the order in which `backward` does it:
        the same bits. `passed` as there."""
        traffic = self.store.traffic
        for layer in self._traced(reversed(self.layers), "backward weight"):
            items = layer.items
            traffic.begin_backward(items)
            for addition in saved.deferred.popleft():
                addition.do()
            traffic.end_backward(items, passed)

    def _differentiate(self, layer: LayerModule, saved: Saved, gradient: torch.Tensor) -> torch.Tensor | None:
        """Take a layer's input and output from what was saved, and return the gradient of the input."""
        given, output = saved.inputs.pop(), saved.outputs.pop()
        if output is None:
            with torch.enable_grad():
                output = self._run(layer, given, saved)
        with torch.enable_grad():
            end = End.apply(output, gradient)
        end.backward()
        return given.grad

    @staticmethod
    def _run(layer: LayerModule, value: torch.Tensor, of: Saved) -> torch.Tensor:
        if isinstance(layer, Head):
            assert of.targets is not None, "the last stage has them"
            return layer.loss(value, of.targets)
        return layer.forward(value, of.documents)
