"""Megatron-DeepSpeed, and layers of torch in DeepSpeed's pipelines: what they do differently."""

from dataclasses import fields, replace

from hpctrain.planner.prices.setup import BytePasses
from hpctrain.software.megatron import MEGATRON
from hpctrain.software.software import NCCL_BUFFER_BYTES, SoftwareVersion

# Megatron's kernels, started by a heavier engine, which keeps gradients of fp16 as they are, and of bf16 a sum in fp32
# beside them. What it loses of a device is what 31 readings of nvidia-smi have more than the rest, 13 GiB of 79 in the
# median (BigScience on A100-80).
DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    since="2021",
    link_share=0.58,
    socket_share=0.58,  # fitted to both sets of AMP
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


def _halved(passes: BytePasses) -> BytePasses:
    """Return passes over numbers of half as many bytes."""
    pairs = {f.name: tuple(n / 2 for n in getattr(passes, f.name)) for f in fields(passes) if f.name != "weight"}
    return BytePasses(**pairs, weight=passes.weight / 2)


# Sailor's runs and profiles (Strati et al. 2025): layers of torch one operation after the other, fp32 throughout. How
# often scores and logits are passed over is read off the profiles of A100-80, where one layer takes 13 and 66 bytes.
_SAILOR = BytePasses((20, 40), (24, 24), (32, 36), (32, 52), (13, 66), (26, 8), 8)
EAGER = SoftwareVersion(
    "eager",
    {4: _SAILOR, 2: _halved(_SAILOR)},
    since="2024",
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
