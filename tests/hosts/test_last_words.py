"""On several hosts too: a rank that is killed, or does not come, is named once."""

import os
import sys
from pathlib import Path

import pytest

from hpctrain.comm.watchdog.flight import read_first_death
from hpctrain.config.errors import CommError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/commands/waiting_ranks.py"


def run(network, folder: Path, story: str, culprit: int):
    command = [sys.executable, SCRIPT, folder, story, str(culprit)]
    return network.run(command, 2, environment={"PYTHONPATH": str(ROOT)}, timeout_seconds=40)


@pytest.mark.parametrize("culprit", [1, 6])
@pytest.mark.timeout(90)
def test_a_killed_rank_is_named_by_the_guardian_of_its_host_alone(network, tmp_path, culprit):
    done = run(network, tmp_path, "killed", culprit)
    assert done.code != 0
    assert done.err.count("hpctrain: ") == 1, done.err
    assert f"hpctrain: rank {culprit} (host node{culprit // 2}, process " in done.err
    assert read_first_death(tmp_path / "flight")[0] == culprit


@pytest.mark.timeout(90)
def test_a_rank_that_does_not_come_is_named_once(network, tmp_path):
    done = run(network, tmp_path, "skips", 5)
    assert done.code == CommError.exit_code, done.err
    assert done.err.count("hpctrain: ") == 1, done.err
    assert "hpctrain: CommError: rank 5 (host node2) has not entered all_reduce number 4 on lane data [0-7]" in done.err
    assert len(os.listdir(tmp_path / "flight")) == 2 * 8 + 1  # records, stacks, and who had the last word
