"""The program in docs/checkpoints.md that reads a checkpoint without hpctrain, run as it is there."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.folder import latest_checkpoint
from tests.checkpoints import write_checkpoint

PAGE = Path(__file__).parents[3] / "docs/checkpoints.md"
NAME = "model/embedding.weight"


@pytest.fixture
def program(tmp_path):
    (text,) = [each for each in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "zlib" in each]
    assert len([line for line in text.splitlines() if line]) <= 20 and "hpctrain" not in text
    path = tmp_path / "read.py"
    path.write_text(text)
    return path


def run(program, checkpoint) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, program, checkpoint, NAME], capture_output=True, text=True, cwd=program.parent
    )


def test_the_program_reads_a_tensor_and_refuses_damage(program, tmp_path):
    tensor = write_checkpoint(tmp_path / "run", 7)[NAME]
    path = latest_checkpoint(tmp_path / "run")
    assert path is not None
    done = run(program, path)
    step, total = done.stdout.split()[0], float(done.stdout.split()[-1])
    assert (step, total) == ("7", pytest.approx(tensor.sum(dtype="f8"))), done.stderr
    rng = np.random.default_rng(0)
    for name in ("manifest.json", "blocks.bin", "index.h5", "plan.toml", "part-00000.h5", "part-00001.h5"):
        data = (path / name).read_bytes()
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1
        (path / name).write_bytes(damaged)
        done = run(program, path)
        assert done.returncode == 1 and f"{name} is damaged" in done.stderr, (name, done.stderr)
        (path / name).write_bytes(data)
