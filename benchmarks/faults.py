"""Kills, damaged bytes and full disks: what a run and its checkpoints survive, counted.

python -m benchmarks.faults kills --count 100      a rank, all ranks or mpirun, at any moment of a run
python -m benchmarks.faults flips --count 600      single bytes of every file; cut, missing, swapped, mixed, forged ones
python -m benchmarks.faults disk                   disks that are full, read-only, or refuse any call (needs root)
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
from click.testing import CliRunner

from benchmarks.disks import disks
from benchmarks.mutants import NO_FILES
from benchmarks.short_runs import compare, start, write_job
from hpctrain.checkpoint.folder import complete_checkpoints, latest_checkpoint
from hpctrain.checkpoint.format import MANIFEST, seal
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.resume import choose_checkpoint, verify_checkpoint
from hpctrain.config.errors import CheckpointError
from tests.checkpoints import FORGED, write_checkpoint
from tests.ranks.small_runs import Alone

KILLED = ("rank", "all", "mpirun")


# ---- kills ----


def kills(count: int, ranks: int, steps: int, folder: Path, seed: int = 0) -> dict:
    """Kill runs at random moments until there were `count` kills, start each again to its end; return what became."""
    rng = random.Random(seed)
    write_job(folder, ranks, steps)
    reference = folder / "reference"
    since = time.monotonic()
    assert start(folder, reference, ranks).wait() == 0, "the reference run fails"
    whole_seconds = time.monotonic() - since
    result = {"kills": Counter(), "bit_equal": 0, "runs": 0, "litter_in_run": 0, "failures": []}
    number = 0
    before = _segments()
    while sum(result["kills"].values()) < count:
        run = folder / f"run{number}"
        number += 1
        for _ in range(min(8, count - sum(result["kills"].values()))):
            process, who, since = start(folder, run, ranks), rng.choice(KILLED), time.monotonic()
            deadline = since + rng.uniform(0.3, 1.0) * whole_seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if process.poll() is None:
                _kill(process, who, rng)
                result["kills"][who] += 1
            if process.wait() == 0:  # on a busy machine the last one may have taken much longer
                whole_seconds = min(whole_seconds, time.monotonic() - since)
                break
            _wait_for_ranks(run)
        finished = start(folder, run, ranks, err=subprocess.PIPE)
        _, err = finished.communicate()
        difference = compare(folder, reference, run)
        result["runs"] += 1
        result["bit_equal"] += not difference
        if finished.returncode or difference:
            result["failures"].append(f"{run.name}: {err[-300:]} {difference}")
        result["litter_in_run"] += len([*run.rglob("*.partial")])
        shutil.rmtree(run)
    result["segments_left"] = len(_segments()) - len(before)
    return result


def _kill(process: subprocess.Popen, who: str, rng: random.Random) -> None:
    ranks = _descendants(process.pid)
    targets = {"mpirun": [process.pid], "all": [process.pid, *ranks], "rank": [rng.choice(ranks)] if ranks else []}[who]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    """Return the processes below one that are python."""
    result, wanted = [], [pid]
    while wanted:
        parent = wanted.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            wanted += children
            result += [child for child in children if _is_python(child)]
    return result


def _is_python(pid: int) -> bool:
    try:
        return "hpctrain" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _wait_for_ranks(run: Path) -> None:
    """Wait until no rank of a killed run is left."""
    for _ in range(300):
        left = [p for p in Path("/proc").glob("[0-9]*") if str(run).encode() in _command(p)]
        if not left:
            return
        time.sleep(0.1)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def _segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("mpich_shm_*")}


# ---- damage ----


def flips(count: int, folder: Path, seed: int = 0) -> dict:
    """Damage the newest of two checkpoints in many ways; return by kind of damage how many were found."""
    rng = random.Random(seed)
    run = folder / "run"
    older = write_checkpoint(run, 1, seed=1)
    tensors = write_checkpoint(run, 2, seed=2)
    (run / "resolved.toml").write_text("")
    one, two = complete_checkpoints(run)
    files = [*sorted(two.iterdir()), run / "checkpoints" / "latest"]
    keys = ("tried", "verify_found", "inspect_found", "fell_back", "latest_refused", "read_in_silence", "tracebacks")
    result = {
        name: dict.fromkeys(keys, 0) for name in ("flip", "cut", "missing", "no file", "swapped", "mixed", "forged")
    }
    for number in range(count):
        file = files[number % len(files)]
        with _restored(file):
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            _observe(result["flip"], run, two, tensors, older)
    for file in files:
        for size in {0, 1, file.stat().st_size // 2, file.stat().st_size - 1}:
            with _restored(file):
                os.truncate(file, size)
                _observe(result["cut"], run, two, tensors, older)
        with _restored(file):
            file.unlink()
            _observe(result["missing"], run, two, tensors, older)
        for make in NO_FILES.values():
            with _restored(file):
                file.unlink()
                make(file)
                _observe(result["no file"], run, two, tensors, older)
    for file in files[:-1]:
        if file.read_bytes() != (one / file.name).read_bytes():  # what is alike in both may be exchanged
            with _restored(file):
                shutil.copy(one / file.name, file)
                _observe(result["mixed"], run, two, tensors, older)
    for a, b in itertools.combinations(files[:-1], 2):
        with _restored(a), _restored(b):
            data = a.read_bytes()
            a.write_bytes(b.read_bytes())
            b.write_bytes(data)
            _observe(result["swapped"], run, two, tensors, older)
    for change in FORGED.values():
        with _restored(two / MANIFEST):
            contents = json.loads((two / MANIFEST).read_bytes())["contents"]
            change(contents)
            (two / MANIFEST).write_bytes(seal(contents))
            _observe(result["forged"], run, two, tensors, older)
    verify_checkpoint(two)
    return result


@contextmanager
def _restored(file: Path) -> Iterator[None]:
    data = file.read_bytes()
    yield
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def _observe(counts: dict, run: Path, damaged: Path, tensors: dict, older: dict) -> None:
    """Count what every reader makes of the damage."""
    from hpctrain.cli import root

    counts["tried"] += 1
    pointer = _raises(lambda: latest_checkpoint(run), CheckpointError)
    counts["verify_found"] += pointer or _raises(lambda: verify_checkpoint(damaged), CheckpointError)
    said = CliRunner().invoke(root, ["inspect", str(run), "--verify"])
    counts["inspect_found"] += isinstance(said.exception, CheckpointError)
    counts["tracebacks"] += said.exception is not None and not isinstance(said.exception, (CheckpointError, SystemExit))
    counts["latest_refused"] += _raises(lambda: choose_checkpoint(Alone(), run, "latest"), CheckpointError)  # pyright: ignore
    checkpoint, lines = choose_checkpoint(Alone(), run, "auto")  # pyright: ignore[reportArgumentType] - one rank
    if checkpoint is not None and lines:
        expected = older if checkpoint != damaged else tensors
        counts["fell_back"] += _holds(checkpoint, expected)
    counts["read_in_silence"] += not _raises_or_holds(damaged, tensors)


def _holds(path: Path, tensors: dict) -> bool:
    with Index(path) as index:
        names = (name.rpartition("/") for name in tensors)
        return all(np.array_equal(index.whole(kind, name), tensors[f"{kind}/{name}"]) for kind, _, name in names)


def _raises_or_holds(path: Path, tensors: dict) -> bool:
    try:
        return _holds(path, tensors)
    except CheckpointError:
        return True


def _raises(work: Callable, kind: type[Exception]) -> bool:
    try:
        work()
    except kind:
        return True
    return False


# ---- command ----


@click.group()
def command():
    """Count what runs and checkpoints survive."""


@command.command("kills")
@click.option("--count", default=100, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--steps", default=40, show_default=True)
def kills_command(count, ranks, steps):
    """Kill a rank, all ranks or mpirun at any moment, and compare the end with a run that was left alone."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        print(json.dumps(kills(count, ranks, steps, Path(folder)), indent=1))


@command.command("flips")
@click.option("--count", default=600, show_default=True)
def flips_command(count):
    """Damage checkpoints in every way."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        print(json.dumps(flips(count, Path(folder)), indent=1))


@command.command("disk")
def disk_command():
    """Fill the disk at every page of a checkpoint, refuse every call, and both under training."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        print(json.dumps(disks(Path(folder)), indent=1))


if __name__ == "__main__":
    command()
