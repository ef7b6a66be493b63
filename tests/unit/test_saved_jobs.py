"""Checkpoints outlive versions: a job that this one does not know is refused with the key."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.checkpoint.state import read_job
from hpctrain.config.errors import CheckpointError
from hpctrain.config.job import load_job


def test_a_saved_job_of_another_version_is_refused_with_its_key():
    saved = json.loads(load_job("tiny", ["model.vocab_size=100"]).model_dump_json())
    index = SimpleNamespace(path=Path("runs/a/checkpoints/step-00000003"), about={"job": json.dumps(saved)})
    assert read_job(index).model.vocab_size == 100
    saved["observe"]["timeout_seconds"] = 3.0
    index.about["job"] = json.dumps(saved)
    with pytest.raises(CheckpointError, match=r"step-00000003: was written by another version .*timeout_seconds"):
        read_job(index)
