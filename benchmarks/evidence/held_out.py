"""Published sets that were predicted blind at first, after all constants were fitted; each function tells its source.

They are half of what each source has, so that others can score the other half. docs/benchmarks.md says what was
learnt from them since.
"""

from dataclasses import replace

from benchmarks.evidence.measured import load_measured
from benchmarks.evidence.published import FOLDER, PublishedSet, summary
from hpctrain.software.run import STACKS


def dgxc() -> PublishedSet:
    """Llama 3.1, Nemotron 4 and GPT-3 by NeMo, bf16 and fp8, 8 to 2,048 H100 and 128 to 512 GB200 (NVIDIA/
    dgxc-benchmarking, README tables at v24.11.1, v25.02.02, v25.04.02 and v25.05.05). Configurations are as for
    `published.nemo`; rows that are there too are left out. 340B of 2025 is assumed to be interleaved by 12."""
    return summary("NeMo at DGX Cloud, H100 and GB200", "dgxc_h100_gb200.csv")


def mlperf() -> PublishedSet:
    """Llama 3.1 405B and 8B in fp8 on 8 to 2,560 H100, H200, B200, GB200 and GB300 (logs of MLPerf Training v5.0 and
    v5.1). Assumed: ends count as a block each, nothing is recomputed. Configurations of 8B start CUDA
    graphs, those of 405B where their name says so."""
    return summary("MLPerf v5, Llama 3.1", "mlperf_llama.csv")


def megatron_bridge() -> PublishedSet:
    """Llama 3 by Megatron-Bridge 25.09 to 26.06 in bf16 and fp8 (NVIDIA-NeMo/Megatron-Bridge, docs/
    performance-summary.md and its archive at 067f987). Assumed as for `mlperf`. Two rows of 70B
    have the microbatch of another column: with a pipeline of 4 it is 1, by the global batch (GB200), and by the recipe,
    which interleaves by 5 (GB300, scripts/performance/configs/llama)."""
    return summary("Megatron-Bridge, H100 to GB300", "megatron_bridge.csv")


def flagperf() -> PublishedSet:
    """Llama 3 8B, Llama 2 70B and 7B by Megatron-Core 0.6 and FlagScale on A800, H800 and H100, with FlashAttention 2
    (FlagOpen/FlagPerf at 1b5a030). Memory is nvidia-smi's. Assumed: ZeRO 1, exchanges at the end of a step, selective
    recomputing where `recompute-activations` is told, else none."""
    return summary("FlagPerf, A800, H800, H100", "flagperf.csv")


def gipfelsturm() -> PublishedSet:
    """Qwen 3 and Llama 3 shapes by Megatron-Core 0.16 on 4 to 32 GH200 (lsaie-ss26-gipfelsturm at 7644e91), fused
    attention by cuDNN, FlashAttention 2 or 3, 512 to 8,192 positions. Qwen 3 8B had one device
    (bench/attention_backend_sweep.sh)."""
    return summary("Gipfelsturm, 4 to 32 GH200", "gipfelsturm_gh200.csv")


def internevo() -> PublishedSet:
    """InternLM 7B on 8 to 1,024 A100-80, four ports of 100 Gb/s a node (InternLM/InternEvo, doc/en/
    train_performance.md at c628a8c). States sharded within 4 or 8 devices are taken as ZeRO 1. Gathers of weights
    overlap nothing (`overlap_sync_param`)."""
    return summary("InternEvo, 8 to 1,024 A100", "internevo_a100.csv")


def nanotron() -> PublishedSet:
    """A Llama of 1B by nanotron in July 2024 on 8 and 16 H100 (nanotron/old_bench). Memory is what torch reserved.
    Stages are those of its source: they balance operations, and the head counts as 2.5 blocks (huggingface/nanotron,
    src/nanotron/models/base.py at 6d85d038). Sockets on one port of 100 Gb/s a node are assumed: with EFA 16 replicas
    and tensor 8 on two nodes are 25 % too fast."""
    return summary("nanotron, 8 and 16 H100", "nanotron_h100.csv")


def yafsdp() -> PublishedSet:
    """Llama by torch's FSDP and by YaFSDP, a rewrite of it, on 64 to 256 A100-80, one row each (yandex/YaFSDP at
    669fc36). Assumed: bf16, and four ports of HDR a node, since each row with 2,048 positions moves 58 to 77 GB/s a
    node, whatever it computes."""
    return summary("FSDP and YaFSDP, 64 to 256 A100", "yafsdp_a100.csv")


def diloco() -> PublishedSet:
    """A Llama of 31M on 4 nodes of one L40S each, links shaped to 0.05 to 5 Gb/s (Adnan082/diloco-measured at 07b7885).
    Data parallel, and local updates that are exchanged after each step; fp32 throughout."""
    return summary("DiLoCo, 4 L40S on slow links", "diloco_l40s.csv")


def dtfm() -> PublishedSet:
    """GPT of 1.3B and more by Megatron-LM and by DT-FM's pipelines (GPipe) on up to 64 V100, links of 1 to 25 Gb/s and
    0.1 to 50 ms (DS3Lab/Decentralized_FM_alpha at cb03043). Networks that are even only, and no parameter server."""
    return summary("DT-FM, 3 to 64 V100 on slow links", "dtfm_v100.csv")


def long_rows() -> PublishedSet:
    """Rows of 4 thousand to a million positions in fp8, with context parallelism.

    Llama 2 7B on H100 and Llama 3 8B on B200 by NeMo 24.03 and 25.04 (NVIDIA/NeMo, docs/source/performance/
    performance_long_sequence.md at 0aa2671, and later). Seconds follow from the operations that its flops_formulas.py
    counts, with all pairs of positions. Assumed: 4 Mi tokens a step on H100, as is told of B200. At 24.03 Transformer
    Engine had FlashAttention 2 where keys and values go around. Llama 3.1 8B and 405B by torchtitan (tables 2 and 6 of
    the file that `published.torchtitan` names), all recomputed. One row a microbatch is assumed, and memory is what
    torch has reserved."""
    return summary("long rows in fp8, H100 and B200", "long_rows_fp8.csv")


def grok() -> PublishedSet:
    """Grok 1, and models of its form with fewer layers, by NeMo on 8 to 2,048 H100 and 128 to 512 GB200, bf16 and fp8
    (NVIDIA/dgxc-benchmarking, grok1/README_314b.md at 143b90d, of 2024, and grok1/README.md at 1f6d9f4, of 2025).
    Those of 2024 have FlashAttention 2 (`NVTE_FUSED_ATTN=0`) and cut each expert as all else by tensor parallelism.
    Degrees for data follow from the number of devices. The load is even: experts have a capacity, and are padded."""
    return summary("Grok 1 by NeMo, H100 and GB200", "grok_h100_gb200.csv")


def megatron_bridge_experts() -> PublishedSet:
    """Qwen 3 30B-A3B, 235B-A22B and gpt-oss 120B by Megatron-Bridge 25.11 to 26.08 on 8 to 256 devices (NVIDIA-NeMo/
    Megatron-Bridge, docs/performance-summary.md and its archive at 067f987; two rows with 20 and 25 s are of
    skills/nemo-mbridge-perf-moe-hardware-configs/SKILL.md). Load is balanced by force. Left out: NVFP4, and runs that
    drop tokens. Recipes and their history tell which dispatcher sends tokens, what overlaps it, and that from 26.06 on
    MXFP8 runs start whole iterations as graphs, with cuDNN's grouped kernels. Stages of 235B count ends as a block."""
    return summary("Megatron-Bridge, models with experts", "megatron_bridge_experts.csv")


def golden_memory() -> list[tuple[str, float, float]]:
    """Return of Megatron-LM's own functional tests what torch allocated on the last rank at the peak: (name, bytes as
    published, bytes as predicted). Small models on 4 or 8 A100, H100 and GB200 (NVIDIA/Megatron-LM at d98e8a6)."""
    result = []
    for row in load_measured(FOLDER / "megatron_golden_memory.csv"):
        stack = replace(STACKS[row.run.stack], reserved_bytes=0.0, communicator_bytes=0.0)
        last = next(stage for stage in row.run.memory(stack) if row.run.num_devices - 1 in stage.ranks)
        result.append((row.name, row.memory_bytes or 0.0, last.memory.total))
    return result


def held_out_sets() -> list[PublishedSet]:
    sets = dgxc, mlperf, megatron_bridge, flagperf, gipfelsturm, internevo, nanotron, yafsdp, diloco, dtfm, long_rows
    return [each() for each in (*sets, grok, megatron_bridge_experts)]
