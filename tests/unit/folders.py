"""Run folders as a run would leave them, made without ranks: every file is of the code that writes it in a run."""

import numpy as np

from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.observe.folder.run_folder import RunFolder
from hpctrain.observe.folder.schema import DRIFT, TIMELINE, TRAFFIC
from hpctrain.observe.live import LiveMetrics
from hpctrain.observe.metrics import add_shares, summarise_ranks
from hpctrain.observe.prediction_check import MeasuredStep, compare
from hpctrain.observe.sample import shown_tiles
from hpctrain.planner.prediction.forecast import forecast
from hpctrain.planner.prediction.simulate import EXPOSED
from hpctrain.planner.prices.setup import Setup
from tests import clusters

SLOWER = 1.25
"""How many times as long as predicted everything takes."""


def make_run(path, job, plan, cluster, steps=6, ends=True):
    """Write a run folder of so many steps; without `ends` its last start neither ended nor failed on record."""
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    reasons = {"plan": "of a test <&>", "train.dtype": "fp32: of a test", "rehearsal": "FLOP/s 1/3,000"}
    folder.describe(job, plan, reasons, cluster)
    expected = forecast(Setup.of_job(job), plan, cluster)
    live = LiveMetrics(folder, plan)
    live.note_start(0, None, reasons, cluster, True, expected.prediction, {"started": 2.0})
    used = [rank for tile in plan.first_tiles for rank in tile.ranks]
    figures = np.zeros((len(plan.ranks), 2 + len(EXPOSED)))
    for number, (tile, parts) in enumerate(expected.exposed.items()):
        for rank in tile.ranks:
            figures[rank] = [1e6 * (number + 1), 0.1, *(SLOWER * parts[part] for part in EXPOSED)]
    seconds = SLOWER * expected.prediction.step_seconds
    full_speed = expected.prediction.mfu * expected.prediction.step_seconds, 300.0
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 6.0 + 1.0 / step, "step_seconds": seconds * (1 + 0.01 * (step % 3))}
        line["tokens_per_second"] = 1e4 / line["step_seconds"]
        add_shares(line, *full_speed)
        if step % 3 == 0:
            line["validation_loss"] = 6.2 + 1.0 / step
        live.write_step(line | summarise_ranks(figures, used), figures)
    groups = [
        {
            "group": "pipeline",
            "operation": "send",
            "from": a.ranks[0],
            "to": b.ranks[0],
            "tensor_bytes": 3000,
            "calls": 2,
        }
        for a in plan.tiles
        for b in plan.downstream(a)
    ]
    ranks = f"0-{len(plan.ranks) - 1}"
    groups.append({"group": "data", "operation": "all_reduce", "ranks": ranks, "tensor_bytes": 8000, "calls": 1})
    axes = {"data": {"communication_seconds": 0.5, "hidden_seconds": 0.125, "exposed_seconds": 0.375}}
    folder.write(TRAFFIC, {"step": 3, "groups": groups, "axes": axes})
    grids = []
    for tile in shown_tiles(plan):
        spans = ((span.instruction, SLOWER * span.begin, SLOWER * span.end) for span in expected.spans[tile])
        named = [[i.action.value, i.virtual_stage, i.microbatch, begin, end] for i, begin, end in spans]
        grids.append({"rank": tile.ranks[0], "spans": named})
    folder.write(TIMELINE, {"step": 3, "grids": grids})
    parts = {part: SLOWER * value for part, value in expected.prediction.exposed_seconds.items()}
    measured = [MeasuredStep(seconds, parts, 2_000_000)] * len(plan.ranks)
    compared = compare(expected.prediction, plan, "a test", measured, steps - 1, knows_parts=True)
    folder.write(DRIFT, compared)
    live.note_save(steps, path / "step-00000006", 0.25)
    if ends:
        alone = {"fast": 5000.0, "slow": None}
        summary = {"overrun": 0.004, "yardstick": {"predicted_alone": alone, "speedup_over_even": 1.5}}
        live.note_end(steps, steps, summary)
    return path


GPU = {"memory_bytes": 80e9, "memory_bytes_per_second": 2e12, "peak_flops_per_second": {"bf16": 300e12, "fp32": 20e12}}
LINKS = {"link_latency_seconds": 2e-6, "link_bytes_per_second": 300e9}
LARGE = parse_cluster(
    clusters.family("gpu", kind="cuda", origin="datasheet", **GPU)
    + clusters.fabric("ib", 2e-6, "datasheet")
    + clusters.nodes({"gpu": 8}, 25e9, "ib", 8, "datasheet", count=128, **LINKS),
    "a test",
)
"""1,024 devices on 128 nodes."""
