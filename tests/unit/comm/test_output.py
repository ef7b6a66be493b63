"""A process that loses its output goes on, says it where it can, and drops what nobody takes."""

import subprocess
import sys

import pytest

from hpctrain.config.errors import HpctrainError

CODE = """
import os, sys
from hpctrain.comm.start.process import keep_output, take_losses
keep_output(True)
for _ in range(3):
    print("x" * 100_000, flush=True)
print("opened as", os.dup(1), "said", len(take_losses()), len(take_losses()), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("redirection", "loss"),
    [
        (">/dev/full", "standard output cannot be written: No space left on device"),
        ("| head -c 1 >/dev/null", "standard output cannot be written: Broken pipe"),
        (">&-", "standard output is closed"),
    ],
)
def test_a_process_without_output_goes_on_and_says_so_once(redirection, loss):
    command = f'{{ "{sys.executable}" -c "$CODE"; echo "code $?" >&2; }} {redirection}'
    done = subprocess.run(["bash", "-c", command], env={"CODE": CODE}, capture_output=True, text=True, timeout=60)
    said, rest, code = done.stderr.splitlines()
    assert said == f"hpctrain: {loss}; training continues, and writes to its run folder"
    assert rest.endswith("said 1 0") and code == "code 0"


def test_a_process_without_any_output_goes_on():
    command = [sys.executable, "-c", CODE]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full, timeout=60).returncode == 0


def test_exit_codes_are_those_of_no_signal_and_no_shell():
    """Raw numbers are MPICH's mpirun's; it joins codes of several ranks by "or", which keeps these above 64."""
    codes = [HpctrainError.exit_code]
    kinds = [HpctrainError]
    while kinds:
        kinds = [child for kind in kinds for child in kind.__subclasses__()]
        codes += [kind.exit_code for kind in kinds]
    sysexits = range(64, 79)
    again = {75, 76}  # EX_TEMPFAIL, which says the same, and the one after it: the same command helps
    assert set(codes) - again == set(range(80, 89))
    assert not set(codes) & {*range(65), *sysexits, *range(124, 256)} - again
