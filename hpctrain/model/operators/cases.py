"""Every operator of a model, with inputs for it, its float64 reference, and how far rounding may take them apart.

`engine.alignment` compares both on a device. References share nothing with operators but shapes: a mistake in one of
them shows. Names of operators are those that messages have for them; `pin` is a key of `precision.overrides`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch

from hpctrain.architectures.description import Attention, Layer, Mlp, Norm
from hpctrain.config.job import Model
from hpctrain.model.operators import activation, attention, embedding, linear, loss, rotary
from hpctrain.model.operators import norm as norms
from hpctrain.model.operators.running import Kernels
from hpctrain.model.parallel.axes import ONE_RANK, Axes
from hpctrain.model.storage.units import Weight

MOST_IDS = 8192
"""Of the vocabulary: what is wrong with a product or a sum shows with so many columns, and float64 takes its time."""


class Rounding(NamedTuple):
    """The causes by which a result of an operator may lose digits."""

    rounds: int
    """How many times values on the longest path are rounded to the dtype that is computed in."""
    length: int
    """How many terms its longest sum has; sums are in fp32."""


@dataclass(frozen=True)
class Operator:
    """One operator with the shapes of a job."""

    name: str
    values: Mapping[str, tuple[int, ...]]
    """Inputs that have gradients, by name."""
    weights: Mapping[str, tuple[int, ...]]
    compute: Callable[..., torch.Tensor]
    """From values, weights (`Weight`) and ids, by name, to the output, as the model computes it."""
    reference: Callable[..., torch.Tensor]
    """The same of float64 tensors, by operations that torch differentiates."""
    roundings: Mapping[str, Rounding]
    """By result: `output`, and `d NAME` for the gradient of each value and weight."""
    ids: Mapping[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    """Whole numbers below a limit, by name: their shape and the limit."""
    pin: str | None = None
    settings: object = None
    """What of the description it is made of: operators of one name and shape may differ in it."""


def operators(model: Model, rows: int, positions: int, kernels: Kernels | None = None) -> list[Operator]:
    """Return all operators of a model that differ, in the order in which a forward pass comes to them.

    Blocks of one description are one. Values are of so many rows and positions; sizes are the model's, but for
    vocabularies above `MOST_IDS`. They are computed by torch's own kernels, or by those that are given.
    """
    kernels = kernels or Kernels()
    description, shape = model.description, (rows, positions)
    ids = min(model.num_ids, MOST_IDS)
    result = [_embedding(shape, ids, model.hidden_size, description.embedding_scale)]
    if description.learned_positions:
        result.append(_positions(shape, model.hidden_size))
    for block in dict.fromkeys(description.blocks):
        result += _block(block, shape, model.hidden_size, kernels)
    result.append(_norm("norm", description.norm, (*shape, model.hidden_size), kernels))
    result += _head(shape, ids, model.hidden_size, description.logit_cap, kernels)
    distinct: dict[tuple, Operator] = {}
    for each in result:
        key = each.name, *sorted({**each.values, **each.weights}.items()), each.settings
        distinct.setdefault(key, each)
    by_name: dict[str, list[Operator]] = {}
    for each in distinct.values():
        by_name.setdefault(each.name, []).append(each)
    numbers = {id(each): number for same in by_name.values() if same[1:] for number, each in enumerate(same, 1)}
    return [
        replace(each, name=f"{each.name} {numbers[id(each)]}") if id(each) in numbers else each
        for each in distinct.values()
    ]


def _embedding(shape: tuple[int, int], ids: int, hidden: int, scale: float) -> Operator:
    def compute(ids: torch.Tensor, table: Weight) -> torch.Tensor:
        result = embedding.embed(torch.zeros((), requires_grad=True), ids, table, 0, ONE_RANK)
        return result if scale == 1.0 else result * scale

    rounds = int(scale != 1.0)
    return Operator(
        "embedding",
        {},
        {"table": (ids, hidden)},
        compute,
        lambda ids, table: embedding.reference(ids, table, scale),
        {"output": Rounding(rounds, 0), "d table": Rounding(rounds, math.prod(shape))},
        {"ids": (shape, ids)},
    )


def _positions(shape: tuple[int, int], hidden: int) -> Operator:
    return Operator(
        "positions",
        {"x": (*shape, hidden)},
        {"table": (shape[1], hidden)},
        lambda x, table: embedding.add_positions(x, table),
        lambda x, table: embedding.reference_positions(x, table),
        {"output": Rounding(1, 0), "d x": Rounding(0, 0), "d table": Rounding(0, shape[0])},
    )


def _norm(name: str, of: Norm, shape: tuple[int, ...], kernels: Kernels) -> Operator:
    features, others = shape[-1], math.prod(shape[:-1])
    roundings = {"output": Rounding(1, features), "d x": Rounding(1, features)}
    weights: dict[str, tuple[int, ...]] = {}
    for each in ("weight", "bias") if of.has_bias else ("weight",):
        weights[each], roundings[f"d {each}"] = (features,), Rounding(0, features + others)
    return Operator(
        name,
        {"x": shape},
        weights,
        lambda x, **weights: norms.NormLayer([*weights.values()], ONE_RANK, features, of, kernels.run)(x),
        lambda x, **weights: norms.reference(x, of, **weights),
        roundings,
        settings=of,
    )


def _norm_of_sum(of: Norm, shape: tuple[int, ...], kernels: Kernels) -> Operator:
    """Return the sum and its norm as one operator; its output is both, one behind the other."""
    norm = _norm("norm", of, shape, kernels)

    def compute(x: torch.Tensor, added: torch.Tensor, **weights: Weight) -> torch.Tensor:
        layer = norms.NormLayer([*weights.values()], ONE_RANK, shape[-1], of, kernels.run)
        return torch.stack(layer.of_sum(x, added)[:2])

    def reference(x: torch.Tensor, added: torch.Tensor, **weights: torch.Tensor) -> torch.Tensor:
        return torch.stack([x + added, norms.reference(x + added, of, **weights)])

    # The sum is rounded before it is normed; its gradient is the sum of two that are rounded.
    roundings = {name: rounding._replace(rounds=rounding.rounds + 1) for name, rounding in norm.roundings.items()}
    for name in ("d x", "d added"):
        roundings[name] = Rounding(3, shape[-1])
    return replace(
        norm,
        name="norm_of_sum",
        values={"x": shape, "added": shape},
        compute=compute,
        reference=reference,
        roundings=roundings,
    )


def _linear(name: str, shape: tuple[int, int], inputs: int, outputs: int, bias: bool, pin: str = "linear") -> Operator:
    tokens = math.prod(shape)
    roundings = {
        "output": Rounding(1 + bias, inputs),
        "d x": Rounding(1, outputs),
        "d weight": Rounding(0, tokens),  # whole operands, and a sum in fp32 that is not rounded
    }
    weights: dict[str, tuple[int, ...]] = {"weight": (outputs, inputs)}
    if bias:
        weights["bias"], roundings["d bias"] = (outputs,), Rounding(0, tokens)
    return Operator(
        name,
        {"x": (*shape, inputs)},
        weights,
        lambda x, weight, **bias: linear.Linear([weight], [*bias.values()], ONE_RANK, ONE_RANK)(x),
        lambda x, **weights: linear.reference(x, **weights),
        roundings,
        pin=pin,
    )


def _block(block: Layer, shape: tuple[int, int], hidden: int, kernels: Kernels) -> Iterator[Operator]:
    of, mlp = block.attention, block.mlp
    whole = *shape, hidden
    yield _norm("norm", of.norm, whole, kernels)
    together = of.query_size + 2 * of.key_size
    yield _linear("attention.qkv", shape, hidden, together, of.bias)
    if of.head_norm:
        yield _norm("head_norm", of.head_norm, (*shape, of.heads, of.head_size), kernels)
    if of.rotary:
        yield _rotary(of, shape, kernels)
    yield _attention(of, shape, kernels)
    yield _linear("attention.o", shape, of.query_size, hidden, of.out_bias)
    if of.out_norm:
        yield _norm("norm", of.out_norm, whole, kernels)
    yield _norm_of_sum(mlp.norm, whole, kernels)
    yield _linear("ffn.up", shape, hidden, mlp.up_size, mlp.bias)
    yield _activation(mlp, shape, kernels)
    yield _linear("ffn.down", shape, mlp.inner, hidden, mlp.bias)
    if mlp.out_norm:
        yield _norm("norm", mlp.out_norm, whole, kernels)
    yield _residual(whole)


def _residual(whole: tuple[int, ...]) -> Operator:
    return Operator(
        "residual",
        {"x": whole, "added": whole},
        {},
        lambda x, added: x + added,
        lambda x, added: x + added,
        {"output": Rounding(1, 0), "d x": Rounding(0, 0), "d added": Rounding(0, 0)},
    )


def _rotary(of: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    turns = of.rotary
    assert turns is not None, "asked for where there is one"

    counts = of.heads, of.kv_heads, of.kv_heads

    def compute(x: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary.tables(turns, shape[1], of.head_size // 2, x.device)
        return torch.cat(rotary.rotate(x, cos, sin, counts, kernels.run), dim=2)

    def reference(x: torch.Tensor) -> torch.Tensor:
        turned, values = x.split([of.heads + of.kv_heads, of.kv_heads], dim=2)
        return torch.cat([rotary.reference(turned, turns), values], dim=2)

    # Cosine and sine, each of two products, and their sum.
    roundings = {"output": Rounding(4, 0), "d x": Rounding(4, 0)}
    values = {"x": (*shape, sum(counts), of.head_size)}
    return Operator("rotary", values, {}, compute, reference, roundings, pin="rotary", settings=turns)


def _attention(of: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    rows, positions = shape
    size, shared = of.head_size, of.heads // of.kv_heads
    heads = {"queries": of.heads, "keys": of.kv_heads, "values": of.kv_heads}
    # Shares and the mixture, with a cap also scores and the cap's steps; back each of them once more.
    forward, back = (2, 4) if of.score_cap is None else (5, 8)
    roundings = {"output": Rounding(forward, positions + size)}
    roundings |= {
        f"d {name}": Rounding(back, (positions + size) * (1 if name == "queries" else shared)) for name in heads
    }
    return Operator(
        "attention",
        {name: (rows, count, positions, size) for name, count in heads.items()},
        {},
        lambda queries, keys, values: attention.attend(queries, keys, values, of, backend=kernels.attention),
        partial(attention.reference, attention=of),
        roundings,
        pin="attention",
        settings=of,
    )


def _activation(mlp: Mlp, shape: tuple[int, int], kernels: Kernels) -> Operator:
    settings = mlp.activation, mlp.gated
    return Operator(
        "activation",
        {"x": (*shape, mlp.up_size)},
        {},
        lambda x: activation.activate(x, *settings, kernels.run),
        lambda x: activation.reference(x, *settings),
        {"output": Rounding(2, 0), "d x": Rounding(2 + mlp.gated, 0)},
        pin="activation",
        settings=settings,
    )


def _head(shape: tuple[int, int], ids: int, hidden: int, cap: float | None, kernels: Kernels) -> Sequence[Operator]:
    tokens, numbers = math.prod(shape), {"targets": (shape, ids)}
    logits, caps = {"logits": (*shape, ids)}, 3 * (cap is not None)

    def loss_of(capped_at: float | None) -> loss.TokenLoss:
        return loss.TokenLoss(Axes(), kernels, 0, ids, capped_at)

    entropy = Operator(
        "cross_entropy",
        logits,
        {},
        lambda logits, targets: loss.cross_entropy(logits, targets, loss_of(None)),
        partial(loss.reference, cap=None),
        {"output": Rounding(0, ids + tokens), "d logits": Rounding(1, ids)},
        numbers,
    )
    chunked = Operator(
        "head.loss",
        {"x": (*shape, hidden)},
        {"table": (ids, hidden)},
        lambda x, table, targets: loss.head_loss(x, table, targets, loss_of(cap)),
        lambda x, table, targets: loss.reference(x @ table.t(), targets, cap),
        {
            "output": Rounding(1 + caps, hidden + ids + tokens),
            "d x": Rounding(3 + caps, hidden + ids),  # logits, their gradient, the product
            "d table": Rounding(2 + caps, hidden + tokens),
        },
        numbers,
        pin="head",
    )
    result = [_linear("head.logits", shape, hidden, ids, False, pin="head")]
    if cap is not None:
        roundings = {"output": Rounding(3, 0), "d logits": Rounding(4, 0)}
        result.append(
            Operator(
                "logit_cap",
                logits,
                {},
                lambda logits: activation.capped(logits, cap),
                lambda logits: activation.reference_cap(logits, cap),
                roundings,
                pin="head",
            )
        )
    return [*result, entropy, chunked]
