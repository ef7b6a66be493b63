"""4D layouts with their communication hidden, against Megatron-style ones with it exposed: rehearsed on 16 ranks.

    python benchmarks/perlmutter_small.py
    python benchmarks/perlmutter_small.py --predict      what would be measured, and what is expected of it

Four nodes of four A100-40 with the links that AxoNN found on Perlmutter (76 GB/s between two GPUs of a node, 20 GB/s of
network for each GPU), scaled as the ready clusters are; memory is scaled down further, so that 16 devices hold a model
as tightly as 1,024 hold one of 80 B. Of each kind the layouts that are predicted to be the fastest are measured.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from make_clusters import HDR, WIDTH, Hosts, Mix, cluster_file
from mixed import call
from perlmutter import OVERLAPS, Layout, four_d, megatron_style

from hpctrain.cluster import Cluster
from hpctrain.cluster_file import parse_cluster
from hpctrain.job import Job, load_job
from hpctrain.jobs.bench_mixed import write_own_tokens
from hpctrain.observe.console import QUOTED_OVERRUN, trust
from hpctrain.plan import Plan, dump_plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.predict import Prediction, Predictor
from hpctrain.planner.stack import HPCTRAIN

RANKS, LAYERS, BATCH, FAMILY = 16, 12, 64, "a100-40"
PAIR_OF_GPUS, NIC = (76e9, 3e-6), 0.8 * HDR
MEMORY_SCALE = 0.25 / WIDTH**2
KINDS: dict[str, tuple[Callable[[], Iterable[Layout]], bool]] = {
    "Megatron-style, exposed": (megatron_style, False),
    "4D, hidden": (four_d, True),
}


def perlmutter(time_scale: float) -> str:
    hosts = Hosts(FAMILY, 4, PAIR_OF_GPUS, (("ib", 4, NIC),), count=RANKS // 4)
    return cluster_file(Mix("16 A100-40 on 4 nodes, as of Perlmutter.", time_scale, (hosts,), MEMORY_SCALE))


def promising(job: Job, cluster: Cluster, kind: str, count: int) -> list[tuple[Layout, Prediction]]:
    """Return the layouts of a kind that fit, the fastest first, as predicted."""
    layouts, hides = KINDS[kind]
    overlaps, bucket_bytes = (OVERLAPS, job.overlap.bucket_bytes) if hides else (frozenset(), None)
    setup = Setup(job.model, job.data.sequence_length, "fp32", HPCTRAIN, overlaps, bucket_bytes)
    found = []
    for layout in layouts():
        plan = layout.plan(job.model, RANKS, BATCH, FAMILY)
        if plan is None:
            continue
        predictor = Predictor(setup, plan, cluster)
        if all(stage.fits for stage in predictor.memory):
            found.append((layout, predictor.predict()))
    return sorted(found, key=lambda each: each[1].step_seconds)[:count]


def measure(folder: Path, plan: Plan, hides: bool, steps: int) -> dict:
    switch = str(hides).lower()
    (folder / "plan.toml").write_text(dump_plan(plan))
    settings = ["plan.file=plan.toml", f"model.num_layers={LAYERS}", f"train.global_batch={BATCH}"]
    settings += [f"overlap.{key}={switch}" for key in ("tensor", "data", "z")]
    settings.append("data.tokens=tokens.bin")
    command = ["bench", "train", "mixed", "--json", "--steps", steps, "--rehearse", "perlmutter.toml"]
    command += [part for setting in settings for part in ("--set", setting)]
    return json.loads(call(*command, ranks=RANKS, cwd=folder).splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--count", type=int, default=2, help="layouts of each kind")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--scale", type=float, default=16.0, help="real seconds for one of the cluster")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_own_tokens(folder / "tokens.bin")
        text = perlmutter(given.scale)
        (folder / "perlmutter.toml").write_text(text)
        job = load_job("mixed", (f"model.num_layers={LAYERS}", f"train.global_batch={BATCH}"))
        cluster = parse_cluster(text, "perlmutter.toml")
        fastest, overruns = {}, [0.0]
        for kind, (_, hides) in KINDS.items():
            for layout, prediction in promising(job, cluster, kind, given.count):
                line = f"{kind}: {layout}: predicted {prediction.step_seconds:.3f} s"
                if not given.predict:
                    told = measure(folder, layout.plan(job.model, RANKS, BATCH, FAMILY), hides, given.steps)
                    seconds = min(told["step_seconds"])
                    fastest[kind] = min(seconds, fastest.get(kind, seconds))
                    overruns.append(told["overrun"])
                    line += f", measured {seconds:.3f} s, overrun {told['overrun']:.2%}, loss {told['loss']:.5f}"
                print(line, flush=True)
        if len(fastest) == len(KINDS):
            megatron, four = fastest.values()
            verdict = "" if max(overruns) <= QUOTED_OVERRUN else f"; {trust(max(overruns))}"
            print(f"4D hidden is {megatron / four:.2f} times as fast as Megatron-style exposed{verdict}")


if __name__ == "__main__":
    main()
