"""Runs hpctrain's commands in forked children of one warm process, each within limits of time and memory."""

import ctypes
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 5
"""Of a core, that a command may take."""
WALL_SECONDS = 20.0
"""After which a command that sleeps is ended."""
GROWTH_BYTES = 1_000_000_000
"""Of memory, that a command may add to what its warm parent has."""
ROOM_BYTES = 3_000_000_000
"""Of address space: more is refused, so that a command that eats all memory harms nobody."""
FAILED = 70
"""The exit code of an exception that no command caught."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Of its exit, or minus the signal that ended it."""
    out: str
    err: str
    seconds: float
    """Of a core."""
    growth_bytes: int
    is_late: bool


def warm_up() -> None:
    """Import what commands import, so that children begin with it. Raises ImportError where something is missing."""
    import h5py  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import tokenizers  # noqa: F401
    import torch

    import hpctrain.cli
    import hpctrain.comm.probe.machine
    import hpctrain.engine.decode
    import hpctrain.engine.trainer
    import hpctrain.observe.console

    torch.set_num_threads(1)
    for name in hpctrain.cli.COMMANDS:
        hpctrain.cli.root.get_command(None, name)


def hpctrain(arguments: Sequence[str]) -> Callable[[], None]:
    """Return what runs a command line of hpctrain."""

    def run() -> None:
        from hpctrain.cli import main

        sys.argv = ["hpctrain", *arguments]
        main()

    return run


def run_in_child(work: Callable[[], None], folder: Path) -> Ended:
    """Fork, run `work` in a folder within the limits, and return how it ended."""
    out, err = folder / ".out", folder / ".err"
    child = os.fork()
    if child == 0:
        _become(work, folder, out, err)
    start, is_late = time.monotonic(), False
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - start > WALL_SECONDS and not is_late:
            is_late = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    seconds = used.ru_utime + used.ru_stime
    texts = [path.read_bytes()[:200_000].decode(errors="replace") if path.exists() else "" for path in (out, err)]
    growth = used.ru_maxrss * 1024 - _resident_bytes()
    is_late = is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU) or seconds > SECONDS
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return Ended(code, *texts, seconds, growth, is_late)


def _become(work: Callable[[], None], folder: Path, out: Path, err: Path) -> None:
    code = FAILED
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no child outlives the parent
        os.setsid()
        os.chdir(folder)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 1, SECONDS + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        room = _mapped_bytes() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        work()
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1 if request.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _pages(field: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def _mapped_bytes() -> int:
    return _pages(0)


def _resident_bytes() -> int:
    return _pages(1)


def copy(template: Path, names: Sequence[str], folder: Path) -> None:
    """Copy files and folders of a template into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in names:
        source = template / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
