"""One run at a time in a run folder."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from hpctrain.comm.start.process import this_machine
from hpctrain.comm.watchdog import diagnosis
from hpctrain.config.errors import JobError, TrainingError
from hpctrain.observe.folder import lock
from hpctrain.observe.folder.lock import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from hpctrain.observe.folder.lock import RunLock
held = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_a_second_run_is_refused_and_a_killed_one_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "STILL_SECONDS", 10_000.0)  # it is known to be dead, and nothing is waited for
    run = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(JobError, match=rf"another run is in this folder \(process {holder.pid} on .*, since .*\)"):
            RunLock(run)
    finally:
        holder.kill()
        holder.wait()
    held = RunLock(run)
    held.release()
    assert (run / "lock").read_bytes() == b""
    RunLock(run).release()


def left_by_another_host(run):
    run.mkdir()
    about = {"host": "elsewhere", "pid": 7, "machine": "another boot", "process_start": 5, "since": "yesterday"}
    (run / "lock").write_text(json.dumps(about))


def test_what_another_host_left_is_taken_over_when_its_heartbeat_stops(tmp_path, monkeypatch):
    """Where the system's locks do not reach from host to host."""
    run = tmp_path / "run"
    left_by_another_host(run)
    monkeypatch.setattr(lock, "STILL_SECONDS", 0.3)
    held = RunLock(run)
    assert json.loads((run / "lock").read_text())["machine"] == this_machine()
    held.release()


def test_a_heart_that_beats_is_left_alone(tmp_path, monkeypatch):
    run = tmp_path / "run"
    left_by_another_host(run)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: os.utime(run / "lock"))
    with pytest.raises(JobError, match="process 7 on elsewhere, since yesterday"):
        RunLock(run)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": []}', "\0" * 50, "[" * 3000])
def test_a_garbled_lock_blocks_nobody(tmp_path, text, monkeypatch):
    monkeypatch.setattr(lock, "STILL_SECONDS", 0.1)
    (tmp_path / "lock").write_text(text)
    RunLock(tmp_path).release()


def test_a_run_that_did_not_begin_leaves_no_folder(tmp_path):
    RunLock(tmp_path / "new").release(is_done=False)
    assert not (tmp_path / "new").exists()
    RunLock(tmp_path).release(is_done=False)
    assert tmp_path.exists(), "it was there before"


@pytest.fixture
def held(tmp_path, monkeypatch):
    """A lock whose heart beats fast."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    result = RunLock(tmp_path / "run")
    yield result
    result._stop.set()
    os.close(result._handle)


def await_true(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("not within ten seconds")


def refuses(held) -> bool:
    try:
        held.check()
    except TrainingError:
        return True
    return False


@pytest.mark.timeout(60)
def test_a_lock_that_is_removed_is_made_again_and_keeps_others_out(tmp_path, held):
    (tmp_path / "run" / "lock").unlink()
    await_true((tmp_path / "run" / "lock").exists)
    await_true(lambda: held._news)
    assert "was removed while the run trains, and is made again" in held.check() and held.check() is None
    code = "import sys; from hpctrain.observe.folder.lock import RunLock, Path; RunLock(Path(sys.argv[1]))"
    second = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True)
    assert f"another run is in this folder (process {os.getpid()} on" in second.stderr


@pytest.mark.timeout(60)
def test_a_run_whose_lock_another_one_has_ends(tmp_path, held, monkeypatch):
    code = HOLDER.replace(
        "from hpctrain.observe.folder.lock", "Path(sys.argv[1], 'lock').unlink()\nfrom hpctrain.observe.folder.lock"
    )
    monkeypatch.setattr(lock, "BEAT_SECONDS", 3600.0)
    time.sleep(0.1)  # the last short beat
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        held._look()
        with pytest.raises(TrainingError, match=rf"another run .* \(process {holder.pid} .* so this one ends"):
            held.check()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.timeout(60)
def test_a_run_whose_folder_is_gone_ends_and_does_not_make_it_again(tmp_path, held):
    shutil.rmtree(tmp_path / "run")
    await_true(lambda: refuses(held))
    with pytest.raises(TrainingError, match="run: the run folder is gone: it was deleted or moved while"):
        held.check()
    assert not (tmp_path / "run").exists()


def test_a_folder_whose_ranks_live_is_refused_without_its_lock_too(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "post_mortem", lambda folder, now: ("in flight, 4 ranks, in step", None))
    with pytest.raises(JobError, match=r"another run is in this folder \(in flight, 4 ranks, in step\), though"):
        RunLock(tmp_path)
    assert not (tmp_path / "lock").exists()
