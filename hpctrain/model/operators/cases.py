"""Every operator of a model, with inputs for it, its float64 reference, and how far rounding may take them apart.

`engine.alignment` compares both on a device. References share nothing with operators but shapes: a mistake in one of
them shows. Names of operators are those that messages have for them; `pin` is a key of `precision.overrides`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from hpctrain.architectures.description import Attention, Layer, Mlp, Norm
from hpctrain.comm.communicator import Communicator
from hpctrain.config.job import Model
from hpctrain.model.axes import Axes, Axis
from hpctrain.model.operators import activation, attention, embedding, linear, loss, rotary
from hpctrain.model.operators import norm as norms
from hpctrain.model.operators.running import Kernels
from hpctrain.model.units import Weight

MOST_IDS = 8192
"""Of the vocabulary: what is wrong with a product or a sum shows with so many columns, and float64 takes its time."""
Tensors = Mapping[str, torch.Tensor]


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
    compute: Callable[[Tensors, Mapping[str, Weight], Tensors], torch.Tensor]
    """From values, weights and ids to the output, as the model computes it."""
    reference: Callable[[Tensors, Tensors, Tensors], torch.Tensor]
    """The same of float64, by operations that torch differentiates."""
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
    count: dict[str, int] = {}
    for each in result:
        key = each.name, *sorted({**each.values, **each.weights}.items()), each.settings
        if key not in distinct:
            count[each.name] = count.get(each.name, 0) + 1
            distinct[key] = each
    seen: dict[str, int] = {}
    return [_numbered(each, count, seen) for each in distinct.values()]


def _numbered(operator: Operator, count: Mapping[str, int], seen: dict[str, int]) -> Operator:
    seen[operator.name] = seen.get(operator.name, 0) + 1
    if count[operator.name] == 1:
        return operator
    return replace(operator, name=f"{operator.name} {seen[operator.name]}")


def _alone() -> Axis:
    return Communicator((0,))


def _embedding(shape: tuple[int, int], ids: int, hidden: int, scale: float) -> Operator:
    def compute(values: Tensors, weights: Mapping[str, Weight], numbers: Tensors) -> torch.Tensor:
        anchor = torch.zeros((), requires_grad=True)
        result = embedding.embed(anchor, numbers["ids"], weights["table"], 0, _alone())
        return result if scale == 1.0 else result * scale

    rounds = int(scale != 1.0)
    return Operator(
        "embedding",
        {},
        {"table": (ids, hidden)},
        compute,
        lambda values, weights, numbers: embedding.reference(numbers["ids"], weights["table"], scale),
        {"output": Rounding(rounds, 0), "d table": Rounding(rounds, math.prod(shape))},
        {"ids": (shape, ids)},
    )


def _positions(shape: tuple[int, int], hidden: int) -> Operator:
    return Operator(
        "positions",
        {"x": (*shape, hidden)},
        {"table": (shape[1], hidden)},
        lambda values, weights, _: embedding.add_positions(values["x"], weights["table"]),
        lambda values, weights, _: embedding.reference_positions(values["x"], weights["table"]),
        {"output": Rounding(1, 0), "d x": Rounding(0, 0), "d table": Rounding(0, shape[0])},
    )


def _norm(name: str, of: Norm, shape: tuple[int, ...], kernels: Kernels) -> Operator:
    names = ("weight", "bias") if of.has_bias else ("weight",)
    features, others = shape[-1], math.prod(shape[:-1])
    axis = None if len(shape) == 4 else _alone()  # of heads

    def compute(values: Tensors, weights: Mapping[str, Weight], _: Tensors) -> torch.Tensor:
        return norms.norm(values["x"], [weights[each] for each in names], axis, features, of, kernels.run)

    def reference(values: Tensors, weights: Tensors, _: Tensors) -> torch.Tensor:
        return norms.reference(values["x"], of, *[weights[each] for each in names])

    roundings = {"output": Rounding(1, features), "d x": Rounding(1, features)}
    roundings |= {f"d {each}": Rounding(0, features + others) for each in names}
    weights: dict[str, tuple[int, ...]] = {each: (features,) for each in names}
    return Operator(name, {"x": shape}, weights, compute, reference, roundings, settings=of)


def _linear(name: str, shape: tuple[int, int], inputs: int, outputs: int, bias: bool, pin: str = "linear") -> Operator:
    tokens = math.prod(shape)

    def compute(values: Tensors, weights: Mapping[str, Weight], _: Tensors) -> torch.Tensor:
        biases = [weights["bias"]] if bias else []
        return linear.linear(values["x"], [weights["weight"]], biases, _alone(), _alone())

    def reference(values: Tensors, weights: Tensors, _: Tensors) -> torch.Tensor:
        return linear.reference(values["x"], weights["weight"], weights.get("bias"))

    roundings = {
        "output": Rounding(1 + bias, inputs),
        "d x": Rounding(1, outputs),
        "d weight": Rounding(0, tokens),  # whole operands, and a sum in fp32 that is not rounded
    }
    weights: dict[str, tuple[int, ...]] = {"weight": (outputs, inputs)}
    if bias:
        weights["bias"], roundings["d bias"] = (outputs,), Rounding(0, tokens)
    return Operator(name, {"x": (*shape, inputs)}, weights, compute, reference, roundings, pin=pin)


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
    yield _residual(whole)
    yield _norm("norm", mlp.norm, whole, kernels)
    yield _linear("ffn.up", shape, hidden, mlp.up_size, mlp.bias)
    yield _activation(mlp, shape, kernels)
    yield _linear("ffn.down", shape, mlp.inner, hidden, mlp.bias)
    if mlp.out_norm:
        yield _norm("norm", mlp.out_norm, whole, kernels)


def _residual(whole: tuple[int, ...]) -> Operator:
    return Operator(
        "residual",
        {"x": whole, "added": whole},
        {},
        lambda values, _, __: values["x"] + values["added"],
        lambda values, _, __: values["x"] + values["added"],
        {"output": Rounding(1, 0), "d x": Rounding(0, 0), "d added": Rounding(0, 0)},
    )


def _rotary(of: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    turns = of.rotary
    assert turns is not None, "asked for where there is one"

    def compute(values: Tensors, _: object, __: object) -> torch.Tensor:
        tables = rotary.tables(turns, shape[1], of.head_size // 2, values["x"].device)
        return rotary.rotate(values["x"], *tables, kernels.run)

    def reference(values: Tensors, _: object, __: object) -> torch.Tensor:
        return rotary.reference(values["x"], turns)

    # Cosine and sine, each of two products, and their sum.
    roundings = {"output": Rounding(4, 0), "d x": Rounding(4, 0)}
    values = {"x": (*shape, of.heads + of.kv_heads, of.head_size)}
    return Operator("rotary", values, {}, compute, reference, roundings, pin="rotary", settings=turns)


def _attention(of: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    rows, positions = shape
    size, shared = of.head_size, of.heads // of.kv_heads

    def compute(values: Tensors, _: object, __: object) -> torch.Tensor:
        return attention.attend(values["queries"], values["keys"], values["values"], of, backend=kernels.attention)

    def reference(values: Tensors, _: object, __: object) -> torch.Tensor:
        return attention.reference(values["queries"], values["keys"], values["values"], of)

    heads = {"queries": of.heads, "keys": of.kv_heads, "values": of.kv_heads}
    # Shares and the mixture, with a cap also scores and the cap's steps; back each of them once more.
    forward, back = (2, 4) if of.score_cap is None else (5, 8)
    roundings = {"output": Rounding(forward, positions + size)}
    roundings |= {
        f"d {name}": Rounding(back, (positions + size) * (1 if name == "queries" else shared)) for name in heads
    }
    values = {name: (rows, count, positions, size) for name, count in heads.items()}
    return Operator("attention", values, {}, compute, reference, roundings, pin="attention", settings=of)


def _activation(mlp: Mlp, shape: tuple[int, int], kernels: Kernels) -> Operator:
    settings = mlp.activation, mlp.gated

    def compute(values: Tensors, _: object, __: object) -> torch.Tensor:
        return activation.activate(values["x"], *settings, kernels.run)

    def reference(values: Tensors, _: object, __: object) -> torch.Tensor:
        return activation.reference(values["x"], *settings)

    roundings = {"output": Rounding(2, 0), "d x": Rounding(2 + mlp.gated, 0)}
    values = {"x": (*shape, mlp.up_size)}
    return Operator("activation", values, {}, compute, reference, roundings, pin="activation", settings=settings)


def _head(shape: tuple[int, int], ids: int, hidden: int, cap: float | None, kernels: Kernels) -> Sequence[Operator]:
    tokens = math.prod(shape)
    numbers = {"targets": (shape, ids)}

    def at_once(values: Tensors, _: object, numbers: Tensors) -> torch.Tensor:
        return loss.cross_entropy(values["logits"], numbers["targets"], 0, ids, None, _alone(), kernels.run)

    def by_parts(values: Tensors, weights: Mapping[str, Weight], numbers: Tensors) -> torch.Tensor:
        axes = Axes(_alone(), _alone(), _alone())
        return loss.head_loss(values["x"], weights["table"], numbers["targets"], 0, ids, cap, axes, kernels)

    entropy = Operator(
        "cross_entropy",
        {"logits": (*shape, ids)},
        {},
        at_once,
        lambda values, _, numbers: loss.reference(values["logits"], numbers["targets"], None),
        {"output": Rounding(0, ids + tokens), "d logits": Rounding(1, ids)},
        numbers,
    )
    chunked = Operator(
        "head.loss",
        {"x": (*shape, hidden)},
        {"table": (ids, hidden)},
        by_parts,
        lambda values, weights, numbers: loss.reference(values["x"] @ weights["table"].t(), numbers["targets"], cap),
        {
            "output": Rounding(1 + 3 * (cap is not None), hidden + ids + tokens),
            "d x": Rounding(3 + 3 * (cap is not None), hidden + ids),  # logits, their gradient, the product
            "d table": Rounding(2 + 3 * (cap is not None), hidden + tokens),
        },
        numbers,
        pin="head",
    )
    result = [_linear("head.logits", shape, hidden, ids, False, pin="head")]
    if cap is not None:
        result.append(
            Operator(
                "logit_cap",
                {"logits": (*shape, ids)},
                {},
                lambda values, _, __: activation.capped(values["logits"], cap),
                lambda values, _, __: activation.reference_cap(values["logits"], cap),
                {"output": Rounding(3, 0), "d logits": Rounding(4, 0)},
                pin="head",
            )
        )
    return [*result, entropy, chunked]
