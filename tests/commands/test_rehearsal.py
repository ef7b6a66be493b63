"""Rehearsals as a person starts them."""

import json

import pytest

from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.clusters.truth import PretendDevice, Truth
from tests import clusters
from tests.busy import OtherPrograms, unless_busy
from tests.pretended import PAIR
from tests.warm_start import MODULE

FAST = PretendDevice(memory_bytes=50_000_000, memory_bytes_per_second=2e9, flops_per_second={"fp32": 2e9})
SLOW = FAST.model_copy(update={"flops_per_second": {"fp32": 1e9}})


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(dump_cluster(PAIR, truth=Truth(devices={"fast": FAST, "slow": SLOW})))
    return path


@pytest.mark.timeout(120)
def test_a_rehearsal_trains_as_any_run_and_says_what_its_times_are(hpctrain, folder, cluster):
    plan = ["--set", "plan.pipeline=2", "--set", "train.steps=3", "--sample", "0"]
    done = hpctrain("train", "job.toml", *plan, "--run", "runs/real", ranks=2, cwd=folder)
    assert done.code == 0, done.err
    done = hpctrain("train", "job.toml", *plan, "--run", "runs/pretended", "--rehearse", cluster, ranks=2, cwd=folder)
    assert done.code == 0, done.err
    assert "rehearsed: times are the pretended devices'; overrun" in done.out
    compared = json.loads((folder / "runs/pretended/drift.json").read_text())
    assert compared["steps"] == 2
    stood = sum(part["measured_seconds"] for part in compared["parts"].values())
    assert stood == pytest.approx(compared["measured_seconds"], rel=0.02)
    assert compared["memory"][0]["measured_bytes"] == pytest.approx(compared["memory"][0]["predicted_bytes"], rel=0.1)
    assert "seconds of a step (mean of 2, and over ranks)" in done.out
    assert "seconds of a step (mean of 2, and over ranks)" in hpctrain("inspect", "runs/pretended", cwd=folder).out
    summary = hpctrain("compare", "runs/real", "runs/pretended", "--json", cwd=folder)
    assert json.loads(summary.out.splitlines()[-1])["same"]


@pytest.mark.timeout(60)
def test_a_rehearsal_needs_a_rank_for_each_device(hpctrain, folder, cluster):
    done = hpctrain("train", "job.toml", "--run", "nowhere", "--rehearse", cluster, ranks=1, cwd=folder)
    assert done.code == 82, done.err
    assert "has 2 devices (1 fast and 1 slow on 2 nodes, by ib), but MPI started 1 rank;" in done.err
    assert "on 1 cpu rank, " in done.err
    assert not (folder / "nowhere").exists()


@pytest.mark.timeout(400)
def test_a_run_that_is_continued_keeps_the_algorithms_it_began_with(hpctrain, folder, tmp_path):
    """Sums over y are doubled by fast NICs and exchanged by slow ones: their bits differ."""
    memory = {"memory_bytes": 50_000_000, "memory_bytes_per_second": 2e9}
    devices = clusters.family("slow", 2e9, **memory) + clusters.fabric(latency_seconds=1e-3)
    for name, speed in (("fast", 1e9), ("slow", 1e8)):
        (tmp_path / f"{name}.toml").write_text(devices + clusters.nodes({"slow": 1}, speed, count=4))

    def train(run: str, cluster: str, *more: str) -> str:
        plan = ["--set", "plan.tensor.y=4", "--set", "train.steps=2", "--sample", "0", "--run", f"runs/{run}"]
        done = hpctrain("train", "job.toml", *plan, "--rehearse", tmp_path / cluster, *more, ranks=4, cwd=folder)
        assert done.code == 0, done.err
        return (folder / "runs" / run / "resolved.toml").read_text()

    assert "# algorithms: all-reduces of 4 ranks by doubling up to " in train("by-fast", "fast.toml")
    train("by-slow", "slow.toml")
    train("moved", "fast.toml", "--stop-after", "1")
    summary = train("moved", "slow.toml")
    assert "by the links of runs/moved/checkpoints/" in summary
    assert hpctrain("compare", "runs/by-fast", "runs/moved", "--exact", cwd=folder).code == 0
    assert hpctrain("compare", "runs/by-fast", "runs/by-slow", "--exact", cwd=folder).code == 1


def two_of_real_size(name: str, memory: tuple[float, float], peaks: dict[str, float], link: float) -> str:
    """Return the tables of a family of GPUs by its data sheet, and of a node with two of them."""
    sheet = dict(zip(("memory_bytes", "memory_bytes_per_second"), memory, strict=True)) | {
        "peak_flops_per_second": peaks
    }
    links = {"link_latency_seconds": 3e-6, "link_bytes_per_second": link}
    table = clusters.family(name, kind="cuda", origin="datasheet", **sheet)
    return table + clusters.nodes({name: 2}, 25e9, "ib", origin="datasheet", **links)


REAL_SIZE = (
    clusters.fabric("ib", 3e-6, "datasheet")
    + two_of_real_size("a100", (80e9, 2.0e12), {"fp32": 19.5e12, "bf16": 312e12}, 300e9)
    + two_of_real_size("v100", (32e9, 0.9e12), {"fp32": 15.7e12, "fp16": 125e12}, 150e9)
)
MOST_OVERRUN = 0.1
LARGE_JOB = """
plan = "auto"
[model]
preset = "llama-8b"
num_layers = 4
[data]
tokens = "none.bin"
validation_fraction = 0.0
sequence_length = 2048
[train]
steps = 2
global_batch = 16
"""


@pytest.mark.timeout(120)
def test_a_large_job_is_rehearsed_on_a_cluster_of_real_size(hpctrain, tmp_path):
    """Without a truth, and without the job's token file."""
    (tmp_path / "site.toml").write_text(REAL_SIZE)
    (tmp_path / "large.toml").write_text(LARGE_JOB)
    others = OtherPrograms()
    arguments = ("train", "large.toml", "--rehearse", "site.toml", "--sample", "0", "--json")
    for run in ("first", "second"):  # once more where others use the cores
        done = hpctrain(*arguments, "--run", run, ranks=4, cwd=tmp_path)
        assert done.code == 0, done.err
        summary = json.loads(done.out.splitlines()[-1])
        if summary["overrun"] < MOST_OVERRUN:
            break
    sizes = "hidden 4096 -> 64, positions 2048 -> 32, vocabulary 128256 -> 2004 (1/64)"
    assert f"rehearsal of site.toml: {sizes}; FLOP/s 1/262,144; bytes/s 1/2,048; memory 1/" in done.err
    assert done.err.count("trained on generated tokens") == 1
    compared = json.loads((tmp_path / run / "drift.json").read_text())
    print(done.err, summary, compared)
    flops = 6 * 16 * 2048 * (4 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256)
    assert compared["measured_seconds"] > flops / (2 * 312e12 + 2 * 125e12), "no faster than the real devices' peaks"
    with unless_busy(others):
        assert summary["overrun"] < MOST_OVERRUN, "the time scale was resolved so that the cores keep up"
        assert compared["measured_seconds"] == pytest.approx(compared["predicted_seconds"], rel=0.35)


@pytest.mark.timeout(120)
def test_a_profiled_rehearsal_is_a_miniature_that_is_planned_for_and_rehearsed_again(hpctrain, tmp_path):
    (tmp_path / "site.toml").write_text(REAL_SIZE)
    (tmp_path / "large.toml").write_text(LARGE_JOB)
    asked = ("probe", "--job", "large.toml", "--rehearse", "site.toml", "--seconds", "2")
    done = hpctrain(*asked, ranks=4, cwd=tmp_path)
    assert done.code == 81 and "site.toml is of real size, and its rehearsal is of a miniature" in done.err
    done = hpctrain(*asked, "--out", "profiled.toml", ranks=4, cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "site.toml").read_text() == REAL_SIZE
    arguments = (
        "plan",
        "search",
        "large.toml",
        "--cluster",
        "profiled.toml",
        "--space",
        "by-speed",
        "--out",
        "plan.toml",
    )
    done = hpctrain(*arguments, cwd=tmp_path)
    assert done.code == 0, done.err
    assert ": profile of this job" in (tmp_path / "plan.toml").read_text()
    settings = ("--set", "plan.file=plan.toml", "--set", "search.must_fit=false")
    arguments = (MODULE, "benchmarks.training", "large.toml", "--rehearse", "profiled.toml", *settings)
    done = hpctrain(*arguments, "--steps", "1", "--warmup", "0", "--time-scale", "0.5", ranks=4, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "(1/64); the cluster as it is; 0.5 s for one of the cluster" in done.err


@pytest.mark.timeout(400)
def test_a_run_on_devices_that_became_slow_is_planned_again_where_that_pays(hpctrain, folder, tmp_path):
    """The first start describes equal devices. Then one family is a little slower, and then it has half its speed."""
    for name, speed in (("equal", 2e9), ("nearly", 1.99e9), ("slow", 1e9)):
        text = clusters.fabric(latency_seconds=1e-3)
        for family, own in (("steady", 2e9), ("throttled", speed)):
            memory = {"memory_bytes": 50_000_000, "memory_bytes_per_second": 2e9}
            text += clusters.family(family, own, **memory) + clusters.nodes({family: 1})
        (tmp_path / f"{name}.toml").write_text(text)

    def train(cluster: str, run: str, *more: str) -> str:
        options = ("--set", "train.steps=6", "--sample", "0", "--run", f"runs/{run}", *more)
        done = hpctrain("train", "job.toml", "--rehearse", tmp_path / f"{cluster}.toml", *options, ranks=2, cwd=folder)
        assert done.code == 0, done.err
        return done.out

    begun = train("equal", "throttled", "--stop-after", "2")
    assert "planned again" not in begun
    kept = train("nearly", "throttled", "--stop-after", "3")
    assert "planned again" not in kept and "no plan of a new search is clearly faster" in kept
    same = train("nearly", "throttled", "--stop-after", "4")
    assert "planned again" not in same
    moved = train("slow", "throttled")
    assert "planned again: by " in moved and "before: " in moved
    train("equal", "steady")
    losses = [
        [json.loads(line)["loss"] for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("throttled", "steady")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
