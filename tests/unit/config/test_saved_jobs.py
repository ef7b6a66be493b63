"""Checkpoints outlive versions: keys that are gone are left out, and others that this one does not know are named."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.state import read_job
from hpctrain.config.errors import CheckpointError, JobError, PlanError
from hpctrain.config.job import WRITTEN, dump_job, load_job, save_job
from hpctrain.config.saved import SCHEMA
from hpctrain.config.tables import toml_value
from hpctrain.plan.file import dump_plan, load_plan, parse_plan
from hpctrain.plan.holdings import check_zero
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval


def checkpoint_of(tree: dict):
    return SimpleNamespace(path=Path("step-00000003"), about={"job": json.dumps(tree)})


@pytest.fixture
def saved() -> dict:
    return json.loads(save_job(load_job("tiny", ["model.vocab_size=100"])))


def test_a_job_is_saved_with_its_schema_and_read_without_a_word(saved):
    said = []
    assert saved["schema"] == SCHEMA
    assert read_job(checkpoint_of(saved), said.append) == load_job("tiny", ["model.vocab_size=100"]) and not said
    saved["observe"]["later_key"] = 3.0
    with pytest.raises(CheckpointError, match=r"step-00000003: was written by another version .*later_key"):
        read_job(checkpoint_of(saved))


@pytest.mark.parametrize("number", [SCHEMA + 1, "1", True, -1])
def test_another_schema_is_refused(saved, tmp_path, number):
    with pytest.raises(
        CheckpointError, match=f"step-00000003: is of schema {number!r}, and this hpctrain reads {SCHEMA}"
    ):
        read_job(checkpoint_of(saved | {"schema": number}))
    path, plan = tmp_path / "resolved.toml", even_plan(6, TensorGrid(), 1, 1, 1, 8)
    text = f"schema = {toml_value(number)}"
    path.write_text(dump_job(load_job("tiny"), {}, None).replace(f"schema = {SCHEMA}", text))
    with pytest.raises(JobError, match="resolved.toml: is of schema"):
        load_job(str(path))
    with pytest.raises(PlanError, match="a plan: is of schema"):
        parse_plan(dump_plan(plan).replace(f"schema = {SCHEMA}", text), "a plan")
    assert parse_plan(dump_plan(plan), "a plan") == plan == parse_plan(dump_plan(plan).split("\n", 1)[1], "a plan")


OLD_KEYS = {
    "observe": {"timeout_seconds": 3.0},
    "comm": {"route": "auto", "algorithm": "doubling"},
    "products": {"a": 1},
}
PASSED_OVER = "is of an older version; keys that are gone are passed over: "


def test_what_is_gone_is_passed_over_in_an_older_schema_alone(saved, tmp_path):
    said, job = [], load_job("tiny", ["model.vocab_size=100"])
    older = {key: value for key, value in saved.items() if key != "schema"}
    for section, keys in OLD_KEYS.items():
        older[section] = older.get(section, {}) | keys
    assert read_job(checkpoint_of(older), said.append) == job
    assert len(said) == 1 and said[0].startswith(f"step-00000003: {PASSED_OVER}")
    assert set(said[0].partition("over: ")[2].split(", ")) == {"observe.timeout_seconds", "comm.algorithm", "products"}
    path = tmp_path / "resolved.toml"
    text = dump_job(job, {}, None).replace("[observe]\n", "[observe]\ntimeout_seconds = 3\n")
    path.write_text(text.replace(f"schema = {SCHEMA}\n", ""))
    assert load_job(str(path), say=said.append).model == job.model
    assert said[1:] == [f"{path}: {PASSED_OVER}observe.timeout_seconds"]
    for refused in (text, text.replace(f"schema = {SCHEMA}\n", "").replace(WRITTEN, "# By hand.")):
        path.write_text(refused)
        with pytest.raises(
            JobError, match=r"observe.timeout_seconds: unknown key; did you mean 'step_timeout_seconds'"
        ):
            load_job(str(path))


@pytest.mark.parametrize(("old", "new"), [("activations", "none"), ("all", "optimizer"), ("optimizer", "optimizer")])
def test_offload_of_activations_is_read_as_what_is_left(saved, tmp_path, old, new):
    said, plan = [], even_plan(6, TensorGrid(), 1, 1, 1, 8, offload=new)
    older = saved | {"schema": 1, "plan": {"data": 1, "offload": old}}
    request = read_job(checkpoint_of(older), said.append).plan
    assert request is not None and request.offload == new
    text = dump_plan(plan).replace('offload = "optimizer"\n', "") + f'offload = "{old}"\n'
    in_plan = text.replace(f"schema = {SCHEMA}", "schema = 1")
    assert parse_plan(in_plan, "a plan", said.append) == plan
    lines = [f'offload = "{old}" is gone and is read as "{new}"'] * 2 if old != new else []
    assert [line.partition("; ")[2].removeprefix("plan.") for line in said] == lines
    path = tmp_path / "plan.toml"
    path.write_text(text.partition("\n")[2])
    if old == new:
        assert load_plan(path) == plan
        return
    with pytest.raises(PlanError, match=r"plan.toml: tile.0.offload = .*input should be 'none' or 'optimizer'"):
        load_plan(path)
    with pytest.raises(JobError, match=r"--set: plan.offload = .*input should be 'none' or 'optimizer'"):
        load_job("tiny", ["plan.data=1", f"plan.offload={old}"])
    (tmp_path / "resolved.toml").touch()
    assert load_plan(path, said.append) == plan, "beside a job of a run it is a run's"


def test_an_unknown_key_of_the_model_is_never_passed_over(saved):
    del saved["schema"]
    saved["model"]["experts"] = 8
    with pytest.raises(CheckpointError, match=r"model.experts: unknown key"):
        read_job(checkpoint_of(saved))


def test_tables_within_sections_are_read_back(tmp_path):
    """Sources to mix, a scaling of rotary positions, and where training starts."""
    (tmp_path / "job.toml").write_text(
        '[model]\npreset = "llama-3.2-1b"\n[data]\ntokens = "x.h5"\n[[data.more]]\ntokens = "a b.h5"\nweight = 0.5\n'
        '[train]\nstart_from = "base"\n'
    )
    job = load_job(str(tmp_path / "job.toml"))
    assert job.train.start_from == tmp_path / "base"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.toml").write_text(dump_job(job, {}, "plan.toml"))
    again = load_job(str(tmp_path / "run" / "resolved.toml"))
    assert (again.model, again.data, again.train) == (job.model, job.data, job.train)


def test_zero_2_and_3_over_unlike_grids_are_read_as_1_and_refused_where_typed(tmp_path):
    items, said = Interval(0, 6), []
    alike = [Tile(Interval(6, 10), Interval(2 * i, 2 * i + 2), (i,), zero=2) for i in range(2)]
    unlike = [Tile(items, Interval(0, 2), (2,), zero=3), Tile(items, Interval(2, 4), (3, 4), TensorGrid(y=2), zero=3)]
    plan = Plan((*unlike, *alike), 1, 4)
    older = dump_plan(plan).replace(f"schema = {SCHEMA}", f"schema = {SCHEMA - 1}")
    read = parse_plan(older, "a plan", said.append)
    assert [tile.zero for tile in read.tiles] == [1, 1, 2, 2]
    assert len(said) == 1 and "zero = 3 of tiles [0, 6], whose tensor grids differ, is gone and is read as 1" in said[0]
    path = tmp_path / "plan.toml"
    path.write_text(older.partition("\n")[2])
    with pytest.raises(PlanError, match="tiles 0 and 1 share items but have different tensor grids: TP1 and TP2; make"):
        check_zero(load_plan(path), "a plan")
