"""torch's FSDP, as torchtitan and Composer use it: what it does differently."""

from dataclasses import replace

from hpctrain.planner.prices.setup import EAGER_PASSES, FLASH_2, FUSED_PASSES, BytePasses
from hpctrain.software.software import CONTEXT_BYTES, NCCL_BUFFER_BYTES, NCCL_BYTES, SoftwareVersion

# torch's own loss keeps exponentials in fp32.
_LOGITS = {2: (34.0, 18.0), 4: (32.0, 16.0)}
# torch's FSDP (Zhao et al. 2023) as torchtitan uses it: weights gathered in half precision one layer ahead, gradients
# summed in fp32; layers of torch one operation after the other. Each weight is copied out of what was gathered, its
# gradient into what is scattered. `selective` is its recomputing by operator (torchtitan, parallelize_llama.py): every
# second product's result is dropped, which are keys, attention's output and the gate, and all that is no product.
# Logits are there as they come, in fp32, as log-probabilities and as their gradient; 14 bytes, since no free block is
# large enough for the last one.
FSDP = SoftwareVersion(
    "fsdp",
    {width: replace(passes, logits=_LOGITS[width], weight=8 * width) for width, passes in EAGER_PASSES.items()},
    since="2023",
    rows_first=True,
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
    since="2024",
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
    since="2025",
    passes={width: replace(p, logits=(3 * width, 3 * width)) for width, p in FSDP_COMPILED.passes.items()},
    loss_bytes={},
)
# Between Megatron-Core and eager torch: FlashAttention 2, and all else as torch's operations, one after the other
# (InternEvo, nanotron). Whole weights, fp32 gradients next to them; stages wait for their messages.
TORCH_FLASH = replace(
    FSDP,
    name="torch-flash",
    rows_first=False,
    passes={width: replace(passes, logits=_LOGITS[width]) for width, passes in EAGER_PASSES.items()},
    again_operations=None,
    dropped=frozenset(),
    keeps_outputs=False,
    stores_halves=True,
    blocking_sends=True,
    buffered_bytes=NCCL_BUFFER_BYTES,
)
# MosaicML's Composer with FSDP and autocast: the residual stream and what is gathered are fp32 and cast at each use,
# the loss is computed once more for metrics; attention by a kernel in Triton, which is slower: a third of a large
# product's speed on A100, as steps of 16 to 64 thousand positions show beside those of 1 thousand.
COMPOSER = replace(
    FSDP,
    name="composer",
    rows_first=False,
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
