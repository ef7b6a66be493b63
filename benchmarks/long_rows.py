"""Predicts a step over one long row that eight devices cut by c. Needs neither ranks nor devices.

Eight H100 gather keys and values, at once and in parts, or exchange heads. Four H100 and four A100 have equal parts of
the positions, or parts by what they are worth.

    python -m benchmarks.long_rows
"""

from dataclasses import replace
from pathlib import Path

from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.prices import Prices
from hpctrain.planner.prices.setup import HPCTRAIN_FUSED, Setup
from hpctrain.planner.search.mixed_tiles import shares_by_worth
from hpctrain.sharding.grid import TensorGrid
from hpctrain.software.run import DescribedRun

DEVICES = 8
MODELS = {
    "Llama 3 8B": {"kv_heads": 8, "ffn": 14336, "vocabulary": 128256},
    "Llama 2 7B": {"kv_heads": 32, "ffn": 11008, "vocabulary": 32000},
}
NETWORKS = {
    "NVLink": {"devices_per_node": DEVICES},
    "400 Gb/s each": {"devices_per_node": 1},
    "100 Gb/s each": {"devices_per_node": 1, "nic_bytes_per_second": 12.5e9},
}
WAYS = {"gathered": (False, 1), "gathered in 4 parts": (False, 4), "heads exchanged": (True, 1)}
UNLIKE = "4 H100", "and 4 A100, equal parts", "by worth"
POSITIONS = 32768, 131072, 524288


def main() -> None:
    print(f"| model | network | positions | {' | '.join(WAYS)} |")
    for model, shape in MODELS.items():
        for network, node in NETWORKS.items():
            for positions in POSITIONS:
                print(f"| {model} | {network} | {positions:,} | {' | '.join(seconds(positions, shape | node))} |")

    print(f"\n| model | positions | {' | '.join(UNLIKE)} | equal / by worth |")
    for model, shape in MODELS.items():
        for positions in POSITIONS:
            print(f"| {model} | {positions:,} | {' | '.join(unlike(positions, shape))} |")


def described(positions: int, more: dict) -> tuple[DescribedRun, Setup]:
    """Return a run over one row, and its setup for our engine."""
    shape = {"hidden": 4096, "layers": 32, "heads": 32, "positions": positions, "architecture": "llama"}
    layout = {"tensor": 1, "pipeline": 1, "data": 1, "context": DEVICES, "microbatch": 1, "global_batch": 1}
    run = DescribedRun(**shape, **layout, accelerator="H100", network="NDR", dtype="bf16", tie_head=False, **more)
    engine = replace(HPCTRAIN_FUSED, native_attention=True)
    return run, Setup(run.model, positions, "bf16", engine, frozenset({"tensor", "z"}), tensor_parts=4)


def unlike(positions: int, more: dict) -> list[str]:
    """Return the seconds of a step by H100 alone, and with A100 by equal parts and by parts by worth; and the ratio."""
    _, setup = described(positions, more | {"devices_per_node": DEVICES})
    cluster = load_cluster(Path(__file__).parent / "clusters" / "h100-a100.toml")
    families = [device.family for device in cluster.devices]
    by_worth = shares_by_worth(Prices(setup, cluster), families, "full")
    steps = []
    for size, shares in ((DEVICES // 2, ()), (DEVICES, ()), (DEVICES, by_worth)):
        grid = TensorGrid(c=size, position_shares=shares)
        tile = {"family": "+".join(dict.fromkeys(families[:size])), "recompute": "full"}
        plan = replace(even_plan(setup.model.num_items, grid, 1, 1, 1, 1, **tile), unused=tuple(range(size, DEVICES)))
        steps.append(predict(setup, plan, cluster).step_seconds)
    return [*(f"{step:.3f} s" for step in steps), f"{steps[1] / steps[2]:.2f}"]


def seconds(positions: int, more: dict) -> list[str]:
    """Return the seconds of a step each way, and the exposed share of collectives over c and z. All is recomputed."""
    run, setup = described(positions, more)
    cluster, result = run.cluster, []
    for exchanges, parts in WAYS.values():
        grid, family = TensorGrid(c=DEVICES, exchanges_heads=exchanges), cluster.devices[0].family
        plan = even_plan(run.model.num_items, grid, 1, 1, 1, 1, family=family, recompute="full")
        step = predict(replace(setup, tensor_parts=parts), plan, cluster)
        exposed = step.breakdown_seconds["tensor"] / step.step_seconds
        result.append(f"{step.step_seconds:.3f} s, {exposed:.1%}")
    return result


if __name__ == "__main__":
    main()
