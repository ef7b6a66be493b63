"""Checkpoints outlive versions: a job that this one does not know is refused with the key."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.state import read_job
from hpctrain.config.errors import CheckpointError
from hpctrain.config.job import dump_job, load_job


def test_a_saved_job_of_another_version_is_refused_with_its_key():
    saved = json.loads(load_job("tiny", ["model.vocab_size=100"]).model_dump_json())
    index = SimpleNamespace(path=Path("runs/a/checkpoints/step-00000003"), about={"job": json.dumps(saved)})
    assert read_job(index).model.vocab_size == 100
    saved["observe"]["timeout_seconds"] = 3.0
    index.about["job"] = json.dumps(saved)
    with pytest.raises(CheckpointError, match=r"step-00000003: was written by another version .*timeout_seconds"):
        read_job(index)


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
