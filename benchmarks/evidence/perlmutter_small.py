"""4D layouts with their communication hidden, against Megatron-style ones with it exposed: rehearsed on 16 ranks.

    python -m benchmarks.evidence.perlmutter_small
    python -m benchmarks.evidence.perlmutter_small --predict      what would be measured, and what is expected of it

Four nodes of four A100-40 with the links that AxoNN found on Perlmutter (76 GB/s between two GPUs of a node, 20 GB/s of
network for each GPU), scaled as the ready clusters are; memory is scaled down further, so that 16 devices hold a model
as tightly as 1,024 hold one of 80 B. Of each kind the layouts that are predicted to be the fastest are measured.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.commands import call
from benchmarks.evidence.perlmutter import Layout, four_d, megatron_style, predict_fitting
from benchmarks.probed import probed
from hpctrain.config.clusters.cluster import Cluster, Nodes
from hpctrain.config.clusters.cluster_file import dump_cluster, locate_cluster, read_cluster_file
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.job import Job, load_job
from hpctrain.observe.console import describe_overrun
from hpctrain.observe.overrun import QUOTED_OVERRUN
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.predictor import Prediction, Predictor
from hpctrain.rehearsal.miniature import miniature

RANKS, LAYERS, BATCH, FAMILY = 16, 12, 64, "a100-40"
PAIR_OF_GPUS, NIC = (76e9, 3e-6), 20e9
MEMORY_TIMES = 0.25
SHAPES = [(m, k, n) for m in (16, 64, 256, 1024) for k in (16, 64, 256) for n in (16, 64, 256)]
"""Of products that the probe measures."""
KINDS: dict[str, tuple[Callable[[], Iterable[Layout]], bool]] = {
    "Megatron-style, exposed": (megatron_style, False),
    "4D, hidden": (four_d, True),
}


def perlmutter(time_scale: float) -> tuple[Job, Cluster, str]:
    """Return the scaled job, and the miniature cluster, whose devices are described as a probe would have found them,
    also as a file."""
    path = locate_cluster("a100-80-40")
    cluster, truth, _ = read_cluster_file(path)
    nic = cluster.nodes[0].nics[0].model_copy(update={"send_bytes_per_second": NIC, "receive_bytes_per_second": NIC})
    bandwidth, latency = PAIR_OF_GPUS
    links = {"link_bytes_per_second": bandwidth, "link_latency_seconds": latency}
    nodes = Nodes(origin="datasheet", count=RANKS // 4, devices={FAMILY: 4}, nics=(nic,), **links)
    real = Cluster(families={FAMILY: cluster.families[FAMILY]}, fabrics=cluster.fabrics, nodes=(nodes,))
    only = Truth(memory_scale=MEMORY_TIMES, devices={FAMILY: truth.devices[FAMILY]})
    job = load_job("mixed", (f"model.num_layers={LAYERS}", f"train.global_batch={BATCH}"))
    made = miniature(real, only, job, cores=2, time_scale=time_scale)
    families = {FAMILY: probed("cuda", made.truth.devices[FAMILY], SHAPES)}
    result = Cluster(families=families, fabrics=made.cluster.fabrics, nodes=made.cluster.nodes)
    return made.job, result, dump_cluster(result, truth=made.truth)


def promising(job: Job, cluster: Cluster, kind: str, count: int) -> list[tuple[Layout, Prediction]]:
    """Return the layouts of a kind that fit, the fastest first, as predicted."""
    layouts, hides = KINDS[kind]
    bucket_bytes = job.overlap.bucket_bytes if hides else None
    result = []
    for layout in layouts():
        plan = layout.plan(job.model, RANKS, BATCH, FAMILY)
        if plan is None:
            continue
        make = partial(Predictor, plan=plan, cluster=cluster)
        if prediction := predict_fitting(job.model, job.data.sequence_length, "fp32", plan, bucket_bytes, make):
            result.append((layout, prediction))
    return sorted(result, key=lambda each: each[1].step_seconds)[:count]


def measure(folder: Path, plan: Plan, hides: bool, steps: int) -> dict:
    switch = str(hides).lower()
    (folder / "plan.toml").write_text(dump_plan(plan))
    settings = ["plan.file=plan.toml", f"model.num_layers={LAYERS}", f"train.global_batch={BATCH}"]
    settings += [f"overlap.{key}={switch}" for key in ("tensor", "data", "z")]  # parts where they are predicted to pay
    command = ["mixed", "--json", "--steps", steps, "--rehearse", "perlmutter.toml"]
    command += [part for setting in settings for part in ("--set", setting)]
    return json.loads(call(*command, ranks=RANKS, cwd=folder, module="benchmarks.training").splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--count", type=int, default=2, help="layouts of each kind")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--scale", type=float, default=64.0, help="real seconds for one of the cluster")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        job, cluster, text = perlmutter(given.scale)
        (folder / "perlmutter.toml").write_text(text)
        fastest, overruns = {}, [0.0]
        for kind, (_, hides) in KINDS.items():
            for layout, prediction in promising(job, cluster, kind, given.count):
                line = f"{kind}: {layout}: predicted {prediction.step_seconds:.3f} s"
                if not given.predict:
                    summary = measure(folder, layout.plan(job.model, RANKS, BATCH, FAMILY), hides, given.steps)
                    seconds = min(summary["step_seconds"])
                    fastest[kind] = min(seconds, fastest.get(kind, seconds))
                    overruns.append(summary["overrun"])
                    line += f", measured {seconds:.3f} s, overrun {summary['overrun']:.2%}, loss {summary['loss']:.5f}"
                print(line, flush=True)
        if len(fastest) == len(KINDS):
            megatron, four = fastest.values()
            verdict = "" if max(overruns) <= QUOTED_OVERRUN else f"; {describe_overrun(max(overruns))}"
            print(f"4D hidden is {megatron / four:.2f} times as fast as Megatron-style exposed{verdict}")


if __name__ == "__main__":
    main()
