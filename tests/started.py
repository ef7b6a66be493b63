"""What tests that start whole commands share."""

import sys
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
"""Where `hpctrain` and `mpirun` are."""


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
