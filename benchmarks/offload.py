"""Offload to host memory: seconds of a step and memory with and without, rehearsed on 4 ranks.

    python -m benchmarks.offload [--steps 2] [--host-copy 1e8]

Two stages of two replicas, on devices with room for everything. `tiny` is the job, which needs the corpus of
`make train`. The last lines are what the search does on devices that are short of memory, with offload and without.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.probed import probed
from benchmarks.recompute import rehearse_on
from benchmarks.rehearsals import SHAPES
from hpctrain.config.clusters.cluster import Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.truth import PretendDevice
from hpctrain.config.job import Job, load_job
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.search import search
from hpctrain.planner.search.space import Space
from hpctrain.sharding.grid import TensorGrid

WAYS = ("none", "optimizer")
ROWS, MICROBATCHES, RANKS = 16, 4, 4
GLOBAL_BATCH = ROWS * MICROBATCHES
DEVICE = PretendDevice(
    memory_bytes=10**9, memory_bytes_per_second=2e9, flops_per_second={"fp32": 2e9}, host_copy_bytes_per_second=1e8
)
SHORT_OF_MEMORY = 18_000_000
"""Of a device: plans fit that offload, and without it slower ones alone."""
SPACE = Space(largest_grid=1, recompute=("none",), zero=(1,))
SETTINGS = ("train.dtype=fp32", "model.vocab_size=1024", f"train.global_batch={GLOBAL_BATCH}", "checkpoint.every=0")


def cluster_of(device: PretendDevice) -> Cluster:
    """Return two nodes of two devices each."""
    nic = Nic(origin="measured", fabric="ib", send_bytes_per_second=5e8, receive_bytes_per_second=5e8)
    nodes = Nodes(
        origin="measured",
        count=2,
        devices={"gpu": RANKS // 2},
        link_latency_seconds=20e-6,
        link_bytes_per_second=1e9,
        nics=(nic,),
        host_memory_bytes=10**10,
    )
    return Cluster(
        families={"gpu": probed("cuda", device, SHAPES)},
        fabrics={"ib": Fabric(origin="measured", latency_seconds=50e-6)},
        nodes=(nodes,),
    )


def plan_of(job: Job, offload: str) -> Plan:
    """Return two stages of two replicas."""
    cut = job.model.num_items, TensorGrid(), 2, RANKS // 2, MICROBATCHES, ROWS
    return even_plan(*cut, family="gpu", offload=offload)


def main() -> None:
    """Rehearse each way and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed, after one that is not")
    parser.add_argument("--host-copy", type=float, default=1e8, help="bytes per second, one direction")
    arguments = parser.parse_args()
    device = DEVICE.model_copy(update={"host_copy_bytes_per_second": arguments.host_copy})
    cluster, job = cluster_of(device), load_job("tiny", list(SETTINGS))
    setup = Setup.of_job(job, "fp32")
    for how in WAYS:
        plan = plan_of(job, how)
        on_host = max(stage.memory.on_host for stage in Predictor(setup, plan, cluster).memory)
        with tempfile.TemporaryDirectory() as folder:
            result = rehearse_on(cluster, {"gpu": device}, plan, SETTINGS, arguments.steps, Path(folder))
        if isinstance(result, str):
            print(f"{how:12} {result}", flush=True)
            continue
        off = [each["predicted_bytes"] / each["measured_bytes"] - 1 for each in result["memory"]]
        peak = max(each["measured_bytes"] for each in result["memory"])
        step = result["predicted_seconds"] / result["measured_seconds"] - 1
        print(
            f"{how:12} {result['measured_seconds']:.3f} s, predicted {step:+.1%}; largest peak {peak / 1e6:.1f} MB,"
            f" memory {min(off):+.1%} to {max(off):+.1%}; {on_host / 1e6:.1f} MB on the host;"
            f" overrun {result['overrun']:.1%}",
            flush=True,
        )
    small = cluster_of(device.model_copy(update={"memory_bytes": SHORT_OF_MEMORY}))
    for ways in (WAYS, WAYS[:1]):
        best = search(setup, GLOBAL_BATCH, small, space=replace(SPACE, offload=ways)).best
        print(f"the search with {SHORT_OF_MEMORY / 1e6:.1f} MB, {ways}: {best.seconds:.3f} s; {best.plan.describe()}")


if __name__ == "__main__":
    main()
