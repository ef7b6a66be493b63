"""Every operator of a model, with the shapes of its inputs: what `engine.alignment` compares with float64.

Names of operators are those that messages have for them. The computation is the model's own; see `Operator.compute`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from hpctrain.architectures.description import Attention, Experts, Layer, Mlp, Norm
from hpctrain.config.job import Model
from hpctrain.model.operators import activation, attention, embedding, experts, linear, loss, rotary
from hpctrain.model.operators import norm as norms
from hpctrain.model.operators.running import Kernels
from hpctrain.model.parallel.axes import ONE_RANK, Axes
from hpctrain.model.storage.units import Weight
from hpctrain.sharding.intervals import Interval

MOST_IDS = 8192
"""Largest vocabulary of a case. So many columns show any fault of a product or a sum, and float64 is slow."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """One operator with the shapes of a job."""

    name: str
    values: Mapping[str, Shape]
    """Inputs that have gradients, by name."""
    weights: Mapping[str, Shape]
    compute: Callable[..., torch.Tensor]
    """Takes values, weights (`Weight`) and ids by name, and returns the output, as the model computes it."""
    ids: Mapping[str, tuple[Shape, int]] = field(default_factory=dict)
    """Shape and upper limit of integer inputs, by name."""
    pin: str | None = None
    """The key of `precision.overrides` by which it computes in another dtype."""
    rounds_inside: bool = False
    """Whether values are rounded to the dtype and summed again. Sums in fp32 are then no more exact than the dtype."""
    settings: object = None
    """The description it is made of. Operators of one name and shape may differ in it."""

    @property
    def longest_sum(self) -> int:
        """Return how many terms a sum of this operator has at most: tokens, features or ids."""
        tokens = [math.prod(shape[:-1]) for shape in self.values.values()]
        tokens += [math.prod(shape) for shape, _ in self.ids.values()]
        return max(*tokens, *(size for shape in (*self.values.values(), *self.weights.values()) for size in shape))


def operators(model: Model, rows: int, positions: int, kernels: Kernels | None = None) -> list[Operator]:
    """Return all operators of a model that differ, in the order in which a forward pass comes to them.

    Values are of so many rows and positions; sizes are the model's, but for vocabularies above `MOST_IDS`. They are
    computed by torch's own kernels, or by those that are given. Those that share a name are numbered.
    """
    distinct = {}
    for operator in _all_operators(model, (rows, positions), kernels or Kernels()):
        key = operator.name, *sorted({**operator.values, **operator.weights}.items()), operator.settings
        distinct.setdefault(key, operator)
    counts, numbers, result = Counter(operator.name for operator in distinct.values()), Counter[str](), []
    for operator in distinct.values():
        numbers[operator.name] += 1
        is_alone = counts[operator.name] == 1
        result.append(operator if is_alone else replace(operator, name=f"{operator.name} {numbers[operator.name]}"))
    return result


def _all_operators(model: Model, shape: tuple[int, int], kernels: Kernels) -> Iterator[Operator]:
    description, hidden, ids = model.description, model.hidden_size, min(model.num_ids, MOST_IDS)
    whole, scale, cap = (*shape, hidden), description.embedding_scale, description.logit_cap

    def embed(ids: torch.Tensor, table: Weight) -> torch.Tensor:
        result = embedding.embed(torch.zeros((), requires_grad=True), ids, table, 0, ONE_RANK)
        return result if scale == 1.0 else result * scale

    def add_positions(x: torch.Tensor, table: Weight) -> torch.Tensor:
        return embedding.add_positions(x, table, [Interval(0, shape[1])])

    table = {"table": (ids, hidden)}
    yield Operator("embedding", {}, table, embed, {"ids": (shape, ids)}, rounds_inside=scale != 1.0)
    if description.learned_positions:
        yield Operator("positions", {"x": whole}, {"table": (shape[1], hidden)}, add_positions)
    for block in dict.fromkeys(description.blocks):
        yield from _block(block, shape, hidden, kernels)
    yield _norm("norm", description.norm, whole, kernels)
    yield _linear("head.logits", shape, hidden, ids, False, pin="head")
    logits, targets = {"logits": (*shape, ids)}, {"targets": (shape, ids)}
    if cap is not None:
        yield Operator("logit_cap", logits, {}, lambda logits: activation.capped(logits, cap), pin="head")
    plain, capped = (loss.TokenLoss(Axes(), kernels, 0, ids, limit) for limit in (None, cap))
    yield Operator(
        "cross_entropy", logits, {}, lambda logits, targets: loss.cross_entropy(logits, targets, plain), targets
    )
    yield Operator(
        "head.loss",
        {"x": whole},
        table,
        lambda x, table, targets: loss.head_loss(x, table, targets, capped),
        targets,
        pin="head",
        rounds_inside=True,
    )


def _block(block: Layer, shape: tuple[int, int], hidden: int, kernels: Kernels) -> Iterator[Operator]:
    attended, mlp, whole = block.attention, block.mlp, (*shape, hidden)
    yield _norm("norm", attended.norm, whole, kernels)
    together = attended.query_size + 2 * attended.key_size
    yield _linear("attention.qkv", shape, hidden, together, attended.bias)
    if attended.head_norm:
        yield _norm("head_norm", attended.head_norm, (*shape, attended.heads, attended.head_size), kernels)
    if attended.rotary:
        yield _rotary(attended, shape, kernels)
    yield _attention(attended, shape, kernels)
    yield _linear("attention.o", shape, attended.query_size, hidden, attended.out_bias)
    if attended.out_norm:
        yield _norm("norm", attended.out_norm, whole, kernels)
    yield _norm_of_sum(mlp.norm, whole, kernels)
    yield from FEED_FORWARD[type(mlp)](mlp, shape, hidden, kernels)
    if mlp.out_norm:
        yield _norm("norm", mlp.out_norm, whole, kernels)
    yield Operator("residual", {"x": whole, "added": whole}, {}, lambda x, added: x + added)


def _dense(mlp: Mlp, shape: tuple[int, int], hidden: int, kernels: Kernels) -> Iterator[Operator]:
    yield _linear("ffn.up", shape, hidden, mlp.up_size, mlp.bias)
    settings = mlp.activation, mlp.gated
    yield Operator(
        "activation",
        {"x": (*shape, mlp.up_size)},
        {},
        lambda x: activation.activate(x, *settings, kernels.run),
        pin="activation",
        settings=settings,
    )
    yield _linear("ffn.down", shape, mlp.inner, hidden, mlp.bias)


def _experts(mixed: Experts, shape: tuple[int, int], hidden: int, kernels: Kernels) -> Iterator[Operator]:
    """Yield the router's products and weights, and all experts as one operator. The choices are given."""

    def route(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return experts.weights_of(experts.scores_of(logits, mixed), chosen, mixed)

    def activated(up: torch.Tensor) -> torch.Tensor:
        return activation.activate(up, mixed.activation, True, kernels.run)

    def compute(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, **handles: Weight) -> torch.Tensor:
        return experts.ExpertMixture(mixed, [*handles.values()], Axes(), activated)(x, weights, chosen)

    choices, count = (*shape, mixed.chosen), mixed.count
    chosen = {"chosen": (choices, count)}
    yield _linear("router", shape, hidden, count, mixed.bias)
    yield Operator("router.weights", {"logits": (*shape, count)}, {}, route, chosen, settings=mixed)
    values = {"x": (*shape, hidden), "weights": choices}
    weights: dict[str, Shape] = {"up": (count * mixed.up_size, hidden), "down": (count * hidden, mixed.inner)}
    if mixed.bias:
        weights |= {"up_bias": (count * mixed.up_size,), "down_bias": (count * hidden,)}
    yield Operator("experts", values, weights, compute, chosen, "linear", rounds_inside=True, settings=mixed)
    if mixed.shared_inner:
        yield from _dense(Mlp(mixed.shared_inner, mixed.norm, activation=mixed.activation), shape, hidden, kernels)


FEED_FORWARD: dict[type[Mlp], Callable[..., Iterator[Operator]]] = {Mlp: _dense, Experts: _experts}
"""The operators of feed-forward parts, by what describes them."""


def _norm(name: str, norm: Norm, shape: Shape, kernels: Kernels) -> Operator:
    weights = {key: shape[-1:] for key in (("weight", "bias") if norm.has_bias else ("weight",))}

    def compute(x: torch.Tensor, **weights: Weight) -> torch.Tensor:
        return norms.NormLayer([*weights.values()], ONE_RANK, shape[-1], norm, kernels.run)(x)

    return Operator(name, {"x": shape}, weights, compute, settings=norm)


def _norm_of_sum(norm: Norm, shape: Shape, kernels: Kernels) -> Operator:
    """Return the sum and its norm as one operator; its output is both, one behind the other."""

    def compute(x: torch.Tensor, added: torch.Tensor, **weights: Weight) -> torch.Tensor:
        layer = norms.NormLayer([*weights.values()], ONE_RANK, shape[-1], norm, kernels.run)
        return torch.stack(layer.of_sum(x, added)[:2])

    alone = _norm("norm_of_sum", norm, shape, kernels)
    return replace(alone, values={"x": shape, "added": shape}, compute=compute, rounds_inside=True)


def _linear(name: str, shape: tuple[int, int], inputs: int, outputs: int, bias: bool, pin: str = "linear") -> Operator:
    def compute(x: torch.Tensor, weight: Weight, **bias: Weight) -> torch.Tensor:
        return linear.Linear([weight], [*bias.values()], ONE_RANK, ONE_RANK)(x)

    weights = {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {})
    return Operator(name, {"x": (*shape, inputs)}, weights, compute, pin=pin)


def _rotary(attended: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    turns, counts = attended.rotary, (attended.heads, attended.kv_heads, attended.kv_heads)
    assert turns is not None, "asked for where there is one"

    def compute(x: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary.tables(turns, shape[1], attended.head_size // 2, x.device)
        return torch.cat(rotary.rotate(x, cos, sin, counts, kernels.run), dim=2)

    values = {"x": (*shape, sum(counts), attended.head_size)}
    return Operator("rotary", values, {}, compute, pin="rotary", settings=turns)


def _attention(attended: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    def compute(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **sinks: Weight) -> torch.Tensor:
        for each in sinks.values():
            queries = attention.WithSinks.apply(queries, each, attended.head_size**-0.5)
        return attention.attend(queries, keys, values, attended, backend=kernels.attention)

    rows, positions = shape
    counts = {"queries": attended.heads, "keys": attended.kv_heads, "values": attended.kv_heads}
    values = {name: (rows, count, positions, attended.head_size) for name, count in counts.items()}
    sinks = {"sinks": (attended.heads,)} if attended.sinks else {}
    return Operator("attention", values, sinks, compute, pin="attention", settings=attended)
