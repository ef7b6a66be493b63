"""Checkpoints outlive versions: keys that are gone are left out, and others that this one does not know are named."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.state import read_job
from hpctrain.config.errors import CheckpointError, JobError
from hpctrain.config.job import WRITTEN, dump_job, load_job
from hpctrain.config.removed import REMOVED


def test_a_saved_job_of_another_version_is_refused_with_its_key():
    saved = json.loads(load_job("tiny", ["model.vocab_size=100"]).model_dump_json())
    index = SimpleNamespace(path=Path("runs/a/checkpoints/step-00000003"), about={"job": json.dumps(saved)})
    assert read_job(index).model.vocab_size == 100
    saved["observe"]["later_key"] = 3.0
    index.about["job"] = json.dumps(saved)
    with pytest.raises(CheckpointError, match=r"step-00000003: was written by another version .*later_key"):
        read_job(index)


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_is_gone_is_left_out_of_what_was_written_and_refused_elsewhere(tmp_path, key):
    job = load_job("tiny", ["model.vocab_size=100"])
    saved, said = json.loads(job.model_dump_json()), []
    *sections, last = key.split(".")
    table = saved
    for section in sections:
        table[section] = table[section] or {}
        table = table[section]
    table[last] = {"inside": 1} if not sections else 3.0
    index = SimpleNamespace(path=Path("step-00000003"), about={"job": json.dumps(saved)})
    assert read_job(index, said.append).model == job.model
    assert said == [f"step-00000003: {key} is of an older version and has no effect any more; now: {REMOVED[key]}"]
    path = tmp_path / "resolved.toml"
    path.write_text(dump_job(job, {}, None) + (f"[{key}]\ninside = 1\n" if not sections else ""))
    if sections:
        line = f"[{sections[0]}]\n"
        text = path.read_text() if line in path.read_text() else path.read_text() + line
        path.write_text(text.replace(line, f"{line}{last} = 3\n"))
    assert load_job(str(path), say=said.append).model == job.model
    assert len(said) == 2 and said[1].startswith(f"{path}: {key} is of an older version")
    path.write_text(path.read_text().replace(WRITTEN, "# By hand."))
    with pytest.raises(JobError, match=rf"resolved.toml: {key}: is gone; {REMOVED[key]}"):
        load_job(str(path))


def test_nothing_is_said_of_a_key_that_is_gone_and_was_auto():
    saved, said = json.loads(load_job("tiny", ["model.vocab_size=100"]).model_dump_json()), []
    saved["comm"] |= {"route": "auto", "algorithm": "doubling"}
    read_job(SimpleNamespace(path=Path("step-00000003"), about={"job": json.dumps(saved)}), said.append)
    assert len(said) == 1 and said[0].startswith("step-00000003: comm.algorithm is of an older version")


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
