"""Says how near accelerators of `hpctrain.config.clusters.device_catalogue` come to their data sheets.

`Efficiency` is one parameter set for each family: two shares are fitted to published measurements by
`benchmarks/evidence/predictor.py`, or are those of a family like it, the source of the rest is given there.
"""

import re
from dataclasses import dataclass

from hpctrain.config.clusters.device_catalogue import ACCELERATORS, lookup


@dataclass(frozen=True)
class Efficiency:
    """The shares of its data sheet that a family reaches."""

    product_share: float
    """Share of peak FLOP/s that large products reach."""
    memory_share: float
    """Share of memory bandwidth that passes over large tensors reach."""
    launch_seconds: float
    """Seconds that the device needs between two operations."""
    processors: int
    """Number of processors that compute tiles of a product in parallel; 1: a product's shape makes no difference."""
    fp32_share: float | None = None
    """Share of peak FLOP/s in fp32, which no tensor core computes; None: as `product_share`."""
    tf32_share: float | None = None
    fp8_gain: float | None = None
    """Speed of large products in fp8, as a multiple of that in half precision; None: the family has no fp8."""
    fused_share: float = 1.0
    """Factor on the share of speed that fused attention reaches on an A100 (`Engine.flash`). Kernels written for an
    A100 reach less of newer devices. FlashAttention-2 reaches 340 TFLOP/s on an H100, half of what large products do
    (Shah et al. 2024)."""
    native_gain: float = 1.0
    """Speed of a kernel that is written for the family, as a multiple of one that is not
    (`Engine.native_attention`)."""
    unaligned_times: float = 1.33
    """Factor by which products in half precision or tf32 take longer, where a dim is no multiple of 16 bytes. On A100 a
    vocabulary of 50,257 in place of 50,304 makes a step of nanoGPT 25 % longer; its head is a third of its products."""
    part_aligned_times: float = 1.33
    """The same where each dim is a multiple of 4 bytes at least. Between these and 16 nobody published a difference."""
    overlap_slowdown: float = 1.0
    """Factor by which computing takes longer while the device communicates."""
    is_measured: bool = True
    """Whether steps of the family were published with all that a prediction needs, and the shares fitted to them."""
    best_published: str = ""
    """Highest published speed in training, with its source. Where steps were published, MFU is of the peak in half
    precision, and the run is the best one of `python -m benchmarks.evidence.predictor --best` for such devices."""
    known: bool = True
    """Whether the figures are those of this model, not assumed from the device's kind."""

    def share(self, dtype: str) -> float:
        """Return the share of peak that large products in a dtype reach."""
        of_dtype = {"fp32": self.fp32_share, "tf32": self.tf32_share}.get(dtype)
        return of_dtype or self.product_share


# Kernels of a collective library take processors and memory bandwidth from overlapped computation: with FSDP and
# pipelines on A100, H100, MI210 and MI250 that took 1.19 times as long in the mean (arXiv 2507.03114).
NCCL_SLOWDOWN = 1.19
# On Hopper, products with an odd dim run kernels of older devices: 71 to 115 TFLOP/s in bf16 on an H100, the most with
# 2047 x 3073 x 8192 (meta-pytorch/float8_experimental, pull request 145, June 2024), where aligned ones come to 663.
UNALIGNED_ON_HOPPER = 5.8
# Its own kernels load 16 bytes. With a dim of 588, a multiple of 4, one of Ampere's took 3.53 times as long as Hopper's
# with 592: 131 and 37 us for 9477 x 588 x 1152 in bf16 (m87-labs/kestrel, pull request 143, 2026).
PART_ALIGNED_ON_HOPPER = 3.5

# By family of accelerators. Shares of fp32 and tf32 are from profiles of single layers (Sailor, seven devices), those
# of half precision and of memory from whole steps; families that nobody measured have those of the one before. Cards
# for games sum products of half precision in fp32 at half their tensor cores' rate, and reach nearly all of that, as of
# tf32 in the profiles. A T4 is limited to 70 W, and its clock falls under load: products of 4096 reach 24 TFLOP/s of 65
# (forums.developer.nvidia.com, thread 264462, confirmed there as power capping), memory 220 GB/s of 320 (Jia et al.
# 2019, arXiv 1903.07486); whole steps of a GPT-2 on 16 of them (AMP, Li et al. 2022) want 14 % less of the first and
# 10 % less of the second. Blackwell's share of products is fitted to steps of NeMo on GB200 (NVIDIA/dgxc-benchmarking).
# FlashAttention-3 is 1.5 to 2 times as fast as 2 on an H100 (Shah et al. 2024). In training it comes to 447 TFLOP/s
# on an H200, and 4 to 834 on a B200 (stas00/ml-engineering, insights/when-to-upgrade-gpus, at 2d872ed). By the same,
# the largest products come to 73 % of the sheet in fp8 and 80 % in bf16 on Hopper, to 76 and 78 % on Blackwell.
EFFICIENCIES: dict[str, Efficiency] = {
    "volta": Efficiency(
        0.78,
        0.82,
        2e-6,
        80,
        0.98,
        overlap_slowdown=NCCL_SLOWDOWN,
        best_published="44.0 % MFU in fp16, 1B on one V100-32",
    ),
    "turing": Efficiency(0.65, 0.80, 2e-6, 68, 1.0, overlap_slowdown=NCCL_SLOWDOWN),
    "t4": Efficiency(0.32, 0.62, 2e-6, 40, 0.55, overlap_slowdown=NCCL_SLOWDOWN),
    "turing-gaming": Efficiency(0.92, 0.80, 2e-6, 68, 1.0, overlap_slowdown=NCCL_SLOWDOWN),
    "ampere": Efficiency(
        0.87,
        0.68,
        2e-6,
        108,
        0.90,
        0.82,
        overlap_slowdown=NCCL_SLOWDOWN,
        best_published="68.7 % MFU in bf16, Llama 3 8B on 8 A800-80; 64.1 % on an A100-80, a model of 7B on 8",
    ),
    "hopper": Efficiency(
        0.67,
        0.85,
        2e-6,
        132,
        0.85,
        0.44,
        fp8_gain=1.83,
        fused_share=0.75,
        native_gain=1.7,
        unaligned_times=UNALIGNED_ON_HOPPER,
        part_aligned_times=PART_ALIGNED_ON_HOPPER,
        overlap_slowdown=NCCL_SLOWDOWN,
        best_published="62.4 % MFU in bf16, Llama 3.1 8B on 16 H100",
    ),
    "blackwell": Efficiency(
        0.55,
        0.85,
        2e-6,
        148,
        0.85,
        0.32,
        fp8_gain=1.97,
        fused_share=0.76,
        native_gain=1.75,
        unaligned_times=UNALIGNED_ON_HOPPER,
        part_aligned_times=PART_ALIGNED_ON_HOPPER,
        overlap_slowdown=NCCL_SLOWDOWN,
        best_published="47.0 % MFU in bf16, Llama 3.1 405B on 128 GB200",
    ),
    "gaming": Efficiency(0.92, 0.82, 2e-6, 82, 1.0, 1.0, overlap_slowdown=NCCL_SLOWDOWN),
    "blackwell-gaming": Efficiency(0.92, 0.82, 2e-6, 170, 1.0, 1.0, overlap_slowdown=NCCL_SLOWDOWN, is_measured=False),
    "ga102": Efficiency(0.87, 0.82, 2e-6, 84, 0.90, 0.82, overlap_slowdown=NCCL_SLOWDOWN, is_measured=False),
    "ada": Efficiency(0.67, 0.82, 2e-6, 142, 0.85, 0.67, overlap_slowdown=NCCL_SLOWDOWN, is_measured=False),
    "pascal": Efficiency(0.78, 0.82, 2e-6, 56, 0.98, overlap_slowdown=NCCL_SLOWDOWN, is_measured=False),
    "cdna1": Efficiency(0.65, 0.75, 3e-6, 120, overlap_slowdown=NCCL_SLOWDOWN, is_measured=False),
    "cdna2": Efficiency(
        0.65,
        0.75,
        3e-6,
        110,
        overlap_slowdown=NCCL_SLOWDOWN,
        is_measured=False,
        best_published="73.5 TFLOP/s a die in bf16, 38 % of its sheet: 22 B on Frontier (Dash et al. 2023, 2312.12705)",
    ),
    "cdna3": Efficiency(
        0.55,
        0.75,
        3e-6,
        304,
        overlap_slowdown=NCCL_SLOWDOWN,
        is_measured=False,
        best_published="Llama 2 70B by LoRA in fp8, 2,164 tokens/s an MI300X, 2,848 an MI325X (logs of MLPerf v5.1)",
    ),
    "cdna4": Efficiency(0.55, 0.75, 3e-6, 256, overlap_slowdown=NCCL_SLOWDOWN, is_measured=False),
    "ascend": Efficiency(
        0.60,
        0.75,
        3e-6,
        1,
        is_measured=False,
        best_published="50 % of the peak, 135 B on 8,192 NPUs of a kind not named (Pangu Ultra 2025, 2504.07866)",
    ),
    "xe-hpc": Efficiency(0.60, 0.75, 3e-6, 1, is_measured=False),
    "gaudi": Efficiency(0.60, 0.75, 3e-6, 1, is_measured=False),
}
_UNKNOWN = Efficiency(0.70, 0.80, 3e-6, 1, is_measured=False, known=False)
_CPU = Efficiency(0.80, 0.80, 1e-6, 1)
ALIKE = {"A100": "ampere", "A800": "ampere", "A10G": "ga102"}
"""Chips whose memory or board a name does not say, and one that is no entry."""


def efficiency_name(model: str | None) -> str | None:
    """Return whose parameters a model has, by its name in the catalogue or as its maker calls it; None: nobody's."""
    if model in ACCELERATORS:
        return ACCELERATORS[model].family_name
    if name := lookup(model or "", ACCELERATORS):
        return ACCELERATORS[name].family_name
    words = re.findall(r"[A-Z0-9]+", (model or "").upper())
    return next((ALIKE[word] for word in words if word in ALIKE), None)


def efficiency_of(kind: str, model: str | None) -> Efficiency:
    """Return the parameters of a model, as `efficiency_name` looks them up; else assumed by kind."""
    name = efficiency_name(model)
    if name is None:
        return _CPU if kind == "cpu" else _UNKNOWN
    return EFFICIENCIES[name]
