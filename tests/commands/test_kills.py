"""What is left of a run whose launcher, node's daemon or rank is killed: nothing, at the next start at the latest."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.kills import LAUNCHER, STEPS, Kill, run_with_kills
from hpctrain.comm.start.process import PREFIXES, SHARED_MEMORY
from hpctrain.jobs.common import generate_tokens
from hpctrain.observe.folder.run_folder import read_metrics
from tests.started import BIN, processes, ranks_of

GONE_SECONDS = 40.0


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def segments_of(pid: int) -> set[Path]:
    """Return the segments of shared memory that a process has mapped."""
    words = Path(f"/proc/{pid}/maps").read_text().split()
    return {Path(word) for word in words if word.startswith(tuple(f"{SHARED_MEMORY}/{each}" for each in PREFIXES))}


def kill_daemon(daemon: int, first: int, other: int) -> None:
    """Kill the parent of two ranks. The first ends last: nobody reads any more what it prints."""
    os.kill(first, signal.SIGSTOP)
    os.kill(daemon, signal.SIGKILL)
    deadline = time.monotonic() + GONE_SECONDS
    while is_alive(other):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(first, signal.SIGCONT)


def is_alive(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty of a zombie
    except OSError:
        return False


@pytest.mark.timeout(240)
@pytest.mark.parametrize("who", ["the launcher", "the daemon of the node", "a rank"])
def test_nothing_is_left_of_a_killed_run(hpctrain, folder, tmp_path, who):
    run = tmp_path / "killed"
    arguments = ["train", "job.toml", "--run", str(run), "--sample", "0", "--set", "checkpoint.every=1"]
    command = [BIN / "mpirun", "-n", "2", BIN / "hpctrain", *arguments, "--set", "train.steps=100000"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(command, cwd=folder, start_new_session=True, **quiet)
    while len(read_metrics(run)) < 3:
        assert launcher.poll() is None
        time.sleep(0.02)
    ranks = ranks_of(str(run))
    assert len(ranks) == 2
    left = set[Path]().union(*map(segments_of, ranks))
    assert left, "a run has segments"
    victim = {"the launcher": launcher.pid, "the daemon of the node": parent(ranks[0]), "a rank": ranks[1]}[who]
    if who == "the daemon of the node":
        kill_daemon(victim, *ranks)
    else:
        os.kill(victim, signal.SIGKILL)
    launcher.wait(GONE_SECONDS)
    deadline = time.monotonic() + GONE_SECONDS
    while remaining := processes(str(run)):
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)
    done = hpctrain(*arguments, "--stop-after", "1000000", "--set", "train.steps=6", cwd=folder)
    assert done.code == 0, done.err
    assert not [path for path in left if path.exists()], "the next start removes what the dead ranks left"


@pytest.mark.timeout(600)
def test_the_script_of_mpirun_starts_killed_ranks_again_from_memory(tmp_path):
    generate_tokens(tmp_path / "tokens.bin", 64)
    whole = run_with_kills(tmp_path / "whole", BIN / "hpctrain", [], random.Random(0))
    assert whole.code == 0 and not whole.origins
    kills = [Kill(victims=1), Kill(victims=3), Kill(victims=LAUNCHER)]
    killed = run_with_kills(tmp_path / "killed", BIN / "hpctrain", kills, random.Random(0), saves=STEPS)
    output = (tmp_path / "killed" / "output").read_text()
    assert killed.code == 0, output
    assert killed.kills == kills
    assert killed.origins == ["memory"] * 3, output
    assert killed.losses == whole.losses
    for parts, stall in zip(killed.parts, killed.stall_seconds, strict=True):
        assert parts["started"] > 0 and stall / 2 < sum(parts.values()) < 1.1 * stall, (parts, stall)
    assert not list(SHARED_MEMORY.glob((tmp_path / "killed" / "run" / "copies").read_text().strip()))
