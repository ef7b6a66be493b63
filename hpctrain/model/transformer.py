"""The layers of a transformer on a tensor grid: embedding, blocks or one branch of them, head.

Shapes, all of them this rank's part: hidden states [rows / z, positions, hidden / x], the same on all y, or their
positions cut by y where the axes are sequence parallel (see `sequence_parallel.py`); queries, keys,
values and the inner width of the feed-forward part are cut by y and the same on all x. Blocks take the residual stream
cut by x to heads cut by y and back, so that nothing is redistributed in between.
"""

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from hpctrain.architectures.description import Norm
from hpctrain.config.job import Model
from hpctrain.config.kernels import tokens_at_once
from hpctrain.model.axes import Axes, Axis
from hpctrain.model.operators import rotary
from hpctrain.model.operators.activation import activate, capped
from hpctrain.model.operators.attention import Documents, attend
from hpctrain.model.operators.embedding import add_positions, embed
from hpctrain.model.operators.linear import linear
from hpctrain.model.operators.loss import cross_entropy, head_loss
from hpctrain.model.operators.norm import norm
from hpctrain.model.operators.running import Kernels, OfInput
from hpctrain.model.operators.scaled_products import FP8
from hpctrain.model.positions import Gathering
from hpctrain.model.recompute import Again, Pack, dropping, keep, keeping_inputs, unpack
from hpctrain.model.sequence_parallel import gathering_linear, scattering_linear
from hpctrain.model.store import Store
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import block_of, is_attention, name_layer
from hpctrain.sharding.parameters import BLOCK_LAYERS, item_parameters, padded_vocabulary

IGNORED = -1  # a target that does not count

Pinned = Mapping[str, torch.dtype]
"""By operator (a key of `[precision.overrides]`), the dtype in which it computes."""
Passing = Generator[None, None, torch.Tensor]
"""Something computed that pauses where it would wait for others, and returns a result."""


def alternating(passings: list[Passing]) -> list[torch.Tensor]:
    """Continue with each until it would wait, one after the other, until all are done; return their results."""
    results: dict[int, torch.Tensor] = {}
    while len(results) < len(passings):
        for number, passing in enumerate(passings):
            if number not in results:
                try:
                    next(passing)
                except StopIteration as done:
                    results[number] = done.value
    return [results[number] for number in range(len(passings))]


class Cache:
    """Keys and values of the positions that a block has read, where it writes text."""

    def __init__(self, limit: int):
        self._limit, self.length = limit, 0
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None

    def extended(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add those of new positions, [rows, heads, positions, head size]; return all."""
        rows, heads, count, size = keys.shape
        if self._stored is None:
            keep = keys.new_empty(2, rows, heads, self._limit, size)
            self._stored = keep[0], keep[1]
        self.length += count
        for kept, new in zip(self._stored, (keys, values), strict=True):
            kept[:, :, self.length - count : self.length] = new
        of_keys, of_values = self._stored
        return of_keys[:, :, : self.length], of_values[:, :, : self.length]


class CutRows(NamedTuple):
    """The cut of a rank's rows in blocks, so that collectives over the tensor grid are overlapped with products."""

    in_halves: bool = False
    """Compute one half of the rows while sums of the other half are in flight."""
    parts: int = 1
    """Into so many parts each product next to a collective."""


UNCUT = CutRows()


class LayerModule:
    """The items of one layer, with the handles of their weights, which are there while the stage has them gathered."""

    def __init__(
        self,
        model: Model,
        items: Interval,
        axes: Axes,
        store: Store,
        kernels: Kernels,
        cut: CutRows,
        pinned: Pinned | None = None,
    ):
        self.kernels = kernels
        self.model, self.axes, self.cut = model, axes, cut
        self._pinned = pinned or {}
        self.description = model.description
        self.items, self._store = items, store
        self.name = name_layer(items, model.num_items)
        self.keeps_whole_inputs = False
        """Whether all positions of a product's input are kept for its backward pass, where y cuts them: what is
        computed again goes back at once."""
        self.drops_results = False
        """Whether a block computes again in its backward pass what lies between its products (`recompute.py`)."""
        self.pack: Pack = keep
        """What graphs keep in the place of a tensor."""
        self._names = {item: [p.name for p in item_parameters(model, item)] for item in range(*items)}

    def forward(self, value: torch.Tensor, more=None) -> torch.Tensor:
        """Return the layer's output for its input: ids or hidden states.

        `more` are the documents inside of which attention stays, or None; the head, whose output is its loss, gets the
        targets, int64 [rows, positions].
        """
        raise NotImplementedError

    def weights(self, *suffixes: str) -> list:
        """Return handles for the parameters whose names end so; those that lie side by side are one product."""
        result = []
        for item, every in self._names.items():
            names = [n for n in every if any(n == s or n.endswith(f".{s}") for s in suffixes)]
            result += self._store.weights(item, names) if names else []
        return result

    def computed_in(self, operator: str, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return what an operator makes of its inputs, in the dtype to which a job pins it, in their own one."""
        dtype = self._pinned.get(operator)
        if dtype is None or dtype == inputs[0].dtype:
            return compute(*inputs)
        return compute(*(each.to(dtype) for each in inputs)).to(inputs[0].dtype)

    def again(self, compute: OfInput, value: torch.Tensor) -> Again:
        """Return what computes something of a value once more, which is kept as graphs keep it."""
        kept = self.pack(value.detach())
        return lambda: compute(unpack(kept))

    def norm(self, x: torch.Tensor, weights: list, of: Norm, again: list[OfInput] | None = None) -> torch.Tensor:
        return norm(x, weights, self.axes.x, self.model.hidden_size, of, self.kernels.run, again)

    def norm_weights(self, name: str) -> list:
        return [w for suffix in ("weight", "bias") for w in self.weights(f"{name}.{suffix}")]

    def gathering_linear(
        self,
        x: torch.Tensor,
        layer: list[list],
        ends: list | None = None,
        in_8_bits: bool = False,
        again: Again | None = None,
        parts: int = 1,
    ) -> Passing:
        """Apply a layer to an input whose positions y cuts. With `ends` it pauses while these are gathered."""
        gathering = Gathering(x.detach(), self.axes.y, parts, self.keeps_whole_inputs)
        if ends is not None:
            yield
        weights, biases = layer
        axes = self.axes.x, self.axes.y
        with dropping(x, again, self.pack):
            return gathering_linear(x, gathering, weights, biases, *axes, ends, in_8_bits)

    def vocabulary(self) -> tuple[int, int]:
        """Return the first token id of this rank's part and the number of ids in it that are not padding."""
        padded = padded_vocabulary(self.model, TensorGrid(y=self.axes.y.size))
        part = cut_evenly(padded, self.axes.y.size)[self.axes.y.rank]
        return part.start, part.intersect(Interval(0, self.model.num_ids)).size


class Embedding(LayerModule):
    """Token ids to hidden states."""

    def __init__(self, *of_layer):
        super().__init__(*of_layer)
        (self.table,) = self.weights("embedding.weight")
        self.positions = self.weights("positions.weight")
        self.anchor = torch.zeros((), requires_grad=True)
        self.first: Callable[[], int] = lambda: 0
        """The position of the first id: another than 0 where text is written with a cache."""

    def forward(self, ids: torch.Tensor, more: Documents | None = None) -> torch.Tensor:
        y, is_cut = self.axes.y, self.axes.sequence_parallel
        hidden = embed(self.anchor, ids, self.table, self.vocabulary()[0], y, is_cut)
        if self.description.embedding_scale != 1.0:
            hidden = hidden * self.description.embedding_scale
        if not self.positions:
            return hidden
        first = y.rank * hidden.shape[1] if is_cut else 0
        places = None if more is None else torch.arange(ids.shape[1], device=ids.device) - more.starts
        if places is not None:
            places = places[:, first : first + hidden.shape[1]]
        return add_positions(hidden, self.positions[0], self.first() + first, places)


class Block(LayerModule):
    """Attention and feed-forward part, or one of them, each after a norm and added to the residual stream."""

    def __init__(self, *of_layer):
        super().__init__(*of_layer)
        block = self.description.blocks[block_of(self.items.start)]
        self.attention_of, self.mlp_of = block.attention, block.mlp
        self._has_attention, self._has_mlp = is_attention(self.items.start), not is_attention(self.items.stop - 1)
        self.attention_norm, self.ffn_norm = self.norm_weights("attention_norm"), self.norm_weights("ffn_norm")
        self.attention_out_norm, self.ffn_out_norm = map(self.norm_weights, ("attention_out_norm", "ffn_out_norm"))
        self.head_norms = self.weights("attention.q_norm.weight") + self.weights("attention.k_norm.weight")
        self.qkv, self.out, self.up, self.down = (
            [self.weights(*(f"{name}.{kind}" for name in layer)) for kind in ("weight", "bias")]
            for layer in BLOCK_LAYERS
        )
        self.num_heads = self.attention_of.heads // self.axes.y.size
        self.num_kv_heads = max(1, self.attention_of.kv_heads // self.axes.y.size)
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self.cache: Cache | None = None

    def forward(self, hidden: torch.Tensor, more: Documents | None = None) -> torch.Tensor:
        parts = hidden.chunk(2) if self.cut.in_halves else (hidden,)
        documents = [None] * len(parts) if more is None else more.split([part.shape[0] for part in parts])
        outputs = alternating([self._passed(*pair) for pair in zip(parts, documents, strict=True)])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _passed(self, hidden: torch.Tensor, documents: Documents | None) -> Passing:
        attention, mlp = self.attention_of, self.mlp_of
        if self._has_attention:
            added = yield from self.attention(*self._normed(hidden, self.attention_norm, attention.norm), documents)
            if attention.out_norm:
                added = self.norm(added, self.attention_out_norm, attention.out_norm)
            hidden = hidden + added
        if self._has_mlp:
            added = yield from self.feed_forward(*self._normed(hidden, self.ffn_norm, mlp.norm))
            if mlp.out_norm:
                added = self.norm(added, self.ffn_out_norm, mlp.out_norm)
            hidden = hidden + added
        return hidden

    def _normed(self, hidden: torch.Tensor, weights: list, of: Norm) -> tuple[torch.Tensor, Again | None]:
        again: list[OfInput] | None = [] if self.drops_results else None
        normed = self.norm(hidden, weights, of, again)
        return normed, self.again(again[0], hidden) if again else None

    def _linear(self, x: torch.Tensor, layer: list[list], into: Axis, out: Axis, again: Again | None = None) -> Passing:
        """Apply a layer. Where its input can be computed `again`, that is not kept."""
        pinned = self._pinned.get("linear", x.dtype)
        in_8_bits = pinned == FP8
        dtype = x.dtype if in_8_bits else pinned
        given = x.to(dtype)
        computed = (lambda: again().to(dtype)) if again else None
        ends, parts = [] if self.cut.in_halves else None, self.cut.parts
        if self.axes.sequence_parallel and out is self.axes.y:
            result = yield from self.gathering_linear(given, layer, ends, in_8_bits, computed, parts)
        else:
            apply = scattering_linear if self.axes.sequence_parallel else linear
            with dropping(given, computed, self.pack):
                result = apply(given, *layer, into=into, out=out, ends=ends, in_8_bits=in_8_bits, parts=parts)
        if ends is None:
            return result.to(x.dtype)
        if into.size > 1:
            yield
        ends[0]()
        return result.to(x.dtype)

    def attention(self, x: torch.Tensor, again: Again | None = None, documents: Documents | None = None) -> Passing:
        attention, size = self.attention_of, self.attention_of.head_size
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = yield from self._linear(x, self.qkv, self.axes.x, self.axes.y, again)
        rows, positions, _ = qkv.shape
        qkv = qkv.view(rows, positions, sum(heads), size)
        queries_keys, values = qkv.split([heads[0] + heads[1], heads[2]], dim=2)
        placing = partial(self._placed, heads=heads[:2])
        placed = placing(queries_keys)
        is_new = self.drops_results and placed is not queries_keys
        placed_again = self.again(placing, queries_keys) if is_new else None
        queries, keys, values = (part.transpose(1, 2) for part in (*placed.split(heads[:2], dim=2), values))
        first = 0
        if self.cache:
            first = self.cache.length
            keys, values = self.cache.extended(keys, values)
        backend = self.kernels.attention
        attending = partial(attend, attention=attention, first=first, documents=documents, backend=backend)
        if self.drops_results and attention.score_cap is not None:
            attending = partial(keeping_inputs, attending)
        with dropping(placed, placed_again, self.pack):
            mixed = self.computed_in("attention", attending, queries, keys, values)
        mixed = mixed.transpose(1, 2).reshape(rows, positions, self.num_heads * size)
        return (yield from self._linear(mixed, self.out, into=self.axes.y, out=self.axes.x))

    def _placed(self, queries_keys: torch.Tensor, heads: list[int]) -> torch.Tensor:
        """Return queries and keys with their norms and rotary positions, where the model has them."""
        attention = self.attention_of
        if attention.head_norm:
            of, run = attention.head_norm, self.kernels.run
            pairs = zip(queries_keys.split(heads, dim=2), self.head_norms, strict=True)
            normed = [norm(part, [weight], None, attention.head_size, of, run) for part, weight in pairs]
            queries_keys = torch.cat(normed, dim=2)
        if attention.rotary:
            tables, run = self.rotary_tables(queries_keys), self.kernels.run
            queries_keys = self.computed_in("rotary", lambda each: rotary.rotate(each, *tables, run), queries_keys)
        return queries_keys

    def feed_forward(self, x: torch.Tensor, again: Again | None = None) -> Passing:
        inner = yield from self._linear(x, self.up, self.axes.x, self.axes.y, again)
        mlp, run = self.mlp_of, self.kernels.run
        activation = partial(activate, activation=mlp.activation, is_gated=mlp.gated, run=run)
        activated = self.computed_in("activation", activation, inner)
        activated_again = None
        if self.drops_results:
            activated_again = self.again(partial(self.computed_in, "activation", activation), inner)
        return (yield from self._linear(activated, self.down, self.axes.y, self.axes.x, activated_again))

    def rotary_tables(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [positions, 1, head size / 2] in fp32, made once per sequence length."""
        of, first = self.attention_of, self.cache.length if self.cache else 0
        assert of.rotary is not None, "asked for where there is one"
        positions = first + x.shape[1]
        if self.rotary is None or self.rotary[0].shape[0] < positions:
            self.rotary = rotary.tables(of.rotary, positions, of.head_size // 2, x.device)
        cos, sin = self.rotary
        return cos[first:positions], sin[first:positions]


class Head(LayerModule):
    """Hidden states to logits, and to the summed loss."""

    def __init__(self, *of_layer):
        super().__init__(*of_layer)
        self.final_norm = self.norm_weights("norm")
        self.table = self.weights("embedding.weight" if self.description.tied_head else "head.weight")

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden, self.final_norm, self.description.norm)
        return normed.to(self._pinned.get("head", normed.dtype))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the logits, [rows / z, positions, padded vocabulary / y]."""
        logits = self._logits(hidden)
        return logits if self.description.logit_cap is None else capped(logits, self.description.logit_cap)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits that are not capped yet."""
        normed = self._normed(hidden)
        if not self.axes.sequence_parallel:
            return linear(normed, self.table, [], into=self.axes.x, out=self.axes.y)
        (logits,) = alternating([self.gathering_linear(normed, [self.table, []])])
        return logits

    def forward(self, hidden: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        assert more is not None, "the loss is of targets"
        (table,), of = self.table, (*self.vocabulary(), self.description.logit_cap)
        if tokens_at_once(more.numel(), table.data.shape[0], self.kernels.logits_bytes) < more.numel():
            normed = self._normed(hidden)
            return head_loss(normed, table, more, *of, self.axes, self.kernels)
        return cross_entropy(self._logits(hidden), more, *of, self.axes.y, self.kernels.run)


def make_layer(
    model: Model,
    items: Interval,
    axes: Axes,
    store: Store,
    kernels: Kernels,
    cut: CutRows = UNCUT,
    pinned: Pinned | None = None,
) -> LayerModule:
    """Make a layer. Operators that are `pinned` compute in another dtype."""
    kind = Embedding if items.start == 0 else Head if items.stop == model.num_items else Block
    return kind(model, items, axes, store, kernels, cut, pinned)
