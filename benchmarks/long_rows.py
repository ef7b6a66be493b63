"""Predicts a step over one long row that eight H100 cut by c: keys and values gathered, at once and in parts, and heads
exchanged. Needs neither ranks nor devices.

    python -m benchmarks.long_rows
"""

from dataclasses import replace

from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.setup import HPCTRAIN_FUSED, Setup
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
POSITIONS = 32768, 131072, 524288


def main() -> None:
    print(f"| model | network | positions | {' | '.join(WAYS)} |")
    for model, shape in MODELS.items():
        for network, node in NETWORKS.items():
            for positions in POSITIONS:
                print(f"| {model} | {network} | {positions:,} | {' | '.join(seconds(positions, shape | node))} |")


def seconds(positions: int, more: dict) -> list[str]:
    """Return the seconds of a step each way, and the exposed share of collectives over c and z. All is recomputed."""
    shape = {"hidden": 4096, "layers": 32, "heads": 32, "positions": positions, "architecture": "llama"}
    layout = {"tensor": 1, "pipeline": 1, "data": 1, "context": DEVICES, "microbatch": 1, "global_batch": 1}
    run = DescribedRun(**shape, **layout, accelerator="H100", network="NDR", dtype="bf16", tie_head=False, **more)
    cluster, engine = run.cluster, replace(HPCTRAIN_FUSED, native_attention=True)
    setup, result = Setup(run.model, positions, "bf16", engine, frozenset({"tensor", "z"})), []
    for exchanges, parts in WAYS.values():
        grid, family = TensorGrid(c=DEVICES, exchanges_heads=exchanges), cluster.devices[0].family
        plan = even_plan(run.model.num_items, grid, 1, 1, 1, 1, family=family, recompute="full")
        step = predict(replace(setup, tensor_parts=parts), plan, cluster)
        exposed = step.breakdown_seconds["tensor"] / step.step_seconds
        result.append(f"{step.step_seconds:.3f} s, {exposed:.1%}")
    return result


if __name__ == "__main__":
    main()
