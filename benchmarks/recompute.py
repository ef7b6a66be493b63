"""Selective recomputing where memory is short, against keeping all and full recomputing: rehearsed on 8 ranks.

    python -m benchmarks.recompute [--steps 2] [--only uniform | mixed]
    python -m benchmarks.recompute --prices      bytes freed a second by operator: a block of llama-8b on an H100

Devices of the short family have memory halfway between what its tiles need with all kept and with selective
recomputing, as predicted. `uniform`: two stages of four replicas, all devices short. `mixed`: the first stage on an old
family, whose devices are short, the second on a new one, which keeps all. The job is `tiny`, which needs the corpus of
`make train`.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import commands
from benchmarks.probed import probed
from benchmarks.rehearsals import SHAPES
from benchmarks.search import Case
from hpctrain.architectures.registry import presets
from hpctrain.config.clusters.cluster import Cluster, Fabric, Nic, Nodes
from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.job import Job, Model, load_job
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.activations import layer_kept
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.cost import SQUARES_PASSED, seen_share
from hpctrain.planner.prices.setup import FLASH_2, HPCTRAIN, Setup
from hpctrain.planner.prices.work import MatrixProduct, PassWork
from hpctrain.planner.search.pools import pools_of
from hpctrain.planner.search.search import search
from hpctrain.planner.search.stages import StageCosts
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import BLOCK

ROWS, MICROBATCHES, STAGE_RANKS = 16, 4, 4
GLOBAL_BATCH = ROWS * MICROBATCHES
DEVICE = PretendDevice(memory_bytes=10**9, memory_bytes_per_second=2e9, flops_per_second={"fp32": 2e9})
OLD = DEVICE.model_copy(update={"memory_bytes_per_second": 1e9, "flops_per_second": {"fp32": 1e9}})
CASES: Mapping[str, tuple[dict[str, PretendDevice], int, str]] = {
    # families of the two stages, the item between them, the family that is short of memory
    "uniform": ({"a": DEVICE}, 5, "a"),
    "mixed": ({"old": OLD, "new": DEVICE}, 5, "old"),
}
SETTINGS = ("train.dtype=fp32", "model.vocab_size=1024", f"train.global_batch={GLOBAL_BATCH}", "checkpoint.every=0")


def cluster_of(devices: Mapping[str, PretendDevice]) -> Cluster:
    """Return four nodes of two devices each, the first family on the first ones."""
    names = list(devices)
    nic = Nic(origin="measured", fabric="ib", send_bytes_per_second=5e8, receive_bytes_per_second=5e8)
    nodes = tuple(
        Nodes(
            origin="measured",
            count=STAGE_RANKS // 2,
            devices={name: 2},
            link_latency_seconds=20e-6,
            link_bytes_per_second=1e9,
            nics=(nic,),
        )
        for name in (names[0], names[-1])
    )
    return Cluster(
        families={name: probed("cuda", device, SHAPES) for name, device in devices.items()},
        fabrics={"ib": Fabric(origin="measured", latency_seconds=50e-6)},
        nodes=nodes,
    )


def plan_of(job: Job, names: list[str], cut: int, short: str, recompute: str) -> Plan:
    """Return two stages of four replicas, of which those of the short family recompute."""
    width, tiles = ROWS // STAGE_RANKS, []
    for stage, items in enumerate((Interval(0, cut), Interval(cut, job.model.num_items))):
        name = (names[0], names[-1])[stage]
        for replica in range(STAGE_RANKS):
            rows, rank = Interval(replica * width, (replica + 1) * width), stage * STAGE_RANKS + replica
            how = recompute if name == short else "none"
            tiles.append(Tile(items, rows, (rank,), family=name, recompute=how))
    return Plan(tuple(tiles), MICROBATCHES, ROWS)


def needed_bytes(setup: Setup, plan: Plan, cluster: Cluster, short: str) -> int:
    """Return what the fullest rank of the short family needs, as predicted."""
    memory = Predictor(setup, plan, cluster).memory
    return max(stage.memory.total for stage in memory if stage.tile.family == short)


def rehearse_on(
    described: Cluster,
    devices: Mapping[str, PretendDevice],
    plan: Plan,
    settings: Sequence[str],
    steps: int,
    folder: Path,
) -> dict | str:
    """Return what a run of `tiny` says of its prediction, or why it ended."""
    cluster, run = folder / "cluster.toml", folder / "run"
    cluster.write_text(dump_cluster(described, truth=Truth(devices=dict(devices))))
    (folder / "plan.toml").write_text(dump_plan(plan))
    settings = (*settings, f"plan.file={folder / 'plan.toml'}", f"train.steps={steps + 1}")
    options = [part for setting in settings for part in ("--set", setting)]
    words = ["train", "tiny", "--rehearse", cluster, "--run", run, "--sample", 0, "--json", *options]
    done = commands.run(commands.command_line(*words, ranks=described.num_devices))
    if done.returncode:
        return " ".join(done.stderr.split("hpctrain: ")[-1].split(";")[0].split())
    overrun = json.loads(done.stdout.splitlines()[-1])["overrun"]
    return json.loads((run / "drift.json").read_text()) | {"overrun": overrun}


def run_case(name: str, steps: int) -> None:
    """Print a row for each way to recompute, and what the search does on the same cluster."""
    devices, cut, short = CASES[name]
    job = load_job("tiny", list(SETTINGS))
    setup, names = Setup.of_job(job, "fp32"), list(devices)
    plans = {how: plan_of(job, names, cut, short, how) for how in ("none", "selective", "full")}
    needs = {how: needed_bytes(setup, plan, cluster_of(devices), short) for how, plan in plans.items()}
    memory_bytes = (needs["none"] + needs["selective"]) // 2
    devices = devices | {short: devices[short].model_copy(update={"memory_bytes": memory_bytes})}
    print(f"{name}: devices of family {short} have {memory_bytes / 1e6:.1f} MB", flush=True)
    for how, plan in plans.items():
        with tempfile.TemporaryDirectory() as folder:
            result = rehearse_on(cluster_of(devices), devices, plan, SETTINGS, steps, Path(folder))
        if isinstance(result, str):
            print(f"  {how:10} needs {needs[how] / 1e6:.1f} MB: {result}", flush=True)
            continue
        off = [each["predicted_bytes"] / each["measured_bytes"] - 1 for each in result["memory"]]
        peak = max(each["measured_bytes"] for each in result["memory"])
        step = result["predicted_seconds"] / result["measured_seconds"] - 1
        print(
            f"  {how:10} needs {needs[how] / 1e6:.1f} MB: {result['measured_seconds']:.3f} s, predicted {step:+.1%};"
            f" largest peak {peak / 1e6:.1f} MB, memory {min(off):+.1%} to {max(off):+.1%};"
            f" overrun {result['overrun']:.1%}",
            flush=True,
        )
    best = search(setup, GLOBAL_BATCH, cluster_of(devices)).best
    ways = {family: set() for family in devices}
    for tile in best.plan.tiles:
        ways[tile.family].add(tile.recompute)
    chosen = ", ".join(f"{family} {' and '.join(sorted(each))}" for family, each in ways.items())
    print(f"  the search: {best.prediction.step_seconds:.3f} s; {chosen}", flush=True)


def price() -> None:
    """Print what a block keeps and takes, and for each operator the bytes freed a second that it takes again."""
    case = Case((("H100", "NDR", 1),), "llama-8b", 8192, 64, 1.0)
    setup = Setup(Model(**presets()[case.preset]), case.positions, "bf16", HPCTRAIN)
    pool = pools_of(case.cluster, list(case.cluster.families), setup)[0]
    grid, tokens, b = TensorGrid(), case.positions, setup.item_bytes
    attention, mlp = setup.branches(BLOCK)
    assert attention and mlp
    costs = StageCosts(setup, case.cluster, [pool])
    for how in ("none", "selective", "full"):
        kept, seconds = layer_kept(setup, grid, BLOCK, how), costs.passes(0, grid, BLOCK, 1, how).both
        print(f"{how:10} keeps {kept / 2**20:8.1f} MiB, takes {1e3 * seconds:6.2f} ms")
    hidden, placed, query = setup.model.hidden_size, attention.query_size + attention.key_size, attention.query_size
    share = seen_share(attention, tokens)
    pair = tokens, attention.head_size, tokens, attention.heads, share, FLASH_2[0]
    passes = setup.passes
    operators = {
        "activation": (mlp.inner, PassWork(passed_bytes=tokens * mlp.inner * passes.inner[0])),
        "rotary": (placed, PassWork(passed_bytes=tokens * placed * passes.rotary[0])),
        "norm": (hidden, PassWork(passed_bytes=tokens * hidden * (passes.norm[0] - SQUARES_PASSED))),
        "gate and up": (2 * mlp.inner, PassWork([MatrixProduct(tokens, hidden, 2 * mlp.inner)])),
        "attention": (query, PassWork([MatrixProduct(*pair), MatrixProduct(*pair)])),
    }
    for name, (features, work) in operators.items():
        freed, seconds = b * tokens * features, work.seconds(pool.device, setup.dtype, HPCTRAIN)
        speed = freed / seconds / 1e9
        print(f"{name:12} frees {freed / 2**20:6.1f} MiB, takes {1e6 * seconds:6.0f} us: {speed:4.0f} GB/s")


def main() -> None:
    """Rehearse the cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed, after one that is not")
    parser.add_argument("--only", choices=list(CASES), help="one of the clusters")
    parser.add_argument("--prices", action="store_true", help="bytes freed a second by operator; nothing is rehearsed")
    arguments = parser.parse_args()
    if arguments.prices:
        price()
        return
    for name in [arguments.only] if arguments.only else CASES:
        run_case(name, arguments.steps)


if __name__ == "__main__":
    main()
