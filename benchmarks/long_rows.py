"""Predicts a step over one long row that eight devices cut by c. Needs neither ranks nor devices.

Eight H100 gather keys and values, at once and in parts, or exchange heads. Each has two mirrored intervals of a row
(zig-zag), or one (plain). Four H100 and four A100 have equal parts of the positions, or parts by what they are worth.

    python -m benchmarks.long_rows

With --rehearse two pretended devices and two of half their speed rehearse a row of 1,152 positions both ways. It sleeps
most of the time.

    python -m benchmarks.long_rows --rehearse [--time-scale 16] [--tokens FILE]
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.rehearsals import KINDS, rehearse
from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.prices import Prices
from hpctrain.planner.prices.setup import HPCTRAIN_FUSED, Setup
from hpctrain.planner.search.mixed_tiles import shares_by_worth
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.items import BLOCK
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
REHEARSED = {"equal parts": (), "by worth": (2, 2, 1, 1)}
"""Shares of the positions of a row of two devices, and of two of half their speed."""

TINY_ITEMS = 10
"""Items of the job `tiny`: of four blocks, embedding and head."""


def main() -> None:
    """Print predicted seconds, or rehearsed ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="rehearse a row on unlike devices instead")
    parser.add_argument("--time-scale", type=float, default=16.0, help="seconds of a rehearsal for one of its cluster")
    parser.add_argument("--tokens", default="tokens/stdlib.h5", help="the corpus; default: that of `make train`")
    arguments = parser.parse_args()
    if arguments.rehearse:
        print_rehearsed(arguments.time_scale, Path(arguments.tokens).absolute())
        return
    print(f"| model | network | positions | {' | '.join(WAYS)} |")
    for model, shape in MODELS.items():
        for network, node in NETWORKS.items():
            for positions in POSITIONS:
                print(f"| {model} | {network} | {positions:,} | {' | '.join(seconds(positions, shape | node))} |")

    print("\n| model | positions | operations, plain / zig-zag | seconds of a block, plain / zig-zag |")
    for model, shape in MODELS.items():
        for positions in POSITIONS:
            print(f"| {model} | {positions:,} | {' | '.join(plain_cut(positions, shape))} |")

    print(f"\n| model | positions | {' | '.join(UNLIKE)} | equal / by worth |")
    for model, shape in MODELS.items():
        for positions in POSITIONS:
            print(f"| {model} | {positions:,} | {' | '.join(unlike(positions, shape))} |")


def print_rehearsed(time_scale: float, tokens: Path) -> None:
    """Rehearse a step over one row with each cut of its positions; print seconds, and their ratio."""
    data = "data.sequence_length=1152", "data.validation_fraction=0.05", f"data.tokens={tokens}"
    train = "train.global_batch=1", "train.validation_sequences=1", "model.max_positions=1152"
    predicted, measured = [], []
    for name, shares in REHEARSED.items():
        grid = TensorGrid(c=4, position_shares=shares)
        plan = even_plan(TINY_ITEMS, grid, 1, 1, 1, 1, family="a+b")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.toml"
            file.write_text(dump_plan(plan))
            settings = (*data, *train, f"plan.file={file}")
            result = rehearse(KINDS["two speeds"], settings, 2, Path(folder), "--time-scale", time_scale)
        predicted.append(result["predicted_seconds"])
        measured.append(result["measured_seconds"])
        print(
            f"{name:12} {measured[-1]:.3f} s, predicted {predicted[-1]:.3f} s; overrun {result['overrun']:.2%}",
            flush=True,
        )
    ratios = (steps[0] / steps[1] for steps in (measured, predicted))
    print("equal / by worth: {:.3f}, predicted {:.3f}".format(*ratios))


def described(positions: int, more: dict) -> tuple[DescribedRun, Setup]:
    """Return a run over one row, and its setup for our engine."""
    shape = {"hidden": 4096, "layers": 32, "heads": 32, "positions": positions, "architecture": "llama"}
    layout = {"tensor": 1, "pipeline": 1, "data": 1, "context": DEVICES, "microbatch": 1, "global_batch": 1}
    run = DescribedRun(**shape, **layout, accelerator="H100", network="NDR", dtype="bf16", tie_head=False, **more)
    engine = replace(HPCTRAIN_FUSED, native_attention=True)
    return run, Setup(run.model, positions, "bf16", engine, frozenset({"tensor", "z"}), tensor_parts=4)


def plain_cut(positions: int, more: dict) -> list[str]:
    """Return the ratios of operations, and of seconds of computing, of both passes over a block on the busiest rank:
    where each has one interval of a row, to where it has two. Of one interval the last rank's queries see all keys but
    for half of its own: 2 - 1 / c times the mean."""
    run, setup = described(positions, more | {"devices_per_node": DEVICES})
    cost = layer_cost(setup, TensorGrid(c=DEVICES), BLOCK, 1, "full")
    device = Prices(setup, run.cluster).devices[run.cluster.devices[0].family]
    counts, seconds = [], []
    for times in (2 - 1 / DEVICES, 1.0):
        works = [
            replace(work, products=[p._replace(share=p.share * (times if p.share != 1 else 1)) for p in work.products])
            for work in (cost.forward, cost.backward)
        ]
        counts.append(sum(p.m * p.k * p.n * p.batch * p.share for work in works for p in work.products))
        seconds.append(sum(device.work_seconds(work, setup.dtype, setup.engine) for work in works))
    return [f"{plain / zigzag:.2f}" for plain, zigzag in (counts, seconds)]


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
