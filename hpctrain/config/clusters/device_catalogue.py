"""The catalogue: accelerators and networks as their makers describe them. Pure data, and how a name is looked up.

Figures are of data sheets (dense products, no sparsity; one direction of a link); memory is what a program can use.
`hpctrain.planner.prices.efficiency` has the share of these figures that programs reach.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.config.clusters.cluster import HOST_OPERATION_SECONDS, Family

LIST_COMMAND = "`hpctrain catalogue` lists them"
GRACE_OPERATION_SECONDS = 50e-6
"""What a Grace processor needs to start an operation: a microbatch of a Qwen 3 of 14B takes 0.21 s by tensor 4, with
512, 1,024 and 2,048 positions, 50 us for each of its 4,100 operations (lsaie-ss26-gipfelsturm, at 7644e91)."""
IDLE_SHARE = 0.15
"""Share of `watts` that a device takes while it waits. Assumed: data sheets do not say it; makers' tools show 50 to
100 W on boards of 400 to 700."""
LINK_LATENCY_SECONDS = 10e-6
"""Of a message of a collective library between devices of a node: NCCL's by its own tests."""


@dataclass(frozen=True)
class CatalogueEntry:
    """A data sheet, but for its memory."""

    kind: str
    memory_bytes: float
    """The bytes that a program can use: sheets round, and mean GiB where they say GB."""
    memory_bytes_per_second: float
    peak_flops_per_second: dict[str, float]
    link_bytes_per_second: float
    """The bandwidth between two of a node, per direction: NVLink, Infinity Fabric, or PCIe."""
    family_name: str
    """The name of its entry in `EFFICIENCIES`."""
    source: str
    watts: float
    """Power at work: the board's or module's limit (TDP), of a die its share. `source` was not read again for it."""
    operation_seconds: float = HOST_OPERATION_SECONDS
    """What its host needs to start an operation, where the host is a part of the module."""
    fully_connected: bool = False
    """Whether each two devices of a node have such a link of their own."""

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
            operation_seconds=self.operation_seconds,
        )


class NetworkEntry(NamedTuple):
    """A network as its maker describes it."""

    bytes_per_second: float
    """The bandwidth of one NIC, per direction."""
    latency_seconds: float
    """The latency of a message. Assumed: the maker's figure, and what MPI adds to a short message."""
    source: str


def _fp(fp32: float, fp16: float, bf16: float | None = None, tf32: float | None = None) -> dict[str, float]:
    given = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16}
    return {dtype: value for dtype, value in given.items() if value}


# Cards for games reach each other through their host's memory: what Sailor's profiles of tensor parallelism on
# Titan-RTX and RTX-2080-Ti (rings of 5.4e9 bytes/s, by both 4 and 8), and of 4 RTX-3090, show.
_HOST_PCIE3, _HOST_PCIE4 = 9.6e9, 12e9

# What a link of Infinity Fabric has for messages, of its sheet: of an MI300X's 64 GB/s in a direction 48 are left after
# protocol and error correction (ROCm/rccl, issue 1210). All seven of a device carry 316 GB/s of an all-reduce
# (hisohara/ai-scripts at 0780bb3). Assumed to be the same for MI300A and MI355X.
XGMI_SHARE = 0.75
XGMI_SOURCE = "; a link without protocol and error correction"

# Memory is what torch's messages of too little of it call the total capacity.
GIB = 2.0**30

# fmt: off
ACCELERATORS: dict[str, CatalogueEntry] = {
    "A100-40": CatalogueEntry(
        "cuda", 39.4 * GIB, 1.555e12, _fp(19.5e12, 312e12, 312e12, 156e12), 300e9, "ampere",
        "NVIDIA A100 data sheet, SXM4", 400),
    "A100-80": CatalogueEntry(
        "cuda", 79.2 * GIB, 2.039e12, _fp(19.5e12, 312e12, 312e12, 156e12), 300e9, "ampere",
        "NVIDIA A100 data sheet, SXM4", 400),
    "A800-80": CatalogueEntry(
        "cuda", 79.2 * GIB, 2.039e12, _fp(19.5e12, 312e12, 312e12, 156e12), 200e9, "ampere",
        "NVIDIA A800 data sheet, SXM4", 400),
    "H100": CatalogueEntry(
        "cuda", 79.1 * GIB, 3.35e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper",
        "NVIDIA H100 data sheet, SXM5", 700),
    "H100-96": CatalogueEntry(
        "cuda", 95.0 * GIB, 2.4e12, _fp(60e12, 886e12, 886e12, 443e12), 450e9, "hopper",
        "Meta's Grand Teton: SXM5 of 96 GB HBM2e and 500 W (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md);"
        " FLOP/s by power between NVIDIA's data sheets of SXM, 989 at 700 W, and NVL, 835 at 400 W", 500),
    "H200": CatalogueEntry(
        "cuda", 139.8 * GIB, 4.8e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper",
        "NVIDIA H200 data sheet, SXM5", 700),
    "GH200": CatalogueEntry(
        "cuda", 94.5 * GIB, 4.0e12, _fp(67e12, 989e12, 989e12, 494e12), 450e9, "hopper",
        "NVIDIA GH200 data sheet, 96 GB", 700, GRACE_OPERATION_SECONDS),
    "B200": CatalogueEntry(
        "cuda", 178.3 * GIB, 7.7e12, _fp(75e12, 2250e12, 2250e12, 1120e12), 900e9, "blackwell",
        "NVIDIA HGX B200 data sheet, an eighth of its figures with sparsity halved", 1000),
    "H100-PCIe": CatalogueEntry(
        "cuda", 79.1 * GIB, 2.0e12, _fp(51e12, 756e12, 756e12, 378e12), 64e9, "hopper",
        "NVIDIA H100 data sheet, PCIe 5", 350),
    "H100-NVL": CatalogueEntry(
        "cuda", 93.0 * GIB, 3.9e12, _fp(60e12, 835e12, 835e12, 417e12), 64e9, "hopper",
        "NVIDIA H100 NVL data sheet, PCIe 5; a bridge joins pairs only", 400),
    "H800": CatalogueEntry(
        "cuda", 79.1 * GIB, 3.35e12, _fp(67e12, 989e12, 989e12, 494e12), 200e9, "hopper",
        "an H100 data sheet, SXM5, with NVLink of 400 GB/s both ways", 700),
    "H20": CatalogueEntry(
        "cuda", 95.0 * GIB, 4.0e12, _fp(44e12, 148e12, 148e12, 74e12), 450e9, "hopper",
        "NVIDIA H20, 96 GB, SXM5, as resellers' sheets have it; NVIDIA publishes none", 400),
    "B300": CatalogueEntry(
        "cuda", 268.0 * GIB, 8.0e12, _fp(75e12, 2250e12, 2250e12, 1125e12), 900e9, "blackwell",
        "NVIDIA HGX B300 data sheet, an eighth of its figures with sparsity halved", 1100),
    "GB300": CatalogueEntry(
        "cuda", 277.0 * GIB, 8.0e12, _fp(80e12, 2500e12, 2500e12, 1250e12), 900e9, "blackwell",
        "NVIDIA GB300 NVL72 data sheet, a 72nd of its figures with sparsity halved", 1400, GRACE_OPERATION_SECONDS),
    "A10": CatalogueEntry(
        "cuda", 22.2 * GIB, 0.6e12, _fp(31.2e12, 125e12, 125e12, 62.5e12), 32e9, "ga102",
        "NVIDIA A10 data sheet, PCIe 4", 150),
    "A30": CatalogueEntry(
        "cuda", 23.5 * GIB, 0.933e12, _fp(10.3e12, 165e12, 165e12, 82e12), 32e9, "ampere",
        "NVIDIA A30 data sheet, PCIe 4; a bridge joins pairs only", 165),
    "A40": CatalogueEntry(
        "cuda", 44.4 * GIB, 0.696e12, _fp(37.4e12, 149.7e12, 149.7e12, 74.8e12), 32e9, "ga102",
        "NVIDIA A40 data sheet, PCIe 4; a bridge joins pairs only", 300),
    "A6000": CatalogueEntry(
        "cuda", 47.4 * GIB, 0.768e12, _fp(38.7e12, 154.8e12, 154.8e12, 77.4e12), 32e9, "ga102",
        "NVIDIA RTX A6000 data sheet, PCIe 4; a bridge joins pairs only", 300),
    "L4": CatalogueEntry(
        "cuda", 22.0 * GIB, 0.3e12, _fp(30.3e12, 121e12, 121e12, 60e12), 32e9, "ada",
        "NVIDIA L4 data sheet, PCIe 4, its figures with sparsity halved", 72),
    "L40S": CatalogueEntry(
        "cuda", 44.4 * GIB, 0.864e12, _fp(91.6e12, 362e12, 362e12, 183e12), 32e9, "ada",
        "NVIDIA L40S data sheet, PCIe 4", 350),
    "RTX-6000-Ada": CatalogueEntry(
        "cuda", 47.4 * GIB, 0.96e12, _fp(91.1e12, 364.2e12, 364.2e12, 182.1e12), 32e9, "ada",
        "NVIDIA RTX 6000 Ada data sheet, PCIe 4, its figures with sparsity halved", 300),
    "P100": CatalogueEntry(
        "cuda", 15.9 * GIB, 0.732e12, _fp(10.6e12, 21.2e12), 80e9, "pascal",
        "NVIDIA P100 data sheet, SXM2", 300),
    "GB200": CatalogueEntry(
        "cuda", 184.0 * GIB, 8.0e12, _fp(80e12, 2450e12, 2450e12, 1225e12), 900e9, "blackwell",
        "NVIDIA GB200, as NVIDIA/dgxc-benchmarking has it (nemotron/README.md)", 1200, GRACE_OPERATION_SECONDS),
    "V100": CatalogueEntry(
        "cuda", 15.7 * GIB, 0.9e12, _fp(15.7e12, 125e12), 150e9, "volta",
        "NVIDIA V100 data sheet, SXM2, 16 GB", 300),
    "V100-32": CatalogueEntry(
        "cuda", 31.7 * GIB, 0.9e12, _fp(15.7e12, 125e12), 150e9, "volta",
        "NVIDIA V100 data sheet, SXM2, 32 GB", 300),
    "V100S": CatalogueEntry(
        "cuda", 31.7 * GIB, 1.134e12, _fp(16.4e12, 130e12), 16e9, "volta",
        "NVIDIA V100S data sheet, PCIe 3", 250),
    "T4": CatalogueEntry(
        "cuda", 14.6 * GIB, 0.32e12, _fp(8.1e12, 65e12), 16e9, "t4", "NVIDIA T4 data sheet, PCIe 3", 70),
    "RTX-2080": CatalogueEntry(
        "cuda", 7.8 * GIB, 0.448e12, _fp(10.1e12, 40.3e12), _HOST_PCIE3, "turing-gaming",
        "NVIDIA Turing white paper, fp32 accumulation", 215),
    "RTX-2080-Ti": CatalogueEntry(
        "cuda", 10.7 * GIB, 0.616e12, _fp(13.4e12, 53.8e12), _HOST_PCIE3, "turing-gaming",
        "NVIDIA Turing white paper, fp32 accumulation", 250),
    "Titan-RTX": CatalogueEntry(
        "cuda", 23.6 * GIB, 0.672e12, _fp(16.3e12, 130.5e12), _HOST_PCIE3, "turing",
        "NVIDIA Turing white paper, fp32 accumulation", 280),
    "RTX-3090": CatalogueEntry(
        "cuda", 23.7 * GIB, 0.936e12, _fp(35.6e12, 71e12, 71e12, 35.6e12), _HOST_PCIE4, "gaming",
        "NVIDIA GA102 white paper", 350),
    "RTX-4090": CatalogueEntry(
        "cuda", 23.6 * GIB, 1.008e12, _fp(82.6e12, 165.2e12, 165.2e12, 82.6e12), _HOST_PCIE4, "gaming",
        "NVIDIA Ada white paper", 450),
    "RTX-5090": CatalogueEntry(
        "cuda", 31.4 * GIB, 1.792e12, _fp(104.8e12, 209.5e12, 209.5e12, 104.8e12), _HOST_PCIE4, "blackwell-gaming",
        "NVIDIA RTX Blackwell white paper, fp32 accumulation; its link is that of an RTX-3090", 575),
    "MI100": CatalogueEntry(
        "rocm", 31.9 * GIB, 1.23e12, _fp(23.1e12, 184.6e12, 92.3e12), 46e9, "cdna1",
        "AMD MI100 data sheet, one link of Infinity Fabric", 300),
    "MI210": CatalogueEntry(
        "rocm", 63.9 * GIB, 1.6e12, _fp(22.6e12, 181e12, 181e12), 32e9, "cdna2",
        "AMD MI210 data sheet, PCIe 4", 300),
    "MI250X-GCD": CatalogueEntry(
        "rocm", 63.9 * GIB, 1.6e12, _fp(23.9e12, 191.5e12, 191.5e12), 50e9, "cdna2",
        "AMD MI250X data sheet, half of it: each of its two dies is a device", 280),
    "MI300A": CatalogueEntry(
        "rocm", 127.5 * GIB, 5.3e12, _fp(122.6e12, 980.6e12, 980.6e12, 490.3e12), 128e9 * XGMI_SHARE, "cdna3",
        "AMD MI300A data sheet; its memory is its host's too" + XGMI_SOURCE, 550, fully_connected=True),
    "MI325X": CatalogueEntry(
        "rocm", 255.9 * GIB, 6.0e12, _fp(163.4e12, 1307e12, 1307e12, 653e12), 64e9 * XGMI_SHARE, "cdna3",
        "AMD MI325X data sheet" + XGMI_SOURCE, 1000, fully_connected=True),
    "MI355X": CatalogueEntry(
        "rocm", 287.9 * GIB, 8.0e12, _fp(157.3e12, 2516e12, 2516e12), 76.8e9 * XGMI_SHARE, "cdna4",
        "AMD MI355X data sheet" + XGMI_SOURCE, 1400, fully_connected=True),
    "Max-1550": CatalogueEntry(
        "xpu", 64.0 * GIB, 1.638e12, _fp(26e12, 419.5e12, 419.5e12, 209.7e12), 26.5e9, "xe-hpc",
        "Intel Data Center GPU Max 1550 product page, half of it: each of its two stacks is a device", 300),
    "Gaudi-2": CatalogueEntry(
        "hpu", 94.6 * GIB, 2.46e12, _fp(0, 432e12, 432e12), 37.5e9, "gaudi",
        "Intel at Hot Chips 2024: 24 links of 100 Gb/s, three to each other card; for plans alone", 600,
        fully_connected=True),
    "Gaudi-3": CatalogueEntry(
        "hpu", 126.0 * GIB, 3.67e12, _fp(0, 1835e12, 1835e12), 75e9, "gaudi",
        "Intel at Hot Chips 2024: 24 links of 200 Gb/s, three to each other card; for plans alone", 900,
        fully_connected=True),
    "MI300X": CatalogueEntry(
        "rocm", 191.9 * GIB, 5.3e12, _fp(163.4e12, 1307e12, 1307e12, 653e12), 64e9 * XGMI_SHARE, "cdna3",
        "AMD MI300X data sheet" + XGMI_SOURCE, 750, fully_connected=True),
    "910B": CatalogueEntry(
        "npu", 60.9 * GIB, 1.6e12, _fp(75e12, 313e12, 313e12), 28e9, "ascend",
        "Huawei Atlas 800T A2 user guide (910B3), HCCS of 56 GB/s per direction between each two; nothing measured",
        400, fully_connected=True),
}
# fmt: on

NETWORKS: dict[str, NetworkEntry] = {
    "HDR": NetworkEntry(25e9, 3e-6, "InfiniBand HDR, 200 Gb/s"),
    "NDR": NetworkEntry(50e9, 3e-6, "InfiniBand NDR, 400 Gb/s"),
    "HDR100": NetworkEntry(12.5e9, 3e-6, "InfiniBand HDR100, half of HDR's lanes, 100 Gb/s"),
    "NDR200": NetworkEntry(25e9, 3e-6, "InfiniBand NDR200, half of NDR's lanes, 200 Gb/s"),
    "EDR": NetworkEntry(12.5e9, 3e-6, "InfiniBand EDR, 100 Gb/s"),
    "XDR": NetworkEntry(100e9, 3e-6, "InfiniBand XDR, 800 Gb/s"),
    "Slingshot-10": NetworkEntry(12.5e9, 3e-6, "HPE Slingshot 10, NICs of 100 Gb/s"),
    "Slingshot-11": NetworkEntry(25e9, 3e-6, "HPE Slingshot 11, 200 Gb/s"),
    "RoCE-100": NetworkEntry(12.5e9, 6e-6, "RoCE v2 on Ethernet of 100 Gb/s"),
    "RoCE-200": NetworkEntry(25e9, 6e-6, "RoCE v2 on Ethernet of 200 Gb/s"),
    "RoCE-400": NetworkEntry(50e9, 6e-6, "RoCE v2 on Ethernet of 400 Gb/s"),
    "EFA-100": NetworkEntry(12.5e9, 15e-6, "AWS Elastic Fabric Adapter, 100 Gb/s"),
    "OPA-100": NetworkEntry(12.5e9, 3e-6, "Omni-Path, 100 Gb/s"),
    "Ethernet-100": NetworkEntry(12.5e9, 30e-6, "Ethernet, 100 Gb/s"),
    "Ethernet-50": NetworkEntry(6.25e9, 30e-6, "Ethernet, 50 Gb/s"),
    "Ethernet-25": NetworkEntry(3.125e9, 30e-6, "Ethernet, 25 Gb/s"),
    "Ethernet-10": NetworkEntry(1.25e9, 40e-6, "Ethernet, 10 Gb/s"),
    "Ethernet-1": NetworkEntry(0.125e9, 50e-6, "Ethernet, 1 Gb/s"),
}

ALIASES = {"MI250X": "MI250X-GCD", "MI250": "MI250X-GCD", "SLINGSHOT": "Slingshot-11"}
"""What a driver or a maker calls an entry by less than its name."""
OTHER_BOARDS = {"PCIE", "NVL"}
"""Boards whose figures differ from those of the same chip in an SXM module."""


def lookup_accelerator(model: str) -> str | None:
    """Return the catalogue's name of a model as people or drivers write it, such as `NVIDIA H100 80GB HBM3`.

    None for what is not there, and for a PCIe board where the catalogue has the SXM module.
    """
    result = lookup(model, ACCELERATORS)
    is_other = result and OTHER_BOARDS & set(_words(model)) and "SXM" in ACCELERATORS[result].source
    return None if is_other else result


def lookup(called: str, names: Collection[str]) -> str | None:
    """Return the name all of whose words are in `called`, whatever the case, hyphens and blanks; the longest one.

    It is that of a network, such as `NDR` for `InfiniBand NDR`, or of a model, whatever board its chip is on. None for
    what is not there.
    """
    words = _words(called)
    said = {*words, *("".join(words[i:j]) for i in range(len(words)) for j in range(i + 2, len(words) + 1))}
    for name in sorted(names, key=len, reverse=True):
        wanted = _words(name)
        # A number may be one of bytes: an A10G is no A10.
        spellings = ({word, f"{word}GB", f"{word}G"} if word.isdigit() else {word} for word in wanted)
        if "".join(wanted) in said or all(said & spelt for spelt in spellings):
            return name
    return next((name for alias, name in ALIASES.items() if alias in words and name in names), None)


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Z0-9]+", name.upper())
