"""Predicts attention on one family and experts on the other, on A40 and V100.

Prints how much such plans may gain at the most, and plans written by hand beside searched ones. Needs neither ranks nor
devices.

    python -m benchmarks.alternating
"""

from pathlib import Path

from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.prices import Prices
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.search import search
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK

CLUSTER = Path(__file__).parent / "clusters" / "a40-v100.toml"
FAMILIES = {"a40": (0, 1), "v100": (2, 3)}
MIXTRAL = {"architecture": "mixtral", "num_heads": 32, "num_kv_heads": 8, "num_experts": 8, "experts_per_token": 2}
QWEN = {"architecture": "qwen3_moe", "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_size": 128}
QWEN |= {"expert_size": 768, "ffn_size": 6144, "experts_per_token": 8}
LARGE = {
    "Mixtral 8x7B": MIXTRAL | {"hidden_size": 4096, "ffn_size": 14336},
    "Qwen 3 30B-A3B": QWEN | {"num_experts": 128},
}
SMALL = {
    "Mixtral, 2.4 G": MIXTRAL | {"hidden_size": 2048, "num_heads": 16, "num_kv_heads": 16, "ffn_size": 5632},
    "Qwen 3, 64 experts": QWEN | {"num_experts": 64},
}
JOBS = ((2048, 64), (8192, 32))
SLOWER = 1, 2, 4


def setup_of(shape: dict, positions: int) -> Setup:
    return Setup(Model(**shape, num_layers=8, vocab_size=32768, max_positions=positions), positions, "fp16", HPCTRAIN)


def branch_seconds(setup: Setup, cluster) -> dict[str, tuple[float, float]]:
    """Return of each family the seconds of an attention and of a feed-forward part, both passes over one row."""
    prices, branches = Prices(setup, cluster), (Interval(1, 2), Interval(2, 3))
    result = {}
    for family, ranks in FAMILIES.items():
        site = prices.site(Tile(BLOCK, Interval(0, 1), ranks[:1], family=family))
        passes = [
            [prices.price(n, site, each, 1, "none", 1).seconds for n in ("forward", "backward")] for each in branches
        ]
        result[family] = sum(passes[0]), sum(passes[1])
    return result


def bound(own: tuple[float, float], other: tuple[float, float]) -> float:
    """Return how fast two families are, the first with all attention and the second with all experts as far as they
    are balanced, over the sum of both. What one has too little of it takes from the other."""
    (attention, own_experts), (other_attention, experts) = own, other
    total = 1 / sum(own) + 1 / sum(other)
    if attention <= experts:
        moved = (experts - attention) / (own_experts + experts)
        return 1 / (attention + moved * own_experts) / total
    moved = (attention - experts) / (attention + other_attention)
    return 1 / (experts + moved * other_attention) / total


def alternating(num_layers: int, rows: int, microbatches: int, attention: str) -> Plan:
    """Return the plan: every attention on one family, every feed-forward part on the other, rows cut over two ranks."""
    cuts = [(0, 2), *((item, item + 1) for item in range(2, 2 * num_layers)), (2 * num_layers, 2 * num_layers + 2)]
    families = [attention, *(family for family in FAMILIES if family != attention)]
    tiles = [
        Tile(Interval(*cut), Interval(place * rows // 2, (place + 1) * rows // 2), (rank,), family=families[number % 2])
        for number, cut in enumerate(cuts)
        for place, rank in enumerate(FAMILIES[families[number % 2]])
    ]
    return Plan(tuple(tiles), microbatches, rows)


def main() -> None:
    cluster = load_cluster(CLUSTER)
    slower = " | ".join(f"V100's attention {times} times as slow" for times in SLOWER)
    print(f"| model | positions | attention, V100 to A40 | experts, V100 to A40 | bound: {slower} |")
    for name, shape in LARGE.items():
        for positions in (2048, 8192, 16384):
            of = branch_seconds(setup_of(shape, positions), cluster)
            (a, e), (b, f) = of["a40"], of["v100"]
            bounds = " | ".join(f"{max(bound((a, e), (b * n, f)), bound((b * n, f), (a, e))):.3f}" for n in SLOWER)
            print(f"| {name} | {positions:,} | {b / a:.2f} | {f / e:.2f} | {bounds} |", flush=True)
    print("| model | positions | alternating, the fastest of four that are written by hand | searched |")
    for name, shape in SMALL.items():
        for positions, batch in JOBS:
            setup = setup_of(shape, positions)
            plans = [alternating(8, rows, batch // rows, family) for rows in (2, 4) for family in FAMILIES]
            fastest = min(Predictor(setup, plan, cluster).predict().step_seconds for plan in plans)
            best = search(setup, batch, cluster).best.seconds
            print(f"| {name} | {positions:,} | {fastest:.2f} s | {best:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
