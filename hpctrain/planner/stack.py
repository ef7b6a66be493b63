"""How a training software carries out what a model says: how often it passes over memory, what it leaves to the host.

What is the same for all software (products, what is exchanged) is in `hpctrain.planner.cost`. Those of others are in
`benchmarks/evidence/stacks.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from hpctrain.comm.network import ClusterNetwork
from hpctrain.config.cluster import Cluster
from hpctrain.plan.schedule import EXPECTED_AHEAD


@dataclass(frozen=True)
class BytePasses:
    """Bytes read and written per element, forward and backward, by everything in a model that is no product."""

    norm: tuple[float, float]
    """Per hidden feature of a token, for one norm."""
    residual: tuple[float, float]
    """Per hidden feature of a token, for all of a block outside its norms, dropout included."""
    rotary: tuple[float, float]
    """Per feature of queries and keys, where there are rotary positions."""
    inner: tuple[float, float]
    """Per inner feature of a token: activation function, gate, bias."""
    scores: tuple[float, float]
    """Per pair of positions and head; 0 where a fused kernel never writes them."""
    logits: tuple[float, float]
    """Per token and id of the vocabulary."""
    weight: float
    """Per weight and backward pass, in addition to the product itself: to add its gradient, and for all copies and
    casts that sharding it takes."""


@dataclass(frozen=True)
class Stack:
    """A training software: what its source and its authors say, and what is fitted (`FITTED`)."""

    name: str
    passes: dict[int, BytePasses]
    """By bytes of a number: 2 and 4."""
    update_bytes: float
    """Read and written per weight that a rank updates."""
    block_operations: tuple[int, int]
    """How many operations a block starts, forward and backward."""
    flash: tuple[float, float] | None = None
    """Where attention is one kernel, which computes only the causal half and keeps no scores: at which share of a large
    product's speed, forward and backward."""
    native_attention: bool = False
    """Whether that kernel is written for each generation (cuDNN, FlashAttention-3 and 4), not for an A100."""
    sequence_parallel: bool = False
    """Whether norms and residuals are cut over y too (Korthikanti et al. 2022)."""
    gradient_bytes: int = 4
    """Of a gradient that replicas exchange."""
    plain_gradients: tuple[str, ...] = ()
    """Dtypes whose gradients replicas exchange as they are."""
    gathered_bytes: int | None = None
    """Of a weight that comes over z; None: of a number of the run's dtype."""
    recomputes_ends: bool = False
    """Whether `full` recomputing is also of embedding and head."""
    again_operations: tuple[int, int] | None = None
    """Of an attention and of a feed-forward part, how many operations `selective` recomputing starts again: those
    between products, whose results it drops. None: it is of attention's scores, where these are kept."""
    again_products: frozenset[str] = frozenset()
    """Whose results `selective` recomputing drops and computes again too: of "keys", of attention's "output", of the
    "gate" of a feed-forward part."""
    keeps_outputs: bool = False
    """Whether `selective` recomputing keeps what a feed-forward part adds to the residual stream, needlessly."""
    cast_bytes: tuple[float, float] = (4.0, 4.0)
    """Read and written per number of a linear layer's input, and of its output's gradient, to cast it to fp8 in both
    operand layouts."""
    kept_inputs: float = 1.0
    """Of a hidden state, per block, that full recomputing keeps."""
    kept_inner: float = 2.0
    """Of the inner features of a block without a gate, how many copies are kept: what the activation function and what
    the product after it need. ReLU's own result is both."""
    loss_bytes: Mapping[int, int] = field(default_factory=dict)
    """For each logit, in addition to what is kept, while the loss is computed; by bytes of a number."""
    kept_logit_bytes: Mapping[int, int] = field(default_factory=dict)
    """Of a logit, that the loss keeps for its backward pass, by bytes of a number; 4 where nothing is said."""
    chunks_logits: bool = False
    """Whether many logits are there some tokens at a time, see `tokens_at_once`, and backward are computed again."""
    dropped_scores: bool = True
    """Whether attention drops scores, and so keeps them twice, and a mask."""
    evens_families: bool = False
    """Whether weights that several families hold are updated by one of them each, whatever ZeRO stage is asked for."""
    sums_in_place: bool = False
    """Whether a distributed optimizer updates from the very gradients that it has summed, not from a copy of them."""
    stores_halves: bool = True
    """Whether weights in half precision are stored with their fp32 masters, not cast anew for each use."""
    kept_gradient_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of a weight's gradient, all copies of it together, by dtype; one in fp32 where nothing is said. What ZeRO 1 sums
    into is stored with them."""
    blocking_sends: bool = False
    """Whether messages between stages go through the stream that computes."""
    buffered_bytes: float = 0.0
    """Of such a message, how much is held by the library that sends it: for this much the sender does not wait."""
    splits_backward: bool = False
    """Whether 1F1B sends the gradient of a stage's input before it computes those of weights."""
    copies_shards: bool = False
    """Whether a rank copies its z-shard of weights and adds to that of gradients, on top of `BytePasses.weight`."""
    gathers_parts: bool = False
    """Whether what comes over a slow link comes in parts, see `hpctrain.plan.transfers.gathers`."""
    sums_by_messages: bool = False
    """Whether ranks add up what others send them, which takes memory until it is added (`buffers.py`)."""
    expected_messages: int = 0
    """For how many messages between stages a rank has buffers before it comes to receive them."""
    tensor_slowdown: float | None = None
    """How many times as long products take while collectives of x and y overlap them; None: as on the device else."""
    dispatch_seconds: float = 8e-6
    """That the host needs to start an operation: what small ones take at the least, one after the other."""
    vocabulary_multiple: int = 1
    """To which the ids of a rank of y are padded."""
    network: Callable[[Cluster, float], ClusterNetwork] = ClusterNetwork
    """Makes what prices its messages and collectives, of a cluster and of `link_share`."""
    link_share: float = 1.0
    """Of what a link gives its collectives."""
    reserved_bytes: float = 0.0
    """Of a device's memory that its libraries take before there is a model."""
    communicator_bytes: float = 0.0
    """That buffers of each communicator take."""
    overhead_share: float = 0.0
    """Of a device's memory that its buffers take, and its allocator cannot use."""
    step_seconds: float = 0.0
    """Of a step that no part of the model accounts for: reading data, agreeing on the norm."""


# FlashAttention-2 on A100 (Dao 2023, causal, heads of 128, 2 to 16 thousand positions): 150 to 200 TFLOP/s of the half
# that it computes forward, 140 to 170 backward, where large products come to 271.
FLASH_2 = 0.65, 0.57

# Counted by hand in model/operators and engine/optimizer.py: one pass for each operation. In
# half precision the product of a weight's gradient adds to fp32, which it reads and writes.
EAGER_PASSES = {
    4: BytePasses((20, 64), (24, 24), (28, 28), (20, 44), (0, 0), (24, 24), 0),
    2: BytePasses((32, 82), (12, 12), (14, 14), (10, 22), (0, 0), (30, 36), 8),
}
HPCTRAIN = Stack(
    "hpctrain",
    EAGER_PASSES,
    update_bytes=48,  # its norm 4, clipped 8, updated 32, zeroed 4
    block_operations=(28, 60),
    flash=FLASH_2,
    recomputes_ends=True,
    again_operations=(10, 6),
    loss_bytes={4: 4, 2: 6},  # exponentials forward; backward in half precision the gradient in fp32, and cast
    kept_logit_bytes={2: 2, 4: 4},
    chunks_logits=True,
    splits_backward=True,
    copies_shards=True,
    gathers_parts=True,
    sums_by_messages=True,
    expected_messages=EXPECTED_AHEAD,
    evens_families=True,
)
# Counted in model/operators: a norm, a rotary position, a gated activation read operands and write results
# once, and read them once more for what is summed over tokens. The loss reads logits twice forward. The host starts 281
# operations of a block instead of 402 (`benchmarks.gpu`).
FUSED_PASSES = {
    4: replace(EAGER_PASSES[4], norm=(8, 20), rotary=(8, 8), inner=(12, 20), logits=(8, 8)),
    2: replace(EAGER_PASSES[2], norm=(4, 10), rotary=(4, 4), inner=(6, 10), logits=(4, 4)),
}
HPCTRAIN_FUSED = replace(
    HPCTRAIN,
    passes=FUSED_PASSES,
    block_operations=(20, 42),
    again_operations=(3, 2),
    loss_bytes={4: 4, 2: 2},  # the gradient
)
"""With `kernels.fused`."""
