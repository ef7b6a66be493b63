"""What tests that start whole commands share."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
"""Where `hpctrain` and `mpirun` are."""


COMPLAINED = "complained:"
"""What stands before each complaint of a pretended device, in the errors of `tests/pretended_start.py`."""
SMALL_MODEL = """
[model]
architecture = "llama"
num_layers = 2
hidden_size = 32
num_heads = 4
"""
"""The beginning of a job file, for a model that trains in no time."""


@dataclass(frozen=True)
class Finished:
    """What a command said."""

    code: int
    out: str
    err: str


def processes(word: str) -> dict[int, str]:
    """Return the command lines of living processes that have a word in them, by process."""
    result = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and int(path.name) != os.getpid():
            result[int(path.name)] = line
    return result


def ranks_of(word: str) -> list[int]:
    """Return the ranks that were started, not warm, with a word in their command lines."""
    return sorted(pid for pid, line in processes(word).items() if "/bin/python" in line)
