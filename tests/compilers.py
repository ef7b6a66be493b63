"""For tests that compile functions: whether this machine can. What is compiled stays in torch's own folder, so that a
run of the suite compiles what no run before it has compiled."""

import functools

import pytest


@functools.cache
def need_compiler() -> None:
    """Skip the test where nothing compiles."""
    from hpctrain.comm.accelerators.cpu import CpuAccelerator  # which imports torch

    ability = CpuAccelerator().compiles()
    if not ability.works:
        pytest.skip(ability.reason)
