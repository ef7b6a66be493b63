"""Accelerators and networks as their makers describe them, and how near to that they come.

Figures are of data sheets (dense products, no sparsity; one direction of a link), memory is what programs find;
`Efficiency` is one parameter set for each family: two shares are fitted to published measurements by
`benchmarks/predictor.py`, or are those of a family like it, the rest is told where it stands.
"""

from dataclasses import dataclass

from hpctrain.cluster import Family


@dataclass(frozen=True)
class Efficiency:
    """How near a family comes to its data sheet."""

    product_share: float
    """Of peak FLOP/s, for large products."""
    memory_share: float
    """Of memory bandwidth, for passes over large tensors."""
    launch_seconds: float
    """That the device needs between two operations."""
    processors: int
    """That compute tiles of a product side by side; 1: a product's shape makes no difference."""
    fp32_share: float | None = None
    """The same for fp32, which no tensor core computes; None: as `product_share`."""
    tf32_share: float | None = None
    fused_share: float = 1.0
    """Of the share at which attention in one kernel computes on an A100 (`Stack.flash`): what is written for it reaches
    less of what comes later. FlashAttention-2 340 TFLOP/s on an H100, half of large products' (Shah et al. 2024)."""
    overlap_times: float = 1.0
    """How many times as long it computes while it communicates."""
    known: bool = True
    """Whether it is of this model, not a guess by its kind."""

    def share(self, dtype: str) -> float:
        """Return the share of peak that large products in a dtype reach."""
        of_dtype = {"fp32": self.fp32_share, "tf32": self.tf32_share}.get(dtype)
        return of_dtype or self.product_share


@dataclass(frozen=True)
class Accelerator:
    """A data sheet, but for its memory."""

    kind: str
    memory_bytes: float
    """What a program finds: sheets round, and mean GiB where they say GB."""
    memory_bytes_per_second: float
    peak_flops_per_second: dict[str, float]
    link_bytes_per_second: float
    """Between two of a node, one way: NVLink, Infinity Fabric, or PCIe."""
    family_name: str
    """Of its parameter set in `EFFICIENCIES`."""
    source: str

    def family(self, name: str) -> Family:
        """Return it as a cluster file's family."""
        return Family(
            origin="datasheet",
            kind=self.kind,
            model=name,
            memory_bytes=int(self.memory_bytes),
            memory_bytes_per_second=self.memory_bytes_per_second,
            peak_flops_per_second=self.peak_flops_per_second,
        )


# Kernels of a collective library take processors and memory bandwidth from what is computed beside: with FSDP and
# pipelines on A100, H100, MI210 and MI250 that took 1.19 times as long in the mean (arXiv 2507.03114).
BESIDE_NCCL = 1.19

# By family of accelerators. Shares of fp32 and tf32 are from profiles of single layers (Sailor, seven devices), those
# of half precision and of memory from whole steps; families that nobody measured have those of the one before. Cards
# for games sum products of half precision in fp32 at half their tensor cores' rate, and reach nearly all of that, as of
# tf32 in the profiles. A T4 is held to 70 W: under load its clock falls to about half (Jia et al. 2019, arXiv
# 1903.07486); its shares are guesses after that.
EFFICIENCIES: dict[str, Efficiency] = {
    "volta": Efficiency(0.78, 0.82, 2e-6, 80, 0.98, overlap_times=BESIDE_NCCL),
    "turing": Efficiency(0.65, 0.80, 2e-6, 68, 1.0, overlap_times=BESIDE_NCCL),
    "t4": Efficiency(0.42, 0.80, 2e-6, 40, 0.55, overlap_times=BESIDE_NCCL),
    "turing-gaming": Efficiency(0.92, 0.80, 2e-6, 68, 1.0, overlap_times=BESIDE_NCCL),
    "ampere": Efficiency(0.87, 0.68, 2e-6, 108, 0.90, 0.82, overlap_times=BESIDE_NCCL),
    "hopper": Efficiency(0.68, 0.85, 2e-6, 132, 0.85, 0.44, fused_share=0.75, overlap_times=BESIDE_NCCL),
    "blackwell": Efficiency(0.68, 0.85, 2e-6, 148, 0.85, 0.44, fused_share=0.75, overlap_times=BESIDE_NCCL),
    "gaming": Efficiency(0.92, 0.82, 2e-6, 82, 1.0, 1.0, overlap_times=BESIDE_NCCL),
    "cdna2": Efficiency(0.65, 0.75, 3e-6, 110, overlap_times=BESIDE_NCCL),
    "cdna3": Efficiency(0.55, 0.75, 3e-6, 304, overlap_times=BESIDE_NCCL),
    "ascend": Efficiency(0.60, 0.75, 3e-6, 1),
}
_UNKNOWN = Efficiency(0.70, 0.80, 3e-6, 1, known=False)
_CPU = Efficiency(0.80, 0.80, 1e-6, 1)


def _fp(fp32: float, fp16: float, bf16: float | None = None, tf32: float | None = None) -> dict[str, float]:
    given = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return {dtype: value for dtype, value in given.items() if value}


# Cards for games reach each other through their host's memory: what Sailor's profiles of tensor parallelism on
# Titan-RTX and RTX-2080-Ti (rings of 5.4e9 bytes/s, by 4 and by 8 alike), and of 4 RTX-3090, show.
_HOST_PCIE3, _HOST_PCIE4 = 9.6e9, 12e9

# Memory is what torch's messages of too little of it call the total capacity.
GIB = 2.0**30

ACCELERATORS: dict[str, Accelerator] = {
    "A100-40": Accelerator(
        "cuda",
        39.4 * GIB,
        1.555e12,
        _fp(19.5e12, 312e12, 312e12, 156e12),
        300e9,
        "ampere",
        "NVIDIA A100 data sheet, SXM4",
    ),
    "A100-80": Accelerator(
        "cuda",
        79.2 * GIB,
        2.039e12,
        _fp(19.5e12, 312e12, 312e12, 156e12),
        300e9,
        "ampere",
        "NVIDIA A100 data sheet, SXM4",
    ),
    "A800-80": Accelerator(
        "cuda",
        79.2 * GIB,
        2.039e12,
        _fp(19.5e12, 312e12, 312e12, 156e12),
        200e9,
        "ampere",
        "NVIDIA A800 data sheet, SXM4",
    ),
    "H100": Accelerator(
        "cuda", 79.1 * GIB, 3.35e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper", "NVIDIA H100 data sheet, SXM5"
    ),
    "H200": Accelerator(
        "cuda", 139.8 * GIB, 4.8e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper", "NVIDIA H200 data sheet, SXM5"
    ),
    "GH200": Accelerator(
        "cuda",
        94.5 * GIB,
        4.0e12,
        _fp(67e12, 989e12, 989e12, 494e12),
        450e9,
        "hopper",
        "NVIDIA GH200 data sheet, 96 GB",
    ),
    "B200": Accelerator(
        "cuda",
        178.3 * GIB,
        7.7e12,
        _fp(75e12, 2250e12, 2250e12, 1120e12),
        900e9,
        "blackwell",
        "NVIDIA HGX B200 data sheet, an eighth of its figures with sparsity halved",
    ),
    "V100": Accelerator(
        "cuda", 15.7 * GIB, 0.9e12, _fp(15.7e12, 125e12), 150e9, "volta", "NVIDIA V100 data sheet, SXM2, 16 GB"
    ),
    "V100-32": Accelerator(
        "cuda", 31.7 * GIB, 0.9e12, _fp(15.7e12, 125e12), 150e9, "volta", "NVIDIA V100 data sheet, SXM2, 32 GB"
    ),
    "V100S": Accelerator(
        "cuda", 31.7 * GIB, 1.134e12, _fp(16.4e12, 130e12), 16e9, "volta", "NVIDIA V100S data sheet, PCIe 3"
    ),
    "T4": Accelerator("cuda", 14.6 * GIB, 0.32e12, _fp(8.1e12, 65e12), 16e9, "t4", "NVIDIA T4 data sheet, PCIe 3"),
    "RTX-2080": Accelerator(
        "cuda",
        7.8 * GIB,
        0.448e12,
        _fp(10.1e12, 40.3e12),
        _HOST_PCIE3,
        "turing-gaming",
        "NVIDIA Turing white paper, fp32 accumulation",
    ),
    "RTX-2080-Ti": Accelerator(
        "cuda",
        10.7 * GIB,
        0.616e12,
        _fp(13.4e12, 53.8e12),
        _HOST_PCIE3,
        "turing-gaming",
        "NVIDIA Turing white paper, fp32 accumulation",
    ),
    "Titan-RTX": Accelerator(
        "cuda",
        23.6 * GIB,
        0.672e12,
        _fp(16.3e12, 130.5e12),
        _HOST_PCIE3,
        "turing",
        "NVIDIA Turing white paper, fp32 accumulation",
    ),
    "RTX-3090": Accelerator(
        "cuda",
        23.7 * GIB,
        0.936e12,
        _fp(35.6e12, 71e12, 71e12, 35.6e12),
        _HOST_PCIE4,
        "gaming",
        "NVIDIA GA102 white paper",
    ),
    "RTX-4090": Accelerator(
        "cuda",
        23.6 * GIB,
        1.008e12,
        _fp(82.6e12, 165.2e12, 165.2e12, 82.6e12),
        _HOST_PCIE4,
        "gaming",
        "NVIDIA Ada white paper",
    ),
    "MI250X-GCD": Accelerator(
        "rocm", 63.9 * GIB, 1.6e12, _fp(23.9e12, 191.5e12, 191.5e12), 50e9, "cdna2", "AMD MI250X data sheet, half of it"
    ),
    "MI300X": Accelerator(
        "rocm", 191.9 * GIB, 5.3e12, _fp(163.4e12, 1307e12, 1307e12, 653e12), 64e9, "cdna3", "AMD MI300X data sheet"
    ),
    "910B": Accelerator(
        "npu",
        60.9 * GIB,
        1.6e12,
        _fp(75e12, 313e12, 313e12),
        28e9,
        "ascend",
        "Huawei Atlas 800T A2 user guide (910B3), HCCS of 56 GB/s both ways between each two; nothing measured",
    ),
}

# A NIC's bandwidth one way, bytes/s, and a message's latency, s: makers' figures, and what MPI adds to a short message.
NETWORKS: dict[str, tuple[float, float]] = {
    "HDR": (25e9, 3e-6),  # InfiniBand, 200 Gb/s
    "NDR": (50e9, 3e-6),  # InfiniBand, 400 Gb/s
    "Slingshot-11": (25e9, 3e-6),  # 200 Gb/s
    "RoCE-200": (25e9, 6e-6),
    "EFA-100": (12.5e9, 15e-6),
    "OPA-100": (12.5e9, 3e-6),  # Omni-Path
    "Ethernet-25": (3.125e9, 30e-6),
    "Ethernet-10": (1.25e9, 40e-6),
}


def efficiency_name(model: str | None) -> str | None:
    """Return whose parameters a model has, by its name in the catalogue or as its maker calls it; None: nobody's."""
    if model in ACCELERATORS:
        return ACCELERATORS[model].family_name
    called = (model or "").upper().replace(" ", "-")
    for name, accelerator in sorted(ACCELERATORS.items(), key=lambda pair: -len(pair[0])):
        if name.upper() in called:
            return accelerator.family_name
    alike = (("A100", "ampere"), ("A800", "ampere"), ("H800", "hopper"), ("MI250X", "cdna2"), ("GB200", "blackwell"))
    return next((name for part, name in alike if part in called), None)


def efficiency_of(kind: str, model: str | None) -> Efficiency:
    """Return the parameters of a model, as `efficiency_name` finds them; else a guess by kind."""
    name = efficiency_name(model)
    if name is None:
        return _CPU if kind == "cpu" else _UNKNOWN
    return EFFICIENCIES[name]
