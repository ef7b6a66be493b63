"""The road from end to end on devices that are not there, together with ranks of the host. Nothing may race."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hpctrain.config.errors import JobError
from tests.started import BIN, COMPLAINED, Finished
from tests.warm_start import MODULE

STARTED = "tests.pretended_start", "hpctrain"


@pytest.fixture
def started(warm_start):
    """Run `hpctrain ARGS` on so many ranks with devices, and so many without, whose MPI is not given device memory."""

    def run(*args: str, devices: int, hosts: int, cwd: Path, code: int = 0) -> Finished:
        words: list[str] = []
        for count, kind in ((devices, "cuda"), (hosts, "cpu")):
            if count:
                start = ["-n", str(count), "env", f"HPCTRAIN_DEVICE={kind}", *warm_start, MODULE, *STARTED, *args]
                words += [":", *start] if words else start
        variables = {"HPCTRAIN_DIRECT": "0", "HPCTRAIN_NATIVE": "1" if not hosts else "0"}
        command, environment = [str(BIN / "mpirun"), *words], os.environ | variables
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, env=environment)
        assert done.returncode == code, done.stdout + done.stderr
        assert COMPLAINED not in done.stderr, done.stderr
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


def losses_of(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [each["loss"] for each in map(json.loads, lines) if "loss" in each]


@pytest.mark.timeout(240)
def test_train_detects_probes_searches_and_trains_on_devices_and_hosts(started, hpctrain, folder):
    """Without a cluster file: then on devices alone, from the checkpoint of both."""
    assert hpctrain("train", "job.toml", "--run", "host", cwd=folder).code == 0
    train = "train", "job.toml", "--run", "both", "--fresh-probe", "--stop-after"
    even = "--set", "plan.pipeline=2", "--set", "plan.data=2"
    first = started(*train, "3", *even, devices=2, hosts=2, cwd=folder)
    assert "on 2 h200 and 2 cpu ranks" in first.err and "a probe of" in first.out, first.out + first.err
    second = started(*train, "6", devices=2, hosts=0, cwd=folder)
    assert "on 2 h200 ranks" in second.err and "search: h200" in second.out, second.out + second.err
    host, both = losses_of(folder / "host"), losses_of(folder / "both")
    assert len(host) == len(both) == 6
    assert both == pytest.approx(host, rel=1e-5)


@pytest.mark.timeout(120)
def test_align_compares_the_operators_of_a_device(started, folder):
    done = started("align", "job.toml", "--tokens", "32", devices=1, hosts=0, cwd=folder)
    assert "1 x h200 (NVIDIA H200)" in done.out and "aligned" in done.out.splitlines()[-1], done.out


@pytest.mark.timeout(120)
def test_products_in_fp8_are_refused_on_a_device(started, hpctrain, folder):
    """With ranks, and on a login node for the description of a machine."""
    done = started(
        "train", "job.toml", "--set", "train.dtype=fp8", devices=1, hosts=0, cwd=folder, code=JobError.exit_code
    )
    assert "h200 computes on devices" in done.err and "19 kernels" in done.err, done.err
