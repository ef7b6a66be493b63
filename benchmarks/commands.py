"""Starts hpctrain, and modules of the benchmarks, on so many ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent  # not resolved: the interpreter of a virtual environment is a link out of it
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STOP_SECONDS = 5.0
TIMED_OUT = 124
"""The exit code of a command that had no more time, as of `timeout`."""


def command_line(*words: object, ranks: int = 0, module: str = "") -> list[str]:
    """Return the command line of hpctrain, or of a module, on so many ranks; 0: without mpirun."""
    launcher = [BIN / "mpirun", "-n", ranks] if ranks else []
    program = [sys.executable, "-m", module] if module else [BIN / "hpctrain"]
    return [str(word) for word in (*launcher, *program, *words)]


def start(command: Sequence[str], cwd: Path | None = None, stdout=None, stderr=None, **variables: str):
    """Start a command, which imports this checkout, as a process group of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
    )  # fmt: skip


def run(
    command: Sequence[str], cwd: Path | None = None, timeout_seconds: float | None = None, stderr=subprocess.PIPE,
    **variables: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command to its end, or until there is no more time for it; see `TIMED_OUT`."""
    process = start(command, cwd, subprocess.PIPE, stderr, **variables)
    try:
        output = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, TIMED_OUT, *stop(process))
    except BaseException:
        stop(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, *output)


def stop(process: subprocess.Popen) -> tuple[str, str]:
    """End a command and its ranks: SIGTERM first, as mpirun takes its ranks down with it, then SIGKILL to all."""
    for number, grace_seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=grace_seconds)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return process.communicate()


def call(*words: object, ranks: int = 0, cwd: Path | None = None, module: str = "") -> str:
    """Return what a command of hpctrain prints, or a module of the benchmarks; end with it where it fails."""
    command = command_line(*words, ranks=ranks, module=module)
    done = run(command, cwd, stderr=None)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout
