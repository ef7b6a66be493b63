"""The parts of a decoder-only transformer. Parameters, torch modules, costs and Hugging Face files follow from them.

A family's module (`llama.py`, `gemma2.py`, …) returns a `Description` for the sizes of a job. Everything here is frozen
and has a hash: layers with equal blocks are equal.
"""

from dataclasses import dataclass
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

    kind: Literal["linear", "llama3"]
    factor: float
    low_factor: float
    high_factor: float
    original_positions: int


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoFormer, Su et al. 2021), with the halves of a head as pairs."""

    base: float
    scaling: RotaryScaling | None = None


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
    activation: Literal["silu", "gelu"] = "silu"
    """`gelu` is the tanh approximation."""
    bias: bool = False
    out_norm: Norm | None = None
    """The norm of the part's output, applied before the output is added to the residual stream."""

    @property
    def up_size(self) -> int:
        """Output features of the first product: gate and up together."""
        return 2 * self.inner if self.gated else self.inner


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


def kv_heads_of(shape: ModelShape) -> int:
    return shape.num_kv_heads or shape.num_heads


def head_size_of(shape: ModelShape) -> int:
    return shape.head_size or shape.hidden_size // shape.num_heads


def inner_of(shape: ModelShape) -> int:
    return shape.ffn_size or 4 * shape.hidden_size


def is_global(shape: ModelShape, layer: int) -> bool:
    """Say whether a layer sees all positions, where every `global_every`-th does and others have a window."""
    return shape.window is None or (shape.global_every is not None and (layer + 1) % shape.global_every == 0)
