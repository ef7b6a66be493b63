"""For tests that compile functions: a folder for what is compiled, and whether this machine has a compiler."""

import functools
import os
from pathlib import Path

import pytest

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@functools.cache
def need_compiler(cache: Path) -> None:
    """Keep what is compiled in a folder from now on, unless the environment names one, as tests/run_all.py does.

    Skips the test where nothing compiles.
    """
    from hpctrain.comm.accelerators.cpu import CpuAccelerator  # which imports torch

    os.environ.setdefault(CACHE_VARIABLE, str(cache))
    ability = CpuAccelerator().compiles()
    if not ability.works:
        pytest.skip(ability.reason)
