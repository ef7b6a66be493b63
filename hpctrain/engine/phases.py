"""The parts of a run that the job gives a timeout each."""

from dataclasses import dataclass

from hpctrain.comm.waiting import Phase
from hpctrain.config.job import Observe


@dataclass(frozen=True)
class Phases:
    """In the order of a run; what comes back has a phase of its own, for ranks wait for other things there."""

    start: Phase
    first_step: Phase
    step: Phase
    validation: Phase
    """Validation does for the first time what training has not done: it has the time of a first step."""
    saving: Phase
    """Ranks wait for the files of others, as at the start."""
    end: Phase


def phases_of(observe: Observe) -> Phases:
    """Return the phases of a job, with the keys that people see in reports."""
    return Phases(
        start=_phase("the start", observe, "start_timeout_seconds"),
        first_step=_phase("the first step", observe, "first_step_timeout_seconds"),
        step=_phase("a training step", observe, "step_timeout_seconds"),
        validation=_phase("validation", observe, "first_step_timeout_seconds"),
        saving=_phase("saving a checkpoint", observe, "start_timeout_seconds"),
        end=_phase("the end", observe, "start_timeout_seconds"),
    )


def _phase(name: str, observe: Observe, key: str) -> Phase:
    return Phase(name, getattr(observe, key), f"observe.{key}")
