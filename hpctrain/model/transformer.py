"""The items of a transformer on a tensor grid: embedding, blocks, head.

Shapes, all of them this rank's part: hidden states [rows / z, positions, hidden / x], the same on all y; queries, keys,
values and the inner width of the feed-forward part are cut by y and the same on all x. Blocks take the residual stream
cut by x to heads cut by y and back, so that nothing is redistributed in between.
"""

from collections.abc import Generator

import torch
import torch.nn.functional as F

from hpctrain.config.job import Model
from hpctrain.model.axes import Axes, Axis
from hpctrain.model.functions import add_positions, cross_entropy, embed, linear, norm, rotate, swiglu
from hpctrain.model.store import Store
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.parameters import BLOCK_LAYERS, item_parameters, padded_vocabulary

IGNORED = -1  # a target that does not count

Passing = Generator[None, None, torch.Tensor]
"""Something computed that pauses where it would wait for others, and returns a result."""


def alternating(passings: list[Passing]) -> list[torch.Tensor]:
    """Go on with each until it would wait, one after the other, until all are done; return their results."""
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(passings):
        for number, passing in enumerate(passings):
            if number not in results:
                try:
                    next(passing)
                except StopIteration as done:
                    results[number] = done.value
    return [results[number] for number in range(len(passings))]


class Item:
    """One item of a plan, with the handles of its weights, which are there while the stage has them gathered."""

    def __init__(self, model: Model, item: int, axes: Axes, store: Store, in_halves: bool):
        self.model, self.axes, self.in_halves = model, axes, in_halves
        self._item, self._store = item, store
        self._names = [p.name for p in item_parameters(model, item)]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the item's output for its input: ids or hidden states. The head's is its loss, and takes targets."""
        raise NotImplementedError

    def weights(self, *suffixes: str) -> list:
        """Return handles for the parameters whose names end so; those that lie side by side are one product."""
        names = [n for n in self._names if any(n == s or n.endswith(f".{s}") for s in suffixes)]
        return self._store.weights(self._item, names)

    def norm(self, x: torch.Tensor, weights: list) -> torch.Tensor:
        return norm(x, weights, self.axes.x, self.model.hidden_size, self.model.norm_epsilon)

    def norm_weights(self, name: str) -> list:
        return [w for suffix in ("weight", "bias") for w in self.weights(f"{name}.{suffix}")]

    def vocabulary(self) -> tuple[int, int]:
        """Return the first token id of this rank's part and the number of ids in it that are not padding."""
        padded = padded_vocabulary(self.model, TensorGrid(y=self.axes.y.size))
        part = cut_evenly(padded, self.axes.y.size)[self.axes.y.rank]
        return part.start, part.intersect(Interval(0, self.model.num_ids)).size


class Embedding(Item):
    """Token ids to hidden states."""

    def __init__(self, *of_item):
        super().__init__(*of_item)
        (self.table,) = self.weights("embedding.weight")
        self.positions = self.weights("positions.weight")
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = embed(self.anchor, ids, self.table, self.vocabulary()[0], self.axes.y)
        return add_positions(hidden, *self.positions) if self.positions else hidden


class Block(Item):
    """Attention and feed-forward part, each after a norm and added to the residual stream."""

    def __init__(self, *of_item):
        super().__init__(*of_item)
        self.attention_norm, self.ffn_norm = self.norm_weights("attention_norm"), self.norm_weights("ffn_norm")
        self.qkv, self.out, self.up, self.down = (
            [self.weights(*(f"{name}.{kind}" for name in layer)) for kind in ("weight", "bias")]
            for layer in BLOCK_LAYERS
        )
        self.num_heads = self.model.num_heads // self.axes.y.size
        self.num_kv_heads = max(1, self.model.kv_heads // self.axes.y.size)
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = hidden.chunk(2) if self.in_halves else (hidden,)
        outputs = alternating([self._passed(part) for part in parts])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _passed(self, hidden: torch.Tensor) -> Passing:
        hidden = hidden + (yield from self.attention(self.norm(hidden, self.attention_norm)))
        return hidden + (yield from self.feed_forward(self.norm(hidden, self.ffn_norm)))

    def _linear(self, x: torch.Tensor, layer: list[list], into: Axis, out: Axis) -> Passing:
        if not self.in_halves:
            return linear(x, *layer, into=into, out=out)
        ends = []
        result = linear(x, *layer, into=into, out=out, ends=ends)
        if into.size > 1:
            yield
        ends[0]()
        return result

    def attention(self, x: torch.Tensor) -> Passing:
        rows, positions, _ = x.shape
        size = self.model.head_size
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = yield from self._linear(x, self.qkv, into=self.axes.x, out=self.axes.y)
        qkv = qkv.view(rows, positions, sum(heads), size)
        if self.model.architecture == "llama":
            queries_keys, values = qkv.split([heads[0] + heads[1], heads[2]], dim=2)
            queries, keys = rotate(queries_keys, *self.rotary_tables(x)).split(heads[:2], dim=2)
        else:
            queries, keys, values = qkv.split(heads, dim=2)
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        mixed = mixed.transpose(1, 2).reshape(rows, positions, self.num_heads * size)
        return (yield from self._linear(mixed, self.out, into=self.axes.y, out=self.axes.x))

    def feed_forward(self, x: torch.Tensor) -> Passing:
        inner = yield from self._linear(x, self.up, into=self.axes.x, out=self.axes.y)
        inner = swiglu(inner) if self.model.architecture == "llama" else F.gelu(inner, approximate="tanh")
        return (yield from self._linear(inner, self.down, into=self.axes.y, out=self.axes.x))

    def rotary_tables(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [positions, 1, head size / 2] in fp32, made once per sequence length."""
        positions = x.shape[1]
        if self.rotary is None or self.rotary[0].shape[0] != positions:
            half = self.model.head_size // 2
            frequencies = self.model.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
            angles = torch.arange(positions, dtype=torch.float64)[:, None, None] * frequencies
            self.rotary = (angles.cos().float().to(x.device), angles.sin().float().to(x.device))
        return self.rotary


class Head(Item):
    """Hidden states to logits, and to the summed loss."""

    def __init__(self, *of_item):
        super().__init__(*of_item)
        self.final_norm = self.norm_weights("norm")
        self.table = self.weights("embedding.weight" if self.model.tie_head else "head.weight")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the logits, [rows / z, positions, padded vocabulary / y]."""
        normed = self.norm(hidden, self.final_norm)
        return linear(normed, self.table, [], into=self.axes.x, out=self.axes.y)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.logits(hidden), targets, *self.vocabulary(), self.axes.y)


def make_item(model: Model, item: int, axes: Axes, store: Store, in_halves: bool = False) -> Item:
    """`in_halves`: blocks compute one half of the rows while sums of the other half are in flight."""
    kind = Embedding if item == 0 else Head if item == model.num_items - 1 else Block
    return kind(model, item, axes, store, in_halves)
