"""Scores the predictor against rehearsals of clusters that nothing was fitted to.

    python -m benchmarks.rehearsals [--suite SUITE] [--steps 3] [--only KIND] [--layout TEXT] [--tokens FILE]

| suite | clusters and layouts |
|---|---|
| probed | five kinds of clusters, the first layouts that one would try |
| sites | two sites far from each other, with a pipeline, or replicas, over both |
| shared | five networks on whose NICs messages of a pipeline, gradients and weights meet |

Each kind of cluster has four pretended devices. The predictor is told what a probe would have found: the speed of
products by shape, memory, links; never what pretended devices really do with a shape that was not measured. For each
layout `hpctrain train --rehearse` compares its own steps and peaks of memory with the prediction (`drift.json`).
The job is `tiny`, which needs the corpus of `make train`.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import call
from benchmarks.probed import probed
from hpctrain.config.clusters.cluster import Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.clusters.truth import PretendDevice, Truth

SHAPES = [(m, k, n) for m in (64, 256, 1024) for k in (128, 256, 1024) for n in (128, 256, 1024)]
LAYOUTS = (
    ("pipeline 2 x data 2", ("plan.pipeline=2", "plan.data=2")),
    ("y 2 x data 2", ("plan.tensor.y=2", "plan.data=2")),
    ("y 2 x pipeline 2, sequence parallel", ("plan.tensor.y=2", "plan.sequence_parallel=true", "plan.pipeline=2")),
    ("z 2 x pipeline 2", ("plan.tensor.z=2", "plan.pipeline=2")),
    ("pipeline 4, recomputing", ("plan.pipeline=4", "plan.recompute=full")),
    ("data 4, ZeRO 3", ("plan.data=4", "plan.zero=3")),
    ("data 4, ZeRO 2", ("plan.data=4", "plan.zero=2")),
)
PLAIN = PretendDevice(memory_bytes=300_000_000, memory_bytes_per_second=4e9, flops_per_second={"fp32": 4e9})
SLOW = PLAIN.model_copy(update={"memory_bytes_per_second": 2e9, "flops_per_second": {"fp32": 2e9}})
TILES = PLAIN.model_copy(update={"tile": (64, 64), "half_speed_rows": 24.0})
NARROW = PLAIN.model_copy(update={"memory_bytes_per_second": 1e9})


class ClusterKind(NamedTuple):
    """A cluster of four devices."""

    devices: dict[str, PretendDevice]
    nodes: tuple[dict[str, int], ...]
    nic_bytes_per_second: float
    latency_seconds: float = 50e-6
    """Of the fabric between nodes."""


TWO_NODES, FOUR_NODES = ({"a": 2}, {"a": 2}), ({"a": 1},) * 4
KINDS = {
    "alike": ClusterKind({"a": PLAIN}, ({"a": 4},), 1e9),
    "two speeds": ClusterKind({"a": PLAIN, "b": SLOW}, ({"a": 2}, {"b": 2}), 2e8),
    "tiles": ClusterKind({"a": TILES}, TWO_NODES, 2e8),
    "slow network": ClusterKind({"a": PLAIN, "b": SLOW}, ({"a": 2}, {"b": 1}, {"b": 1}), 5e7),
    "narrow memory": ClusterKind({"a": NARROW}, TWO_NODES, 5e8),
}
SITES = {
    f"{milliseconds} ms, {bandwidth:g} GB/s": ClusterKind({"a": PLAIN}, TWO_NODES, bandwidth * 1e9, milliseconds * 1e-3)
    for milliseconds in (10, 50)
    for bandwidth in (1, 0.1)
}
OVER_SITES = (
    ("pipeline 2 x data 2", ("plan.pipeline=2", "plan.data=2")),
    ("data 4", ("plan.data=4", "plan.microbatch=2")),
)
SHARED = {
    "fast": ClusterKind({"a": PLAIN}, FOUR_NODES, 1e9),
    "slow": ClusterKind({"a": PLAIN}, FOUR_NODES, 1e7),
    "slower": ClusterKind({"a": PLAIN}, FOUR_NODES, 4e6),
    "far": ClusterKind({"a": PLAIN}, FOUR_NODES, 2e7, 20e-3),
    "two a node": ClusterKind({"a": PLAIN}, TWO_NODES, 6e6),
}
# All ranks of a stage have a NIC that their messages leave by, and their gradients too.
MEETING = (
    ("pipeline 2 x data 2", ("plan.pipeline=2", "plan.data=2", "overlap.data=true")),
    ("the same, ZeRO 0", ("plan.pipeline=2", "plan.data=2", "plan.zero=0", "overlap.data=true")),
    ("virtual stages", ("plan.pipeline=2", "plan.virtual_stages=2", "plan.data=2", "overlap.data=true")),
)
SUITES: Mapping[str, tuple[Mapping[str, ClusterKind], tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "probed": (KINDS, LAYOUTS),
    "sites": (SITES, OVER_SITES),
    "shared": (SHARED, MEETING),
}


def cluster_text(kind: ClusterKind) -> str:
    """Return a cluster file, as a probe without noise would write it, and its truth."""
    devices, nodes, nic_bytes_per_second, latency_seconds = kind
    families = {name: probed("cuda", device, SHAPES) for name, device in devices.items()}
    nic = Nic(
        origin="measured",
        fabric="ib",
        send_bytes_per_second=nic_bytes_per_second,
        receive_bytes_per_second=nic_bytes_per_second,
    )
    tables = tuple(
        Nodes(origin="measured", devices=each, link_latency_seconds=20e-6, link_bytes_per_second=1e9, nics=(nic,))
        for each in nodes
    )
    fabrics = {"ib": Fabric(origin="measured", latency_seconds=latency_seconds)}
    cluster = Cluster(families=families, fabrics=fabrics, nodes=tables)
    return dump_cluster(cluster, truth=Truth(devices=devices))


def rehearse(kind: ClusterKind, layout: tuple[str, ...], steps: int, folder: Path, *more: object) -> dict:
    """Return what a run with `more` options says of its prediction, and its overrun."""
    cluster, run = folder / "cluster.toml", folder / "run"
    cluster.write_text(cluster_text(kind))
    settings = (*layout, "train.dtype=fp32", f"train.steps={steps + 1}", "checkpoint.every=0")
    options = [part for setting in settings for part in ("--set", setting)]
    said = call("train", "tiny", "--rehearse", cluster, "--run", run, "--sample", 0, "--json", *options, *more, ranks=4)
    return json.loads((run / "drift.json").read_text()) | {"overrun": json.loads(said.splitlines()[-1])["overrun"]}


def main() -> None:
    """Print each rehearsal beside its prediction, and the errors of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed, after one that is not")
    parser.add_argument("--suite", choices=list(SUITES), default="probed", help="which clusters and layouts")
    parser.add_argument("--only", default="", help="only kinds of clusters whose names have this text")
    parser.add_argument("--layout", default="", help="only layouts whose names have this text")
    parser.add_argument("--tokens", default="tokens/stdlib.h5", help="the corpus; default: that of `make train`")
    arguments = parser.parse_args()
    kinds, layouts = SUITES[arguments.suite]
    times, memories = [], []
    for kind in (each for each in kinds if arguments.only in each):
        for name, layout in (each for each in layouts if arguments.layout in each[0]):
            settings = (*layout, f"data.tokens={arguments.tokens}")
            with tempfile.TemporaryDirectory() as folder:
                result = rehearse(kinds[kind], settings, arguments.steps, Path(folder))
            off = [each["predicted_bytes"] / each["measured_bytes"] - 1 for each in result["memory"]]
            step = result["predicted_seconds"] / result["measured_seconds"] - 1
            times.append(abs(step))
            memories += off
            print(
                f"{kind:14} {name:35} {result['measured_seconds']:7.3f} s, predicted {step:+6.1%};"
                f" memory {', '.join(f'{by:+.1%}' for by in off)}; overrun {result['overrun']:.1%}; most in"
                f" {result['drifted']}",
                flush=True,
            )
    high = sorted(times)[min(len(times) - 1, int(0.95 * len(times)))]
    print(f"step time: mean {statistics.mean(times):.1%}, 95th percentile {high:.1%} of {len(times)} rehearsals")
    absolute = [abs(by) for by in memories]
    print(f"memory: mean {statistics.mean(absolute):.1%}, largest {max(absolute):.1%} of {len(absolute)} tiles")


if __name__ == "__main__":
    main()
