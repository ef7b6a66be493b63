"""`hpctrain probe` on ranks that pretend to be two families on two hosts; its file is read back."""

import json
import os
import subprocess

import pytest

from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.clusters.links import link_between, slowest_links
from tests.commands.conftest import BIN, Finished

PLACES = ({"HPCTRAIN_HOST": "alpha", "HPCTRAIN_FAMILY": "fast"}, {"HPCTRAIN_HOST": "beta", "HPCTRAIN_FAMILY": "slow"})


@pytest.fixture
def probe(warm_start):
    """Two ranks in each of PLACES."""

    def run(folder, *args: str, variables: dict[str, str] | None = None) -> Finished:
        command: list[str] = [str(BIN / "mpirun")]
        for place in PLACES:
            summary = [f"{name}={value}" for name, value in (place | (variables or {})).items()]
            command += ["-n", "2", "env", *summary, *warm_start, "probe", *args, ":"]
        done = subprocess.run(command[:-1], cwd=folder, capture_output=True, text=True, timeout=100, env=os.environ)
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.mark.timeout(240)
def test_two_families_on_two_hosts_become_a_cluster(probe, tmp_path):
    done = probe(tmp_path, "--out", "cluster.toml", "--seconds", "2")
    assert done.code == 0, done.out + done.err
    assert "wrote cluster.toml: 2 fast and 2 slow on 2 nodes, by network" in done.out
    assert os.listdir(tmp_path) == ["cluster.toml"], "nothing else is left"
    cluster = load_cluster(tmp_path / "cluster.toml")
    assert [(d.node, d.family) for d in cluster.devices] == [(0, "fast"), (0, "fast"), (1, "slow"), (1, "slow")]
    for family in cluster.families.values():
        assert family.origin == "measured"
        assert family.measured_at_once == 2
        assert family.overlap_slowdown >= 1, "how much more depends on what else the machine does"
        assert family.sustained_flops_per_second["fp32"] > 0
    inside, across = link_between(cluster, 0, 1), link_between(cluster, 0, 2)
    assert (inside.between, across.between, across.fabric) == ("node", "fabric", "network")
    assert {time.flows for time in inside.times} == {1}
    assert {time.flows for time in across.times} == {1, 2}
    sizes = [time.message_bytes for time in inside.times]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1 << 10
    assert sizes[-1] >= 1 << 18
    assert slowest_links(cluster)["across"].latency_seconds > 0
    text = (tmp_path / "cluster.toml").read_text()
    assert "# 2 ranks; figures are the median rank's." in text
    assert "2 ranks of a host measured at once." in text

    before = text
    done = probe(tmp_path, "--out", "cluster.toml")
    assert done.code == 81
    assert done.err.count("cluster.toml: is there already; choose another --out, or replace it with --force") == 1
    assert (tmp_path / "cluster.toml").read_text() == before


@pytest.mark.timeout(120)
def test_it_is_replaced_if_asked_for_and_printed_as_json(hpctrain, tmp_path):
    (tmp_path / "cluster.toml").write_text("old")
    done = hpctrain("probe", "--out", "cluster.toml", "--seconds", "0.5", "--force", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    summary = json.loads(done.out)
    assert summary["nodes"][0]["devices"] == {"cpu": 1}
    assert load_cluster(tmp_path / "cluster.toml").num_devices == 1
    seen = hpctrain("inspect", "cluster.toml", "--json", cwd=tmp_path)
    assert json.loads(seen.out)["cluster"] == "1 cpu on 1 node"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("none/cluster.toml", "none/cluster.toml: its folder is not there; choose another --out"),
        (".", ".: is a folder; give --out the name of a file in it"),
    ],
)
def test_where_it_cannot_be_written_is_reported_before_anything_is_measured(hpctrain, tmp_path, out, message):
    done = hpctrain("probe", "--out", out, "--force", cwd=tmp_path)
    assert done.code == 81
    assert f"hpctrain: JobError: {message}" in done.err


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    from hpctrain.config.clusters.cluster_file import write_cluster_text
    from hpctrain.config.errors import JobError

    path = tmp_path / "cluster.toml"
    path.write_text("old")

    def refuse(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        JobError, match="cluster.toml: cannot be written: No space left on device; choose another --out"
    ):
        write_cluster_text(path, "new")
    assert os.listdir(tmp_path) == ["cluster.toml"]
    assert path.read_text() == "old"


@pytest.mark.timeout(120)
def test_ranks_of_a_host_that_name_different_fabrics_are_refused(probe, tmp_path):
    done = probe(tmp_path, "--out", "cluster.toml", variables={"HPCTRAIN_FABRIC": "backbone"})
    assert done.code == 83
    assert done.err.count("hpctrain: ") == 1, done.err
    assert "HPCTRAIN_FABRIC=backbone on rank 0: that is what the connection of several fabrics is called" in done.err
    assert not (tmp_path / "cluster.toml").exists()
