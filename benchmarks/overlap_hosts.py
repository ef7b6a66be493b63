"""What overlaps make of a step's time between hosts: network namespaces as hosts, with shaped links.

    python -m benchmarks.overlap_hosts --pairs 20        (root, iproute2)

Four hosts with a rank each, on links of so many Gbit/s: four replicas, tensor y = 4, and z = 4. Printed is what
`python -m benchmarks.overlap_variants --pairs` tells on each.
"""

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.hosts.network import Cluster, Site, open_network  # noqa: E402
from tests.ranks.small_runs import write_tokens  # noqa: E402

JOB = """
[model]
architecture = "llama"
num_layers = 4
hidden_size = 128
num_heads = 8
vocab_size = 512
[data]
tokens = "tokens.bin"
sequence_length = 64
[train]
global_batch = 16
dtype = "fp32"
"""
LAYOUTS = {"data 4": "plan.data=4", "tensor y 4": "plan.tensor.y=4", "z 4": "plan.tensor.z=4"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--gigabits", type=float, default=1.0)
    arguments = parser.parse_args()
    bits_per_second = arguments.gigabits * 1e9
    site = Site((Cluster("one", 4, bits_per_second),), bits_per_second)
    with tempfile.TemporaryDirectory() as folder, open_network(site) as network:
        path = Path(folder)
        write_tokens(path / "tokens.bin")
        (path / "job.toml").write_text(JOB)
        for name, setting in LAYOUTS.items():
            program = [sys.executable, "-m", "benchmarks.overlap_variants"]
            command = [*program, "job.toml", "--pairs", arguments.pairs, "--set", setting]
            done = network.run(command, cwd=path, environment={"PYTHONPATH": str(HERE.parent)}, timeout_seconds=400)
            assert done.code == 0, done.out + done.err
            print(f"{name}, {arguments.gigabits:g} Gbit/s\n{done.out}", flush=True)


if __name__ == "__main__":
    main()
