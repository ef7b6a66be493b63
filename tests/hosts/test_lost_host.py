"""A host that is lost: the script of `hpctrain mpirun` starts the ranks of those that answer, from copies in memory."""

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hpctrain.comm.start.process import SHARED_MEMORY
from hpctrain.jobs.common import generate_tokens
from hpctrain.observe.folder.run_folder import read_metrics
from tests import clusters
from tests.hosts.network import LAUNCHER, MPI_ENVIRONMENT, SWITCH, SWITCH_ADDRESS, open_network
from tests.started import BIN, SMALL_MODEL

JOB = """
{model}
vocab_size = 64
[data]
tokens = "tokens.bin"
sequence_length = 32
[train]
steps = 60
global_batch = 8
dtype = "fp32"
[observe]
step_timeout_seconds = 10.0
[recovery]
copies = 5
"""
LOST = "alpha-1"


@pytest.fixture
def network(network):
    """A network of each test's own: a host that comes back sends what was under way when it was lost."""
    with open_network(network.site) as own:
        yield own


def write_script(network, folder: Path) -> Path:
    """Write the run folder of a job on two hosts of the network, and return its script."""
    generate_tokens(folder / "tokens.bin", 64)
    (folder / "job.toml").write_text(JOB.format(model=SMALL_MODEL))
    cluster = clusters.family("alpha") + clusters.fabric() + clusters.nodes({"alpha": 2}, count=2)
    (folder / "cluster.toml").write_text(cluster)
    (folder / "hosts").write_text(f"alpha-0\n{LOST}\n")
    run, options = folder / "run", ["--cluster", "cluster.toml", "--hosts", "hosts", "--run", "run"]
    subprocess.run([BIN / "hpctrain", "mpirun", "job.toml", *options], cwd=folder, check=True, capture_output=True)
    script = run / "start.sh"
    reached = f"-localhost {SWITCH_ADDRESS} -launcher rsh -launcher-exec {LAUNCHER}"
    text, count = re.subn(r"(/\S+/bin/mpirun) ", rf"\1 {reached} ", script.read_text())
    assert count == 2
    script.write_text(text)
    return script


def lose(network, copies: str, is_silent: bool) -> None:
    """Take a host away with the copies in its memory; a `silent` one has no time to close its connections."""
    down = [["ip", "-netns", network.namespace(LOST), "link", "set", link, "down"] for link in ("manage", "fabric")]
    for command in down if is_silent else []:
        subprocess.run(command, check=True)
    pids = subprocess.run(["ip", "netns", "pids", network.namespace(LOST)], capture_output=True, text=True).stdout
    for pid in pids.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    for command in [] if is_silent else down:
        subprocess.run(command, check=True)
    shutil.rmtree(SHARED_MEMORY / copies / LOST)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_silent", [False, True])
def test_the_script_of_mpirun_leaves_out_a_host_that_is_lost(network, tmp_path, is_silent):
    script, run = write_script(network, tmp_path), tmp_path / "run"
    environment = os.environ | MPI_ENVIRONMENT | {"NAMESPACE_PREFIX": network.namespace("")}
    environment |= {"STAYS_SECONDS": "300"} if is_silent else {}
    command = ["ip", "netns", "exec", network.namespace(SWITCH), "bash", script, "--sample", "0"]
    output = tmp_path / "output"
    with output.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as started:
        try:
            deadline = time.monotonic() + 120
            while len(read_metrics(run)) < 20:
                assert started.poll() is None and time.monotonic() < deadline, output.read_text()
                time.sleep(0.02)
            lose(network, (run / "copies").read_text().strip(), is_silent)
            assert started.wait(240) == 0, output.read_text()
        finally:
            started.terminate()
            for link in ("manage", "fabric"):
                subprocess.run(["ip", "-netns", network.namespace(LOST), "link", "set", link, "up"], check=True)
    text = output.read_text()
    assert "hpctrain: alpha-1 does not answer: its ranks are left out" in text, text
    assert "2 alpha on 1 node" in text and ", from memory, " in text, text
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == list(range(1, 61)), text
    alone = [BIN / "hpctrain", "train", "job.toml", "--run", "alone", "--sample", "0"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    for own, other in zip(metrics, read_metrics(tmp_path / "alone"), strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)
