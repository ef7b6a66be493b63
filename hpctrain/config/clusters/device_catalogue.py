"""The catalogue: accelerators and networks as their makers describe them. Pure data, and how a name is looked up.

Figures are of data sheets (dense products, no sparsity; one direction of a link); memory is what a program can use.
`hpctrain.planner.prices.efficiency` has the share of these figures that programs reach.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.config.clusters.cluster import Family

LIST_COMMAND = "`hpctrain catalogue` lists them"
LINK_LATENCY_SECONDS = 10e-6
"""Of a message of a collective library between devices of a node: NCCL's by its own tests."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A data sheet, but for its memory."""

    kind: str
    memory_bytes: float
    """What a program can use: sheets round, and mean GiB where they say GB."""
    memory_bytes_per_second: float
    peak_flops_per_second: dict[str, float]
    link_bytes_per_second: float
    """Between two of a node, per direction: NVLink, Infinity Fabric, or PCIe."""
    family_name: str
    """Of its parameter set in `EFFICIENCIES`."""
    source: str

    def family(self, name: str, reserved_bytes: int | None = None) -> Family:
        """Return it as a cluster file's family; `reserved_bytes` in place of the default."""
        return Family(
            origin="datasheet",
            kind=self.kind,
            model=name,
            memory_bytes=int(self.memory_bytes),
            memory_bytes_per_second=self.memory_bytes_per_second,
            peak_flops_per_second=self.peak_flops_per_second,
            reserved_bytes=reserved_bytes,
        )


class NetworkEntry(NamedTuple):
    """A network as its maker describes it."""

    bytes_per_second: float
    """Of one NIC, per direction."""
    latency_seconds: float
    """Of a message: assumed, the maker's figure and what MPI adds to a short message."""
    source: str


def _fp(fp32: float, fp16: float, bf16: float | None = None, tf32: float | None = None) -> dict[str, float]:
    given = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return {dtype: value for dtype, value in given.items() if value}


# Cards for games reach each other through their host's memory: what Sailor's profiles of tensor parallelism on
# Titan-RTX and RTX-2080-Ti (rings of 5.4e9 bytes/s, by both 4 and 8), and of 4 RTX-3090, show.
_HOST_PCIE3, _HOST_PCIE4 = 9.6e9, 12e9

# Memory is what torch's messages of too little of it call the total capacity.
GIB = 2.0**30

# fmt: off
ACCELERATORS: dict[str, CatalogueEntry] = {
    "A100-40": CatalogueEntry(
        "cuda", 39.4 * GIB, 1.555e12, _fp(19.5e12, 312e12, 312e12, 156e12), 300e9, "ampere",
        "NVIDIA A100 data sheet, SXM4"),
    "A100-80": CatalogueEntry(
        "cuda", 79.2 * GIB, 2.039e12, _fp(19.5e12, 312e12, 312e12, 156e12), 300e9, "ampere",
        "NVIDIA A100 data sheet, SXM4"),
    "A800-80": CatalogueEntry(
        "cuda", 79.2 * GIB, 2.039e12, _fp(19.5e12, 312e12, 312e12, 156e12), 200e9, "ampere",
        "NVIDIA A800 data sheet, SXM4"),
    "H100": CatalogueEntry(
        "cuda", 79.1 * GIB, 3.35e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper",
        "NVIDIA H100 data sheet, SXM5"),
    "H100-96": CatalogueEntry(
        "cuda", 95.0 * GIB, 2.4e12, _fp(60e12, 886e12, 886e12, 443e12), 450e9, "hopper",
        "Meta's Grand Teton: SXM5 of 96 GB HBM2e and 500 W (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md);"
        " FLOP/s by power between NVIDIA's data sheets of SXM, 989 at 700 W, and NVL, 835 at 400 W"),
    "H200": CatalogueEntry(
        "cuda", 139.8 * GIB, 4.8e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper",
        "NVIDIA H200 data sheet, SXM5"),
    "GH200": CatalogueEntry(
        "cuda", 94.5 * GIB, 4.0e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper",
        "NVIDIA GH200 data sheet, 96 GB"),
    "B200": CatalogueEntry(
        "cuda", 178.3 * GIB, 7.7e12, _fp(75e12, 2250e12, 2250e12, 1120e12), 900e9, "blackwell",
        "NVIDIA HGX B200 data sheet, an eighth of its figures with sparsity halved"),
    "GB200": CatalogueEntry(
        "cuda", 184.0 * GIB, 8.0e12, _fp(80e12, 2450e12, 2450e12, 1225e12), 900e9, "blackwell",
        "NVIDIA GB200, as NVIDIA/dgxc-benchmarking has it (nemotron/README.md)"),
    "V100": CatalogueEntry(
        "cuda", 15.7 * GIB, 0.9e12, _fp(15.7e12, 125e12), 150e9, "volta",
        "NVIDIA V100 data sheet, SXM2, 16 GB"),
    "V100-32": CatalogueEntry(
        "cuda", 31.7 * GIB, 0.9e12, _fp(15.7e12, 125e12), 150e9, "volta",
        "NVIDIA V100 data sheet, SXM2, 32 GB"),
    "V100S": CatalogueEntry(
        "cuda", 31.7 * GIB, 1.134e12, _fp(16.4e12, 130e12), 16e9, "volta",
        "NVIDIA V100S data sheet, PCIe 3"),
    "T4": CatalogueEntry("cuda", 14.6 * GIB, 0.32e12, _fp(8.1e12, 65e12), 16e9, "t4", "NVIDIA T4 data sheet, PCIe 3"),
    "RTX-2080": CatalogueEntry(
        "cuda", 7.8 * GIB, 0.448e12, _fp(10.1e12, 40.3e12), _HOST_PCIE3, "turing-gaming",
        "NVIDIA Turing white paper, fp32 accumulation"),
    "RTX-2080-Ti": CatalogueEntry(
        "cuda", 10.7 * GIB, 0.616e12, _fp(13.4e12, 53.8e12), _HOST_PCIE3, "turing-gaming",
        "NVIDIA Turing white paper, fp32 accumulation"),
    "Titan-RTX": CatalogueEntry(
        "cuda", 23.6 * GIB, 0.672e12, _fp(16.3e12, 130.5e12), _HOST_PCIE3, "turing",
        "NVIDIA Turing white paper, fp32 accumulation"),
    "RTX-3090": CatalogueEntry(
        "cuda", 23.7 * GIB, 0.936e12, _fp(35.6e12, 71e12, 71e12, 35.6e12), _HOST_PCIE4, "gaming",
        "NVIDIA GA102 white paper"),
    "RTX-4090": CatalogueEntry(
        "cuda", 23.6 * GIB, 1.008e12, _fp(82.6e12, 165.2e12, 165.2e12, 82.6e12), _HOST_PCIE4, "gaming",
        "NVIDIA Ada white paper"),
    "MI250X-GCD": CatalogueEntry(
        "rocm", 63.9 * GIB, 1.6e12, _fp(23.9e12, 191.5e12, 191.5e12), 50e9, "cdna2",
        "AMD MI250X data sheet, half of it"),
    "MI300X": CatalogueEntry(
        "rocm", 191.9 * GIB, 5.3e12, _fp(163.4e12, 1307e12, 1307e12, 653e12), 64e9, "cdna3",
        "AMD MI300X data sheet"),
    "910B": CatalogueEntry(
        "npu", 60.9 * GIB, 1.6e12, _fp(75e12, 313e12, 313e12), 28e9, "ascend",
        "Huawei Atlas 800T A2 user guide (910B3), HCCS of 56 GB/s per direction between each two; nothing measured"),
}
# fmt: on

NETWORKS: dict[str, NetworkEntry] = {
    "HDR": NetworkEntry(25e9, 3e-6, "InfiniBand HDR, 200 Gb/s"),
    "NDR": NetworkEntry(50e9, 3e-6, "InfiniBand NDR, 400 Gb/s"),
    "Slingshot-11": NetworkEntry(25e9, 3e-6, "HPE Slingshot 11, 200 Gb/s"),
    "RoCE-100": NetworkEntry(12.5e9, 6e-6, "RoCE v2 on Ethernet of 100 Gb/s"),
    "RoCE-200": NetworkEntry(25e9, 6e-6, "RoCE v2 on Ethernet of 200 Gb/s"),
    "RoCE-400": NetworkEntry(50e9, 6e-6, "RoCE v2 on Ethernet of 400 Gb/s"),
    "EFA-100": NetworkEntry(12.5e9, 15e-6, "AWS Elastic Fabric Adapter, 100 Gb/s"),
    "OPA-100": NetworkEntry(12.5e9, 3e-6, "Omni-Path, 100 Gb/s"),
    "Ethernet-50": NetworkEntry(6.25e9, 30e-6, "Ethernet, 50 Gb/s"),
    "Ethernet-25": NetworkEntry(3.125e9, 30e-6, "Ethernet, 25 Gb/s"),
    "Ethernet-10": NetworkEntry(1.25e9, 40e-6, "Ethernet, 10 Gb/s"),
    "Ethernet-1": NetworkEntry(0.125e9, 50e-6, "Ethernet, 1 Gb/s"),
}

OTHER_BOARDS = {"PCIE", "NVL"}
"""Boards whose figures differ from those of the same chip in an SXM module."""


def lookup_accelerator(model: str) -> str | None:
    """Return the catalogue's name of a model as people or drivers write it, such as `NVIDIA H100 80GB HBM3`.

    None for what is not there, and for a PCIe board where the catalogue has the SXM module.
    """
    result = _lookup(model, ACCELERATORS)
    is_other = result and OTHER_BOARDS & set(_words(model)) and "SXM" in ACCELERATORS[result].source
    return None if is_other else result


def lookup_network(name: str) -> str | None:
    """Return the catalogue's name of a network, such as `NDR` for `InfiniBand NDR`; None for what is not there."""
    return _lookup(name, NETWORKS)


def _lookup(called: str, names: Iterable[str]) -> str | None:
    """Return the name all of whose words are in `called`, whatever the case, hyphens and blanks; the longest one."""
    words = _words(called)
    joined = "".join(words)
    for name in sorted(names, key=len, reverse=True):
        wanted = _words(name)
        if "".join(wanted) == joined or all({word, f"{word}GB", f"{word}G"} & set(words) for word in wanted):
            return name
    return None


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Z0-9]+", name.upper())
