"""What asks a run to end or to save."""

import os
import signal
import stat
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.start.launcher import end_of_batch_job, parse_slurm_seconds
from hpctrain.comm.start.process import STOP_SIGNALS, StopSignals
from hpctrain.config.errors import RankLossError
from hpctrain.config.job import Checkpoint
from hpctrain.engine.requests import MARGIN_SECONDS, NO_REQUESTS, Requests, StepRequests
from hpctrain.engine.saves import CheckpointSchedule


def test_signals_are_remembered_and_a_second_interrupt_is_not():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
    signals = StopSignals().listen()
    try:
        assert Requests(signals).check() == NO_REQUESTS
        for number in set(STOP_SIGNALS) - {signal.SIGINT}:
            os.kill(os.getpid(), number)
            assert signals.received == signal.Signals(number).name
        requests = Requests(signals)
        assert requests.check() == StepRequests(interrupt=True)
        assert requests.reason(StepRequests(interrupt=True), Gathered()) == signals.received
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Gathered:
    """A world in which other ranks have what it is made of."""

    def __init__(self, *others):
        self._others = others

    def gather_objects(self, value):
        return [value, *self._others]


def test_the_signal_and_its_rank_are_named_where_others_have_none():
    requests, asked = Requests(StopSignals()), StepRequests(interrupt=True)
    assert requests.reason(asked, Gathered(None, "SIGUSR2", "SIGUSR2")) == "SIGUSR2 on ranks 2-3"
    assert requests.reason(asked, Gathered("SIGXCPU", "SIGALRM")) == "SIGXCPU on rank 1 and SIGALRM on rank 2"
    requests.signals.received = "SIGTERM"
    assert requests.reason(asked, Gathered("SIGTERM")) == "SIGTERM"


def test_hangups_that_are_ignored_stay_so():
    code = "import signal; from hpctrain.comm.start.process import StopSignals; StopSignals().listen();"
    code += "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    command = [sys.executable, "-c", code]
    for handler, is_ignored in ((signal.SIG_DFL, False), (signal.SIG_IGN, True)):  # the second as nohup does
        as_started = partial(signal.signal, signal.SIGHUP, handler)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=as_started)
        assert done.stdout == f"{is_ignored}\n", done.stderr


def test_files_are_requests_until_they_are_followed(tmp_path):
    requests = Requests(StopSignals(), tmp_path)
    (tmp_path / "save").touch()
    asked = requests.check()
    assert asked == StepRequests(save=True) and not asked.ends
    (tmp_path / "stop").touch()
    assert requests.check() == StepRequests(stop=True, save=True)
    requests.fulfilled(asked)
    asked = requests.check()
    assert asked == StepRequests(stop=True) and asked.ends
    assert requests.reason(asked, Gathered()) == "the file stop in the run folder"
    requests.fulfilled(asked)
    assert requests.check() == NO_REQUESTS


def test_a_run_ends_while_a_step_and_a_checkpoint_still_fit_into_its_batch_job():
    clock = [1000.0]
    requests = Requests(StopSignals(), end_time=2000.0, now=lambda: clock[0])
    requests.longest_step, requests.longest_save = 100.0, 50.0
    clock[0] = 2000.0 - MARGIN_SECONDS - 300.0
    assert not requests.check().ends
    clock[0] += 1
    assert requests.check() == StepRequests(interrupt=True)
    assert requests.reason(StepRequests(interrupt=True), Gathered()) == "the end of the batch job"


@given(days=st.integers(0, 30), hours=st.integers(0, 23), minutes=st.integers(0, 59), seconds=st.integers(0, 59))
def test_times_as_slurm_writes_them(days, hours, minutes, seconds):
    whole = 86400 * days + 3600 * hours + 60 * minutes + seconds
    text = f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
    assert parse_slurm_seconds(text) == whole
    assert parse_slurm_seconds(text.partition("-")[2]) == whole - 86400 * days
    assert parse_slurm_seconds(f"{minutes}:{seconds:02}") == 60 * minutes + seconds


def test_the_end_of_a_batch_job_is_known_from_variables_or_from_slurm(monkeypatch, tmp_path):
    for name in ("HPCTRAIN_END_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    assert end_of_batch_job() is None
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho UNLIMITED\n")
    squeue.chmod(squeue.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert end_of_batch_job() is None
    squeue.write_text("#!/bin/sh\necho 1:00\n")
    monkeypatch.setattr("time.time", lambda: 5.0)
    assert end_of_batch_job() == 65.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "12")
    assert end_of_batch_job() == 12.0


def test_the_loss_of_a_rank_is_not_taken_for_a_checkpoint_that_failed():
    def finish():
        raise RankLossError("rank 1 was killed", is_dead=True)

    said = []
    saver = SimpleNamespace(finish=finish, copies=None)
    schedule = CheckpointSchedule(saver, Checkpoint(), said.append, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RankLossError):
        schedule.end()
    assert not said
