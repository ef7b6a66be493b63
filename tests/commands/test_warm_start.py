"""A process that is forked from what is imported ends as one that Python started."""

import subprocess
import sys

import pytest

from tests.warm_start import CODE

THREAD = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('waited for'))).start()"


@pytest.mark.parametrize(
    "program",
    [
        "import sys; print('in a buffer', end=''); sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "import sys; sys.exit()",
        "raise ValueError('a reason')",
        "import atexit; atexit.register(print, 'at exit'); print('before')",
        THREAD,
        "import sys; sys.stdout.write('text'); sys.stdout.flush(); sys.stdout.write('more'); import os; os.close(1)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    ],
)
def test_it_has_the_code_and_the_output_of_a_process_of_its_own(warm_start, program):
    done, expected = (
        subprocess.run([*start, *CODE[1:], program], capture_output=True, text=True)
        for start in ([*warm_start, CODE[0]], [sys.executable])
    )
    assert (done.returncode, done.stdout) == (expected.returncode, expected.stdout)
    assert bool(done.stderr) == bool(expected.stderr)
    assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]
