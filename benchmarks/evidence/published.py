"""Published measurements (benchmarks/evidence/published/), in the predictor's words; each function tells its source.

What a paper does not tell is assumed here, and said so.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.evidence.calibrate import Measured
from benchmarks.evidence.layers import LayerTimes, load_layers
from benchmarks.evidence.measured import load_measured
from benchmarks.evidence.mixed_runs import MixedRun, NodeGroup
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, GIB
from hpctrain.sharding.items import BLOCK
from hpctrain.software.run import DescribedRun

FOLDER = Path(__file__).parent / "published"
A100 = "A100-80"
SHAPE = ("hidden", "layers", "heads", "seq", "tp", "pp", "dp")


@dataclass(frozen=True)
class PublishedSet:
    """Rows that one group of people measured."""

    name: str
    rows: tuple[Measured, ...]
    left_out: tuple[str, ...] = ()
    """Rows that the set itself calls suspect, with the reason."""
    out_of_memory: tuple[Measured, ...] = ()
    """Runs that had too little of it."""


def read(name: str) -> Iterable[dict[str, str]]:
    with (FOLDER / name).open(newline="") as file:
        yield from csv.DictReader(file)


def _shape(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(row[key]) for key in SHAPE)


def vtrain() -> PublishedSet:
    """Megatron-DeepSpeed on one node (vTrain, Bang et al. 2024). Vocabulary and memory size are not told: assumed."""
    rows = [
        Measured(
            f"h{r['hidden']} l{r['layers']} t{r['tp']} p{r['pp']} d{r['dp']} b{r['micro_batch']}",
            DescribedRun(
                *_shape(r),
                int(r["micro_batch"]),
                int(r["global_batch"]),
                A100,
                recompute="full",
                stack="megatron-deepspeed",
            ),
            float(r["iter_time_ms"]) / 1e3,
        )
        for r in read("vtrain_single_a100.csv")
    ]
    return PublishedSet("vTrain, one node", tuple(rows))


def korthikanti() -> PublishedSet:
    """Megatron-LM with full recomputing, and with selective and sequence parallelism (Korthikanti et al. 2022)."""
    result = []
    for r in read("seqsel_a100.csv"):
        full = r["mode"].startswith("full")
        run = DescribedRun(
            *_shape(r),
            int(r["micro_batch"]),
            int(r["global_batch"]),
            A100,
            recompute="full" if full else "selective",
            sequence_parallel=not full,
            interleave=int(r["interleave"]),
        )
        result.append(
            Measured(f"{r['model']} {'full' if full else 'selective'}", run, float(r["measured_iter_time_s"]))
        )
    return PublishedSet("Korthikanti", tuple(result))


def korthikanti_memory() -> list[tuple[str, float, float]]:
    """Return of each model what weights and optimizer need (of a stage of blocks alone, where there is one), what
    activations do with nothing recomputed, and with selective recomputing and sequence parallelism: (name, bytes as
    published, bytes as predicted)."""
    result = []
    published = list(read("seqsel_a100.csv"))
    for row, r in zip(korthikanti().rows, published, strict=True):
        if row.run.recompute == "full":
            stages = [stage.memory for stage in replace(row.run, recompute="none").memory()]
            plain, middle = stages[0], stages[len(stages) // 2]
            states = middle.weights + middle.gradients + middle.moments
            result.append((f"{r['model']} states", float(r["paper_param_opt_GiB"]) * GIB, states))
            result.append((f"{r['model']} none", float(r["paper_act_GiB_tp_only"]) * GIB, plain.activations))
        else:
            kept = row.run.memory()[0].memory.activations
            result.append((f"{r['model']} selective", float(r["paper_act_GiB_seqsel"]) * GIB, kept))
    return result


def sc21() -> PublishedSet:
    """Megatron-LM at scale (Narayanan et al. 2021). Microbatches and interleaving are not told: assumed here."""
    result = []
    for r in read("megatron_sc21_a100.csv"):
        pipeline, data = int(r["pp"]), int(r["dp"])
        measured = float(r["measured_iter_time_s"] or r["derived_iter_time_s"])
        interleaved = "interleaved +" in r["schedule"] and pipeline > 1
        per_stage = int(r["layers"]) // pipeline
        run = DescribedRun(
            *_shape(r),
            4 if pipeline == 1 else 1,
            int(r["global_batch"]) // data * data,
            A100,
            recompute="full",
            interleave=next(v for v in (2, 3, 1) if per_stage % v == 0) if interleaved else 1,
        )
        result.append(Measured(r["model"], run, measured))
    return PublishedSet("SC21", tuple(result))


def megatron_2020() -> PublishedSet:
    """Megatron-LM on DGX-2 and DGX A100 (its README of 2020). Not told, and assumed here: recomputing, one microbatch,
    and torch's data parallelism, which that README calls the faster one."""
    result = []
    for r in read("megatron_2020_v100_a100.csv"):
        accelerator = "V100-32" if r["accel"].startswith("V100") else "A100-40"
        data, batch = int(r["dp"]), int(r["global_batch"])
        shape = (int(r[key]) for key in ("hidden", "layers", "heads"))
        degrees = (int(r[key]) for key in ("tp", "pp", "dp"))
        run = DescribedRun(*shape, 1024, *degrees, batch // data, batch, accelerator, recompute="full", overlapped=True)
        name = f"{r['model']} on {r['gpus']} {accelerator}"
        result.append(Measured(name, run, float(r["iter_time_ms"]) / 1e3))
    return PublishedSet("Megatron 2020", tuple(result))


# ---- sets in the columns of `measured.py`; seconds follow from published tokens or FLOP in a second --------------


def summary(name: str, file: str) -> PublishedSet:
    """Read such a set."""
    rows = load_measured(FOLDER / file)
    return PublishedSet(
        name, tuple(row for row in rows if row.ran), out_of_memory=tuple(row for row in rows if not row.ran)
    )


def foundry() -> PublishedSet:
    """MPT by Composer and FSDP on 8 to 128 A100 and H100 (llm-foundry, scripts/train/benchmarking/README.md, at
    061f2c7). A100 are joined by RoCE of 8 x 200 Gb/s a node; H100 by what is not told, 400 Gb/s each are assumed."""
    return summary("llm-foundry, FSDP", "llm_foundry.csv")


def torch_fsdp() -> PublishedSet:
    """Llama by torch's FSDP on 64 and 128 A100-80, nothing or all recomputed (torchtitan, docs/performance.md, 2024; 7B
    of IBM and Meta, Maximizing training throughput using PyTorch FSDP, 2024). The network is not told: 400 Gb/s a node
    of eight are assumed, what clouds rent such nodes with; with as much for each device it is 8 % faster."""
    return summary("torch FSDP", "torch_fsdp.csv")


def bigscience() -> PublishedSet:
    """Models about BLOOM's size by Megatron-DeepSpeed on 384 A100-80 (BigScience, train/tr11-176B-ml/
    chronicles-prequel.md, 25 and 28 February 2022), those that ran out of memory too. Nodes have four 100 Gb/s ports of
    Omni-Path. Where `stages` are given, embedding and head count as a block each. From 320 devices on it always hung
    unless the host waited for each operation, which is assumed of all of these."""
    return summary("BigScience, 384 A100", "bigscience_a100.csv")


def bigscience_early() -> PublishedSet:
    """The same software from 20 to 27 February, on 8 to 384 devices, with other numbers of heads (the same file, at
    053adaf). Until 25 February paths of the hosts made steps up to 5 % longer. 78 blocks by 12 stages are 7 each, and
    one. The vocabulary is told as 250 thousand."""
    return summary("BigScience, 8 to 384 A100, the days before", "bigscience_a100_early.csv")


def llama3() -> PublishedSet:
    """Llama 3 405B on H100 at scale (The Llama 3 Herd of Models, 2024, table 4): 126 blocks, embedding and head by 16
    stages of 8 items. Not told, and assumed here: interleaved one by one, all activations kept."""
    return summary("Llama 3", "llama3_h100.csv")


def mcore() -> PublishedSet:
    """GPT-3 175B, Nemotron 15B and 340B by NeMo on Megatron-Core, DGX H100 (NVIDIA/dgxc-benchmarking: nemo_megatron/
    README_175b.md and nemotron/README_15b.md at 0b71cfd, README_340b.md). The configurations next to them have sequence
    parallelism, a distributed optimizer, gradients and weights exchanged while ranks compute (`overlap_grad_sync`,
    `overlap_param_sync`), and user buffers for tensor parallelism, but for 340B."""
    return summary("Megatron-Core, 16 to 2,048 H100", "mcore_h100.csv")


def nemo() -> PublishedSet:
    """Llama 3.1 by NeMo 24.09 with context parallelism, and Nemotron by NeMo 2, in bf16 on DGX H100.

    NVIDIA/dgxc-benchmarking, llama3.1/README_8b.md, README_70b.md and README_405b.md at 143b90d, nemotron/README.md at
    1f6d9f4. Configurations are as for `mcore`; 405B, also with fewer layers, has the vocabulary of GPT-2."""
    return summary("NeMo, Llama 3.1 on 8 to 2,304 H100", "nemo_h100.csv")


def nemo_gb200() -> PublishedSet:
    """Nemotron 340B and Llama 3.1 405B by NeMo 2 in bf16 on GB200 (NVIDIA/dgxc-benchmarking, nemotron/README.md at
    1f6d9f4, llama3.1/README.md at 14fb6ae). 64 devices of a domain of NVLink are assumed to be one node."""
    return summary("NeMo, 128 to 512 GB200", "nemo_gb200.csv")


def torchtitan() -> PublishedSet:
    """Llama by torchtitan, eager and compiled, with recomputing by operator or of whole blocks.

    8 to 256 H100 of 500 W: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at 31a17bf, and its pull request
    1299; with one row each: torchao, pull request 1793. 32 H100: AWS, Efficient pre-training of Llama 3-like model
    architectures using torchtitan on Amazon SageMaker, 2024; one row each is assumed, torchtitan's default. 64 A100-80:
    docs/performance.md at 0413364; the network is assumed as for `torch_fsdp`. Memory is what torch has reserved."""
    return summary("torchtitan, H100 and A100", "torchtitan.csv")


def nemo_fp8() -> PublishedSet:
    """The same software with linear layers of blocks in fp8, on H100, B200 and GB200: the tables for fp8 next to those
    for bf16, and NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md at 0a25f91, container 25.11."""
    return summary("NeMo in fp8, H100, B200, GB200", "nemo_fp8.csv")


def nemo_2412() -> PublishedSet:
    """GPT-3, Llama 2, Llama 3 and Nemotron in fp8 on 8 to 512 H100 (NVIDIA NeMo 24.12, performance_summary.html). Not
    told, and assumed as for `nemo_fp8`: sequence parallelism and user buffers with tensor parallelism, overlapped
    gradients and weights."""
    return summary("NeMo 24.12 in fp8, 8 to 512 H100", "nemo_2412_fp8.csv")


def torchtitan_fp8() -> PublishedSet:
    """The same as `torchtitan` in fp8, and 32 and 64 H200 with a compiled loss (torchtitan,
    benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md at 1af2937). Weights are assumed to be gathered in half
    precision."""
    return summary("torchtitan in fp8, H100 and H200", "torchtitan_fp8.csv")


def vtrain_multi() -> PublishedSet:
    """Megatron-DeepSpeed on 64 to 512 A100 (vTrain, Bang et al. 2024, data/ground_truth_multi.csv at f8dda84). Nodes of
    eight share four ports of 200 Gb/s. Vocabulary and memory size are not told: assumed."""
    return summary("vTrain, 64 to 512 A100", "vtrain_multi_a100.csv")


def amp_t4() -> PublishedSet:
    """A GPT-2 by Megatron-DeepSpeed on 4 nodes of 4 T4 each, 50 Gb/s between nodes and inside (AMP, Li et al. 2022,
    results/homogeneous_results.txt at cf0a32a). `stages` are its partitions: two layers before the blocks, four
    after."""
    return summary("AMP, 16 T4", "amp_t4.csv")


def amp_mixed() -> PublishedSet:
    """The same on 3 nodes of 4 V100, 10 Gb/s a node, and one of 4 T4, 50 Gb/s (src/results/het_cluster_results.txt at
    62fc27d). What NVLink of such a node gives is not told: four links for each V100, which reach the other three."""
    v100 = NodeGroup("V100", 4, 3, 100e9, 1.25e9)
    t4 = NodeGroup("T4", 4, 1, 6.25e9, 6.25e9)
    result = summary("AMP, 12 V100 and 4 T4", "amp_v100_t4.csv")
    rows = tuple(replace(row, run=MixedRun.of(row.run, v100, t4)) for row in result.rows)
    return replace(result, rows=rows)


# ---- Sailor (Strati et al. 2025) -------------------------------------------------------------------------------------

SAILOR_POSITIONS, SAILOR_TENSOR = 2048, 4  # sequences of its scripts; its nodes of GH200 have 4 devices
SAILOR_NIC = 0.1175e9  # bytes/s between its nodes of cards for games
# Of each model hidden size, layers, heads, vocabulary (their published configurations), and how many copies of inner
# features are kept: ReLU's result is the next product's operand, GPT-Neo writes its GELU out in four operations.
SAILOR_MODELS = {"OPT-350": (1024, 24, 16, 50272, 1.0), "GPT-Neo-2.7": (2560, 32, 20, 50257, 3.0)}
# What the profiles call RTX-2080 has room for 4 sequences and updates weights at 0.9 of a Titan RTX' bandwidth: it is
# the card of 11 GB.
SAILOR_DEVICES = {"RTX-2080": "RTX-2080-Ti"}


@cache
def sailor_layers(model: str) -> LayerTimes:
    return load_layers(FOLDER / "sailor_layers.csv", model, SAILOR_DEVICES)


def sailor() -> PublishedSet:
    """Training on nodes of 4 GH200, predicted from layer profiles; what the set itself calls suspect is left out."""
    result, left_out = [], []
    for r in read("sailor_gh200_runs.csv"):
        name = r["file"].removeprefix("clariden/").removesuffix(".json")
        if r["flag"]:
            left_out.append(f"{name}: {r['flag']}")
            continue
        hidden, layers, heads, vocabulary, kept_inner = SAILOR_MODELS[r["model"]]
        run = DescribedRun(
            hidden,
            layers,
            heads,
            SAILOR_POSITIONS,
            SAILOR_TENSOR,
            int(r["pp"]),
            int(r["dp"]),
            int(r["mbs"]),
            int(r["gbs"]),
            "GH200",
            vocabulary=vocabulary,
            devices_per_node=SAILOR_TENSOR,
            network="Slingshot-11",
            dtype="tf32",
            stack="eager",
            stages=tuple(map(int, r["layers_per_stage"].split("/"))),
            kept_inner=kept_inner,
        )
        layers_of = sailor_layers(r["model"])
        result.append(Measured(name, run, float(r["real_s"]), float(r["max_mem_bytes"]), layers=layers_of))
    return PublishedSet("Sailor, GH200, from layer profiles", tuple(result), tuple(left_out))


def sailor_gaming() -> PublishedSet:
    """Training on 2 to 6 nodes of 8 cards for games each, 1 Gb/s between nodes, predicted from layer profiles.

    What a NIC gives is what the set says of sockets (sailor/providers/mit/bandwidth_sockets.json). Memory is left out,
    which is the same to the last byte by tensor 4 and 8.
    """
    result, left_out = [], []
    for r in read("sailor_gaming_runs.csv"):
        if r["flag"]:
            left_out.append(f"{r['file']}: {r['flag']}")
            continue
        nodes = [node.split(":") for node in r["nodes"].split()]
        groups = [_gaming_node(SAILOR_DEVICES.get(device, device), int(count)) for device, count in nodes]
        hidden, layers, heads, vocabulary, kept_inner = SAILOR_MODELS[r["model"]]
        run = DescribedRun(
            hidden,
            layers,
            heads,
            SAILOR_POSITIONS,
            int(r["tp"]),
            int(r["pp"]),
            int(r["dp"]),
            int(r["mbs"]),
            int(r["gbs"]),
            groups[0].accelerator,
            vocabulary=vocabulary,
            network="Ethernet-1",
            dtype="fp32",
            stack="eager",
            stages=tuple(map(int, r["layers_per_stage"].split("/"))),
            kept_inner=kept_inner,
        )
        layers_of = sailor_layers(r["model"])
        result.append(Measured(r["file"], MixedRun.of(run, *groups), float(r["real_s"]), layers=layers_of))
    return PublishedSet("Sailor, cards for games, from layer profiles", tuple(result), tuple(left_out))


def _gaming_node(device: str, count: int) -> NodeGroup:
    return NodeGroup(device, count, 1, ACCELERATORS[device].link_bytes_per_second, SAILOR_NIC)


@dataclass(frozen=True)
class LayerRow:
    """Forward and backward pass of one layer, as measured and as predicted from the device's data sheet."""

    device: str
    name: str
    measured: float
    predicted: float


def sailor_single_layers() -> list[LayerRow]:
    """The profiles themselves: a block, and of OPT also the head, whose loss is no part of it."""
    result = []
    for r in read("sailor_layers.csv"):
        if r["model"] not in SAILOR_MODELS:
            continue
        hidden, layers, heads, vocabulary, kept_inner = SAILOR_MODELS[r["model"]]
        layer, rows, tensor = int(r["layer"]), int(r["mbs"]), int(r["tp"])
        if layer != 1 and (layer != layers + 1 or r["model"] != "OPT-350"):
            continue
        device = SAILOR_DEVICES.get(r["gpu"], r["gpu"])
        run = DescribedRun(
            hidden,
            layers,
            heads,
            SAILOR_POSITIONS,
            tensor,
            1,
            1,
            rows,
            rows,
            device,
            vocabulary=vocabulary,
            # Ampere and Hopper computed fp32 by their tensor cores (tf32): nothing else is as fast
            dtype="tf32" if "tf32" in ACCELERATORS[device].peak_flops_per_second else "fp32",
            stack="eager",
            kept_inner=kept_inner,
        )
        setup = run.setup()
        items = BLOCK if layer == 1 else setup.head
        passes = run.predictor().layer_passes(run.plan.tiles[0], items, rows)
        what = f"{r['model']} {'block' if layer == 1 else 'head'} t{tensor} b{rows}"
        predicted = passes["forward"].seconds + passes["backward"].seconds
        result.append(LayerRow(device, what, float(r["fwd_s"]) + float(r["bwd_s"]), predicted))
    return result


def all_sets() -> list[PublishedSet]:
    measured = [
        vtrain(),
        korthikanti(),
        sc21(),
        megatron_2020(),
        sailor(),
        sailor_gaming(),
        foundry(),
        torch_fsdp(),
        bigscience(),
        llama3(),
    ]
    measured += [mcore(), vtrain_multi(), amp_t4(), amp_mixed()]
    measured += [nemo(), nemo_gb200(), torchtitan(), nemo_fp8(), torchtitan_fp8()]
    return [*measured, bigscience_early(), nemo_2412()]
