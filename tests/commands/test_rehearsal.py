"""Rehearsals as a person starts them."""

import json

import pytest

from hpctrain.cluster_file import dump_cluster
from hpctrain.truth import PretendDevice, Truth
from tests.pretended import PAIR

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
    told = hpctrain("compare", "runs/real", "runs/pretended", "--json", cwd=folder)
    assert json.loads(told.out.splitlines()[-1])["same"]


@pytest.mark.timeout(60)
def test_a_rehearsal_needs_a_rank_for_each_device_and_a_truth(hpctrain, folder, cluster):
    done = hpctrain("train", "job.toml", "--run", "nowhere", "--rehearse", cluster, ranks=1, cwd=folder)
    assert done.code == 12, done.err
    assert "has 2 devices (1 fast and 1 slow on 2 nodes, by ib), but 1 ranks were started" in done.err
    cluster.write_text(dump_cluster(PAIR))
    done = hpctrain("train", "job.toml", "--run", "nowhere", "--rehearse", cluster, ranks=2, cwd=folder)
    assert done.code == 13, done.err
    assert "cluster.toml: truth: missing; a rehearsal's pretend devices need it" in done.err
    assert done.err.count("hpctrain: ") == 1
    assert not (folder / "nowhere").exists()
