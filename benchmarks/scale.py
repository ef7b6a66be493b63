"""Predicts steps at scales that nobody here can run, beside what others published of them.

    python -m benchmarks.scale

Everything is from data sheets and the predictor's shipped constants; what is assumed is printed with each table. 4D
layouts against Megatron-style ones are in `perlmutter.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

from hpctrain.config.clusters.cluster import Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, LINK_LATENCY_SECONDS, NETWORKS
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.extra_warmup import with_extra_warmup
from hpctrain.planner.search.search import search
from hpctrain.sharding.grid import TensorGrid
from hpctrain.software.megatron import MEGATRON
from hpctrain.software.predictor import SoftwarePredictor
from hpctrain.software.software import SoftwareSetup

BUCKET_BYTES = 4 << 20
MIXED_DTYPE = "fp16"


def gpt(layers: int, hidden: int, heads: int, positions: int = 2048) -> Model:
    return Model(
        architecture="gpt2",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=51200,
        max_positions=positions,
        tie_head=True,
    )


def nodes_of(accelerator: str, count: int, per_node: int, networks: Sequence[str]) -> Nodes:
    """Return nodes with a NIC of each network for each device."""
    nics = tuple(
        Nic(
            origin="datasheet",
            fabric=name,
            count=per_node if name != "Ethernet-25" else 1,
            send_bytes_per_second=NETWORKS[name].bytes_per_second,
            receive_bytes_per_second=NETWORKS[name].bytes_per_second,
        )
        for name in networks
    )
    return Nodes(
        origin="datasheet",
        count=count,
        devices={accelerator: per_node},
        link_latency_seconds=LINK_LATENCY_SECONDS,
        link_bytes_per_second=ACCELERATORS[accelerator].link_bytes_per_second,
        nics=nics,
    )


def cluster_of(nodes: Sequence[Nodes]) -> Cluster:
    families = dict.fromkeys(name for each in nodes for name in each.devices)
    fabrics = dict.fromkeys(nic.fabric for each in nodes for nic in each.nics)
    return Cluster(
        families={name: ACCELERATORS[name].family(name) for name in families},
        fabrics={name: Fabric(origin="datasheet", latency_seconds=NETWORKS[name].latency_seconds) for name in fabrics},
        nodes=tuple(nodes),
    )


# ---- two fabrics (Holmes, Yang et al. 2023) ------------------------------------------------------------------------

HOLMES_PUBLISHED = {"Megatron-DeepSpeed": 110, "Megatron-LM": 133, "Megatron-LLaMA": 162, "Holmes": 184}
HOLMES_BATCH = 1536


def holmes() -> None:
    """32 A100 by InfiniBand and 32 by RoCE, Ethernet between; published figures are read off a plot (3 %)."""
    model = gpt(36, 4096, 32)
    half = [nodes_of("A100-80", 4, 8, [name, "Ethernet-25"]) for name in ("HDR", "RoCE-200")]
    cluster = cluster_of(half)
    print("7.5 B on 32 A100 by InfiniBand and 32 by RoCE, an Ethernet of 25 Gbit/s a node between")
    print(f"assumed: 36 layers x 4,096, 2,048 positions, {HOLMES_BATCH} sequences, 4 at once, blocks computed again;")
    print("TFLOP/s as published: 96 B s L h^2 (1 + s / 6 h + V / 16 L h); published ones are read off a figure, to 3 %")
    flops = 96 * HOLMES_BATCH * 2048 * 36 * 4096**2 * (1 + 2048 / 6 / 4096 + 51200 / 16 / 36 / 4096)
    for name, placed, overlapped, goes_ahead in (
        ("data across both fabrics, as Megatron-LM", False, None, False),
        ("pipeline across, data inside", True, None, False),
        ("the same, gradients beside, as Holmes", True, BUCKET_BYTES, False),
        ("the same, more microbatches in flight", True, BUCKET_BYTES, True),
    ):
        plan = even_plan(
            model.num_items,
            TensorGrid(),
            2,
            32,
            HOLMES_BATCH // 32 // 4,
            128,
            family="A100-80",
            recompute="full",
            zero=1,
        )
        if not placed:  # both stages on each node: replicas of a stage are on both sides
            order = [rank for i in range(32) for rank in (2 * i, 2 * i + 1)]
            ranks = {tile.ranks[0]: tile for tile in plan.tiles}
            tiles = [
                replace(ranks[i + 32 * stage], ranks=(order[2 * i + stage],)) for stage in (0, 1) for i in range(32)
            ]
            plan = replace(plan, tiles=tuple(tiles))
        setup = SoftwareSetup(model, model.max_positions, MIXED_DTYPE, MEGATRON, bucket_bytes=overlapped)
        if goes_ahead:
            predictor = SoftwarePredictor(setup, plan, cluster)
            plan = with_extra_warmup(plan, predictor.costs, predictor.headroom) or plan
        result = SoftwarePredictor(setup, plan, cluster).predict()
        print(
            f"  {name:42} {result.step_seconds:7.2f} s  {flops / result.step_seconds / 64 / 1e12:4.0f} TFLOP/s a device"
        )
    print("  published: " + ", ".join(f"{name} {value}" for name, value in HOLMES_PUBLISHED.items()))


# ---- mixed clusters ------------------------------------------------------------------------------------------------


def mixed(name: str, model: Model, kinds: Sequence[tuple[str, int]], batch: int) -> None:
    """Print the plan that the search finds, beside the sum of what the families would do alone."""
    setup = Setup(model, model.max_positions, MIXED_DTYPE, HPCTRAIN)
    nodes = [nodes_of(kind, count // 8, 8, ["HDR"]) for kind, count in kinds]
    devices = " + ".join(f"{count} {kind}" for kind, count in kinds)
    peak = sum(ACCELERATORS[kind].peak_flops_per_second[MIXED_DTYPE] * count for kind, count in kinds)
    print(f"{name}: {devices} ({peak / 1e15:.0f} PFLOP/s)")
    print(f"assumed: {model.num_layers} layers x {model.hidden_size}, 2,048 positions, {batch} sequences, our engine,")
    print("HDR everywhere; a family alone trains the same batch, by the plan that the search finds for it")
    result = search(setup, batch, cluster_of(nodes))
    alone = 0.0
    for each in nodes:
        try:
            speed = 1 / search(setup, batch, cluster_of([each])).best.seconds
        except PlanError:
            speed = 0.0
        summary = f"{1 / speed:.1f} s" if speed else "it does not fit"
        print(f"  {next(iter(each.devices))} alone: {summary}")
        alone += speed
    best = result.best.prediction
    verdict = "" if best.fits else ", DOES NOT FIT"
    print(
        f"  all: {best.step_seconds:.2f} s, MFU {best.mfu:.1%}{verdict}: {1 / best.step_seconds / alone:.1%} of the sum"
    )
    print(f"  {result.best.describe([pool.name for pool in result.pools])}")
    parts = {part: f"{seconds / best.step_seconds:.0%}" for part, seconds in best.breakdown_seconds.items()}
    print(f"  of the step: {', '.join(f'{part} {share}' for part, share in parts.items())}", flush=True)


def main() -> None:
    """Print all tables."""
    holmes()
    large = gpt(80, 8192, 64)
    mixed("768 devices", large, (("910B", 256), ("A100-80", 256), ("H100", 256)), 2048)
    kinds = (("910B", 256), ("MI250X-GCD", 256), ("A100-80", 256), ("H100", 256))
    mixed("1,024 chips of four kinds", large, kinds, 2048)


if __name__ == "__main__":
    main()
