"""`hpctrain train JOB` and nothing else: the machine is detected, the plan is searched, the steps are compared."""

import json
import os
import re
import subprocess

import pytest

from hpctrain.config.clusters.cluster_file import load_cluster
from tests.started import BIN

ARGUMENTS = ("job.toml", "--sample", "0")


@pytest.fixture
def start(warm_start):
    """Run `hpctrain train` with a folder of descriptions of its own; `families` gives each rank its own name."""

    def run(folder, *arguments, cache, families=(), variables=None, ranks=0):
        environment = os.environ | {"HPCTRAIN_CACHE": str(cache)} | (variables or {})
        program = [*warm_start, "train", *ARGUMENTS, *map(str, arguments)]
        command = [str(BIN / "mpirun")]
        if families:
            for family in families:
                command += [*(":" if len(command) > 1 else ""), "-n", "1", "-env", "HPCTRAIN_FAMILY", family, *program]
        else:
            command += ["-n", str(ranks), *program]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, env=environment)

    return run


def losses(folder, run):
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.timeout(400)
def test_a_job_searches_its_plan_on_this_machine_and_the_same_one_again(start, folder, tmp_path):
    cache = tmp_path / "cache"
    first = start(folder, "--run", "runs/road1", cache=cache, ranks=2)
    assert first.returncode == 0, first.stderr
    assert "machine: 2 cpu on 1 node: a probe of" in first.stdout
    assert "the least of" in first.stdout and "runner-up:" in first.stdout
    assert "predicted: a step takes" in first.stdout
    compared = json.loads((folder / "runs/road1/drift.json").read_text())
    assert compared["measured_seconds"] > 0 and compared["predicted_seconds"] > 0
    (kept,) = (cache / "machines").iterdir()
    described = load_cluster(kept)
    assert described.num_devices == 2 and described.profiles, "the job's own passes were measured too"
    assert load_cluster(folder / "runs/road1/cluster.toml") == described
    text = kept.read_text()
    second = start(folder, "--run", "runs/road2", cache=cache, ranks=2)
    assert f"{kept}, measured on" in second.stdout
    assert kept.read_text() == text
    plans = [(folder / run / "plan.toml").read_text() for run in ("runs/road1", "runs/road2")]
    assert plans[0] == plans[1]
    # One that is damaged, or that cannot be kept, is measured again.
    short = ("--set", "train.steps=2", "--set", "train.validate_every=0")
    kept.write_text(text[:100])
    again = start(folder, *short, "--run", "runs/damaged", cache=cache, ranks=2)
    assert again.returncode == 0 and "a probe of" in again.stdout
    load_cluster(kept)
    (tmp_path / "file").write_text("")
    nowhere = start(folder, *short, "--run", "runs/nowhere", cache=tmp_path / "file", ranks=2)
    assert nowhere.returncode == 0, nowhere.stderr
    assert "not kept (" in nowhere.stdout and "set HPCTRAIN_CACHE to a folder that can be written" in nowhere.stdout


@pytest.mark.timeout(300)
def test_a_run_continues_with_other_ranks_by_a_plan_of_their_own(start, folder, tmp_path):
    """On 4 ranks, then on 3 of two families, then on 2; as if on one rank all the time."""
    cache = tmp_path / "cache"
    assert start(folder, "--run", "runs/one", cache=cache, ranks=1).returncode == 0
    begun = start(folder, "--run", "runs/moved", "--stop-after", "2", cache=cache, ranks=4)
    assert begun.returncode == 0, begun.stderr
    moved = start(folder, "--run", "runs/moved", "--stop-after", "4", cache=cache, families=["fast", "fast", "slow"])
    assert moved.returncode == 0, moved.stderr
    assert "planned again: " in moved.stdout
    first, again = (
        re.search(r"a step takes (\S+) s", begun.stdout),
        re.search(r"predicted (\S+) s a step; now", moved.stdout),
    )
    assert first and again and first[1] == again[1], "the plan before is predicted as it was then"
    # On a busy machine the best plan may leave ranks unused.
    writers = r"was written by [1-4] cpu(?: and [1-3] unused)?; these are 2 fast and 1 slow"
    assert re.search(writers, moved.stdout), moved.stdout
    last = start(folder, "--run", "runs/moved", cache=cache, ranks=2)
    assert last.returncode == 0, last.stderr
    assert "these are 2 cpu" in last.stdout
    assert losses(folder, "runs/moved") == pytest.approx(losses(folder, "runs/one"), rel=1e-5)


@pytest.mark.timeout(200)
def test_a_profile_of_this_machine_is_used_by_the_next_start(start, folder, tmp_path, hpctrain, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_CACHE", str(tmp_path))
    done = hpctrain("probe", "--job", "job.toml", "--seconds", "5", ranks=2, cwd=folder)
    assert done.code == 0, done.err
    (kept,) = (tmp_path / "machines").iterdir()
    text = kept.read_text()
    assert f"wrote {kept}" in done.out and len(load_cluster(kept).profiles) == 3
    started = start(folder, "--set", "train.steps=2", "--run", "runs/profiled", cache=tmp_path, ranks=2)
    assert started.returncode == 0, started.stderr
    assert kept.read_text() == text, "the job's passes are not measured again"


@pytest.mark.timeout(100)
def test_ranks_that_are_not_the_devices_of_the_cluster_are_refused(start, folder, tmp_path):
    cache = tmp_path / "cache"
    few = start(folder, "--cluster", "v100-t4", cache=cache, ranks=2)
    assert few.returncode == 82
    assert "v100-t4 describes 8 devices (4 v100-16 and 4 t4-16), but MPI started 2 ranks" in few.stderr
    assert few.stderr.count("hpctrain: ") == 1
