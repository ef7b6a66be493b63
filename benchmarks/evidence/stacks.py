"""The training software of others: facts of their sources, and three constants that are fitted.

Two facts that nobody tells are read off runs: how fast Composer's attention is, and what Megatron-DeepSpeed loses of a
device's memory.
"""

from dataclasses import fields, replace

from benchmarks.evidence.nccl import NcclNetwork
from hpctrain.planner.stack import EAGER_PASSES, FLASH_2, FUSED_PASSES, HPCTRAIN, BytePasses, Stack

# What CUDA's context and kernels take of a device; and a communicator of NCCL: in each of 24 channels what a ring comes
# into, 4 MiB, and 5.2 MiB for the two protocols of small messages (NCCL src/init.cc, DEFAULT_BUFFSIZE and its like).
CONTEXT_BYTES, NCCL_BYTES = 0.6e9, 0.23e9
NCCL_BUFFER_BYTES = (
    2**21
)  # of a message to another node: 2 channels, 8 slots each, chunks of 128 KiB (its graph/paths.cc)

# Fused kernels of Megatron-LM (Shoeybi et al. 2019, Narayanan et al. 2021): norms read and write once; bias, dropout
# and residual are one kernel; scores are read and written by softmax and by dropout; the
# loss is computed in fp32, one pass for each operation of torch.
_FUSED = {
    2: BytePasses((4, 6), (14, 12), (4, 4), (6, 8), (9, 11), (38, 14), 8),
    4: BytePasses((8, 12), (26, 24), (8, 8), (12, 16), (17, 21), (36, 12), 8),
}
MEGATRON = Stack(
    "megatron-lm",
    _FUSED,
    vocabulary_multiple=128,  # --make-vocab-size-divisible-by
    gathers_parts=True,  # --no-scatter-gather-tensors-in-pipeline is off by default
    update_bytes=40,
    network=NcclNetwork,
    link_share=0.8,
    block_operations=(30, 50),
    gradient_bytes=4,
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
EAGER = Stack(
    "eager",
    {4: _SAILOR, 2: _halved(_SAILOR)},
    network=NcclNetwork,
    link_share=0.75,
    update_bytes=60,
    block_operations=(40, 60),
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
FSDP = Stack(
    "fsdp",
    {width: replace(passes, logits=_LOGITS[width], weight=8 * width) for width, passes in EAGER_PASSES.items()},
    network=NcclNetwork,
    link_share=0.9,
    update_bytes=40,
    block_operations=(24, 40),
    flash=FLASH_2,
    again_operations=(10, 6),
    again_products=frozenset({"keys", "output", "gate"}),
    keeps_outputs=True,
    dropped_scores=False,
    stores_halves=False,
    loss_bytes={2: 10, 4: 8},
    reserved_bytes=CONTEXT_BYTES,
    communicator_bytes=NCCL_BYTES,
    dispatch_seconds=10e-6,
)
# The same with blocks compiled: what is between products is one kernel, which reads its operands and writes its results
# once (as `hpctrain.planner.stack.FUSED_PASSES`); the sum of the residual stream is part of the next norm's. The loss
# stays as it is.
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
    cast_bytes=(7.0, 7.0),
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
    gradient_bytes=2,
    gathered_bytes=4,
    again_operations=None,
    again_products=frozenset(),
    kept_inputs=2.0,
    loss_bytes={},
)
# The same with all in half precision.
COMPOSER_PURE = replace(
    COMPOSER,
    name="composer-pure",
    passes=COMPOSER.passes | {2: BytePasses((6, 10), (12, 12), (4, 4), (4, 6), (0, 0), (50, 18), 12)},
    gathered_bytes=None,
    kept_inputs=1.0,
)
_TORCH = EAGER, FSDP, FSDP_COMPILED, FSDP_COMPILED_LOSS, COMPOSER, COMPOSER_PURE
_ALL = HPCTRAIN, MEGATRON, DEEPSPEED, MEGATRON_CORE, *_TORCH
STACKS = {s.name: s for s in _ALL}

ROWS_FIRST = "fsdp", "fsdp-compiled", "fsdp-compiled-loss"
"""Software whose hidden states have rows first: gathered positions of several rows are put in order, as here.
Megatron's have positions first."""
FITTED = ("dispatch_seconds", "link_share", "reserved_bytes")
"""The constants of a stack."""
