"""The ready cluster files: real devices and networks, scaled down so that small real work takes a large model's part.

    python benchmarks/make_clusters.py hpctrain/jobs/clusters

writes one file for each mix of `MIXES`. Their figures are those of data sheets, of dense products in half precision,
and the stated shares of them that devices reach, as a probe would find; one set of scales makes a rehearsal of all of
it (`Scale`).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

WIDTH = 64
"""A hidden size of 64 stands for 4,096, and 32 positions for 2,048."""


class Scale:
    """What one of the cluster is in a rehearsal whose widths and positions are `WIDTH` times smaller.

    Products of a row shrink by WIDTH^3, what they read and write and all messages by WIDTH^2; but numbers are fp32,
    each twice as wide as the half precision that it stands for. So seconds stay what they are.
    """

    flops = 1 / WIDTH**3
    num_bytes = 2 / WIDTH**2
    memory = 4 / WIDTH**2  # operations that are not fused keep about twice as many numbers
    rows = 1 / WIDTH


@dataclass(frozen=True)
class Chip:
    """One device: what its maker says, and how it behaves."""

    kind: str
    model: str
    memory_bytes: float
    memory_bytes_per_second: float
    flops_per_second: float
    """Dense, in half precision."""
    share: float
    """Of these, that large products reach."""
    half_speed_rows: float
    launch_seconds: float
    overlap_times: float


# Peaks: NVIDIA's data sheets of A100 (2021), A800 (2022), V100 and V100S (2020), T4 (2019); AMD's of the MI250X (2021),
# of which one GCD is half; Ascend 910 as shown at Hot Chips 31 (2019). The other columns are guesses within what
# benchmarks of these chips report: T4 is limited by its 70 W, AMD and Ascend reach less of their peaks than NVIDIA.
CHIPS = {
    "a100-80": Chip("cuda", "NVIDIA A100 SXM 80GB", 80e9, 2.039e12, 312e12, 0.85, 320, 4e-6, 1.15),
    "a100-40": Chip("cuda", "NVIDIA A100 SXM 40GB", 40e9, 1.555e12, 312e12, 0.85, 320, 4e-6, 1.15),
    "a800-80": Chip("cuda", "NVIDIA A800 SXM 80GB", 80e9, 2.039e12, 312e12, 0.85, 320, 4e-6, 1.15),
    "v100-16": Chip("cuda", "NVIDIA V100 SXM2 16GB", 16e9, 0.900e12, 125e12, 0.80, 192, 5e-6, 1.20),
    "v100s-32": Chip("cuda", "NVIDIA V100S PCIe 32GB", 32e9, 1.134e12, 130e12, 0.75, 192, 5e-6, 1.20),
    "t4-16": Chip("cuda", "NVIDIA T4 16GB", 16e9, 0.320e12, 65e12, 0.50, 96, 5e-6, 1.25),
    "mi250x-gcd": Chip("rocm", "AMD MI250X, one GCD", 64e9, 1.638e12, 191.5e12, 0.70, 384, 8e-6, 1.20),
    "ascend-910": Chip("npu", "Ascend 910 32GB", 32e9, 1.200e12, 256e12, 0.70, 512, 10e-6, 1.10),
}
MEMORY_SHARE = 0.85  # of the bandwidth of memory, that passes over it reach
JITTER_SHARE = 0.01
TILE_ROWS = 128  # rows and columns of the result that a product is computed in
PROBED_ROWS = 256  # of the products that a probe of the rehearsal measures, in rows of the rehearsal

# name: latency in seconds, the software's share included; guesses.
FABRICS = {"ib": 5e-6, "roce": 8e-6, "ethernet": 30e-6}
HDR, EDR, ETHERNET = 25e9, 12.5e9, 3.125e9  # bytes/s one way: 200 and 100 Gb/s InfiniBand or RoCE, 25 GbE

# bytes/s one way, and latency, between two devices of a node: NVLink 3 (A100), its 400 GB/s form (A800), NVLink 2
# (V100), PCIe 3 x16, Infinity Fabric between GCDs, HCCS.
NVLINK3, NVLINK_A800, NVLINK2 = (300e9, 3e-6), (200e9, 3e-6), (150e9, 3e-6)
PCIE3, INFINITY, HCCS = (12e9, 8e-6), (50e9, 4e-6), (30e9, 5e-6)


@dataclass(frozen=True)
class Hosts:
    """Nodes that are alike."""

    chip: str
    devices: int
    link: tuple[float, float]
    nics: tuple[tuple[str, int, float], ...]
    """Fabric, how many, bytes/s of each one way."""
    count: int = 1


@dataclass(frozen=True)
class Mix:
    """A cluster."""

    about: str
    time_scale: float
    """Such that all plans of `hpctrain bench mixed` are late by less than 1 % on two cores: the faster the devices, the
    more operations for each second."""
    hosts: tuple[Hosts, ...]
    memory_scale: float = Scale.memory


MIXES = {
    "a100-80-40": Mix(
        "4 A100-80 and 4 A100-40: memory differs, speed does not.",
        5.0,
        (Hosts("a100-80", 4, NVLINK3, (("ib", 4, HDR),)), Hosts("a100-40", 4, NVLINK3, (("ib", 4, HDR),))),
        memory_scale=1 / WIDTH**2,  # less, so that a model of this size is a large one
    ),
    "v100-t4": Mix(
        "4 V100-16 and 4 T4-16: speed differs by three, memory does not.",
        0.9,
        (Hosts("v100-16", 4, NVLINK2, (("ib", 2, EDR),)), Hosts("t4-16", 4, PCIE3, (("ib", 2, EDR),))),
    ),
    "a800-v100s": Mix(
        "4 A800-80 and 4 V100S-32: speed and memory differ.",
        2.5,
        (Hosts("a800-80", 4, NVLINK_A800, (("ib", 4, HDR),)), Hosts("v100s-32", 4, PCIE3, (("ib", 2, EDR),))),
    ),
    "three-vendors": Mix(
        "4 A100-40, 2 GCDs of an MI250X and 2 Ascend 910: three makers.",
        4.0,
        (
            Hosts("a100-40", 4, NVLINK3, (("roce", 4, EDR),)),
            Hosts("mi250x-gcd", 2, INFINITY, (("roce", 2, EDR),)),
            Hosts("ascend-910", 2, HCCS, (("roce", 2, EDR),)),
        ),
    ),
    "six-two": Mix(
        "6 V100S-32 and 2 A100-80: unequal counts.",
        2.0,
        (Hosts("v100s-32", 6, PCIE3, (("ib", 2, EDR),)), Hosts("a100-80", 2, NVLINK3, (("ib", 2, HDR),))),
    ),
    "ib-roce": Mix(
        "4 A100-80 on InfiniBand and 4 A800-80 on RoCE, Ethernet between them: the network differs.",
        3.0,
        (
            Hosts("a100-80", 2, NVLINK3, (("ib", 2, HDR), ("ethernet", 1, ETHERNET)), count=2),
            Hosts("a800-80", 2, NVLINK_A800, (("roce", 2, HDR), ("ethernet", 1, ETHERNET)), count=2),
        ),
    ),
    "four-families": Mix(
        "2 A100-80, 2 V100S-32, 2 GCDs of an MI250X and 2 Ascend 910: four families.",
        3.0,
        (
            Hosts("a100-80", 2, NVLINK3, (("roce", 2, EDR),)),
            Hosts("v100s-32", 2, PCIE3, (("roce", 2, EDR),)),
            Hosts("mi250x-gcd", 2, INFINITY, (("roce", 2, EDR),)),
            Hosts("ascend-910", 2, HCCS, (("roce", 2, EDR),)),
        ),
    ),
}


def number(value: float) -> str:
    """Write a figure with as many digits as anybody needs."""
    text = f"{value:.4g}"
    return text if any(mark in text for mark in ".e") else f"{text}.0"


def whole(value: float) -> str:
    return f"{round(value):_}"


def family(name: str, chip: Chip, memory_scale: float) -> str:
    """Return what a probe and a data sheet say of a device."""
    peak = chip.flops_per_second * Scale.flops
    probed = peak * chip.share / (1 + chip.half_speed_rows * Scale.rows / PROBED_ROWS)
    return f"""
# {chip.model}: {chip.flops_per_second / 1e12:g} TFLOP/s, {chip.memory_bytes / 1e9:g} GB at \
{chip.memory_bytes_per_second / 1e9:g} GB/s
[families.{name}]
kind = "{chip.kind}"
model = "{chip.model}"
origin = "datasheet"
origins = {{sustained_flops_per_second = "measured", memory_bytes_per_second = "measured", overlap_times = "measured"}}
memory_bytes = {whole(chip.memory_bytes * memory_scale)}
memory_bytes_per_second = {number(chip.memory_bytes_per_second * MEMORY_SHARE * Scale.num_bytes)}
peak_flops_per_second = {{fp32 = {number(peak)}}}
sustained_flops_per_second = {{fp32 = {number(probed)}}}
overlap_times = {chip.overlap_times:g}
"""


def truth(name: str, chip: Chip, memory_scale: float) -> str:
    """Return how a pretended device really behaves."""
    speed = chip.flops_per_second * chip.share
    return f"""
# {chip.share:.0%} of its peak in large products, half of that with {chip.half_speed_rows:g} tokens of the cluster
[truth.devices.{name}]
memory_bytes = {whole(chip.memory_bytes * memory_scale)}
memory_bytes_per_second = {number(chip.memory_bytes_per_second * MEMORY_SHARE * Scale.num_bytes)}
flops_per_second = {{fp32 = {number(speed * Scale.flops)}}}
launch_seconds = {number(chip.launch_seconds)}
tile = [{round(TILE_ROWS * Scale.rows)}, {round(TILE_ROWS * Scale.rows)}]
half_speed_rows = {number(chip.half_speed_rows * Scale.rows)}
overlap_times = {chip.overlap_times:g}
jitter_share = {JITTER_SHARE:g}
"""


def nodes(hosts: Hosts) -> str:
    bandwidth, latency = hosts.link
    count = f"count = {hosts.count}\n" if hosts.count > 1 else ""
    nics = ""
    for fabric, how_many, each in hosts.nics:
        scaled = number(each * Scale.num_bytes)
        nics += (
            f'  {{origin = "datasheet", fabric = "{fabric}", count = {how_many}, send_bytes_per_second = {scaled},'
            f" receive_bytes_per_second = {scaled}}},  # {each / 1e9:g} GB/s\n"
        )
    return f"""
[[nodes]]
{count}devices = {{{hosts.chip} = {hosts.devices}}}
origin = "datasheet"
origins = {{link_latency_seconds = "guessed"}}
link_latency_seconds = {number(latency)}
link_bytes_per_second = {number(bandwidth * Scale.num_bytes)}  # {bandwidth / 1e9:g} GB/s one way
nics = [
{nics}]
"""


def fabric(name: str) -> str:
    return f"""
[fabrics.{name}]
origin = "guessed"
latency_seconds = {number(FABRICS[name])}
"""


def cluster_file(mix: Mix) -> str:
    """Return the text of a cluster file."""
    chips = list(dict.fromkeys(hosts.chip for hosts in mix.hosts))
    fabrics = list(dict.fromkeys(nic[0] for hosts in mix.hosts for nic in hosts.nics))
    head = f"""# {mix.about}
#
# Written by benchmarks/make_clusters.py, which says where its figures are from. For models of hidden size {WIDTH} with
# {2048 // WIDTH} positions, which stand for {WIDTH * WIDTH:,} and 2,048: FLOP/s are 1/{WIDTH**3:,} of the cluster's,
# bytes/s 1/{1 / Scale.num_bytes:,.0f}, bytes of memory 1/{1 / mix.memory_scale:,.0f}. fp32 stands for the devices' half
# precision. The rehearsal takes {mix.time_scale:g} s for one of the cluster.
"""
    text = head + "".join(family(name, CHIPS[name], mix.memory_scale) for name in chips) + "".join(map(fabric, fabrics))
    text += "".join(map(nodes, mix.hosts))
    text += f"""
[truth]
time_scale = {mix.time_scale:g}
memory_scale = {mix.memory_scale!r}
bandwidth_to_compute_scale = {Scale.num_bytes / Scale.flops!r}
"""
    return text + "".join(truth(name, CHIPS[name], mix.memory_scale) for name in chips)


def main(folder: Path) -> None:
    for name, mix in MIXES.items():
        (folder / f"{name}.toml").write_text(cluster_file(mix))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
