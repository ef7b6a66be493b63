"""The parts of a decoder-only transformer. Parameters, torch modules, costs and Hugging Face files follow from them.

A family's module (`llama.py`, `gemma2.py`, …) returns a `Description` for the sizes of a job. Everything here is frozen
and has a hash: layers with equal blocks are equal.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol


class ModelShape(Protocol):
    """The sizes that a family describes: the keys of a job's `[model]`, which say what each is."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None
    head_size: int | None
    ffn_size: int | None
    max_positions: int
    tie_head: bool
    rope_base: float
    rope_local_base: float | None
    window: int | None
    global_every: int | None
    score_divisor: float | None
    score_cap: float | None
    logit_cap: float | None
    num_experts: int | None
    experts_per_token: int | None
    expert_size: int | None
    shared_experts: int
    dense_layers: int
    expert_groups: int
    groups_per_token: int
    normalise_scores: bool
    score_scale: float
    norm_epsilon: float

    @property
    def rope_scaling(self) -> "RotaryScaling | None": ...


@dataclass(frozen=True)
class Norm:
    """RMSNorm (scale by the root of the mean square), or LayerNorm, which has a mean and a bias too."""

    epsilon: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    """What is added to the stored weight before it scales."""

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer"


class RotaryScaling(Protocol):
    """A job's table `[model.rope_scaling]`, which says what each key is."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_factor: float
    high_factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    truncate: bool


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoFormer, Su et al. 2021), with the halves of a head as pairs."""

    base: float
    scaling: RotaryScaling | None = None


SINK_FEATURES = 8
"""Features that a head has in addition in kernels of attention, where heads have sinks: one, and as many as kernels
want."""


@dataclass(frozen=True)
class Attention:
    """Causal attention with grouped queries."""

    heads: int
    kv_heads: int
    head_size: int
    norm: Norm
    """The norm of the part's input."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    out_bias: bool = False
    rotary: Rotary | None = None
    head_norm: Norm | None = None
    """The norm of each head's queries and keys, applied before rotary positions."""
    window: int | None = None
    """Number of positions that a token attends to, itself included; None: all positions before it too."""
    score_divisor: float | None = None
    """Scores are divided by the square root of this number; None: by that of the head size."""
    score_cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    out_norm: Norm | None = None
    """The norm of the part's output, applied before the output is added to the residual stream."""
    sinks: bool = False
    """Whether each head has a score of no position: a weight that takes its share of attention, and adds nothing."""

    @property
    def kernel_size(self) -> int:
        """Features of a head as kernels of attention have them."""
        return self.head_size + SINK_FEATURES * self.sinks

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def key_size(self) -> int:
        return self.kv_heads * self.head_size


@dataclass(frozen=True)
class Mlp:
    """The feed-forward part: activation(up(x)), or activation(gate(x)) * up(x) where it is gated; then down."""

    inner: int
    norm: Norm
    """The norm of the part's input."""
    gated: bool = True
    activation: Literal["silu", "gelu", "clamped"] = "silu"
    """`gelu` is the tanh approximation; `clamped` is that of gpt-oss, see `model/operators/activation.py`."""
    bias: bool = False
    """Whether products have biases: with experts the router's too, and those of each expert."""
    out_norm: Norm | None = None
    """The norm of the part's output, applied before the output is added to the residual stream."""

    @property
    def up_size(self) -> int:
        """Output features of the first product: gate and up together."""
        return 2 * self.inner if self.gated else self.inner

    @property
    def token_inner(self) -> int:
        """Inner features that a token computes with."""
        return self.inner

    @property
    def router_size(self) -> int:
        """Output features of the router of a mixture of experts; 0 without one."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Experts(Mlp):
    """A mixture of experts: gated feed-forward parts of `inner` features, some of which compute each token.

    A router scores all experts for a token. What the chosen ones return is added, weighted by their scores. No token is
    dropped, whatever the load of an expert.
    """

    count: int
    chosen: int
    """Number of experts that compute a token."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the router's logits: softmax over all experts, or the sigmoid of each."""
    normalised: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the scores."""
    groups: int = 1
    """Groups of consecutive experts. A token takes experts of the `chosen_groups` whose two best scores have the
    largest sum (DeepSeek V3, arXiv 2412.19437)."""
    chosen_groups: int = 1
    shared_inner: int = 0
    """Inner features of the expert that computes every token; 0: there is none."""
    balances: bool = False
    """Whether a bias of each expert is added to its score for the choice alone, against uneven load (Wang et al. 2024,
    arXiv 2408.15664)."""

    def __post_init__(self):
        checks = [("experts_per_token", self.chosen, "num_experts", self.count)]
        checks += [("groups_per_token", self.chosen_groups, "expert_groups", self.groups)]
        for key, number, of, limit in checks:
            if not 0 < number <= limit:
                raise ValueError(f"{key} = {number} must be 1 to {of} = {limit}")
        if self.count % self.groups:
            raise ValueError(f"num_experts {self.count} is not divisible by expert_groups {self.groups}")
        if (available := self.count // self.groups * self.chosen_groups) < self.chosen:
            raise ValueError(f"groups_per_token = {self.chosen_groups} have {available} experts, fewer than a token's")

    @property
    def token_inner(self) -> int:
        return self.chosen * self.inner + self.shared_inner

    @property
    def router_size(self) -> int:
        return self.count


@dataclass(frozen=True)
class Layer:
    """A layer: attention, then the feed-forward part, each added to the residual stream."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True)
class Description:
    """A whole model."""

    hidden: int
    blocks: tuple[Layer, ...]
    norm: Norm
    """The norm of the last hidden states, which the head computes with."""
    learned_positions: int | None = None
    """Rows of the table of learned positions, which is added to the embeddings; None: no such table."""
    tied_head: bool = False
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    """Logits l become cap * tanh(l / cap)."""


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies cos and sin by where frequencies are divided by `factor` (arXiv 2309.00071, eq. 22).

    `mscale` is of DeepSeek: configs that have it take the quotient of two such numbers.
    """
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


def kv_heads_of(shape: ModelShape) -> int:
    return shape.num_kv_heads or shape.num_heads


def head_size_of(shape: ModelShape) -> int:
    return shape.head_size or shape.hidden_size // shape.num_heads


def inner_of(shape: ModelShape) -> int:
    return shape.ffn_size or 4 * shape.hidden_size


def expert_size_of(shape: ModelShape) -> int:
    return shape.expert_size or inner_of(shape)


def is_global(shape: ModelShape, layer: int) -> bool:
    """Say whether a layer sees all positions, where every `global_every`-th does and others have a window."""
    return shape.window is None or (shape.global_every is not None and (layer + 1) % shape.global_every == 0)


def with_experts(dense: Description, shape: ModelShape, inner: int, first: int = 0, **more) -> Description:
    """Return a model with experts of `inner` features in each layer from the `first` one on; `more` is of `Experts`.

    Raises ValueError without a number of experts, or without a layer that has them.
    """
    count, chosen = shape.num_experts, shape.experts_per_token
    if count is None or chosen is None:
        raise ValueError("num_experts and experts_per_token are missing; a model with experts needs both")
    if first >= len(dense.blocks):
        raise ValueError(f"dense_layers = {first} leaves no layer with experts: num_layers = {len(dense.blocks)}")
    experts = Experts(inner, dense.blocks[0].mlp.norm, count=count, chosen=chosen, **more)
    blocks = (*dense.blocks[:first], *(replace(block, mlp=experts) for block in dense.blocks[first:]))
    return replace(dense, blocks=blocks)
