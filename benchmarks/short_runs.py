"""Training runs of seconds on a few ranks, for what kills them and what refuses their files."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import commands  # noqa: E402
from benchmarks.commands import ONE_THREAD, command_line  # noqa: E402
from tests.ranks.small_runs import write_tokens  # noqa: E402

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
    words = ["train", "job.toml", "--run", run, "--sample", 0, *arguments]
    return commands.start(command_line(*words, ranks=ranks), folder, subprocess.DEVNULL, err, **ONE_THREAD)


def compare(folder: Path, one: Path, other: Path) -> str:
    """Return what differs between two runs in any bit; nothing: an empty text."""
    same = commands.run(command_line("compare", one, other, "--exact"), folder)
    return "" if same.returncode == 0 else same.stdout[-200:] + same.stderr[-200:]
