"""How long the planner's search takes, what memory it needs, and how far its plans may be from the best.

    python -m benchmarks.search
    python -m benchmarks.search --table       the searched plan, the one by speed, the even one, all devices busy
    python -m benchmarks.search --sequence-parallel      even plans that cut positions over y, and that do not

Clusters are made of the catalogue's accelerators and networks: 8 devices a node, with a NIC each; families on different
fabrics reach each other by Ethernet. Each case runs in a process of its own, on one core.
"""

import argparse
import itertools
import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from hpctrain.architectures.registry import presets
from hpctrain.config.clusters.cluster import Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.device_catalogue import ACCELERATORS, NETWORKS
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.config.parallelism import Overlap
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.forecast import BUSY, format_waterfall, waterfall
from hpctrain.planner.prediction.predictor import Prediction, predict
from hpctrain.planner.prices.setup import HPCTRAIN_FUSED, Setup
from hpctrain.planner.search.search import search
from hpctrain.planner.search.space import by_speed_space, even_space
from hpctrain.sharding.grid import TensorGrid

PER_NODE = 8
BETWEEN = "Ethernet-25"


@dataclass(frozen=True)
class Case:
    """A cluster, and what is trained on it."""

    families: tuple[tuple[str, str, int], ...]
    """Accelerator, network, nodes."""
    preset: str
    positions: int
    global_batch: int
    wanted_seconds: float

    @property
    def cluster(self) -> Cluster:
        nodes, networks = [], {network for _, network, _ in self.families}
        for accelerator, network, count in self.families:
            between = (BETWEEN,) if len(networks) > 1 else ()
            nodes.append(
                Nodes(
                    origin="datasheet",
                    count=count,
                    devices={accelerator: PER_NODE},
                    link_latency_seconds=10e-6,
                    link_bytes_per_second=ACCELERATORS[accelerator].link_bytes_per_second,
                    nics=(_nic(network, PER_NODE), *(_nic(other, 1) for other in between)),
                )
            )
        used = [*networks, BETWEEN] if len(networks) > 1 else list(networks)
        return Cluster(
            families={name: ACCELERATORS[name].family(name) for name, _, _ in self.families},
            fabrics={
                name: Fabric(origin="datasheet", latency_seconds=NETWORKS[name].latency_seconds)
                for name in sorted(used)
            },
            nodes=tuple(nodes),
        )

    @property
    def setup(self) -> Setup:
        """As a run there would have it: what is exchanged is overlapped with computation."""
        model, overlapped = Model(**presets()[self.preset]), frozenset(("tensor", "z"))
        stack, bucket_bytes = HPCTRAIN_FUSED, Overlap().bucket_bytes
        return Setup(model, self.positions, "bf16", stack, overlapped, bucket_bytes=bucket_bytes, tensor_parts=None)


def _nic(network: str, count: int) -> Nic:
    bandwidth = NETWORKS[network].bytes_per_second
    return Nic(
        origin="datasheet",
        fabric=network,
        count=count,
        send_bytes_per_second=bandwidth,
        receive_bytes_per_second=bandwidth,
    )


CASES = {
    "128 of 1 family": Case((("A100-80", "HDR", 16),), "llama-8b", 4096, 512, 1.0),
    "1,024 of 2 families": Case((("H100", "NDR", 64), ("A100-80", "HDR", 64)), "llama-70b", 4096, 4096, 5.0),
    "1,024 of 4 families, 3 fabrics": Case(
        (("H100", "NDR", 32), ("A100-80", "HDR", 32), ("A100-40", "HDR", 32), ("MI250X-GCD", "Slingshot-11", 32)),
        "llama-70b",
        4096,
        4096,
        30.0,
    ),
    "4,096 of 2 families": Case((("H100", "NDR", 256), ("A100-80", "HDR", 256)), "llama-70b", 4096, 16384, 60.0),
}


def run(name: str) -> None:
    """Search one case in this process, and print a line."""
    case = CASES[name]
    setup, cluster = case.setup, case.cluster
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = search(setup, case.global_batch, cluster, clock=time.process_time)
    seconds, began = result.wall_seconds, result.first_plan_seconds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best, mfu = result.best, result.best.prediction.mfu
    print(f"{name}: {seconds:.2f} s ({case.wanted_seconds:g} s wanted), first plan after {began:.2f} s,")
    print(f"    {peak / 1024:,.0f} MiB at the most, {(peak - before) / 1024:,.0f} of them for searching")
    print(f"    step {best.seconds:.4g} s, MFU {mfu:.1%}: {format_waterfall(waterfall(best.predictor))};")
    print(f"    {result.searched}")
    print(f"    {best.describe([pool.name for pool in result.pools])}", flush=True)


FAMILIES = (("H100", "NDR"), ("A100-80", "HDR"), ("A100-40", "HDR"), ("MI250X-GCD", "Slingshot-11"))
SIZES = ((64, "llama-8b", 256), (256, "llama-70b", 1024), (1024, "llama-70b", 4096))
"""Devices, model, and sequences of a step."""


def print_table() -> None:
    """Print, for each cluster, the predicted seconds of the best plans of three spaces, and if all devices are busy."""
    print(
        "| devices | families | model | searched | by speed | even | all devices busy |\n|--:|--:|---|--:|--:|--:|--:|"
    )
    for (num_devices, preset, batch), count in itertools.product(SIZES, (2, 4)):
        nodes = num_devices // count // PER_NODE
        case = Case(tuple((*each, nodes) for each in FAMILIES[:count]), preset, 4096, batch, math.inf)
        result = search(case.setup, batch, case.cluster)
        summary = [f"{result.best.seconds:.4g} s"]
        for space in (by_speed_space(), even_space()):
            try:
                seconds = search(case.setup, batch, case.cluster, space=space).best.seconds
                summary.append(f"{seconds:.4g} s ({seconds / result.best.seconds:.2f})")
            except PlanError:
                summary.append("does not fit")
        busy = waterfall(result.best.predictor)[BUSY]
        summary.append(f"{busy:.4g} s ({busy / result.best.seconds:.2f})")
        print(f"| {num_devices:,} | {count} | {preset} | {' | '.join(summary)} |", flush=True)


LAYOUTS = ((4, 8, 32), (8, 8, 16), (8, 4, 32), (8, 1, 128))
"""Tensor y, pipeline and data of even plans on 1,024 devices."""


def print_sequence_parallel() -> None:
    """Print even plans of llama-70b on 1,024 H100 with and without sequence parallelism, and the searched one."""
    case = Case((("H100", "NDR", 128),), "llama-70b", 8192, 1024, math.inf)
    print("| plan | step | MFU | compute | tensor | bubble | largest memory |\n|---|--:|--:|--:|--:|--:|--:|")
    for (y, pipeline, data), is_cut in itertools.product(LAYOUTS, (False, True)):
        grid, microbatches = TensorGrid(y=y, sequence_parallel=is_cut), case.global_batch // data
        plan = even_plan(case.setup.model.num_items, grid, pipeline, data, microbatches, data, family="H100")
        _print_prediction(f"{grid} x PP{pipeline} x DP{data}", predict(case.setup, plan, case.cluster))
    best = search(case.setup, case.global_batch, case.cluster).best
    _print_prediction(f"searched: {best.plan.describe()}", best.prediction)


def _print_prediction(name: str, prediction: Prediction) -> None:
    parts = (f"{prediction.breakdown_seconds[part]:.2f} s" for part in ("compute", "tensor", "bubble"))
    needed = max(stage.memory.total for stage in prediction.memory) / 1e9
    fits = "" if prediction.fits else ", does not fit"
    shown = f"{prediction.step_seconds:.2f} s", f"{prediction.mfu:.1%}", *parts, f"{needed:.1f} GB{fits}"
    print(f"| {name} | {' | '.join(shown)} |", flush=True)


def main() -> None:
    """Run all cases, or one, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="in this process")
    parser.add_argument("--table", action="store_true", help="beside other plans")
    parser.add_argument("--sequence-parallel", action="store_true", help="even plans with it and without")
    arguments = parser.parse_args()
    if arguments.sequence_parallel:
        print_sequence_parallel()
        return
    if arguments.table:
        print_table()
        return
    if arguments.case:
        run(arguments.case)
        return
    for name in CASES:
        subprocess.run([sys.executable, __file__, "--case", name], check=True)


if __name__ == "__main__":
    main()
