"""Tests of whole commands, started as a person would: `mpirun -n N hpctrain ...`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.started import BIN, SMALL_MODEL, Finished

JOB = f"""
{SMALL_MODEL}
[data]
tokens = "tokens.h5"
sequence_length = 32
[train]
steps = 6
global_batch = 8
learning_rate = 1e-2
dtype = "fp32"
validate_every = 3
validation_sequences = 8
"""


@pytest.fixture(scope="session")
def hpctrain(warm_start):
    """Run `hpctrain ARGS` on a number of ranks (0: without mpirun) in a folder. `cold` imports everything anew."""

    def run(*args: str, ranks: int = 0, cwd: Path, timeout_seconds: float = 240, cold: bool = False, environment=None):
        command = [*([str(BIN / "hpctrain")] if cold else warm_start), *map(str, args)]
        if ranks:
            command = [str(BIN / "mpirun"), "-n", str(ranks), *command]
        env = os.environ | (environment or {})
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_seconds, env=env)
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, hpctrain) -> Path:
    """A folder with a corpus, its token file and a job."""
    path = tmp_path_factory.mktemp("work")
    text = path / "text"
    text.mkdir()
    for i in range(40):
        lines = [f"def function_{i}_{j}(value):\n    return value + {j}\n" for j in range(40)]
        (text / f"module_{i}.py").write_text("\n".join(lines))
    (path / "job.toml").write_text(JOB)
    assert hpctrain("prepare", "text", "--out", "tokens.h5", cwd=path).code == 0
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, prepared) -> Path:
    """A copy of that for the tests of one file: runs of other files may have the same names."""
    return Path(shutil.copytree(prepared, tmp_path_factory.mktemp("runs") / "work"))
