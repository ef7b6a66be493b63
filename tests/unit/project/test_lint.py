"""What ruff and pyright say of the sources: nothing."""

import subprocess

import pytest

from tests.run_all import BIN, LINTERS, ROOT


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", LINTERS, ids=" ".join)
def test_a_linter_has_no_complaint(command):
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
