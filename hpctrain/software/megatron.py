"""Megatron-LM and Megatron-Core: what they do differently, by version."""

from dataclasses import replace

from hpctrain.planner.prices.setup import FLASH_2, BytePasses
from hpctrain.software.software import CONTEXT_BYTES, NCCL_BUFFER_BYTES, NCCL_BYTES, SoftwareVersion

# Fused kernels of Megatron-LM (Shoeybi et al. 2019, Narayanan et al. 2021): norms read and write once; bias, dropout
# and residual are one kernel; scores are read and written by softmax and by dropout; the
# loss is computed in fp32, one pass for each operation of torch.
FUSED = {
    2: BytePasses((4, 6), (14, 12), (4, 4), (6, 8), (9, 11), (38, 14), 8),
    4: BytePasses((8, 12), (26, 24), (8, 8), (12, 16), (17, 21), (36, 12), 8),
}
MEGATRON = SoftwareVersion(
    "megatron-lm",
    FUSED,
    vocabulary_multiple=128,  # --make-vocab-size-divisible-by
    since="2021-04",
    ties_by_pairs=True,
    gathers_parts=True,  # --no-scatter-gather-tensors-in-pipeline is off by default
    clipping_bytes=8,
    link_share=0.8,
    block_operations=(30, 50),
    blocking_sends=True,
    buffered_bytes=NCCL_BUFFER_BYTES,
    sums_in_place=True,  # 6 + 12 / d bytes of a weight (its README, Distributed Optimizer)
    loss_bytes={2: 6, 4: 4},  # logits as they come, in fp32, and their exponentials, of which the last are kept
    reserved_bytes=CONTEXT_BYTES,
    communicator_bytes=NCCL_BYTES,
    dispatch_seconds=10e-6,
)
# As it was until April 2021: every rank of a stage sends the whole output, and gradients are exchanged as they are.
MEGATRON_2020 = replace(
    MEGATRON,
    name="megatron-lm-2020",
    since="2019",
    gathers_parts=False,
    plain_gradients=("fp16",),
    kept_gradient_bytes={"fp16": 2},
    sums_in_place=False,
)
# As it is today: attention in one kernel, norms cut over y.
MEGATRON_CORE = replace(
    MEGATRON,
    name="megatron-core",
    since="2023",
    link_share=0.9,
    blocking_sends=False,  # `overlap_p2p_comm`
    passes={width: replace(passes, scores=(0, 0), logits=(24, 10)) for width, passes in FUSED.items()},
    flash=FLASH_2,
    native_attention=True,
    sequence_parallel=True,
    copies_for_update=True,  # DistributedOptimizer._copy_model_grads_to_main_grads, in `step`
    loss_bytes={2: 4, 4: 4},  # exponentials and their gradient are computed in place (tensor_parallel/cross_entropy.py)
    keeps_fp8=True,  # Transformer Engine's linear layers save their inputs quantized
)
# Until 2024 its attention was FlashAttention 2, on Hopper too, where cuDNN was not chosen.
MEGATRON_CORE_2024 = replace(MEGATRON_CORE, name="megatron-core-2024", native_attention=False)
