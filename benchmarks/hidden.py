"""How much of the communication that can be hidden is hidden: 8 pretended devices, each on a node of its own.

    python -m benchmarks.hidden
    python -m benchmarks.hidden "y 2 z 2 data 2" --scale 8

Links have the bandwidth at which communication is 40 % of a step that exposes all of it; printed is what
`python -m benchmarks.overlap_variants --rehearse` tells of each layout. Quote it where the overrun is small.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.commands import call
from benchmarks.overlap_variants import ALL_AND_PARTS
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.jobs.common import generate_tokens

RANKS = 8
VARIANTS = "benchmarks.overlap_variants"
FLOPS_PER_SECOND, MEMORY_BYTES, MEMORY_BYTES_PER_SECOND = 5e8, 200_000_000, 2e9
CLUSTER = """
[families.pretended]
origin = "datasheet"
kind = "cuda"
memory_bytes = {memory}
memory_bytes_per_second = {passed}
peak_flops_per_second = {{fp32 = {flops}}}
[fabrics.net]
origin = "datasheet"
latency_seconds = 2e-4
[[nodes]]
origin = "datasheet"
count = {ranks}
devices = {{pretended = 1}}
nics = [{{fabric = "net", send_bytes_per_second = {speed}, receive_bytes_per_second = {speed}, origin = "datasheet"}}]
"""
JOB = """
[model]
architecture = "llama"
num_layers = 6
hidden_size = 128
num_heads = 8
vocab_size = 512
max_positions = 64
[data]
tokens = "tokens.bin"
sequence_length = 32
validation_fraction = 0.0
[train]
global_batch = 32
dtype = "fp32"
[overlap]
bucket_bytes = 600_000
"""
LAYOUTS = {
    "data 8": (("plan.data=8",), 7e6),
    "y 2 z 2 data 2": (("plan.tensor.y=2", "plan.tensor.z=2", "plan.data=2", "plan.microbatch=16"), 6e6),
    "y 4 data 2": (("plan.tensor.y=4", "plan.data=2", "plan.microbatch=16"), 12e6),
}
"""By name: the plan, and the links' bytes/s."""


def cluster_file(bytes_per_second: float, scale: float) -> str:
    figures = {"memory": MEMORY_BYTES, "passed": MEMORY_BYTES_PER_SECOND, "flops": FLOPS_PER_SECOND}
    device = PretendDevice(
        memory_bytes=MEMORY_BYTES,
        memory_bytes_per_second=MEMORY_BYTES_PER_SECOND,
        flops_per_second={"fp32": FLOPS_PER_SECOND},
    )
    described = parse_cluster(CLUSTER.format(ranks=RANKS, speed=bytes_per_second, **figures), "eight")
    return dump_cluster(described, truth=Truth(time_scale=scale, devices={"pretended": device}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"of {', '.join(LAYOUTS)}; all of them if none is named")
    parser.add_argument("--scale", type=float, default=1.0, help="real seconds for a pretended one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, help="bytes/s of a link, in place of the layout's")
    given = parser.parse_args()
    if unknown := [name for name in given.layouts if name not in LAYOUTS]:
        parser.error(f"no such layout: {unknown[0]}; there are {', '.join(LAYOUTS)}")
    print("| layout | communication of exposed | exposed | on | a step | at best | hidden of what can be | overrun |")
    print("|---|--:|--:|---|--:|--:|--:|--:|", flush=True)
    for name in given.layouts or LAYOUTS:
        settings, speed = LAYOUTS[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            generate_tokens(path / "tokens.bin", 512)
            (path / "job.toml").write_text(JOB)
            (path / "cluster.toml").write_text(cluster_file(given.bandwidth or speed, given.scale))
            command = ["job.toml", "--rehearse", "cluster.toml", "--json", "--steps", given.steps]
            command += [part for setting in settings for part in ("--set", setting)]
            summary = json.loads(call(*command, ranks=RANKS, cwd=path, module=VARIANTS).splitlines()[-1])
        share, overrun = f"{summary['communication_share']:.0%}", f"{summary['overrun']:.2%}"
        for variant in [each for each in ("all", ALL_AND_PARTS) if each in summary["step_seconds"]]:
            steps = (
                summary["step_seconds"]["exposed"],
                summary["step_seconds"][variant],
                summary["best_seconds"][variant],
            )
            exposed, hidden, best = (f"{seconds * 1e3:.1f} ms" for seconds in steps)
            hidden_share = f"{summary['hidden_share'][variant]:.0%}"
            print("|", " | ".join((name, share, exposed, variant, hidden, best, hidden_share, overrun)), "|")
        print(f"    {json.dumps(summary)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
