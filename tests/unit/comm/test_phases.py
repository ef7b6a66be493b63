"""Each part of a run has its own timeout, and is entered when it begins."""

from types import SimpleNamespace

import pytest

from hpctrain.comm.start.process import StopSignals
from hpctrain.comm.watchdog.flight import PHASE_BYTES
from hpctrain.config.errors import JobError
from hpctrain.config.job import Observe, load_job
from hpctrain.engine.requests import Requests
from hpctrain.engine.step.phases import phases_of
from hpctrain.engine.trainer import Trainer

OBSERVE = Observe(start_timeout_seconds=3, first_step_timeout_seconds=2, step_timeout_seconds=1)


def test_phases_have_the_seconds_and_the_keys_of_the_job():
    phases = phases_of(OBSERVE)
    seconds = {name: phase.seconds for name, phase in phases._asdict().items()}
    assert seconds == {"start": 3, "first_step": 2, "step": 1, "validation": 2, "saving": 3, "end": 3}
    for phase in phases:
        section, key = phase.key.split(".")
        assert section == "observe"
        assert getattr(OBSERVE, key) == phase.seconds
        assert len(phase.name) < PHASE_BYTES
    assert str(phases.saving) == (
        "in saving a checkpoint an operation may take 3 s (raise observe.start_timeout_seconds if it was only slow)"
    )


def test_training_enters_each_phase_before_it_does_what_is_in_it():
    """Steps, with validation after every second and checkpoints after every third of five."""
    done = []
    train = SimpleNamespace(validate_every=2, steps=9, kept_step=None)
    trainer = SimpleNamespace(
        job=SimpleNamespace(observe=OBSERVE, train=train, checkpoint=SimpleNamespace(every=3)),
        _replicas=lambda: None,
        world=SimpleNamespace(enter=lambda phase: done.append(f"[{phase.name}]")),
        steps_done=0,
        validate=lambda sequences: done.append("validate"),
    )

    def step_is_done(metrics, is_due, is_last, others_write):
        done.extend(["save"] * is_due)

    def step(sequences, asked):
        trainer.steps_done += 1
        done.append("step")
        return {}, asked

    trainer.step = step
    saver = SimpleNamespace(is_writing=False, longest_seconds=0.0)
    saves = SimpleNamespace(saver=saver, step_is_done=step_is_done, may_copy=lambda step: False)
    requests = Requests(StopSignals())
    assert Trainer.fit(trainer, None, "sequences", 5, saves, lambda metrics: None, requests) is None
    assert " ".join(done) == (
        "[the first step] step [a training step] step [validation] validate [a training step] step"
        " [saving a checkpoint] save [a training step] step [validation] validate [a training step] step"
        " [saving a checkpoint] save [the end]"
    )


def test_unknown_keys_of_every_section_are_reported():
    for key in ("comm.rout", "comm.link", "plan.tensor.w", "nam", "observe.timeout_seconds"):
        with pytest.raises(JobError, match=f"{key}: unknown key"):
            load_job("tiny", [f"{key}=1"])
