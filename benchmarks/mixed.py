"""What mixed clusters do, rehearsed: `hpctrain bench mixed` on every ready cluster, as one table.

    python benchmarks/mixed.py                    all of them
    python benchmarks/mixed.py v100-t4 ib-roce    some
    python benchmarks/mixed.py --networks         InfiniBand and RoCE with Ethernet between, against all of one kind
    python benchmarks/mixed.py --parity           20 steps by speed on each, against one rank
    python benchmarks/mixed.py --memory           a job for which families alone are short of memory, the mix is not

A larger --time-scale helps where a plan has more small operations than the cores can keep up with (a high overrun).
Times are the rehearsed clusters', so that runs may be compared where their overrun is small.
"""

import argparse
import json
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster_file import load_cluster, ready_clusters
from hpctrain.jobs.bench_mixed import write_own_tokens

BIN = Path(sys.executable).parent
MAKE_CLUSTERS = Path(__file__).with_name("make_clusters.py")
HYBRID = "ib-roce"
PARITY_STEPS, PARITY_BATCH, TOLERANCE, HURRIED_SCALE = 20, 48, 1e-5, 0.01
# Where the sum of the families is a weak baseline (H2, arXiv 2505.17548): with so many layers four A100-40 must compute
# blocks again and four A100-80 go through one row at a time; together they need neither. Predicted: 1.13 of the sum.
# Rows one by one are many small operations, for which a core needs longer than the pretended device.
SHORT, SHORT_LAYERS, SHORT_BATCH, SHORT_SCALE = "a100-80-40", 38, 96, 4.0


def call(*arguments, ranks: int = 0, cwd: Path | None = None) -> str:
    launcher = [BIN / "mpirun", "-n", ranks] if ranks else []
    command = [str(part) for part in (*launcher, BIN / "hpctrain", *arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=cwd)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def measure(cluster: str | Path, options: list) -> dict:
    num_ranks = load_cluster(ready_clusters().get(str(cluster), Path(cluster))).num_devices
    said = call("bench", "mixed", cluster, "--json", *options, ranks=num_ranks)
    return json.loads(said.splitlines()[-1])


def rescaled(name: str, folder: Path, time_scale: float) -> Path:
    """Write a ready cluster whose rehearsal takes so many seconds for one of the cluster."""
    path = folder / f"{name}.toml"
    path.write_text(re.sub(r"time_scale = .*", f"time_scale = {time_scale}", ready_clusters()[name].read_text()))
    return path


def row(name: str, told: dict) -> str:
    if "no_ratio" in told:
        return f"| {name} | {told['no_ratio']} |"
    of_even = f"{told['of_even']:.2f}" if "of_even" in told else "does not fit"
    return (
        f"| {name} | {told['of_sum']:.3f} | {told['of_simulated']:.3f} | {told['of_best_family']:.2f} | {of_even} |"
        f" {told['possible_of_even']:.2f} | {told['cause']} {told['lost'][told['cause']]:.1%} | {told['overrun']:.2%} |"
    )


def all_clusters(names: list[str], options: list, time_scale: float | None) -> None:
    columns = ("cluster", "of the sum", "of the simulated speed", "of the best family", "of the even cut", "possible")
    print("|", " | ".join((*columns, "most lost by", "overrun")), "|", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ready_clusters():
            cluster = rescaled(name, Path(folder), time_scale) if time_scale else name
            print(row(name, measure(cluster, options)), flush=True)


def networks(options: list, time_scale: float | None) -> None:
    """Compare the hybrid network with one that is InfiniBand throughout, and one that is Ethernet throughout."""
    made = runpy.run_path(str(MAKE_CLUSTERS))
    mix, scores = made["MIXES"][HYBRID], {}
    mix = replace(mix, time_scale=time_scale or mix.time_scale)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ib", HYBRID, "ethernet"):
            hosts = mix.hosts
            if name != HYBRID:
                nics = {nic[0]: nic for each in mix.hosts for nic in each.nics}
                hosts = tuple(replace(each, nics=(nics[name],)) for each in mix.hosts)
            path = Path(folder, f"{name}.toml")
            path.write_text(made["cluster_file"](replace(mix, hosts=hosts)))
            told = measure(path, options)
            best = max(told["mixed"], key=lambda about: about["tokens_per_second"])
            scores[name] = best["tokens_per_second"]
            print(f"{name}: {scores[name]:,.1f} tokens/s, overrun {best['overrun']:.2%}, {best['plan']}", flush=True)
    hybrid = scores[HYBRID]
    print(f"hybrid is {hybrid / scores['ib']:.3f} of all InfiniBand, {hybrid / scores['ethernet']:.2f} of all Ethernet")


def memory(options: list, time_scale: float) -> None:
    made = runpy.run_path(str(MAKE_CLUSTERS))
    job = ("--set", f"model.num_layers={SHORT_LAYERS}", "--set", f"train.global_batch={SHORT_BATCH}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{SHORT}.toml")
        path.write_text(made["cluster_file"](replace(made["MIXES"][SHORT], time_scale=time_scale)))
        told = measure(path, [*options, *job])
    print(json.dumps(told))
    print(row(SHORT, told))
    if "because" in told:
        print(f"more than the sum for a weak baseline: alone, {'; '.join(told['because'])}")


def parity(names: list[str]) -> None:
    """Times are of no interest here, and the numbers do not depend on them: the rehearsals go as fast as they can."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_own_tokens(folder / "mixed.bin")
        settings = ("--set", "data.tokens=mixed.bin", "--set", f"train.global_batch={PARITY_BATCH}")
        train = ("train", "mixed", *settings, "--set", f"train.steps={PARITY_STEPS}", "--sample", "0", "--json")
        call(*train, "--run", "alone", ranks=1, cwd=folder)
        for name in names or ready_clusters():
            num_ranks = load_cluster(rescaled(name, folder, HURRIED_SCALE)).num_devices
            plan = f"plan-{name}.toml"
            call("plan", "mixed", *settings, "--cluster", name, "--proportional", "--out", plan, cwd=folder)
            planned = ("--set", f"plan.file={plan}", "--rehearse", f"{name}.toml", "--run", name)
            call(*train, *planned, ranks=num_ranks, cwd=folder)
            said = call("compare", "alone", name, "--tolerance", TOLERANCE, cwd=folder)
            print(f"{name}: {said.splitlines()[0]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clusters", nargs="*")
    parser.add_argument("--networks", action="store_true")
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--alone", default=5, type=int, help="plans measured of each family alone")
    parser.add_argument("--plans", default=2, type=int, help="measured of each other kind")
    parser.add_argument("--steps", default=2, type=int, help="timed of each")
    parser.add_argument("--time-scale", type=float, help="seconds of a rehearsal for one of its cluster")
    given = parser.parse_args()
    options = ["--alone", given.alone, "--plans", given.plans, "--steps", given.steps]
    if given.networks:
        networks(options, given.time_scale)
    elif given.memory:
        memory(options, given.time_scale or SHORT_SCALE)
    elif given.parity:
        parity(given.clusters)
    else:
        all_clusters(given.clusters, options, given.time_scale)


if __name__ == "__main__":
    main()
