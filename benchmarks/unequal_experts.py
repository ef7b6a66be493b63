"""Predicts tiles of unlike devices whose ranks of y have unequal numbers of experts, beside searched plans.

An unequal tile is priced without what may go wrong with it: its experts end at the same time on all ranks, whatever
whole numbers that needs, and any memory suffices. Needs neither ranks nor devices.

    python -m benchmarks.unequal_experts
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.alternating import MIXTRAL, QWEN
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.prices import Prices
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.search import search
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, divisors

FOLDER = Path(__file__).parent / "clusters"
RECOMPUTED = "none", "selective"
MODELS = {
    "Mixtral": MIXTRAL | {"hidden_size": 4096, "ffn_size": 14336},
    "Qwen 3, 128 experts": QWEN | {"num_experts": 128},
    "Mixtral, small": MIXTRAL | {"hidden_size": 2048, "num_heads": 16, "num_kv_heads": 16, "ffn_size": 5632},
    "Qwen 3, 64 experts": QWEN | {"num_experts": 64},
}
CASES = (
    ("h100-a100", "bf16", 4, ("Mixtral", "Qwen 3, 128 experts")),
    ("a40-v100", "fp16", 8, ("Mixtral, small", "Qwen 3, 64 experts")),
)
PER_FAMILY = 1, 2
POSITIONS, BATCHES = 4096, (4, 32)
EXPERTS = Interval(2, 3)
"""The item of the first block's experts."""


def with_devices(cluster: Cluster, per_family: int, beside: bool) -> Cluster:
    """Return a cluster with so many devices of each family, on nodes of their own or `beside` each other on one."""
    data = cluster.model_dump(exclude_unset=True)
    for node in data["nodes"]:
        node["devices"] = dict.fromkeys(node["devices"], per_family)
        for nic in node["nics"]:
            nic["count"] = min(nic.get("count", 1), per_family)
    if beside:
        data["nodes"] = [data["nodes"][0] | {"devices": dict.fromkeys(data["families"], per_family)}]
        data["nodes"][0].setdefault("link_bytes_per_second", 24e9)
    return Cluster(**data)


def mixed_plans(setup: Setup, cluster: Cluster, batch: int) -> Iterator[Plan]:
    """Yield plans of tiles over all families, whose ranks of y have the same number of experts."""
    size, families = len(cluster.devices), list(cluster.families)
    order = [rank for pair in zip(*(_ranks(cluster, family) for family in families), strict=True) for rank in pair]
    for y in (n for n in divisors(size) if n > 1):
        for rows in (size // y * n for n in divisors(batch * y // size)):
            for recompute in RECOMPUTED:
                shape = 1, size // y, batch // rows, rows
                tile = {"family": "+".join(families), "recompute": recompute}
                plan = even_plan(setup.model.num_items, TensorGrid(y=y), *shape, **tile)
                tiles = (replace(each, ranks=tuple(order[rank] for rank in each.ranks)) for each in plan.tiles)
                yield replace(plan, tiles=tuple(tiles))


def _ranks(cluster: Cluster, family: str) -> list[int]:
    return [device.rank for device in cluster.devices if device.family == family]


def saved_seconds(prices: Prices, cluster: Cluster, plan: Plan) -> float:
    """Return by how much a step is shorter where experts end at the same time on all ranks of a tile, at the most."""
    tile, saved = plan.tiles[0], 0.0
    devices = [prices.devices[cluster.devices[rank].family] for rank in tile.ranks]
    sites = [replace(prices.site(tile), devices=(device,), by_place=()) for device in devices]
    for name in ("forward", "backward"):
        seconds = [prices.price(name, at, EXPERTS, tile.rows.size, tile.recompute, 1).compute for at in sites]
        saved += max(seconds) - len(seconds) / sum(1 / each for each in seconds)
    return saved * prices.setup.model.num_layers * plan.microbatches


def main() -> None:
    print("| model, layers | devices | rows | equal | unequal, at the most | searched | searched / unequal |")
    for name, dtype, layers, models in CASES:
        for per_family, is_beside, model in product(PER_FAMILY, (False, True), models):
            cluster = with_devices(load_cluster(FOLDER / f"{name}.toml"), per_family, is_beside)
            shape = Model(**MODELS[model], num_layers=layers, vocab_size=32768, max_positions=POSITIONS)
            setup = Setup(shape, POSITIONS, dtype, HPCTRAIN, frozenset({"tensor", "z"}))
            prices = Prices(setup, cluster)
            for batch in BATCHES:
                plans = list(mixed_plans(setup, cluster, batch))
                steps = [Predictor(setup, plan, cluster).predict().step_seconds for plan in plans]
                saved = [saved_seconds(prices, cluster, plan) for plan in plans]
                unequal = min(step - less for step, less in zip(steps, saved, strict=True))
                try:
                    best = search(setup, batch, cluster).best.seconds
                    searched = f"{best:.3f} s | {best / unequal:.2f}"
                except PlanError:
                    searched = "none fits | "
                figures = f"{min(steps):.3f} s | {unequal:.3f} s | {searched}"
                print(f"| {model}, {layers} | {cluster.describe()} | {batch} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
