"""Ranks that wait in vain: one report, by one of them, that names who is missing; who was killed is named too; and
whatever ends a run, mpirun returns the code that says what it was."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpctrain.comm.start.launcher import EXIT_FILE_VARIABLE
from hpctrain.comm.start.process import process_status
from hpctrain.comm.watchdog.flight import RUNNING, read_first_death, read_flights, record_path
from hpctrain.config.errors import CommError, DataError
from tests.started import BIN, Finished
from tests.warm_start import SCRIPT as WARM_SCRIPT

SCRIPT = Path(__file__).with_name("waiting_ranks.py")
ROOT = Path(__file__).parents[2]
RANKS = 4
STARTED_BY = "HPCTRAIN_TEST_STARTED_BY"
WAIT_SECONDS = 45
"""Less than the 60 s for which ranks rest, or are stuck, where nobody ends them."""
COLD_START_SECONDS = 150
"""For ranks that import everything, on a machine that is busy."""


def start(python: Sequence[str | Path], folder: Path | str, story: str, culprit: int = 0) -> subprocess.Popen:
    command = [BIN / "mpirun", "-n", str(RANKS), *python, SCRIPT, folder, story, str(culprit)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT), STARTED_BY: str(os.getpid())}, **pipes)


@pytest.fixture
def run(warm_start):
    """Play a story to its end."""

    def run(folder: Path | str, story: str, culprit: int = 0) -> Finished:
        with start([*warm_start, WARM_SCRIPT], folder, story, culprit) as process:
            try:
                out, err = process.communicate(timeout=WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return Finished(process.returncode, out, err)

    return run


def check_report(done: Finished, *parts: str) -> None:
    """One report, with the exit code of a communication error."""
    assert done.code == CommError.exit_code, done.out + done.err
    assert done.err.count("hpctrain: ") == 1, done.err
    for part in parts:
        assert part in done.err, done.err


def wait_for(ready: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def guardians() -> list[str]:
    """Return the guardians that run for a test of this process; others test at the same time."""
    result, mark = [], f"{STARTED_BY}={os.getpid()}".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"guardian.py" in path.read_bytes() and mark in path.with_name("environ").read_bytes().split(b"\0"):
                result.append(str(path))
        except OSError:
            continue
    return result


@pytest.mark.timeout(120)
def test_nothing_is_said_where_all_come(run, tmp_path, hpctrain):
    done = run(tmp_path, "all")
    assert (done.code, done.err) == (0, "")
    assert not guardians()
    assert "flight" in os.listdir(tmp_path)
    (tmp_path / "resolved.toml").write_text("")
    summary = hpctrain("inspect", tmp_path, cwd=tmp_path)
    assert summary.code == 0
    assert "state" not in summary.out


@pytest.mark.timeout(120)
def test_a_slow_rank_is_waited_for(run):
    done = run("-", "slow", 1)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.timeout(120)
def test_a_rank_that_does_not_come_is_named(run, tmp_path, hpctrain, monkeypatch, culprit):
    monkeypatch.setenv(EXIT_FILE_VARIABLE, str(tmp_path / "code"))
    done = run(tmp_path, "skips", culprit)
    name = f"rank {culprit} (host node{culprit // 2})"
    assert (tmp_path / "code").read_text() == f"{CommError.exit_code}\n"
    check_report(
        done,
        f"hpctrain: CommError: {name} has not entered all_reduce number 4 on lane data [0-3], 4.2 MB;"
        " its last was all_reduce number 3 on lane data [0-3], 4.2 MB, finished ",
        " s ago; 3 ranks wait for it\n  detected by rank 0: in a test an operation may take 1 s (raise"
        " observe.step_timeout_seconds if it was only slow); all ranks are stopped",
        f"\n    {name}  works  all_reduce 3 on data, 4.2 MB, done ",
        "  waits  all_reduce 4 on data, 4.2 MB, begun ",
        f"Python stacks of the ranks that answered: {tmp_path}/flight/stacks-*.txt",
    )
    for rank in range(RANKS):
        stacks = (tmp_path / f"flight/stacks-{rank:05}.txt").read_text()
        assert ("in lost_in_thought" in stacks) == (rank == culprit)
        assert ("in together" in stacks) == (rank != culprit)
    summary = hpctrain("inspect", tmp_path, cwd=tmp_path)
    assert f"rank 0 (host node0) reported: CommError: {name} has not entered all_reduce number 4" in summary.out


@pytest.mark.timeout(120)
def test_where_a_library_connects_in_vain_the_report_says_what_names_the_network(run):
    check_report(
        run("-", "connecting", 1), "rank 1", "in connecting by NCCL an operation may take 1 s (NCCL_SOCKET_IFNAME names"
    )


@pytest.mark.timeout(120)
def test_where_files_are_waited_for_a_missing_rank_is_named_too(run, tmp_path, hpctrain):
    done = run(tmp_path, "absent", 2)
    check_report(
        done,
        "hpctrain: CommError: rank 2 (host node1) has not entered agree number ",
        " on lane world [0-3]; its last was all_reduce number 3 on lane data [0-3], 4.2 MB, finished ",
        "detected by rank 0: in a test an operation may take 1 s (raise observe.step_timeout_seconds if",
    )
    summary = hpctrain("inspect", tmp_path, cwd=tmp_path)
    assert "not ended in order, 4 ranks, in a test\n" in summary.out
    assert (
        "; in a test an operation may take 1 s (raise observe.step_timeout_seconds if it was only slow)" in summary.out
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("story, folder_is_known", [("equally", False), ("equally", True), ("late", True)])
def test_where_all_ranks_fail_equally_one_speaks_and_the_code_is_theirs(run, tmp_path, story, folder_is_known):
    done = run(tmp_path if folder_is_known else "-", story)
    assert (done.code, done.out) == (DataError.exit_code, "")
    assert done.err == "hpctrain: DataError: nothing to continue from\n"
    assert not guardians()


@pytest.mark.timeout(120)
def test_where_one_rank_fails_it_speaks_and_the_code_is_its(run, tmp_path):
    done = run(tmp_path, "fails", 2)
    assert done.code == DataError.exit_code, done.out + done.err
    banner = "hpctrain: DataError: nothing to continue from here\n  on rank 2 of 4, host node1; all ranks are stopped\n"
    assert banner in done.err
    assert done.err.count("hpctrain: ") == 1, done.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("story", ["leaves", "sharing"])
def test_where_one_rank_fails_the_waits_of_all_others_end(run, tmp_path, story):
    done = run(tmp_path, story, 2)
    assert done.code == DataError.exit_code, done.out + done.err
    assert "on rank 2 of 4, host node1; all ranks are stopped\n" in done.err
    assert done.err.count("hpctrain: ") == 1, done.err
    assert not any(flight.in_flight for flight in read_flights(tmp_path / "flight").values())


@pytest.mark.timeout(120)
def test_a_rank_that_is_told_of_a_failure_lets_the_failed_one_speak_first(run):
    done = run("-", "busy", 3)
    assert "hpctrain: DataError: nothing to continue from here\n  on rank 3 of 4" in done.err, done.err
    assert done.err.count("hpctrain: ") == 1, done.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("culprit", [0, 2])
def test_ranks_that_no_launcher_kills_end_when_one_of_them_is_killed(tmp_path, culprit):
    """The launcher's daemon is stopped, and kills nobody. Ranks wait for 40 s.

    A daemon that goes on where all have ended may leave their last words unread, which are therefore in a file.
    """
    last_words = tmp_path / "last-words"
    process = start(["bash", "-c", 'exec "$@" 2>> "$0"', last_words, sys.executable], tmp_path, "awaited", culprit)
    daemon = 0
    try:
        wait_for(lambda: (tmp_path / f"resting-{culprit}").exists(), COLD_START_SECONDS)
        flights = read_flights(tmp_path / "flight")
        daemon = process_status(flights[0].pid).parent
        os.kill(daemon, signal.SIGSTOP)
        os.kill(flights[culprit].pid, signal.SIGKILL)
        wait_for(lambda: all(flight.process_is_gone() for flight in flights.values()), WAIT_SECONDS / 2)
        wait_for(lambda: not guardians())
        assert not any(flight.in_flight for flight in read_flights(tmp_path / "flight").values())
        os.kill(daemon, signal.SIGCONT)
        process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
        if daemon and process_status(daemon).parent:
            os.kill(daemon, signal.SIGKILL)
    err = last_words.read_text()
    host, pid = f"node{culprit // 2}", flights[culprit].pid
    killed = f"hpctrain: rank {culprit} (host {host}, process {pid}) was killed or crashed"
    assert killed in err and err.count("hpctrain: ") == 1, err
    assert (death := read_first_death(tmp_path / "flight")) and death[0] == culprit


@pytest.mark.timeout(120)
def test_where_several_ranks_fail_one_of_them_speaks(run, tmp_path):
    done = run(tmp_path, "others", 0)
    assert done.code == DataError.exit_code, done.out + done.err
    assert done.err.count("hpctrain: DataError: nothing to continue from here") == 1, done.err
    assert done.err.count("hpctrain: ") == 1, done.err


@pytest.mark.timeout(120)
def test_without_a_folder_the_stack_of_the_missing_rank_is_in_the_report(run):
    check_report(
        run("-", "skips", 3), "rank 3 (host node1) has not entered", "stacks of rank 3:\n", "lost_in_thought(60)"
    )


@pytest.mark.timeout(120)
def test_several_missing_ranks_are_named_together(run):
    done = run("-", "everybody", 1)
    check_report(
        done, "ranks 0,2-3 (hosts node0, node1) have not entered all_reduce number 4", "rank 1 (host node0) waits"
    )


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.timeout(120)
def test_a_rank_that_cannot_answer_is_named(run, tmp_path, culprit):
    """Where rank 0 cannot speak, rank 1 does."""
    done = run(tmp_path, "stuck", culprit)
    check_report(
        done,
        f"rank {culprit} (host node{culprit // 2}) does not answer: it is gone, or stuck in a call that holds Python's"
        " lock; has not entered all_reduce number 4 on lane data [0-3]",
        f"detected by rank {0 if culprit else 1}:",
        f"rank {culprit} (host node{culprit // 2})  no answer  all_reduce 3 on data",
    )


@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.timeout(120)
def test_a_killed_rank_is_named_by_us_or_the_launcher_and_by_inspect(run, tmp_path, hpctrain, culprit):
    done = run(tmp_path, "killed", culprit)
    assert done.code != 0
    assert not guardians()
    said = done.out + done.err
    pid = read_flights(tmp_path / "flight")[culprit].pid
    ours = f"hpctrain: rank {culprit} (host node{culprit // 2}, process {pid}) was killed or crashed"
    launchers = f"process rank {culprit} with PID"  # of Open MPI; it may get the process wrong
    assert said.count(ours) + said.count(launchers) == 1, said
    assert said.count("hpctrain: ") == said.count(ours), said
    flights = read_flights(tmp_path / "flight")
    assert {flight.state for flight in flights.values()} == {RUNNING}
    assert all(flight.process_is_gone() for flight in flights.values())
    assert flights[culprit].in_flight == ()
    summary = hpctrain("inspect", tmp_path, cwd=tmp_path)
    assert summary.code == 0, summary.err
    assert "not ended in order, 4 ranks" in summary.out
    name = f"rank {culprit} (host node{culprit // 2})"
    assert f"{name} was killed or crashed, the first to end without a word; its last was " in summary.out
    for rank in range(RANKS):
        assert f"rank {rank} (host node{rank // 2})  " in summary.out
    assert record_path(tmp_path / "flight", 0).stat().st_size == 65536


@pytest.mark.timeout(120)
def test_no_rank_is_blamed_where_the_launcher_is_killed(tmp_path):
    process = start([sys.executable], tmp_path, "rest")
    try:
        wait_for(lambda: len(list(tmp_path.glob("resting-*"))) == RANKS, COLD_START_SECONDS)
        assert guardians(), "they are detected while they are there"
        process.kill()
        _, err = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
    assert "hpctrain: " not in err
    wait_for(lambda: all(flight.process_is_gone() for flight in read_flights(tmp_path / "flight").values()))
    assert read_first_death(tmp_path / "flight") is None
