"""Scores the predictor against published measurements (benchmarks/published/), beside a trivial baseline.

    python benchmarks/predictor.py --rows

The baseline is one efficiency for all devices, the best for the same set or for all others, and (P - 1) / M of bubble.
The predictor's constants (`planner/catalogue.py`, `planner/stack.py`) are those that are shipped; which of them were
chosen by looking at which set is in docs/benchmarks.md.
"""

import argparse
import csv
import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.plan import TensorGrid, even_plan
from hpctrain.planner.catalogue import ACCELERATORS, NETWORKS
from hpctrain.planner.cost import model_flops
from hpctrain.planner.described import DescribedRun
from hpctrain.planner.simulate import Costs, PassCost, Sharing, TileCost, simulate
from hpctrain.schedule import one_f_one_b

PUBLISHED = Path(__file__).parent / "published"
A100 = "A100-80"
VTRAIN_LINK = 150e9  # bytes/s inside a node, of vTrain's own configuration


@dataclass(frozen=True)
class Row:
    """A measured step, and what both sides need to predict it."""

    name: str
    measured: float
    run: DescribedRun

    def baseline(self) -> float:
        """Return the trivial prediction, at full efficiency."""
        run = self.run
        tokens = run.global_batch * run.positions
        flops = model_flops(run.setup(), tokens) * (4 / 3 if run.recompute == "full" else 1)
        microbatches = run.global_batch // run.data // run.microbatch
        bubble = 1 + (run.pipeline - 1) / microbatches / run.interleave
        return flops * bubble / run.num_devices / ACCELERATORS[run.accelerator].peak_flops_per_second["fp16"]


def read(name: str) -> Iterable[dict[str, str]]:
    with (PUBLISHED / name).open() as file:
        yield from csv.DictReader(file)


def vtrain() -> list[Row]:
    """Megatron-DeepSpeed on one node (vTrain, Bang et al. 2024). Vocabulary and memory size are not told: assumed."""
    return [
        Row(
            f"h{r['hidden']} l{r['layers']} t{r['tp']} p{r['pp']} d{r['dp']} b{r['micro_batch']}",
            float(r["iter_time_ms"]) / 1e3,
            DescribedRun(
                *(int(r[key]) for key in ("hidden", "layers", "heads", "seq", "tp", "pp", "dp", "micro_batch")),
                int(r["global_batch"]),
                A100,
                recompute="full",
                link_bytes_per_second=VTRAIN_LINK,
                stack="megatron-deepspeed",
            ),
        )
        for r in read("vtrain_single_a100.csv")
    ]


def korthikanti() -> list[Row]:
    """Megatron-LM with full recomputing, and with selective and sequence parallelism (Korthikanti et al. 2022)."""
    found = []
    for r in read("seqsel_a100.csv"):
        full = r["mode"].startswith("full")
        run = DescribedRun(
            *(int(r[key]) for key in ("hidden", "layers", "heads", "seq", "tp", "pp", "dp", "micro_batch")),
            int(r["global_batch"]),
            A100,
            recompute="full" if full else "selective",
            sequence_parallel=not full,
            interleave=int(r["interleave"]),
        )
        found.append(Row(f"{r['model']} {'full' if full else 'selective'}", float(r["measured_iter_time_s"]), run))
    return found


def sc21() -> list[Row]:
    """Megatron-LM at scale (Narayanan et al. 2021). Microbatches and interleaving are not told: assumed here."""
    found = []
    for r in read("megatron_sc21_a100.csv"):
        pipeline, data = int(r["pp"]), int(r["dp"])
        measured = float(r["measured_iter_time_s"] or r["derived_iter_time_s"])
        interleaved = "interleaved +" in r["schedule"] and pipeline > 1
        per_stage = int(r["layers"]) // pipeline
        run = DescribedRun(
            *(int(r[key]) for key in ("hidden", "layers", "heads", "seq", "tp", "pp", "dp")),
            4 if pipeline == 1 else 1,
            int(r["global_batch"]) // data * data,
            A100,
            recompute="full",
            interleave=next(v for v in (2, 3, 1) if per_stage % v == 0) if interleaved else 1,
        )
        found.append(Row(r["model"], measured, run))
    return found


def errors(predicted: list[float], rows: list) -> list[float]:
    return [abs(p / row.measured - 1) for p, row in zip(predicted, rows, strict=True)]


def kendall(predicted: list[float], measured: list[float]) -> float:
    """Return Kendall's tau-a: the share of pairs in the right order, less that in the wrong one."""
    pairs = list(itertools.combinations(zip(predicted, measured, strict=True), 2))
    signs = (((a[0] > b[0]) - (a[0] < b[0])) * ((a[1] > b[1]) - (a[1] < b[1])) for a, b in pairs)
    return sum(signs) / max(1, len(pairs))


def told(predicted: list[float], rows: list) -> str:
    """Return a line of scores."""
    found = sorted(errors(predicted, rows))
    high = found[min(len(found) - 1, int(0.95 * len(found)))]
    tau = kendall(predicted, [row.measured for row in rows])
    bias = statistics.mean(p / row.measured - 1 for p, row in zip(predicted, rows, strict=True))
    return f"mean {statistics.mean(found):6.1%}  95th {high:6.1%}  tau {tau:5.2f}  bias {bias:+6.1%}"


def baseline(rows: list[Row], of: list[Row]) -> list[float]:
    """Return the trivial predictions of `rows`, with the efficiency that fits `of` best."""
    efficiency = statistics.median(row.baseline() / row.measured for row in of)
    return [row.baseline() / efficiency for row in rows]


# ---- Sailor's runs, from its layer profiles --------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfiledRun:
    """A run of Sailor (Strati et al. 2025) on nodes of 4 GH200; `flag` where the set itself calls it suspect."""

    name: str
    measured: float
    model: str
    microbatch: int
    microbatches: int
    data: int
    layers: tuple[int, ...]
    flag: str


# Of each model hidden size and vocabulary (their published configurations); sequences of 2,048 (Sailor's scripts).
SAILOR_MODELS = {"OPT-350": (1024, 50272), "GPT-Neo-2.7": (2560, 50257)}
SAILOR_POSITIONS, SAILOR_TENSOR = 2048, 4


def sailor() -> list[ProfiledRun]:
    return [
        ProfiledRun(
            r["file"].removeprefix("clariden/").removesuffix(".json"),
            float(r["real_s"]),
            r["model"],
            int(r["mbs"]),
            int(r["gbs"]) // int(r["mbs"]) // int(r["dp"]),
            int(r["dp"]),
            tuple(map(int, r["layers_per_stage"].split("/"))),
            r["flag"],
        )
        for r in read("sailor_gh200_runs.csv")
    ]


def predict_profiled(run: ProfiledRun, profiles: dict, link_share: float = 0.8) -> float:
    """Return the step that the simulator finds for layers that take what the profile says."""
    hidden, vocabulary = SAILOR_MODELS[run.model]
    profile = profiles[run.model, run.microbatch]
    _, first, middle, last = sorted(profile)
    stages = len(run.layers)
    plan = even_plan(stages + 2, TensorGrid(), stages, 1, run.microbatches, run.microbatch)
    bandwidth = NETWORKS["Slingshot-11"][0] * link_share
    tiles, sharings, at = {}, [], 0
    for stage, tile in enumerate(plan.tiles):
        layers = range(at, last + 1 if stage == stages - 1 else at + run.layers[stage])
        at = layers.stop
        parts = [profile[0 if i == 0 else last if i == last else first if i < middle else middle] for i in layers]
        forward, backward, update = (sum(part[i] for part in parts) for i in range(3))
        tiles[tile] = (TileCost((PassCost(forward),), (PassCost(backward),), update),)
        weights = (len(layers) * 12 * hidden + vocabulary * (stage in (0, stages - 1))) * hidden / SAILOR_TENSOR
        reduce = 2 * (run.data - 1) / run.data * weights * 4 / bandwidth
        sharings.append(Sharing((tile,), reduce, 0.0))
    message = run.microbatch * SAILOR_POSITIONS * hidden * 4 / bandwidth
    pairs = {(a, b): (message,) for a in plan.tiles for b in plan.tiles}
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    return simulate(plan, schedules, Costs(tiles, pairs, tuple(sharings), blocking_sends=True)).step_seconds


def sailor_profiles() -> dict:
    found: dict = {}
    for r in read("sailor_gh200_layers.csv"):
        if int(r["tp"]) == SAILOR_TENSOR:
            times = tuple(float(r[key]) for key in ("fwd_s", "bwd_s", "update_s"))
            found.setdefault((r["model"], int(r["mbs"])), {})[int(r["layer"])] = times
    return found


def main() -> None:
    """Print the scores of each set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print each row of the small sets")
    arguments = parser.parse_args()
    sets = {"vTrain, one node": vtrain(), "Korthikanti": korthikanti(), "SC21": sc21()}
    for name, rows in sets.items():
        others = [row for other, theirs in sets.items() if other != name for row in theirs]
        predicted = [row.run.predict().step_seconds for row in rows]
        print(f"{name}, {len(rows)} rows")
        print(f"  predictor                {told(predicted, rows)}")
        print(f"  trivial baseline         {told(baseline(rows, rows), rows)}")
        print(f"    fitted without it      {told(baseline(rows, others), rows)}")
        if arguments.rows and len(rows) < 50:
            for p, row in zip(predicted, rows, strict=True):
                print(f"    {row.name:32} {row.measured:9.3f} s, predicted {p:9.3f} ({p / row.measured - 1:+.1%})")
    runs, profiles = [run for run in sailor() if not run.flag], sailor_profiles()
    predicted = [predict_profiled(run, profiles) for run in runs]
    print(f"Sailor, GH200, from layer profiles, {len(runs)} rows")
    print(f"  predictor                {told(predicted, runs)}")
    for run in sailor():
        if run.flag:
            print(f"  left out: {run.name}: {run.flag}")
    if arguments.rows:
        for p, run in zip(predicted, runs, strict=True):
            print(f"    {run.name:40} {run.measured:9.3f} s, predicted {p:9.3f} ({p / run.measured - 1:+.1%})")


if __name__ == "__main__":
    main()
