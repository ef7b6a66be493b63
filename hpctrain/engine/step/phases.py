"""The parts of a run that the job gives a timeout each."""

from typing import NamedTuple

from hpctrain.comm.waiting import Phase
from hpctrain.config.job import Observe


class Phases(NamedTuple):
    """The phases of a rank, in the order of a run.

    A part of the run that repeats, such as validation, has its own phase, since ranks wait for other things there.
    """

    start: Phase
    first_step: Phase
    step: Phase
    validation: Phase
    """Validation; it has the timeout of a first step, since it runs code that training has not run yet."""
    saving: Phase
    """Saving; it has the timeout of the start, since ranks wait for files of others."""
    end: Phase


def phases_of(observe: Observe) -> Phases:
    """Return the phases of a job, with the keys that people see in reports."""
    keys = {
        "the start": "start_timeout_seconds",
        "the first step": "first_step_timeout_seconds",
        "a training step": "step_timeout_seconds",
        "validation": "first_step_timeout_seconds",
        "saving a checkpoint": "start_timeout_seconds",
        "the end": "start_timeout_seconds",
    }
    return Phases(*(Phase(name, getattr(observe, key), f"observe.{key}") for name, key in keys.items()))
