"""Training runs of seconds on a few ranks, for what kills them and what refuses their files."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.ranks.small_runs import write_tokens  # noqa: E402
from tests.started import BIN  # noqa: E402

JOB = """
[model]
architecture = "llama"
num_layers = 2
hidden_size = 32
num_heads = 4
max_positions = 32
vocab_size = 64
[data]
tokens = "tokens.bin"
sequence_length = 32
[train]
steps = {steps}
global_batch = 4
dtype = "fp32"
[plan]
data = {ranks}
[checkpoint]
every = 1
"""


def write_job(folder: Path, ranks: int, steps: int) -> None:
    """Write tokens, and a job that saves in every step."""
    write_tokens(folder / "tokens.bin")
    (folder / "job.toml").write_text(JOB.format(steps=steps, ranks=ranks))


def start(folder: Path, run: Path, ranks: int, *arguments: str, err: int = subprocess.DEVNULL) -> subprocess.Popen:
    """Start the job of a folder."""
    command = [BIN / "mpirun", "-n", str(ranks), BIN / "hpctrain", "train", "job.toml", "--run", run, "--sample", "0"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=err,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def compare(folder: Path, one: Path, other: Path) -> str:
    """Return what differs between two runs in any bit; nothing: an empty text."""
    command = [BIN / "hpctrain", "compare", one, other, "--exact"]
    same = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    return "" if same.returncode == 0 else same.stdout[-200:] + same.stderr[-200:]
