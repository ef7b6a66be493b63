"""How a training software carries out what a model says: how often it passes over memory, what it leaves to the host.

What is the same for all software (products, what is exchanged) is in `hpctrain.planner.cost`. A stack has facts, which
its source tells, and three constants that are fitted. Two facts that nobody tells are read off runs: how fast
Composer's attention is, and what Megatron-DeepSpeed loses of a device's memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from hpctrain.cluster import Cluster
from hpctrain.comm.network import ClusterNetwork
from hpctrain.schedule import EXPECTED_AHEAD


@dataclass(frozen=True)
class Passes:
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
    """Per weight and backward pass, beside the product itself: to add its gradient, and for all copies and casts that
    sharding it takes."""

    def halved(self) -> "Passes":
        """Return them for numbers of half as many bytes."""
        pairs = {f.name: tuple(each / 2 for each in getattr(self, f.name)) for f in fields(self) if f.name != "weight"}
        return Passes(**pairs, weight=self.weight / 2)


@dataclass(frozen=True)
class Stack:
    """A training software: what its source and its authors tell, and what is fitted (`FITTED`)."""

    name: str
    passes: dict[int, Passes]
    """By bytes of a number: 2 and 4."""
    update_bytes: float
    """Read and written per weight that a rank updates."""
    block_operations: tuple[int, int]
    """How many operations a block starts, forward and backward."""
    flash: tuple[float, float] | None = None
    """Where attention is one kernel, which computes only the causal half and keeps no scores: at which share of a large
    product's speed, forward and backward."""
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
    kept_inputs: float = 1.0
    """Of a hidden state, per block, that full recomputing keeps."""
    kept_inner: float = 2.0
    """Of the inner features of a block without a gate, how many copies are kept: what the activation function and what
    the product after it need. ReLU's own result is both."""
    loss_bytes: Mapping[int, int] = field(default_factory=dict)
    """For each logit, beside what is kept, while the loss is computed; by bytes of a number."""
    dropped_scores: bool = True
    """Whether attention drops scores, and so keeps them twice, and a mask."""
    stores_halves: bool = True
    """Whether weights in half precision are stored beside their fp32 masters, not cast anew for each use."""
    kept_gradient_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of a weight's gradient, all copies of it together, by dtype; one in fp32 where nothing is said. What ZeRO 1 sums
    into is beside them."""
    blocking_sends: bool = False
    """Whether messages between stages go through the stream that computes."""
    splits_backward: bool = False
    """Whether 1F1B sends the gradient of a stage's input before it computes those of weights."""
    copies_shards: bool = False
    """Whether `Passes.weight` leaves out that a rank copies its z-shard of weights, and adds to that of gradients."""
    gathers_pieces: bool = False
    """Whether what comes from another host comes in pieces, see `hpctrain.transfers.gathers`."""
    cuts_messages: bool = False
    """Whether each rank of y sends its part of a message, however few its rows, and the y of the next stage gather it;
    where norms are cut over y, nothing else is there to send, and no need to gather."""
    expected_messages: int = 0
    """For how many messages between stages a rank has room before it comes to receive them."""
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
    lost_share: float = 0.0
    """Of a device's memory that its buffers take, and its allocator cannot use."""
    step_seconds: float = 0.0
    """Of a step that no part of the model accounts for: reading data, agreeing on the norm."""


# FlashAttention-2 on A100 (Dao 2023, causal, heads of 128, 2 to 16 thousand positions): 150 to 200 TFLOP/s of the half
# that it computes forward, 140 to 170 backward, where large products come to 271.
FLASH_2 = 0.65, 0.57

# Counted by hand in hpctrain/model/functions.py and hpctrain/engine/optimizer.py: one pass for each operation of torch.
_EAGER = {
    4: Passes((20, 64), (24, 24), (28, 28), (20, 44), (0, 0), (32, 16), 0),
    2: Passes((32, 82), (12, 12), (14, 14), (10, 22), (0, 0), (34, 18), 10),
}
HPCTRAIN = Stack(
    "hpctrain",
    _EAGER,
    update_bytes=48,  # its norm 4, clipped 8, updated 32, zeroed 4
    block_operations=(28, 60),
    flash=FLASH_2,
    recomputes_ends=True,
    loss_bytes={4: 4, 2: 6},  # logits in fp32, and in half precision, while their exponentials are made
    splits_backward=True,
    copies_shards=True,
    gathers_pieces=True,
    expected_messages=EXPECTED_AHEAD,
)

# Fused kernels of Megatron-LM (Shoeybi et al. 2019, Narayanan et al. 2021): norms read and write once; bias, dropout
# and residual are one kernel; scores are read and written by softmax and by dropout; the
# loss is computed in fp32, one pass for each operation of torch.
_FUSED = {
    2: Passes((4, 6), (14, 12), (4, 4), (6, 8), (9, 11), (38, 14), 8),
    4: Passes((8, 12), (26, 24), (8, 8), (12, 16), (17, 21), (36, 12), 8),
}
MEGATRON = Stack(
    "megatron-lm",
    _FUSED,
    vocabulary_multiple=128,  # --make-vocab-size-divisible-by
    cuts_messages=True,  # --no-scatter-gather-tensors-in-pipeline is off by default
    update_bytes=40,
    block_operations=(30, 50),
    gradient_bytes=4,
    dispatch_seconds=10e-6,
)
# The same kernels, started by a heavier engine, which keeps gradients of fp16 as they are, and of bf16 a sum in fp32
# beside them. What it loses of a device is what 31 readings of nvidia-smi have more than the rest, 13 GiB of 79 in the
# median (BigScience on A100-80).
DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    plain_gradients=("fp16",),  # DeepSpeedEngine.communication_data_type
    kept_gradient_bytes={"fp16": 2, "bf16": 6},
    dispatch_seconds=24e-6,
    lost_share=0.165,
    blocking_sends=True,
)
# As it is today: attention in one kernel, norms cut over y.
MEGATRON_CORE = replace(
    MEGATRON,
    name="megatron-core",
    passes={width: replace(passes, scores=(0, 0)) for width, passes in _FUSED.items()},
    flash=FLASH_2,
    sequence_parallel=True,
)
# Sailor's runs and profiles (Strati et al. 2025): layers of torch one operation after the other, fp32 throughout. How
# often scores and logits are passed over is read off the profiles of A100-80, where one layer takes 13 and 66 bytes.
_SAILOR = Passes((20, 40), (24, 24), (32, 36), (32, 52), (13, 66), (26, 8), 8)
EAGER = Stack(
    "eager",
    {4: _SAILOR, 2: _SAILOR.halved()},
    update_bytes=60,
    block_operations=(40, 60),
    kept_inner=3.0,
    dropped_scores=False,
    kept_gradient_bytes={"fp32": 8, "tf32": 8},
    blocking_sends=True,
    reserved_bytes=4.6e9,
)
# torch's FSDP (Zhao et al. 2023) as torchtitan uses it: weights gathered in half precision one layer ahead, gradients
# summed in fp32; layers of torch one operation after the other. Each weight is copied out of what was gathered, its
# gradient into what is scattered.
FSDP = Stack(
    "fsdp",
    {width: replace(passes, weight=8 * width) for width, passes in _EAGER.items()},
    update_bytes=40,
    block_operations=(24, 40),
    flash=FLASH_2,
    dropped_scores=False,
    stores_halves=False,
    dispatch_seconds=10e-6,
)
# MosaicML's Composer with FSDP and autocast: the residual stream and what is gathered are fp32 and cast at each use,
# the loss is computed once more for metrics; attention by a kernel in Triton, which is slower: a third of a large
# product's speed on A100, as steps of 16 to 64 thousand positions show beside those of 1 thousand.
COMPOSER = replace(
    FSDP,
    name="composer",
    passes={2: Passes((10, 20), (20, 24), (4, 4), (4, 6), (0, 0), (50, 18), 28), 4: replace(_EAGER[4], weight=32)},
    flash=(0.40, 0.31),
    gradient_bytes=2,
    gathered_bytes=4,
    kept_inputs=2.0,
)
# The same with all in half precision.
COMPOSER_PURE = replace(
    COMPOSER,
    name="composer-pure",
    passes=COMPOSER.passes | {2: Passes((6, 10), (12, 12), (4, 4), (4, 6), (0, 0), (50, 18), 12)},
    gathered_bytes=None,
    kept_inputs=1.0,
)
STACKS = {s.name: s for s in (HPCTRAIN, MEGATRON, DEEPSPEED, MEGATRON_CORE, EAGER, FSDP, COMPOSER, COMPOSER_PURE)}

FITTED = ("dispatch_seconds", "link_share", "reserved_bytes")
"""The constants of a stack."""
