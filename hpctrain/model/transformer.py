"""The layers of a transformer on a tensor grid: embedding, blocks or one branch of them, head.

Shapes, all of them this rank's part: hidden states [rows / z, positions, hidden / x], the same on all y, or their
positions cut by y where the axes are sequence parallel (see `operators/linear.py`); queries, keys,
values and the inner width of the feed-forward part are cut by y and the same on all x. Blocks take the residual stream
cut by x to heads cut by y and back, so that nothing is redistributed in between.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from hpctrain.architectures.description import Norm
from hpctrain.config.job import Model
from hpctrain.config.kernels import tokens_at_once
from hpctrain.model.feed_forward import FEED_FORWARD
from hpctrain.model.operators import rotary
from hpctrain.model.operators.activation import capped
from hpctrain.model.operators.attention import Documents, WithSinks, attend_at
from hpctrain.model.operators.embedding import add_positions, embed
from hpctrain.model.operators.linear import Linear
from hpctrain.model.operators.loss import TokenLoss, cross_entropy, head_loss
from hpctrain.model.operators.norm import NormLayer
from hpctrain.model.operators.running import Kernels
from hpctrain.model.parallel.axes import ONE_RANK, Axes, Axis
from hpctrain.model.parallel.context import see_context
from hpctrain.model.recompute import Dropping, KeepingInputs
from hpctrain.model.storage.store import Store
from hpctrain.model.storage.units import Weight
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.items import block_of, is_attention, name_layer
from hpctrain.sharding.parameters import BLOCK_PRODUCTS, item_parameters, padded_vocabulary

IGNORED = -1  # a target that does not count


class Cache:
    """Keys and values of the positions that a block has read, where it writes text."""

    def __init__(self, limit: int):
        self._limit, self.length = limit, 0
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None

    def extended(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add those of new positions, [rows, heads, positions, head size]; return all."""
        rows, heads, count, size = keys.shape
        if self._stored is None:
            stored = keys.new_empty(2, rows, heads, self._limit, size)
            self._stored = stored[0], stored[1]
        self.length += count
        for kept, new in zip(self._stored, (keys, values), strict=True):
            kept[:, :, self.length - count : self.length] = new
        of_keys, of_values = self._stored
        return of_keys[:, :, : self.length], of_values[:, :, : self.length]


@dataclass(frozen=True)
class LayerContext:
    """The model, the rank and the settings that all layers of a rank share."""

    model: Model
    axes: Axes
    store: Store
    kernels: Kernels = field(default_factory=Kernels)
    parts: int = 1
    """Number of parts into which a product next to a collective is cut, so that the collective overlaps another
    part."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtype in which an operator computes, by operator (a key of `[precision.overrides]`)."""
    rotary_tables: rotary.Tables = field(default_factory=rotary.Tables)


class LayerModule:
    """The items of one layer, with handles of their weights, which are valid while the stage has them gathered."""

    def __init__(self, items: Interval, context: LayerContext, recompute: str):
        """`recompute` is "none", "selective" or "full"."""
        self.items, self.context, self._recompute = items, context, recompute
        self.model, self.axes, self.kernels = context.model, context.axes, context.kernels
        self.description, self.name = self.model.description, name_layer(items, self.model.num_items)
        self._names = {item: [p.name for p in item_parameters(self.model, item)] for item in range(*items)}

    def forward(self, value: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Return hidden states from ids or hidden states. The head has `loss` instead.

        With `documents` attention stays inside of them.
        """
        raise NotImplementedError

    def weights(self, *suffixes: str) -> list[Weight]:
        """Return handles for the parameters whose names end so. Neighbours in storage share one: q, k and v are one."""
        result = []
        for item, every in self._names.items():
            names = [n for n in every if any(n == s or n.endswith(f".{s}") for s in suffixes)]
            result += self.context.store.weights(item, names) if names else []
        return result

    def make_norm(self, name: str, of: Norm) -> NormLayer:
        """Make a norm of hidden states, which x cuts."""
        weights = [w for suffix in ("weight", "bias") for w in self.weights(f"{name}.{suffix}")]
        return NormLayer(weights, self.axes.x, self.model.hidden_size, of, self.kernels.run)

    def make_linear(
        self, weights: list[Weight], biases: list[Weight], input_axis: Axis, output_axis: Axis, parts=1
    ) -> Linear:
        """Make a linear layer between what x cuts and what y cuts, where hidden states may be cut by positions."""
        cuts_sequence, y = self.axes.sequence_parallel, self.axes.y
        return Linear(
            weights,
            biases,
            input_axis,
            output_axis,
            gathers=cuts_sequence and output_axis is y,
            scatters=cuts_sequence and input_axis is y,
            parts=parts,
            keeps_whole=self._recompute == "full",  # the backward pass follows at once, so that it is kept for a moment
        )

    def computed_in(self, operator: str, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Compute an operator in the dtype to which a job pins it; return the result in the dtype of its inputs."""
        dtype = self.context.dtypes.get(operator)
        if dtype is None or dtype == inputs[0].dtype:
            return compute(*inputs)
        return compute(*(each.to(dtype) for each in inputs)).to(inputs[0].dtype)

    def vocabulary(self) -> tuple[int, int]:
        """Return the first token id of this rank's part and the number of ids in it that are not padding."""
        padded = padded_vocabulary(self.model, TensorGrid(y=self.axes.y.size))
        part = cut_evenly(padded, self.axes.y.size)[self.axes.y.rank]
        return part.start, part.intersect(Interval(0, self.model.num_ids)).size


class Embedding(LayerModule):
    """Token ids to hidden states."""

    def __init__(self, items: Interval, context: LayerContext, recompute: str):
        super().__init__(items, context, recompute)
        (self.table,) = self.weights("embedding.weight")
        self.positions = self.weights("positions.weight")
        self.anchor = torch.zeros((), requires_grad=True)
        self.first: Callable[[], int] = lambda: 0
        """The position of the first id: another than 0 where text is written with a cache."""

    def forward(self, ids: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        y, is_cut = self.axes.y, self.axes.sequence_parallel
        hidden = embed(self.anchor, ids, self.table, self.vocabulary()[0], y, is_cut)
        if self.description.embedding_scale != 1.0:
            hidden = hidden * self.description.embedding_scale
        if not self.positions:
            return hidden
        positions, places = self.axes.positions(ids.shape[1], self.first()), None
        if documents is not None:
            own = self.axes.context(ids.shape[1])
            parts = [torch.arange(*each, device=ids.device) - documents.starts[:, slice(*each)] for each in own]
            places = torch.cat(parts, dim=1)
            places = places.tensor_split(y.size, dim=1)[y.rank] if is_cut else places
        return add_positions(hidden, self.positions[0], positions, places)


class Block(LayerModule):
    """Attention and feed-forward part, or one of them, each after a norm and added to the residual stream.

    Products `qkv` and `up` are column-parallel in y, as Megatron's, their inputs being cut by x; `out` and `down` are
    row-parallel in y, their outputs being cut by x.
    """

    def __init__(self, items: Interval, context: LayerContext, recompute: str):
        super().__init__(items, context, recompute)
        block = self.description.blocks[block_of(self.items.start)]
        attention, mlp = block.attention, block.mlp
        self.attention_description = attention
        self._has_attention, self._has_mlp = is_attention(self.items.start), not is_attention(self.items.stop - 1)
        self.attention_norm = self.make_norm("attention_norm", attention.norm)
        self.attention_out_norm = attention.out_norm and self.make_norm("attention_out_norm", attention.out_norm)
        self.ffn_norm = self.make_norm("ffn_norm", mlp.norm)
        self.ffn_out_norm = mlp.out_norm and self.make_norm("ffn_out_norm", mlp.out_norm)
        self.head_norms = [
            NormLayer(
                self.weights(f"attention.{each}_norm.weight"), ONE_RANK, attention.head_size, of, self.kernels.run
            )
            for each in "qk"
            if (of := attention.head_norm)
        ]
        self.sinks = self.weights("attention.sinks.weight")
        self._linear_dtype = self.context.dtypes.get("linear")
        x, y = self.axes.x, self.axes.y
        self.qkv, self.out = self.make_product(BLOCK_PRODUCTS[0], x, y), self.make_product(BLOCK_PRODUCTS[1], y, x)
        self.num_heads = attention.heads // y.size
        # More y than key and value heads: several y hold the same head, and the optimizer sums its gradient.
        self.num_kv_heads = max(1, attention.kv_heads // y.size)
        self.cache: Cache | None = None
        self.dropping: Dropping | None = None
        """What selective recomputing drops of a forward pass, while there is one."""
        self.feed_forward = FEED_FORWARD[type(mlp)](self, mlp) if self._has_mlp else None

    def make_product(self, names: Iterable[str], input_axis: Axis, output_axis: Axis) -> Linear:
        """Make the linear layer of some parameters, without ".weight" or ".bias"."""
        weights, biases = (self.weights(*(f"{name}.{kind}" for name in names)) for kind in ("weight", "bias"))
        return self.make_linear(weights, biases, input_axis, output_axis, self.context.parts)

    def forward(self, hidden: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Return the residual stream behind the block; drop what is computed again."""
        if self._recompute != "selective" or not torch.is_grad_enabled():
            return self._add_parts(hidden, documents)
        self.dropping = Dropping()
        try:
            with self.dropping.packing():
                return self._add_parts(hidden, documents)
        finally:
            self.dropping = None

    def _add_parts(self, hidden: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Return hidden states to which attention and feed-forward part have been added."""
        added = None
        if self._has_attention:
            hidden, x = self.normed(self.attention_norm, hidden)
            added = self.attention(x, documents)
            added = self.attention_out_norm(added) if self.attention_out_norm else added
        if self.feed_forward:
            hidden, x = self.normed(self.ffn_norm, hidden, added)
            added = self.feed_forward(x)
            added = self.ffn_out_norm(added) if self.ffn_out_norm else added
        assert added is not None, "a block has a branch"
        return hidden + added

    def attention(self, x: torch.Tensor, documents: Documents | None) -> torch.Tensor:
        """Return what attention adds, of normed hidden states."""
        qkv = self.linear(self.qkv, x)
        qkv = qkv.view(*qkv.shape[:2], -1, self.attention_description.head_size)
        queries, keys, values = self.split_heads(qkv)
        mixed = self.attend(queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), documents)
        return self.linear(self.out, mixed.transpose(1, 2).flatten(2))

    def linear(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Apply a layer, in the dtype to which a job pins it."""
        dropping, dtype = self.dropping, self._linear_dtype
        if dtype is None or dtype == x.dtype:
            return layer(x)
        given = x.to(dtype)
        if dropping and dropping.drops(x):
            dropping.drop(given, lambda wide: wide.to(dtype), x)
        return layer(given).to(x.dtype)

    def normed(
        self, norm: NormLayer, hidden: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream with what is added to it, and its norm, which a product reads. With selective
        recomputing autograd does not keep the norm."""
        hidden, result, compute = norm.of_sum(hidden, added)
        if self.dropping:
            self.dropping.drop(result, compute, hidden)
        return hidden, result

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values. With selective recomputing autograd does not keep queries and keys: they are
        views of one tensor, which is dropped. Values are a view of `qkv`, which is kept."""
        heads = self.normalise_and_rotate(qkv)
        if self.dropping and (self.head_norms or self.attention_description.rotary):
            self.dropping.drop(heads[0], lambda qkv: self.normalise_and_rotate(qkv)[0], qkv)
        return heads

    def normalise_and_rotate(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries and keys with their norms and rotary positions, where the model has them, and values."""
        counts, values = [self.num_heads, self.num_kv_heads, self.num_kv_heads], ()
        if self.head_norms:
            *parts, value = qkv.split_with_sizes(counts, dim=2)
            qkv = torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], dim=2)
            counts, values = counts[:2], (value,)
        if not self.attention_description.rotary:
            return *qkv.split_with_sizes(counts, dim=2), *values
        positions = self.axes.context(qkv.shape[1], self.cache.length if self.cache else 0)
        cos, sin = self.context.rotary_tables.get(self.attention_description, positions, qkv)
        dtype = self.context.dtypes.get("rotary")
        return *rotary.rotate(qkv, cos, sin, counts, self.kernels.run, dtype), *values

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, documents: Documents | None
    ) -> torch.Tensor:
        """Return attention's mix of values. With selective recomputing autograd does not keep scores with a cap."""
        first = self.cache.length if self.cache else 0
        for sinks in self.sinks:
            queries = WithSinks.apply(queries, sinks, self.attention_description.head_size**-0.5)
        if self.cache:
            keys, values = self.cache.extended(keys, values)
        backend, attention, parts = self.kernels.attention, self.attention_description, []
        begin, own = documents and documents.begin, (queries, keys, values)
        for seen in see_context(*own, self.axes, first, self.dropping, self.context.parts, attention.window, begin):
            given = {"attention": attention, "positions": seen.positions, "key_positions": seen.key_positions}
            attending = partial(attend_at, **given, documents=documents, backend=backend)
            if self._recompute == "selective" and attention.score_cap is not None:
                attending = partial(KeepingInputs.apply, attending)
            parts.append(seen.restore(self.computed_in("attention", attending, *seen.heads)))
        return (
            parts[0] if len(parts) == 1 else torch.cat([each.transpose(1, 2) for each in parts], dim=2).transpose(1, 2)
        )


class Head(LayerModule):
    """Hidden states to logits, and to the summed loss."""

    def __init__(self, items: Interval, context: LayerContext, recompute: str):
        super().__init__(items, context, recompute)
        self.final_norm = self.make_norm("norm", self.description.norm)
        self.table = self.weights("embedding.weight" if self.description.tied_head else "head.weight")
        self._product = self.make_linear(self.table, [], self.axes.x, self.axes.y)
        self._loss = TokenLoss(self.axes, self.kernels, *self.vocabulary(), self.description.logit_cap)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.final_norm(hidden)
        return normed.to(self.context.dtypes.get("head", normed.dtype))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the logits, [rows / z, positions, padded vocabulary / y]."""
        logits = self._product(self._normed(hidden))
        return logits if self.description.logit_cap is None else capped(logits, self.description.logit_cap)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of targets, int64 [rows, positions]."""
        (table,), count = self.table, targets.numel()
        if tokens_at_once(count, table.data.shape[0], self.kernels.logits_bytes) < count:
            return head_loss(self._normed(hidden), table, targets, self._loss)
        return cross_entropy(self._product(self._normed(hidden)), targets, self._loss)
