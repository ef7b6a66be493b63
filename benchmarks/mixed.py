"""What mixed clusters do, rehearsed: `benchmarks.families` on every ready cluster, as one table.

    python -m benchmarks.mixed                    all of them
    python -m benchmarks.mixed v100-t4 ib-roce    some
    python -m benchmarks.mixed --networks         InfiniBand and RoCE with Ethernet between, against all of one kind
    python -m benchmarks.mixed --parity           20 steps by speed on each, against one rank
    python -m benchmarks.mixed --memory           a job for which families alone are short of memory, the mix is not

A larger --time-scale helps where a plan has more small operations than the cores can keep up with (a high overrun).
Times are the rehearsed clusters', so that runs may be compared where their overrun is small.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

from benchmarks.commands import call
from hpctrain.config.clusters.cluster import Cluster, Nodes
from hpctrain.config.clusters.cluster_file import dump_cluster, load_cluster, read_cluster_file, ready_clusters
from hpctrain.config.clusters.truth import Truth
from hpctrain.config.job import Job
from hpctrain.jobs.common import generate_tokens, ready_miniature

HYBRID = "ib-roce"
PARITY_STEPS, PARITY_BATCH, TOLERANCE, HURRIED_SCALE = 20, 48, 1e-5, 0.01
# Where the sum of the families is a weak baseline (H2, arXiv 2505.17548): with so many layers four A100-40 must compute
# blocks again and four A100-80 go through one row at a time; together they need neither. Predicted: 1.13 of the sum.
# Rows one by one are many small operations, for which a core needs longer than the pretended device.
SHORT, SHORT_LAYERS, SHORT_BATCH, SHORT_SCALE = "a100-80-40", 38, 96, 4.0


def measure(cluster: str | Path, options: list) -> dict:
    num_ranks = load_cluster(ready_clusters().get(str(cluster), Path(cluster))).num_devices
    said = call(cluster, "--json", *options, ranks=num_ranks, module="benchmarks.families")
    return json.loads(said.splitlines()[-1])


def row(name: str, summary: dict) -> str:
    if "no_ratio" in summary:
        return f"| {name} | {summary['no_ratio']} |"
    over_even = f"{summary['speedup_over_even']:.2f}" if "speedup_over_even" in summary else "does not fit"
    cause = summary["cause"]
    return (
        f"| {name} | {summary['fraction_of_sum']:.3f} | {summary['fraction_of_simulated']:.3f}"
        f" | {summary['speedup_over_best_family']:.2f} | {over_even} | {summary['possible_speedup_over_even']:.2f}"
        f" | {cause} {summary['losses'][cause]:.1%} | {summary['overrun']:.2%} |"
    )


def all_clusters(names: list[str], options: list) -> None:
    columns = ("cluster", "of the sum", "of the simulated speed", "of the best family", "of the even cut", "possible")
    print("|", " | ".join((*columns, "most lost by", "overrun")), "|", flush=True)
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for name in names or ready_clusters():
        print(row(name, measure(name, options)), flush=True)


def networks(options: list) -> None:
    """Compare the hybrid network with one that is InfiniBand throughout, and one that is Ethernet throughout."""
    path, scores = ready_clusters()[HYBRID], {}
    cluster, truth, _ = read_cluster_file(path)
    nics = {nic.fabric: nic for nodes in cluster.nodes for nic in nodes.nics}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ib", HYBRID, "ethernet"):
            made = cluster
            if name != HYBRID:
                nodes = tuple(Nodes(**dict(each) | {"nics": (nics[name],)}) for each in cluster.nodes)
                made = Cluster(**dict(cluster) | {"nodes": nodes})
            path = Path(folder, f"{name}.toml")
            path.write_text(dump_real(made, truth))
            summary = measure(path, options)
            best = max(filter(None, summary["mixed"].values()), key=lambda about: about["tokens_per_second"])
            scores[name] = best["tokens_per_second"]
            print(f"{name}: {scores[name]:,.1f} tokens/s, overrun {best['overrun']:.2%}, {best['plan']}", flush=True)
    hybrid = scores[HYBRID]
    print(f"hybrid is {hybrid / scores['ib']:.3f} of all InfiniBand, {hybrid / scores['ethernet']:.2f} of all Ethernet")


def dump_real(cluster: Cluster, truth: Truth) -> str:
    """Return a cluster file of real size, without the scales that are of miniatures alone."""
    text = dump_cluster(cluster, truth=truth)
    return re.sub(r"^(time|memory|width|bandwidth_to_compute)_scale = .*\n", "", text, flags=re.MULTILINE)


def memory(options: list) -> None:
    job = ("--set", f"model.num_layers={SHORT_LAYERS}", "--set", f"train.global_batch={SHORT_BATCH}")
    summary = measure(SHORT, [*options, *job])
    print(json.dumps(summary))
    print(row(SHORT, summary))
    if "reasons" in summary:
        print(f"more than the sum for a weak baseline: alone, {'; '.join(summary['reasons'])}")


def settings_of(job: Job) -> list[str]:
    """Return the options that make the job `mixed` the scaled one, which a single rank can train."""
    model = ("hidden_size", "ffn_size", "vocab_size", "max_positions")
    settings = [f"model.{key}={getattr(job.model, key)}" for key in model]
    settings += [f"data.sequence_length={job.data.sequence_length}", f"train.dtype={job.train.dtype}"]
    settings += [f"overlap.bucket_bytes={job.overlap.bucket_bytes}", f"train.global_batch={PARITY_BATCH}"]
    return [part for setting in [*settings, "data.tokens=mixed.bin"] for part in ("--set", setting)]


def parity(names: list[str]) -> None:
    """Times are of no interest here, and the numbers do not depend on them: the rehearsals go as fast as they can."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = None
        for name in names or ready_clusters():
            made = ready_miniature(name)
            if settings is None:  # of all ready clusters the same
                settings = settings_of(made.job)
                generate_tokens(folder / "mixed.bin", made.job.model.vocab_size)
                train = ("train", "mixed", *settings, "--set", f"train.steps={PARITY_STEPS}", "--sample", "0", "--json")
                call(*train, "--run", "alone", ranks=1, cwd=folder)
            hurried = made.truth.model_copy(update={"time_scale": HURRIED_SCALE})
            cluster, plan = f"{name}.toml", f"plan-{name}.toml"
            (folder / cluster).write_text(dump_cluster(made.cluster, truth=hurried))
            call(
                "plan",
                "search",
                "mixed",
                *settings,
                "--cluster",
                cluster,
                "--space",
                "by-speed",
                "--out",
                plan,
                cwd=folder,
            )
            planned = ("--set", f"plan.file={plan}", "--rehearse", cluster, "--run", name)
            call(*train, *planned, ranks=made.cluster.num_devices, cwd=folder)
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
    if given.time_scale or given.memory:
        options += ["--time-scale", given.time_scale or SHORT_SCALE]
    if given.networks:
        networks(options)
    elif given.memory:
        memory(options)
    elif given.parity:
        parity(given.clusters)
    else:
        all_clusters(given.clusters, options)


if __name__ == "__main__":
    main()
