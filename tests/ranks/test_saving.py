"""Saving behind the steps: what is saved is the state of its step; errors reach all ranks; parts by rank and node."""

import errno
import os
import time

import pytest

import hpctrain.checkpoint.saving as saving
from hpctrain.checkpoint.folder import complete_checkpoints, latest_checkpoint
from hpctrain.checkpoint.resume import verify_checkpoint
from hpctrain.config.errors import CheckpointError
from hpctrain.data.order import open_datasets
from hpctrain.engine.requests import EarlyEnd, Requests
from hpctrain.engine.saves import CheckpointSchedule
from tests.ranks.small_runs import make_job, make_trainer, whole

LAYOUT = {"tensor": {"y": 2}, "data": 2}


def job_of(tokens, steps=5, **keys):
    job = make_job(tokens, "llama", LAYOUT, {"num_layers": 2}, steps=steps)
    return job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=keys)})


def fit(world, job, folder, said=None):
    _, training, _ = open_datasets(job.data, job.train.seed)
    trainer = make_trainer(world, job)
    trainer.initialise()
    saves = CheckpointSchedule(
        trainer.saver(folder, {}), job.checkpoint, (said if said is not None else []).append, None
    )
    trainer.fit(training, None, job.train.steps, saves, lambda metrics: None, NoRequests())
    return saves


class NoRequests(Requests):
    def __init__(self):
        from hpctrain.comm.start.process import StopSignals

        super().__init__(StopSignals())


@pytest.mark.timeout(120)
def test_one_save_is_in_flight_and_the_next_waits_for_it(world, tokens, folder, monkeypatch):
    """Rank 1 writes so slowly that training continues for several steps."""
    write = saving.write_stream
    slow = [1.5, 0.0, 0.0, 0.0]
    started = []

    def write_later(*args):
        time.sleep(slow.pop(0) if world.rank == 1 and slow else 0.0)
        return write(*args)

    monkeypatch.setattr(saving, "write_stream", write_later)
    job, said = job_of(tokens, steps=5, every=2, keep=5), []
    start = saving.Saver.start
    monkeypatch.setattr(saving.Saver, "start", lambda self, *args: (started.append(args[0]), start(self, *args)))
    saves = fit(world, job, folder / "five", said)
    world.agree(None)
    assert started == [2, 4, 5]
    assert saves.latest.name == "step-00000005"
    assert [path.name[-1] for path in complete_checkpoints(folder / "five")] == ["2", "4", "5"]
    if world.rank == 0:
        for path in complete_checkpoints(folder / "five"):
            verify_checkpoint(path)
    assert said and all("training waited" in line for line in said)
    world.agree(None)


@pytest.mark.timeout(120)
def test_a_snapshot_is_not_changed_by_later_steps(world, tokens, folder, monkeypatch):
    job = job_of(tokens)
    _, training, _ = open_datasets(job.data, job.train.seed)
    for name, behind in (("a", 0), ("b", 2)):
        trainer = make_trainer(world, job)
        trainer.initialise()
        trainer.step(training)
        saver = trainer.saver(folder / name, {})
        write = saving.write_stream
        monkeypatch.setattr(saving, "write_stream", lambda *args, write=write: (time.sleep(0.3), write(*args))[1])
        saver.start(1)
        for _ in range(behind):
            trainer.step(training)
        assert saver.in_flight
        saver.finish()
        monkeypatch.setattr(saving, "write_stream", write)
    if world.rank == 0:
        a, b = whole(folder / "a"), whole(folder / "b")
        assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []
    world.agree(None)


@pytest.mark.timeout(120)
def test_a_part_of_a_node_has_the_same_numbers(world, tokens, folder):
    for name, more in (("plain", {}), ("other", {"parts": "node"})):
        trainer = make_trainer(world, job_of(tokens, **more))
        trainer.initialise()
        trainer.save(folder / name, {})
    if world.rank == 0:
        a, b = whole(folder / "plain"), whole(folder / "other")
        assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []
        path = latest_checkpoint(folder / "other")
        verify_checkpoint(path)
        assert len(list(path.glob("part-*"))) == 1
    world.agree(None)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_one_rank_that_cannot_write_stops_all_or_none(world, tokens, folder, monkeypatch, on_error):
    write, failing = saving.write_stream, [2, 3]
    state = {"count": 0}

    def full(*args):
        state["count"] += 1
        if world.rank == 1 and state["count"] in failing:
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(saving, "write_stream", full)
    job, said = job_of(tokens, steps=6, every=1, keep=9, on_error=on_error), []
    if on_error == "stop":
        with pytest.raises(CheckpointError, match=r"step-00000002.partial: cannot be written: No space .* are free"):
            fit(world, job, folder, said)
    else:
        fit(world, job, folder, said)
        failures = [line for line in said if "no checkpoint" in line]
        assert len(failures) == 2 and "training continues, the latest is " in failures[0]
    world.agree(None)
    names = [path.name[-1] for path in complete_checkpoints(folder)]
    assert names == (["1"] if on_error == "stop" else ["1", "4", "5", "6"])
    assert not list(folder.glob("checkpoints/*.partial"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_checkpoint_that_fails_before_another_plan_counts_as_any_other(world, tokens, folder, monkeypatch, on_error):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    job, said = job_of(tokens, every=1, on_error=on_error), []
    _, training, _ = open_datasets(job.data, job.train.seed)
    trainer, requests = make_trainer(world, job), NoRequests()
    trainer.initialise()
    requests.is_unbalanced = lambda: True
    saves = CheckpointSchedule(trainer.saver(folder, {}), job.checkpoint, said.append, None)
    monkeypatch.setattr(saving, "write_stream", full)
    what = training, None, job.train.steps, saves, lambda metrics: None, requests, lambda: True
    if on_error == "stop":
        with pytest.raises(CheckpointError, match="No space left"):
            trainer.fit(*what)
    else:
        assert trainer.fit(*what) == EarlyEnd("another plan", continues=True)
        assert len(said) == 1 and "training continues" in said[0]
