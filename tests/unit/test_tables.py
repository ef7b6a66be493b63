"""Files of people: an unknown key is reported wherever it is, with what it may have meant."""

import pytest

from hpctrain.config.errors import JobError
from hpctrain.config.job import Checkpoint, Comm, Data, Job, Model, Observe, Train, load_job
from hpctrain.config.parallelism import PlanRequest, TensorSizes

SECTIONS = {
    "": Job,
    "model": Model,
    "data": Data,
    "train": Train,
    "plan": PlanRequest,
    "plan.tensor": TensorSizes,
    "checkpoint": Checkpoint,
    "comm": Comm,
    "observe": Observe,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_of_every_section_is_reported(section):
    known = list(SECTIONS[section].model_fields)[-1]
    key = f"{section}.{known}x".lstrip(".")
    with pytest.raises(JobError) as caught:
        load_job("tiny", [f"{key}=1"])
    assert str(caught.value).startswith(f"--set: {key}: unknown key; did you mean '{known}'?")


def test_what_should_be_a_section_is_reported():
    with pytest.raises(
        JobError, match=r"tiny.toml: train = 3: must be a section of keys$|--set: train = 3: must be a sec"
    ):
        load_job("tiny", ["train=3"])
    with pytest.raises(JobError, match=r"plan = 'aut': must be a section of keys, or 'auto'$"):
        load_job("tiny", ["plan=aut"])
