"""The training software of others: facts of their sources, and three constants that are fitted.

Two facts that nobody tells are read off runs: how fast Composer's attention is, and what Megatron-DeepSpeed loses of a
device's memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from benchmarks.evidence.nccl import NcclNetwork, ScatteringNetwork
from hpctrain.architectures.description import Attention, Mlp
from hpctrain.config.clusters.cluster import ITEM_BYTES, Cluster
from hpctrain.planner.prediction.activations import branch_kept
from hpctrain.planner.prices.cost import heads_on
from hpctrain.planner.prices.setup import (
    EAGER_PASSES,
    FLASH_2,
    FUSED_PASSES,
    GRADIENT_BYTES,
    MASTER_BYTES,
    BytePasses,
    Setup,
    Stack,
)
from hpctrain.sharding.grid import TensorGrid

# What CUDA's context and kernels take of a device; and a communicator of NCCL: in each of 24 channels what a ring comes
# into, 4 MiB, and 5.2 MiB for the two protocols of small messages (NCCL src/init.cc, DEFAULT_BUFFSIZE and its like).
CONTEXT_BYTES, NCCL_BYTES = 0.6e9, 0.23e9
NCCL_BUFFER_BYTES = (
    2**21
)  # of a message to another node: 2 channels, 8 slots each, chunks of 128 KiB (its graph/paths.cc)


@dataclass(frozen=True)
class Software(Stack):
    """A training software of others: what its source and its authors say, and what is fitted (`FITTED`)."""

    is_hpctrain: ClassVar[bool] = False

    splits_backward: bool = False
    own_gradient_bytes: int = GRADIENT_BYTES
    """Of a gradient that replicas exchange."""
    plain_gradients: tuple[str, ...] = ()
    """Dtypes whose gradients replicas exchange as they are."""
    residual_bytes: int | None = None
    """Of a number of the residual stream, and of a weight that comes over z; None: of a number of the run's dtype."""
    dropped: frozenset[str] = frozenset()
    """Whose results `selective` recomputing drops and computes again too: of "keys", of attention's "output", of the
    "gate" of a feed-forward part."""
    keeps_outputs: bool = False
    """Whether `selective` recomputing keeps what a feed-forward part adds to the residual stream, needlessly."""
    kept_inner: float = 2.0
    """Of the inner features of a block without a gate, how many copies are kept: what the activation function and what
    the product after it need. ReLU's own result is both."""
    dropped_scores: bool = True
    """Whether attention drops scores, and so keeps them twice, and a mask."""
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
    scatters_sums: bool = False
    """Whether sums over a tensor grid are scattered and gathered, since norms are cut over y."""
    link_share: float = 1.0
    """Of what a link gives its collectives."""
    reserved_bytes: float = 0.0
    """Of a device's memory that its libraries take before there is a model."""
    communicator_bytes: float = 0.0
    """That buffers of each communicator take."""
    overhead_share: float = 0.0
    """Of a device's memory that its buffers take, and its allocator cannot use."""

    def network(self, cluster: Cluster) -> NcclNetwork:
        return (ScatteringNetwork if self.scatters_sums else NcclNetwork)(cluster, self.link_share)

    def blocking_share(self, num_bytes: float) -> float | None:
        return max(0.0, 1 - self.buffered_bytes / num_bytes) if self.blocking_sends else None

    def exchanged_bytes(self, dtype: str) -> int:
        return ITEM_BYTES[dtype] if dtype in self.plain_gradients else self.own_gradient_bytes

    def gathered_bytes(self, item_bytes: int) -> int:
        return self.residual_bytes or item_bytes

    def stored_bytes(self, item_bytes: int) -> int:
        return item_bytes if self.stores_halves or item_bytes >= MASTER_BYTES else 0

    def gradient_bytes(self, dtype: str) -> tuple[int, int]:
        return self.kept_gradient_bytes.get(dtype, GRADIENT_BYTES), 0 if self.sums_in_place else GRADIENT_BYTES

    def taken_bytes(self, available: int, num_groups: int) -> int:
        lost = int(self.overhead_share * available)
        return int(self.reserved_bytes) + lost + int(num_groups * self.communicator_bytes)

    def again_products(self, setup: Setup, grid: TensorGrid, branch: Attention | Mlp) -> list[tuple[int, int]]:
        hidden = setup.model.hidden_size // grid.x
        if isinstance(branch, Mlp):
            sizes = {"gate": (hidden, branch.inner // grid.y)} if branch.gated else {}
        else:
            query, key = heads_on(branch, grid)
            sizes = {"keys": (hidden, key), "output": (query, hidden)}
        return [size for name, size in sizes.items() if name in self.dropped]

    def branch_kept(self, setup: Setup, grid: TensorGrid, branch: Attention | Mlp, recompute: str, own: float) -> float:
        b, positions = setup.item_bytes, setup.positions
        hidden = positions * setup.model.hidden_size / grid.x / setup.position_parts(grid)
        if not self.flash:
            return (2 * b + 1) * hidden + self._inner_kept(setup, grid, branch, recompute)
        if recompute != "selective":
            return own
        if self.again_operations is None:  # there are no scores to drop
            return branch_kept(setup, grid, branch, "none", rows=1)
        if isinstance(branch, Mlp):  # its input is computed again from attention's output
            own += b * hidden * (self.keeps_outputs - ("output" in self.dropped))
            gate = positions * branch.inner / grid.y if branch.gated and "gate" in self.dropped else 0.0
            return own - b * gate
        return own - b * positions * heads_on(branch, grid)[1] * ("keys" in self.dropped)

    def _inner_kept(self, setup: Setup, grid: TensorGrid, branch: Attention | Mlp, recompute: str) -> float:
        """Return the bytes that a branch with scores keeps of a row besides its input."""
        b, positions = setup.item_bytes, setup.positions
        if isinstance(branch, Mlp):
            return b * positions * branch.inner / grid.y * self.kept_inner
        of_scores = 2 * b + 1 if self.dropped_scores else b
        scores = branch.heads / grid.y * positions**2 * of_scores if recompute == "none" else 0.0
        return 2 * b * positions * sum(heads_on(branch, grid)) + scores


# Fused kernels of Megatron-LM (Shoeybi et al. 2019, Narayanan et al. 2021): norms read and write once; bias, dropout
# and residual are one kernel; scores are read and written by softmax and by dropout; the
# loss is computed in fp32, one pass for each operation of torch.
_FUSED = {
    2: BytePasses((4, 6), (14, 12), (4, 4), (6, 8), (9, 11), (38, 14), 8),
    4: BytePasses((8, 12), (26, 24), (8, 8), (12, 16), (17, 21), (36, 12), 8),
}
MEGATRON = Software(
    "megatron-lm",
    _FUSED,
    vocabulary_multiple=128,  # --make-vocab-size-divisible-by
    gathers_parts=True,  # --no-scatter-gather-tensors-in-pipeline is off by default
    clipping_bytes=8,
    link_share=0.8,
    block_operations=(30, 50),
    sums_in_place=True,  # 6 + 12 / d bytes of a weight (its README, Distributed Optimizer)
    loss_bytes={2: 6, 4: 4},  # logits as they come, in fp32, and their exponentials, of which the last are kept
    reserved_bytes=CONTEXT_BYTES,
    communicator_bytes=NCCL_BYTES,
    dispatch_seconds=10e-6,
)
# The same kernels, started by a heavier engine, which keeps gradients of fp16 as they are, and of bf16 a sum in fp32
# beside them. What it loses of a device is what 31 readings of nvidia-smi have more than the rest, 13 GiB of 79 in the
# median (BigScience on A100-80).
DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    link_share=0.58,
    plain_gradients=("fp16",),  # DeepSpeedEngine.communication_data_type
    kept_gradient_bytes={"fp16": 2, "bf16": 6},
    sums_in_place=False,
    loss_bytes={},
    reserved_bytes=0.0,  # `overhead_share` has all of it
    communicator_bytes=0.0,
    dispatch_seconds=24e-6,
    overhead_share=0.165,
    blocking_sends=True,
    buffered_bytes=NCCL_BUFFER_BYTES,
)
# As it is today: attention in one kernel, norms cut over y.
MEGATRON_CORE = replace(
    MEGATRON,
    name="megatron-core",
    link_share=0.9,
    passes={width: replace(passes, scores=(0, 0), logits=(24, 10)) for width, passes in _FUSED.items()},
    flash=FLASH_2,
    native_attention=True,
    sequence_parallel=True,
)


def _halved(passes: BytePasses) -> BytePasses:
    """Return passes over numbers of half as many bytes."""
    pairs = {f.name: tuple(n / 2 for n in getattr(passes, f.name)) for f in fields(passes) if f.name != "weight"}
    return BytePasses(**pairs, weight=passes.weight / 2)


# Sailor's runs and profiles (Strati et al. 2025): layers of torch one operation after the other, fp32 throughout. How
# often scores and logits are passed over is read off the profiles of A100-80, where one layer takes 13 and 66 bytes.
_SAILOR = BytePasses((20, 40), (24, 24), (32, 36), (32, 52), (13, 66), (26, 8), 8)
EAGER = Software(
    "eager",
    {4: _SAILOR, 2: _halved(_SAILOR)},
    link_share=0.75,
    clipping_bytes=28,
    block_operations=(40, 60),
    dispatch_seconds=5.5e-6,  # no block of the profiles on GH200 is below 3.1 ms, 27 us an operation on a Grace
    kept_inner=3.0,
    dropped_scores=False,
    kept_gradient_bytes={"fp32": 8, "tf32": 8},
    gathers_parts=True,  # DeepSpeed's PipelineEngine: `pipe_partitioned` and `grad_partitioned` are on by default
    blocking_sends=True,
    buffered_bytes=NCCL_BUFFER_BYTES,
    reserved_bytes=4.6e9,
)
# torch's own loss keeps exponentials in fp32.
_LOGITS = {2: (34.0, 18.0), 4: (32.0, 16.0)}
# torch's FSDP (Zhao et al. 2023) as torchtitan uses it: weights gathered in half precision one layer ahead, gradients
# summed in fp32; layers of torch one operation after the other. Each weight is copied out of what was gathered, its
# gradient into what is scattered. `selective` is its recomputing by operator (torchtitan, parallelize_llama.py): every
# second product's result is dropped, which are keys, attention's output and the gate, and all that is no product.
# Logits are there as they come, in fp32, as log-probabilities and as their gradient; 14 bytes, since no free block is
# large enough for the last one.
FSDP = Software(
    "fsdp",
    {width: replace(passes, logits=_LOGITS[width], weight=8 * width) for width, passes in EAGER_PASSES.items()},
    link_share=0.9,
    clipping_bytes=8,
    block_operations=(24, 40),
    flash=FLASH_2,
    again_operations=(10, 6),
    dropped=frozenset({"keys", "output", "gate"}),
    keeps_outputs=True,
    dropped_scores=False,
    stores_halves=False,
    loss_bytes={2: 10, 4: 8},
    reserved_bytes=CONTEXT_BYTES,
    communicator_bytes=NCCL_BYTES,
    dispatch_seconds=10e-6,
)
# The same with blocks compiled: what is between products is one kernel, which reads its operands and writes its results
# once (as `hpctrain.planner.prices.setup.FUSED_PASSES`); the sum of the residual stream is part of the next norm's.
# The loss stays as it is.
FSDP_COMPILED = replace(
    FSDP,
    name="fsdp-compiled",
    passes={
        width: replace(fused, residual=(2 * width, 3 * width), weight=8 * width)
        for width, fused in FUSED_PASSES.items()
    },
    block_operations=(12, 20),
    again_operations=(3, 2),
    keeps_outputs=False,
    # torchao scales by what it sees: it reads for the maximum, and casts for each operand layout.
    cast_bytes=7.0,
)
# Since 2025 the loss too: logits are read as they come, and become their own gradient.
FSDP_COMPILED_LOSS = replace(
    FSDP_COMPILED,
    name="fsdp-compiled-loss",
    passes={width: replace(p, logits=(3 * width, 3 * width)) for width, p in FSDP_COMPILED.passes.items()},
    loss_bytes={},
)
# MosaicML's Composer with FSDP and autocast: the residual stream and what is gathered are fp32 and cast at each use,
# the loss is computed once more for metrics; attention by a kernel in Triton, which is slower: a third of a large
# product's speed on A100, as steps of 16 to 64 thousand positions show beside those of 1 thousand.
COMPOSER = replace(
    FSDP,
    name="composer",
    passes={
        2: BytePasses((10, 20), (20, 24), (4, 4), (4, 6), (0, 0), (50, 18), 28),
        4: replace(EAGER_PASSES[4], logits=_LOGITS[4], weight=32),
    },
    flash=(0.40, 0.31),
    own_gradient_bytes=2,
    residual_bytes=4,
    again_operations=None,
    dropped=frozenset(),
    loss_bytes={},
)
# The same with all in half precision.
COMPOSER_PURE = replace(
    COMPOSER,
    name="composer-pure",
    passes=COMPOSER.passes | {2: BytePasses((6, 10), (12, 12), (4, 4), (4, 6), (0, 0), (50, 18), 12)},
    residual_bytes=None,
)
_TORCH = EAGER, FSDP, FSDP_COMPILED, FSDP_COMPILED_LOSS, COMPOSER, COMPOSER_PURE
_ALL = MEGATRON, DEEPSPEED, MEGATRON_CORE, *_TORCH
STACKS = {s.name: s for s in _ALL}

ROWS_FIRST = "fsdp", "fsdp-compiled", "fsdp-compiled-loss"
"""Software whose hidden states have rows first: gathered positions of several rows are put in order, as here.
Megatron's have positions first."""
FITTED = ("dispatch_seconds", "link_share", "reserved_bytes")
"""The constants of a stack."""
