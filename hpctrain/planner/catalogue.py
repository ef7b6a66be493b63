"""Accelerators and networks as their makers describe them, and how near to that they come.

Figures are of data sheets (dense products, no sparsity; one direction of a link); `Efficiency` is one parameter set for
each family, fitted to published measurements by `benchmarks/predictor.py`, or that of a family like it.
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
    known: bool = True
    """Whether it is of this model, not a guess by its kind."""


@dataclass(frozen=True)
class Accelerator:
    """A data sheet."""

    kind: str
    memory_bytes: float
    memory_bytes_per_second: float
    peak_flops_per_second: dict[str, float]
    link_bytes_per_second: float
    """Between two of a node, one way: NVLink, Infinity Fabric, or PCIe."""
    efficiency: Efficiency
    source: str

    def family(self, name: str) -> Family:
        """Return it as a cluster file's family, every figure of which is a data sheet's."""
        return Family(
            origin="datasheet",
            kind=self.kind,
            model=name,
            memory_bytes=int(self.memory_bytes),
            memory_bytes_per_second=self.memory_bytes_per_second,
            peak_flops_per_second=self.peak_flops_per_second,
        )


_VOLTA, _TURING = Efficiency(0.72, 0.80, 2e-6, 80), Efficiency(0.65, 0.80, 2e-6, 68)
_AMPERE, _HOPPER = Efficiency(0.80, 0.82, 2e-6, 108), Efficiency(0.68, 0.85, 2e-6, 132)
_GAMING = Efficiency(0.75, 0.82, 2e-6, 82)
_CDNA2, _CDNA3 = Efficiency(0.65, 0.75, 3e-6, 110), Efficiency(0.55, 0.75, 3e-6, 304)
_UNKNOWN = Efficiency(0.70, 0.80, 3e-6, 1, known=False)
_CPU = Efficiency(0.80, 0.80, 1e-6, 1)


def _fp(fp32: float, fp16: float, bf16: float | None = None, tf32: float | None = None) -> dict[str, float]:
    given = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return {dtype: value for dtype, value in given.items() if value}


ACCELERATORS: dict[str, Accelerator] = {
    "A100-40": Accelerator(
        "cuda", 40e9, 1.555e12, _fp(19.5e12, 312e12, 312e12, 156e12), 300e9, _AMPERE, "NVIDIA A100 data sheet, SXM4"
    ),
    "A100-80": Accelerator(
        "cuda", 80e9, 2.039e12, _fp(19.5e12, 312e12, 312e12, 156e12), 300e9, _AMPERE, "NVIDIA A100 data sheet, SXM4"
    ),
    "A800-80": Accelerator(
        "cuda", 80e9, 2.039e12, _fp(19.5e12, 312e12, 312e12, 156e12), 200e9, _AMPERE, "NVIDIA A800 data sheet, SXM4"
    ),
    "H100": Accelerator(
        "cuda", 80e9, 3.35e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, _HOPPER, "NVIDIA H100 data sheet, SXM5"
    ),
    "H200": Accelerator(
        "cuda", 141e9, 4.8e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, _HOPPER, "NVIDIA H200 data sheet, SXM5"
    ),
    "GH200": Accelerator(
        "cuda", 96e9, 4.0e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, _HOPPER, "NVIDIA GH200 data sheet, 96 GB"
    ),
    "V100": Accelerator(
        "cuda", 16e9, 0.9e12, _fp(15.7e12, 125e12), 150e9, _VOLTA, "NVIDIA V100 data sheet, SXM2, 16 GB"
    ),
    "V100S": Accelerator("cuda", 32e9, 1.134e12, _fp(16.4e12, 130e12), 16e9, _VOLTA, "NVIDIA V100S data sheet, PCIe 3"),
    "T4": Accelerator("cuda", 16e9, 0.32e12, _fp(8.1e12, 65e12), 16e9, _TURING, "NVIDIA T4 data sheet, PCIe 3"),
    "RTX-2080": Accelerator(
        "cuda", 8e9, 0.448e12, _fp(10.1e12, 40.3e12), 16e9, _TURING, "NVIDIA Turing white paper, fp32 accumulation"
    ),
    "Titan-RTX": Accelerator(
        "cuda", 24e9, 0.672e12, _fp(16.3e12, 130.5e12), 16e9, _TURING, "NVIDIA Turing white paper, fp32 accumulation"
    ),
    "RTX-3090": Accelerator(
        "cuda", 24e9, 0.936e12, _fp(35.6e12, 71e12, 71e12, 35.6e12), 32e9, _GAMING, "NVIDIA GA102 white paper"
    ),
    "RTX-4090": Accelerator(
        "cuda", 24e9, 1.008e12, _fp(82.6e12, 165.2e12, 165.2e12, 82.6e12), 32e9, _GAMING, "NVIDIA Ada white paper"
    ),
    "MI250X-GCD": Accelerator(
        "rocm", 64e9, 1.6e12, _fp(23.9e12, 191.5e12, 191.5e12), 50e9, _CDNA2, "AMD MI250X data sheet, half of it"
    ),
    "MI300X": Accelerator(
        "rocm", 192e9, 5.3e12, _fp(163.4e12, 1307e12, 1307e12, 653e12), 64e9, _CDNA3, "AMD MI300X data sheet"
    ),
}

# A NIC's bandwidth one way, bytes/s, and a message's latency, s: makers' figures, and what MPI adds to a short message.
NETWORKS: dict[str, tuple[float, float]] = {
    "HDR": (25e9, 3e-6),  # InfiniBand, 200 Gb/s
    "NDR": (50e9, 3e-6),  # InfiniBand, 400 Gb/s
    "Slingshot-11": (25e9, 3e-6),  # 200 Gb/s
    "RoCE-200": (25e9, 6e-6),
    "Ethernet-25": (3.125e9, 30e-6),
    "Ethernet-10": (1.25e9, 40e-6),
}


def efficiency_of(kind: str, model: str | None) -> Efficiency:
    """Return the parameters of a model by its name in the catalogue, or as its maker calls it; else a guess by kind."""
    if model in ACCELERATORS:
        return ACCELERATORS[model].efficiency
    if kind == "cpu":
        return _CPU
    called = (model or "").upper().replace(" ", "-")
    for name, accelerator in sorted(ACCELERATORS.items(), key=lambda pair: -len(pair[0])):
        if name.upper() in called:
            return accelerator.efficiency
    for part, efficiency in (("A100", _AMPERE), ("A800", _AMPERE), ("H800", _HOPPER), ("MI250X", _CDNA2)):
        if part in called:
            return efficiency
    return _UNKNOWN
