"""Every operator of a model with inputs for it, and the same in float64, written a second time in plain torch.

`engine.alignment` compares both on a device. The second version shares nothing with the first but shapes: a mistake in
one of them shows. Names of operators are those that messages have for them; `pin` is a key of `precision.overrides`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hpctrain.architectures.description import Attention, Layer, Mlp, Norm
from hpctrain.comm.communicator import Communicator
from hpctrain.config.job import Model
from hpctrain.model import functions, head_loss, linear_layers
from hpctrain.model.axes import Axes, Axis
from hpctrain.model.kernels import Kernels
from hpctrain.model.transformer import rotary_frequencies
from hpctrain.model.units import Weight

MOST_IDS = 8192
"""Of the vocabulary: what is wrong with a product or a sum shows with so many columns, and float64 takes its time."""
Tensors = Mapping[str, torch.Tensor]


class Rounding(NamedTuple):
    """Where a result of an operator may lose digits."""

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
        key = each.name, *sorted({**each.values, **each.weights}.items()), _settings(each)
        if key not in distinct:
            count[each.name] = count.get(each.name, 0) + 1
            distinct[key] = each
    seen: dict[str, int] = {}
    return [_numbered(each, count, seen) for each in distinct.values()]


def _settings(operator: Operator) -> object:
    """Return what makes two operators of one name and shape differ: the description that they are made of."""
    return getattr(operator.compute, "made_of", None)


def _numbered(operator: Operator, count: Mapping[str, int], seen: dict[str, int]) -> Operator:
    seen[operator.name] = seen.get(operator.name, 0) + 1
    if count[operator.name] == 1:
        return operator
    return Operator(**{**operator.__dict__, "name": f"{operator.name} {seen[operator.name]}"})


def _made_of(what: object, compute: Callable) -> Callable:
    compute.made_of = what  # pyright: ignore[reportFunctionMemberAccess]
    return compute


def _alone() -> Axis:
    return Communicator((0,))


def _embedding(shape: tuple[int, int], ids: int, hidden: int, scale: float) -> Operator:
    def compute(values: Tensors, weights: Mapping[str, Weight], numbers: Tensors) -> torch.Tensor:
        anchor = torch.zeros((), requires_grad=True)
        result = functions.embed(anchor, numbers["ids"], weights["table"], 0, _alone())
        return result if scale == 1.0 else result * scale

    rounds = int(scale != 1.0)
    return Operator(
        "embedding",
        {},
        {"table": (ids, hidden)},
        compute,
        lambda values, weights, numbers: weights["table"][numbers["ids"]] * scale,
        {"output": Rounding(rounds, 0), "d table": Rounding(rounds, math.prod(shape))},
        {"ids": (shape, ids)},
    )


def _positions(shape: tuple[int, int], hidden: int) -> Operator:
    return Operator(
        "positions",
        {"x": (*shape, hidden)},
        {"table": (shape[1], hidden)},
        lambda values, weights, _: functions.add_positions(values["x"], weights["table"]),
        lambda values, weights, _: values["x"] + weights["table"],
        {"output": Rounding(1, 0), "d x": Rounding(0, 0), "d table": Rounding(0, shape[0])},
    )


def _norm(name: str, of: Norm, shape: tuple[int, ...], kernels: Kernels) -> Operator:
    names = ("weight", "bias") if of.has_bias else ("weight",)
    features, others = shape[-1], math.prod(shape[:-1])
    of_head = len(shape) == 4

    def compute(values: Tensors, weights: Mapping[str, Weight], _: Tensors) -> torch.Tensor:
        if of_head:
            return kernels.head_norm(values["x"], weights["weight"], of)
        return kernels.norm(values["x"], [weights[each] for each in names], _alone(), features, of)

    def reference(values: Tensors, weights: Tensors, _: Tensors) -> torch.Tensor:
        x = values["x"]
        if of.has_bias:
            return F.layer_norm(x, (features,), weights["weight"], weights["bias"], of.epsilon)
        scale = weights["weight"] + of.offset
        return x / (x.square().mean(-1, keepdim=True) + of.epsilon).sqrt() * scale

    roundings = {"output": Rounding(1, features), "d x": Rounding(1, features)}
    roundings |= {f"d {each}": Rounding(0, features + others) for each in names}
    return Operator(name, {"x": shape}, dict.fromkeys(names, (features,)), _made_of(of, compute), reference, roundings)


def _linear(name: str, shape: tuple[int, int], inputs: int, outputs: int, bias: bool, pin: str = "linear") -> Operator:
    tokens = math.prod(shape)

    def compute(values: Tensors, weights: Mapping[str, Weight], _: Tensors) -> torch.Tensor:
        biases = [weights["bias"]] if bias else []
        return linear_layers.linear(values["x"], [weights["weight"]], biases, _alone(), _alone())

    def reference(values: Tensors, weights: Tensors, _: Tensors) -> torch.Tensor:
        return F.linear(values["x"], weights["weight"], weights.get("bias"))

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
    attention, mlp = block.attention, block.mlp
    whole = *shape, hidden
    yield _norm("norm", attention.norm, whole, kernels)
    together = attention.query_size + 2 * attention.key_size
    yield _linear("attention.qkv", shape, hidden, together, attention.bias)
    if attention.head_norm:
        yield _norm("head_norm", attention.head_norm, (*shape, attention.heads, attention.head_size), kernels)
    if attention.rotary:
        yield _rotary(attention, shape, kernels)
    yield _attention(attention, shape, kernels)
    yield _linear("attention.o", shape, attention.query_size, hidden, attention.out_bias)
    if attention.out_norm:
        yield _norm("norm", attention.out_norm, whole, kernels)
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


def _rotary(attention: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    rotary = attention.rotary
    assert rotary is not None, "asked for where there is one"
    frequencies = rotary_frequencies(rotary, attention.head_size // 2)
    angles = torch.arange(shape[1], dtype=torch.float64)[:, None, None] * frequencies

    def compute(values: Tensors, _: object, __: object) -> torch.Tensor:
        x = values["x"]
        return kernels.rotate(x, *(table.float().to(x.device) for table in (angles.cos(), angles.sin())))

    def reference(values: Tensors, _: object, __: object) -> torch.Tensor:
        pairs = torch.complex(*values["x"].chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    # Cosine and sine, each of two products, and their sum.
    roundings = {"output": Rounding(4, 0), "d x": Rounding(4, 0)}
    values = {"x": (*shape, attention.heads + attention.kv_heads, attention.head_size)}
    return Operator("rotary", values, {}, _made_of(rotary, compute), reference, roundings, pin="rotary")


def _attention(attention: Attention, shape: tuple[int, int], kernels: Kernels) -> Operator:
    rows, positions = shape
    size, shared = attention.head_size, attention.heads // attention.kv_heads
    scale = 1 / math.sqrt(attention.score_divisor or size)

    def compute(values: Tensors, _: object, __: object) -> torch.Tensor:
        return kernels.attend(values["queries"], values["keys"], values["values"], attention)

    def reference(values: Tensors, _: object, __: object) -> torch.Tensor:
        grouped = values["queries"].unflatten(1, (attention.kv_heads, shared))
        scores = torch.einsum("rgsqe,rgke->rgsqk", grouped, values["keys"]) * scale
        if attention.score_cap is not None:
            scores = torch.tanh(scores / attention.score_cap) * attention.score_cap
        visible = torch.ones(positions, positions, dtype=torch.bool).tril()
        if attention.window is not None:
            visible &= ~torch.ones_like(visible).tril(-attention.window)
        shares = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
        return torch.einsum("rgsqk,rgke->rgsqe", shares, values["values"]).flatten(1, 2)

    heads = {"queries": attention.heads, "keys": attention.kv_heads, "values": attention.kv_heads}
    # Shares and the mixture, with a cap also scores and the cap's steps; back each of them once more.
    forward, back = (2, 4) if attention.score_cap is None else (5, 8)
    roundings = {"output": Rounding(forward, positions + size)}
    roundings |= {
        f"d {name}": Rounding(back, (positions + size) * (1 if name == "queries" else shared)) for name in heads
    }
    values = {name: (rows, count, positions, size) for name, count in heads.items()}
    return Operator("attention", values, {}, _made_of(attention, compute), reference, roundings, pin="attention")


def _activation(mlp: Mlp, shape: tuple[int, int], kernels: Kernels) -> Operator:
    def compute(values: Tensors, _: object, __: object) -> torch.Tensor:
        if mlp.gated:
            return kernels.gated(values["x"], mlp.activation)
        return functions.ACTIVATIONS[mlp.activation](values["x"])

    def curve(x: torch.Tensor) -> torch.Tensor:
        if mlp.activation == "silu":
            return x * torch.sigmoid(x)
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def reference(values: Tensors, _: object, __: object) -> torch.Tensor:
        if not mlp.gated:
            return curve(values["x"])
        gate, up = values["x"].chunk(2, dim=-1)
        return curve(gate) * up

    roundings = {"output": Rounding(2, 0), "d x": Rounding(2 + mlp.gated, 0)}
    values = {"x": (*shape, mlp.up_size)}
    made_of = mlp.activation, mlp.gated
    return Operator("activation", values, {}, _made_of(made_of, compute), reference, roundings, pin="activation")


def _head(shape: tuple[int, int], ids: int, hidden: int, cap: float | None, kernels: Kernels) -> Sequence[Operator]:
    tokens = math.prod(shape)
    numbers = {"targets": (shape, ids)}

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")

    def capped(logits: torch.Tensor) -> torch.Tensor:
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def at_once(values: Tensors, _: object, numbers: Tensors) -> torch.Tensor:
        return head_loss.cross_entropy(values["logits"], numbers["targets"], 0, ids, None, _alone(), kernels)

    def by_parts(values: Tensors, weights: Mapping[str, Weight], numbers: Tensors) -> torch.Tensor:
        axes = Axes(_alone(), _alone(), _alone())
        return head_loss.head_loss(values["x"], weights["table"], numbers["targets"], 0, ids, cap, axes, kernels)

    entropy = Operator(
        "cross_entropy",
        {"logits": (*shape, ids)},
        {},
        at_once,
        lambda values, _, numbers: loss_of(values["logits"], numbers["targets"]),
        {"output": Rounding(0, ids + tokens), "d logits": Rounding(1, ids)},
        numbers,
    )
    chunked = Operator(
        "head.loss",
        {"x": (*shape, hidden)},
        {"table": (ids, hidden)},
        by_parts,
        lambda values, weights, numbers: loss_of(capped(values["x"] @ weights["table"].t()), numbers["targets"]),
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
                lambda values, _, __: functions.capped(values["logits"], cap),
                lambda values, _, __: capped(values["logits"]),
                {"output": Rounding(3, 0), "d logits": Rounding(4, 0)},
                pin="head",
            )
        )
    return [*result, entropy, chunked]
