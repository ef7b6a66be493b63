"""What a profile of the job is worth where a data sheet is wrong.

    python -m benchmarks.wrong_sheet [CLUSTER] [FAMILY] [--times 1.3] [--steps 3]

Three rehearsals of one ready cluster, whose devices are the same each time: with the figures of its own file; with a
file that says another speed of one family; and with that file after `hpctrain probe --job mixed`.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

from benchmarks.commands import call
from hpctrain.config.clusters.cluster_file import load_cluster, ready_clusters

SPEEDS = "sustained_flops_per_second"


def with_speed(text: str, family: str, times: float) -> str:
    """Return a cluster file's text with another speed of a family; its `[truth]` stays as it is."""
    head, found, rest = text.partition(f"[families.{family}]")
    wrong, count = re.subn(
        rf"({SPEEDS} = \{{\w+ = )([\d.e]+)", lambda part: f"{part[1]}{float(part[2]) * times:.6g}", rest, count=1
    )
    if not found or not count:
        raise SystemExit(f"no {SPEEDS} of the family '{family}'")
    return head + found + wrong


def train(name: str, cluster: Path, ranks: int, steps: int, folder: Path) -> float:
    """Rehearse a cluster by `hpctrain train`, print what it says, and return the measured seconds of a step."""
    options = ["--set", f"train.steps={steps + 1}", "--run", folder / name, "--sample", 0, "--json"]
    said = call("train", "mixed", "--rehearse", cluster, *options, ranks=ranks, cwd=folder)
    drift = json.loads((folder / name / "drift.json").read_text())
    measured, predicted = drift["measured_seconds"], drift["predicted_seconds"]
    overrun, plan = json.loads(said.splitlines()[-1])["overrun"], (folder / name / "plan.toml").read_text()
    rows = re.findall(r"^rows = (\[.*\])", plan, re.MULTILINE)
    print(
        f"{name}: measured {measured:.4g} s a step, predicted {predicted:.4g} s, overrun {overrun:.2%}, rows of tiles"
        f" {' '.join(dict.fromkeys(rows))}",
        flush=True,
    )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", nargs="?", default="v100-t4", choices=list(ready_clusters()))
    parser.add_argument("family", nargs="?", help="default: the first of the file")
    parser.add_argument("--times", default=1.3, type=float, help="the speed that the sheet says, by that of the file")
    parser.add_argument("--steps", default=3, type=int, help="that are timed")
    given = parser.parse_args()
    path = ready_clusters()[given.cluster]
    cluster = load_cluster(path)
    ranks, family = cluster.num_devices, given.family or next(iter(cluster.families))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wrong, profiled = folder / "wrong.toml", folder / "profiled.toml"
        wrong.write_text(with_speed(path.read_text(), family, given.times))
        true = train("right", path, ranks, given.steps, folder)
        by_sheet = train("wrong", wrong, ranks, given.steps, folder)
        call("probe", "--job", "mixed", "--rehearse", wrong, "--out", profiled, ranks=ranks, cwd=folder)
        by_profile = train("profiled", profiled, ranks, given.steps, folder)
    print(
        f"{given.cluster}, {family} said to be {given.times:g} times as fast: a step takes {by_sheet / true - 1:+.1%}"
        f" by the sheet alone, {by_profile / true - 1:+.1%} with a profile"
    )


if __name__ == "__main__":
    main()
