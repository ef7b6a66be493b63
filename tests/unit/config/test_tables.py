"""Files of people: an unknown key is reported wherever it is. What we write is TOML, whatever text is in it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.errors import JobError
from hpctrain.config.job import Checkpoint, Comm, Data, Job, Model, Observe, dump_job, load_job
from hpctrain.config.kernels import KernelChoice
from hpctrain.config.other_names import OTHER_NAMES, UNSUPPORTED
from hpctrain.config.parallelism import PlanRequest, TensorSizes
from hpctrain.config.tables import parse_toml, toml_comment, toml_key, toml_value
from hpctrain.config.training.train import Train
from hpctrain.plan.file import dump_plan, parse_plan
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.intervals import Interval

SECTIONS = {
    "": Job,
    "model": Model,
    "data": Data,
    "train": Train,
    "plan": PlanRequest,
    "plan.tensor": TensorSizes,
    "checkpoint": Checkpoint,
    "comm": Comm,
    "kernels": KernelChoice,
    "observe": Observe,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_of_every_section_is_reported(section):
    known = list(SECTIONS[section].model_fields)[-1]
    key = f"{section}.{known}{known[-1]}".lstrip(".")
    with pytest.raises(JobError) as caught:
        load_job("tiny", [f"{key}=1"])
    assert str(caught.value).startswith(f"--set: {key}: unknown key; did you mean '{known}'?")


@pytest.mark.parametrize(("key", "instead"), sorted(OTHER_NAMES.items()))
def test_a_key_of_other_trainers_is_answered_by_what_is_set_here(key, instead):
    section, _, rest = instead.removeprefix("set ").partition(".")
    if section in Job.model_fields:
        assert re.split(r"\W", rest)[0] in SECTIONS[section].model_fields
    else:
        assert instead == UNSUPPORTED or "train.global_batch" in instead
    with pytest.raises(JobError, match=f"plan.{key}: unknown key; {re.escape(instead)}$"):
        load_job("tiny", [f"plan.{key}=1"])


def test_what_should_be_a_section_is_reported():
    with pytest.raises(
        JobError, match=r"tiny.toml: train = 3: must be a section of keys$|--set: train = 3: must be a sec"
    ):
        load_job("tiny", ["train=3"])
    with pytest.raises(JobError, match=r"plan = 'aut': must be a section of keys, or 'auto'$"):
        load_job("tiny", ["plan=aut"])


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
# Of a family: what `check_name` lets through, quotes and backslashes more often than by chance.
NAMES = st.text(st.sampled_from("\"\\'#[]=.") | st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
VALUES = st.recursive(
    ANY_TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(ANY_TEXT, VALUES, ANY_TEXT)
def test_what_is_written_is_read_back(key, value, comment):
    text = "\n".join([*toml_comment(comment), f"{toml_key(key)} = {toml_value(value)}", *toml_comment(comment, 20)])
    assert parse_toml(text, "a test", JobError) == {key: value}


@given(st.lists(NAMES, min_size=2, max_size=2))
def test_plans_of_families_of_any_name_round_trip(names):
    tiles = tuple(Tile(Interval(i, i + 1), Interval(0, 2), (i,), family=name) for i, name in enumerate(names))
    plan = Plan(tiles, 1, 2)
    assert parse_plan(dump_plan(plan), "a test") == plan


def test_a_reason_of_several_lines_is_a_comment():
    text = dump_job(load_job("tiny"), {"prediction": "none: two mistakes:\ntrain.steps = 1"}, None)
    assert parse_toml(text, "a test", JobError)["train"]["steps"] == load_job("tiny").train.steps
    assert "\n# train.steps = 1\n" in text
