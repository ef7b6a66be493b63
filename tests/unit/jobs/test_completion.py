"""Shells complete commands, ready jobs and clusters, and the keys of a job."""

import subprocess
import sys

import pytest

from hpctrain.config.parallelism import TensorSizes

CODE = 'import sys; sys.argv[0] = "hpctrain"; from hpctrain.cli import main; main()'


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hpctrain tr", {"plain,train"}),
        ("hpctrain train mix", {"plain,mixed", "plain,mixtral-8x7b", "plain,mixtral-8x22b", "file,mix"}),
        ("hpctrain predict tiny --cluster v", {"plain,v100-t4", "file,v"}),
        ("hpctrain train tiny --set plan.tensor.", {f"plain,plan.tensor.{axis}=" for axis in TensorSizes.model_fields}),
        ("hpctrain train tiny --set search.se", {"plain,search.seconds="}),
    ],
)
def test_what_is_typed_is_completed(monkeypatch, line, offered):
    monkeypatch.setenv("_HPCTRAIN_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == offered, done.stderr
