"""The road from end to end on devices that are not there, together with ranks of the host. Nothing may race."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpctrain.config.errors import CommError, TopologyError
from tests import clusters
from tests.pretended_faults import FAULT_VARIABLE, MOVED, REFUSED, TWO_SIZES, UNSEEN
from tests.started import BIN, COMPLAINED, Finished
from tests.warm_start import MODULE

STARTED = "tests.pretended_start", "hpctrain"


@pytest.fixture
def started(warm_start):
    """Run `hpctrain ARGS` on so many ranks with devices, and so many without, whose MPI is not given device memory.

    Ranks whose devices are `UNSEEN` are not told to use them.
    """

    def run(*args: str, devices: int, hosts: int, cwd: Path, fault: str = "", code: int = 0, **more: str) -> Finished:
        words: list[str] = []
        for count, kind in ((devices, "cuda"), (hosts, "cpu")):
            if count:
                told = [] if fault == UNSEEN else ["env", f"HPCTRAIN_DEVICE={kind}"]
                start = ["-n", str(count), *told, *warm_start, MODULE, *STARTED, *args]
                words += [":", *start] if words else start
        variables = {
            "HPCTRAIN_DIRECT": "0",
            "HPCTRAIN_NATIVE": "1" if not hosts else "0",
            FAULT_VARIABLE: fault,
            **more,
        }
        command, environment = [str(BIN / "mpirun"), *words], os.environ | variables
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        assert COMPLAINED not in done.stderr, done.stderr
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


def line_of(word: str, text: str) -> str:
    """Return the line of an output that begins with a word."""
    (line,) = [line for line in text.splitlines() if line.startswith(word)]
    return line


def losses_of(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [each["loss"] for each in map(json.loads, lines) if "loss" in each]


@pytest.mark.timeout(240)
def test_train_detects_probes_searches_and_trains_on_devices_and_hosts(started, hpctrain, folder):
    """Without a cluster file: then on devices alone, from the checkpoint of both."""
    assert hpctrain("train", "job.toml", "--run", "host", cwd=folder).code == 0
    train, fresh = ("train", "job.toml", "--run", "both", "--stop-after"), "--fresh-probe"
    even = "--set", "plan.pipeline=2", "--set", "plan.data=2"
    first = started(*train, "3", fresh, *even, devices=2, hosts=2, cwd=folder)
    assert "on 2 h200 (cuda) and 2 cpu ranks" in first.err and "a probe of" in first.out, first.out + first.err
    staged = "MPI through pinned host buffers (MPI is not given memory of h200: HPCTRAIN_DIRECT=0"
    assert f"{staged}; no native library: HPCTRAIN_NATIVE=0" in line_of("routes: data: ", first.out)
    second = started(*train, "5", fresh, devices=2, hosts=0, cwd=folder)
    assert "on 2 h200 (cuda) ranks" in second.err and "search: h200" in second.out, second.out + second.err
    third = started(*train, "6", "--set", "plan.data=2", devices=2, hosts=0, cwd=folder)  # a search may take a pipeline
    routes = line_of("routes: ", third.out)
    assert "NCCL (NCCL of torch " in routes and f"# {routes}\n" in (folder / "both/resolved.toml").read_text()
    host, both = losses_of(folder / "host"), losses_of(folder / "both")
    assert len(host) == len(both) == 6
    assert both == pytest.approx(host, rel=1e-5)


@pytest.mark.timeout(120)
def test_align_compares_the_operators_of_a_device(started, folder):
    done = started("align", "job.toml", "--tokens", "32", devices=1, hosts=0, cwd=folder)
    assert "1 x h200 (NVIDIA H200)" in done.out and "aligned" in done.out.splitlines()[-1], done.out


@pytest.mark.timeout(120)
def test_a_rank_whose_host_has_a_device_does_not_compute_without_it(started, folder):
    """HPCTRAIN_FAMILY alone gave it the name of a device, and its figures were kept as those of the device."""
    train = "train", "job.toml", "--run", "unseen", "--sample", "0"
    case = {"devices": 1, "hosts": 0, "cwd": folder, "fault": UNSEEN, "HPCTRAIN_FAMILY": "h100"}
    done = started(*train, code=TopologyError.exit_code, **case)
    assert "on 1 h100 (cpu) rank," in done.err
    assert "has /dev/null of NVIDIA's driver, but torch" in done.err and "or set HPCTRAIN_DEVICE=cpu" in done.err
    examined = started("doctor", code=TopologyError.exit_code, **case)
    assert "/dev/null of NVIDIA: ranks compute on processors, since torch sees no device" in examined.out
    started(*train, "--stop-after", "1", **case, HPCTRAIN_DEVICE="cpu")


@pytest.mark.timeout(120)
def test_a_library_that_refuses_its_ranks_ends_a_start_and_nothing_is_kept(started, folder, tmp_path):
    case = {
        "devices": 2,
        "hosts": 0,
        "cwd": folder,
        "fault": REFUSED,
        "code": CommError.exit_code,
        "HPCTRAIN_CACHE": str(tmp_path),
    }
    words = "NCCL refuses these 2 ranks (RuntimeError: NCCL_ERROR_SYSTEM_ERROR: unhandled system error)"
    done = started("train", "job.toml", "--run", "refused", **case)
    assert words in done.err and "HPCTRAIN_NATIVE=0 does without it" in done.err and not list(tmp_path.iterdir())
    assert f"error    routes         {words}" in started("doctor", **case).out


@pytest.mark.timeout(120)
def test_ranks_that_share_no_memory_take_a_device_each_and_two_sizes_are_two_families(started, folder):
    done = started("doctor", "--json", devices=2, hosts=0, cwd=folder, fault=TWO_SIZES, MPIR_CVAR_NOLOCAL="1")
    ranks = json.loads(done.out)["ranks"]
    assert [rank["device"] for rank in ranks] == ["pretended:0", "pretended:1"]
    assert [rank["family"] for rank in ranks] == ["a100-40", "a100-80"]


@pytest.mark.timeout(240)
def test_messages_between_families_are_of_device_memory_where_that_is_proven_and_the_first_lines_say_so(
    started, folder, tmp_path
):
    """A probe works before there is a plan: it times such messages while the library has nothing to do."""
    train = "train", "job.toml", "--stop-after", "1", "--sample", "0", "--set", "plan.pipeline=2"
    case = {"devices": 4, "hosts": 0, "cwd": folder, "fault": MOVED}
    case |= {"HPCTRAIN_DIRECT": "auto", "HPCTRAIN_CACHE": str(tmp_path), "HPCTRAIN_IGNORE_LOAD": "1"}
    first = started(*train, "--run", "unproven", "--set", "plan.tensor.y=2", **case).out
    assert "a probe of" in first, first
    second = started(*train, "--run", "proven", "--set", "plan.data=2", **case).out
    assert "measured on" in line_of("machine: ", second), second
    for out, run, route, why in (
        (first, "unproven", "staged", "MPI on device memory may wait for the devices while a library waits"),
        (second, "proven", "direct", "MPI moves memory of a100-40, a100-80: "),
    ):
        said = line_of("messages between families: ", out)
        assert said.startswith(f"messages between families: {route} (a100-40 and a100-80): {why}")
        assert out.count("no rank waits in" if run == "proven" else why) == 1, out
        assert f"# {said}\n" in (folder / run / "resolved.toml").read_text()
    assert "MPI on device memory" in line_of("routes: ", second)


@pytest.mark.timeout(60)
def test_ranks_of_the_host_are_no_devices_of_a_cluster_file(hpctrain, folder):
    described = clusters.family("v100", kind="cuda") + clusters.nodes({"v100": 1}, None)
    (folder / "v100.toml").write_text(described)
    variables = {"HPCTRAIN_FAMILY": "v100"}
    done = hpctrain("train", "job.toml", "--cluster", "v100.toml", ranks=1, cwd=folder, environment=variables)
    assert done.code == TopologyError.exit_code, done.err
    assert "family 'v100' is of kind cuda there, but rank 0 on host" in done.err and "computes on cpu" in done.err
