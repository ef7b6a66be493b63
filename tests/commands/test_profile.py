"""`hpctrain probe --job`, the plan by its curves, the run by that plan; and what does not fit, as a person sees it."""

import json
import re

import pytest

from hpctrain.config.clusters.cluster_file import dump_cluster, load_cluster, read_cluster_file, ready_clusters
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.plan.file import load_plan
from tests.pretended import PAIR

FAST = PretendDevice(memory_bytes=3_000_000, memory_bytes_per_second=2e9, flops_per_second={"fp32": 2e9})
SLOW = PretendDevice(memory_bytes=2_000_000, memory_bytes_per_second=1e9, flops_per_second={"fp32": 5e8})
TRUTH = Truth(devices={"fast": FAST, "slow": SLOW})
MORE = ("--set", "train.global_batch=48", "--set", "train.steps=2", "--set", "train.validate_every=0")


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    memory = {name: {"memory_bytes": device.memory_bytes} for name, device in TRUTH.devices.items()}
    families = {name: family.model_copy(update=memory[name]) for name, family in PAIR.families.items()}
    path.write_text(dump_cluster(PAIR.model_copy(update={"families": families}), {"families.fast": "Ours."}, TRUTH))
    return path


@pytest.mark.timeout(240)
def test_a_job_is_profiled_planned_and_trained(hpctrain, folder, cluster):
    before = cluster.read_text()
    asked = ("probe", "--job", "job.toml", *MORE, "--rehearse", cluster, "--seconds", "10")
    done = hpctrain(*asked, ranks=2, cwd=folder)
    assert done.code == 0, done.err
    assert f"wrote {cluster}" in done.out and "rows fit" in done.out
    text = cluster.read_text()
    assert text.startswith(before.rstrip("\n")) and read_cluster_file(cluster).truth == TRUTH
    result = load_cluster(cluster).profiles
    assert [(of.family, of.zero) for of in result] == [
        (family, zero) for family in ("fast", "slow") for zero in (1, 2, 3)
    ]
    limits = {(of.family, of.zero): of.largest_rows for of in result}
    assert limits["slow", 1] < limits["fast", 1]

    again = hpctrain(*asked, "--json", ranks=2, cwd=folder)
    assert again.code == 0, again.err
    assert cluster.read_text() == text, "what is there is not measured again"
    assert len(json.loads(again.out)) == 6

    plan = cluster.parent / "plan.toml"
    asked_plan = (
        "plan",
        "search",
        "job.toml",
        *MORE,
        "--set",
        "plan.zero=3",
        "--cluster",
        cluster,
        "--space",
        "by-speed",
    )
    done = hpctrain(*asked_plan, "--out", plan, cwd=folder)
    assert done.code == 0, done.err
    assert "# compute seconds of fast, slow: profile of this job" in plan.read_text()
    made = load_plan(plan)
    assert {tile.zero for tile in made.tiles} == {3} or len({tile.items for tile in made.tiles}) == len(made.tiles)
    done = hpctrain(
        *("train", "job.toml", *MORE, "--set", f"plan.file={plan}", "--run", cluster.parent / "run"),
        *("--rehearse", cluster, "--sample", "0"),
        ranks=2,
        cwd=folder,
    )
    assert done.code == 0, done.err

    summary = hpctrain(
        "plan",
        "search",
        "job.toml",
        "--cluster",
        cluster,
        "--space",
        "by-speed",
        "--set",
        "model.num_layers=3",
        cwd=folder,
    )
    assert summary.code == 0 and "profile of this job" not in summary.out


@pytest.mark.timeout(120)
def test_it_is_measured_again_if_asked_for_and_may_go_elsewhere(hpctrain, folder, cluster):
    out = cluster.parent / "profiled.toml"
    before = cluster.read_text()
    asked = ("probe", "--job", "job.toml", *MORE, "--rehearse", cluster, "--seconds", "2", "--out", out)
    done = hpctrain(*asked, ranks=2, cwd=folder)
    assert done.code == 0, done.err
    assert cluster.read_text() == before and len(load_cluster(out).profiles) == 6
    edited = out.read_text().replace("largest_rows = ", "largest_rows = 1000")
    out.write_text(edited)
    asked = (
        "probe",
        "--job",
        "job.toml",
        *MORE,
        "--rehearse",
        cluster,
        "--cluster",
        out,
        "--seconds",
        "2",
        "--refresh",
    )
    done = hpctrain(*asked, ranks=2, cwd=folder)
    assert done.code == 0, done.err
    assert all(of.largest_rows < 1000 for of in load_cluster(out).profiles)


@pytest.mark.timeout(120)
def test_what_cannot_be_is_reported_before_anything_is_measured(hpctrain, folder, cluster):
    name = next(iter(ready_clusters()))
    done = hpctrain("probe", "--job", "job.toml", "--cluster", name, ranks=2, cwd=folder)
    assert done.code == 81 and done.err.count("hpctrain: ") == 1, done.err
    assert f"{name} comes with hpctrain and stays as it is; say where the profiled one goes by --out" in done.err
    done = hpctrain("probe", "--job", "job.toml", "--cluster", cluster, ranks=2, cwd=folder)
    assert done.code == 83 and done.err.count("hpctrain: ") == 1, done.err
    assert "cluster.toml: rank 0 is a device of family 'fast' there, but 'cpu' here; start the ranks" in done.err


@pytest.mark.timeout(120)
def test_a_step_that_does_not_fit_ends_all_with_one_message(hpctrain, folder, cluster):
    """It says which rank, what it needed, what there was, and what to change."""
    roomy = TRUTH.model_copy(
        update={"devices": {"fast": FAST.model_copy(update={"memory_bytes": 10**8}), "slow": SLOW}}
    )
    cluster.write_text(dump_cluster(PAIR, truth=roomy))
    plan = ("--set", "plan.data=2", "--set", "plan.microbatch=16", "--set", "train.global_batch=32")
    run = cluster.parent / "run"
    done = hpctrain("train", "job.toml", *plan, "--run", run, "--rehearse", cluster, ranks=2, cwd=folder)
    assert done.code == 88, done.err
    assert done.err.count("hpctrain: TrainingError") == 1, done.err
    summary = " ".join(done.err.split())
    assert "rank 1 (slow, items [0, 6], rows [16, 32]) is out of memory" in summary
    assert re.search(r"is out of memory in step 1: 1\.\d of 1\.9 MiB are in use", summary)
    assert re.search(
        r"the pretended slow is out of memory: \d+ bytes more than the \d+ in use are beyond its 2000000", summary
    )
    assert "give its tile fewer rows or items" in summary and "Traceback" not in summary
