"""What a stage sends to the next one over a slow link, by the counters of the interfaces."""

import subprocess

import pytest

from tests import clusters
from tests.ranks.small_runs import write_tokens
from tests.started import SMALL_MODEL

ROWS, POSITIONS, HIDDEN, STEPS = 8, 256, 256, 2
JOB = f"""
{SMALL_MODEL.replace("hidden_size = 32", f"hidden_size = {HIDDEN}")}
vocab_size = 512
[data]
tokens = "tokens.bin"
sequence_length = {POSITIONS}
validation_fraction = 0.0
[train]
steps = {STEPS}
global_batch = {ROWS}
dtype = "fp32"
"""
OTHER_BYTES = 200_000
"""What else the ranks of a host send to the other one, at the most: to start and to agree."""
HEADERS = 1.08


@pytest.mark.timeout(300)
@pytest.mark.parametrize("y", [2, 4], ids=["two", "four"])
def test_one_copy_crosses_the_slow_link_however_few_rows_a_microbatch_has(network, warm_start, tmp_path, y):
    """Each host is a stage of y ranks, and each microbatch is one row: whole messages would cross y times."""
    write_tokens(tmp_path / "tokens.bin")
    (tmp_path / "job.toml").write_text(JOB)
    # Described, not measured: on a busy machine ranks of one host may be measured as slow as the link between hosts.
    tables = [clusters.fabric("backbone")]
    for name in ("alpha", "beta"):
        tables += clusters.family(name), clusters.nodes({name: y}, 1e7, "backbone", link_bytes_per_second=2e9)
    (tmp_path / "cluster.toml").write_text("".join(tables))
    layout = (f"plan.tensor.y={y}", "plan.pipeline=2", "plan.microbatch=1")

    def bytes_crossed(run: str, *settings: str) -> list[int]:
        command = [*warm_start, "train", "job.toml", "--cluster", "cluster.toml", "--run", run, "--sample", "0"]
        command += [part for setting in (*layout, *settings) for part in ("--set", setting)]
        done = network.run(command, y, hosts=("alpha-0", "beta-0"), cwd=tmp_path, timeout_seconds=90)
        assert done.code == 0, done.out + done.err
        return [link.sent for link in done.traffic.clusters.values()]

    crossed = {gathers: bytes_crossed(gathers, f"comm.gather_messages={gathers}") for gathers in ("true", "false")}
    copy = STEPS * ROWS * POSITIONS * HIDDEN * 4
    print(f"y = {y}: a copy is {copy:,} bytes; sent by the hosts {crossed}")
    for parts, whole in zip(crossed["true"], crossed["false"], strict=True):
        assert copy <= parts <= HEADERS * copy + OTHER_BYTES
        assert y * copy <= whole <= HEADERS * y * copy + OTHER_BYTES
    compare = [*warm_start, "compare", "true", "false", "--exact"]
    said = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert said.returncode == 0, said.stdout + said.stderr
