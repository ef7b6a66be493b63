"""Disks that are full, read-only, or refuse a call: what checkpoints and runs survive. Needs root, for mounts."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from benchmarks.short_runs import compare, start, write_job
from hpctrain.checkpoint.folder import CHECKPOINTS, complete_checkpoints, latest_checkpoint, tidy
from hpctrain.checkpoint.resume import verify_checkpoint
from hpctrain.config.errors import CheckpointError
from hpctrain.engine.trainer import Trainer
from tests.ranks.small_runs import Alone, make_job, make_trainer, write_tokens

PAGE = 4096
CALLS = ("open", "pwrite", "ftruncate", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
WRITER = "checkpoint"
"""The thread that writes."""
QUOTA = ("btrfs", "quota")
BTRFS_BYTES = 300_000_000


def disks(folder: Path) -> dict:
    """Return by kind of disk what became of saves and runs."""
    return {
        "full at every page": full_at_every_page(folder),
        "every call refused": {os.strerror(number): every_call(folder, number) for number in ERRORS},
        "training": training_on(folder),
    }


@contextmanager
def _disk(mount: Path) -> Iterator[None]:
    mount.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", mount], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", mount], check=True)


def _used_pages(mount: Path) -> int:
    about = os.statvfs(mount)
    return about.f_blocks - about.f_bfree


def _resize(mount: Path, pages: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={pages * PAGE}", mount], check=True)


def _trainer(folder: Path, keep: int) -> Trainer:
    job = make_job(write_tokens(folder / "tokens.bin"), "llama")
    job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"keep": keep})})
    trainer = make_trainer(Alone(), job)
    trainer.initialise()
    return trainer


def full_at_every_page(folder: Path, every: int = 1) -> dict:
    """Save a second checkpoint on disks that are full after each of its pages, until one is large enough."""
    trainer, mount = _trainer(folder, 2), folder / "disk"
    result: Counter = Counter(tried=0, refused=0, first_stays=0, says_bytes=0, litter=0)
    with _disk(mount):
        trainer.save(mount / "run", {})
        first, pages, trainer.steps_done = latest_checkpoint(mount / "run"), _used_pages(mount), 1
        assert first is not None
        while latest_checkpoint(mount / "run") == first:
            _resize(mount, pages)
            result["tried"] += 1
            try:
                trainer.save(mount / "run", {})
            except CheckpointError as error:
                result["refused"] += 1
                words = (str(mount), "No space left", "bytes are to be written", "are free")
                result["says_bytes"] += all(word in str(error) for word in words)
                verify_checkpoint(first)
                result["first_stays"] += complete_checkpoints(mount / "run") == [first]
            result["litter"] += len(list((mount / "run" / CHECKPOINTS).glob("*.partial")))
            pages += every
        verify_checkpoint(mount / "run" / CHECKPOINTS / "step-00000001")
    return result


def every_call(folder: Path, number: int) -> dict:
    """Refuse each call of a save to the file system, one a save, with an error number."""
    trainer, template, run = _trainer(folder, 1), folder / "template", folder / "tried"
    shutil.rmtree(template, ignore_errors=True)
    trainer.steps_done = 0
    trainer.save(template, {})
    trainer.steps_done = 1
    result: Counter = Counter(calls=0, refused=0, names_path=0, an_intact_latest=0, litter_after_start=0)
    while True:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(template, run)
        with _refusing(result["calls"], number) as was_reached:
            try:
                trainer.save(run, {})
            except CheckpointError as error:
                result["refused"] += 1
                result["names_path"] += str(run) in str(error) and os.strerror(number) in str(error)
        if not was_reached:
            return result
        result["calls"] += 1
        latest = latest_checkpoint(run)
        if latest is not None:
            verify_checkpoint(latest)
            result["an_intact_latest"] += 1
        tidy(run)
        result["litter_after_start"] += len(list(run.rglob("*.partial")))


@contextmanager
def _refusing(position: int, number: int) -> Iterator[list]:
    """Let one call of the writer fail, the one at a position; the list is empty if there were fewer calls."""
    count, reached = [0], []

    def counted(call):
        def refuse(*args, **keys):
            if threading.current_thread().name == WRITER:
                count[0] += 1
                if count[0] == position + 1:
                    reached.append(call.__name__)
                    raise OSError(number, os.strerror(number))
            return call(*args, **keys)

        return refuse

    with mock.patch.multiple(os, **{name: counted(getattr(os, name)) for name in CALLS}):
        yield reached


def training_on(folder: Path, ranks: int = 2, steps: int = 40) -> dict:
    """Train on a spoilt disk, with both choices of checkpoint.on_error; then on the mended one.

    Each result says how many steps were trained, what was said, and whether the mended run is bit-equal to another.
    """
    write_job(folder, ranks, steps)
    reference = folder / "reference"
    assert start(folder, reference, ranks).wait() == 0, "the reference run fails"
    result = {}
    for name, kind in kinds().items():
        for choice in ("stop", "continue"):
            run = folder / f"{name}-{choice}" / "run"
            with kind.disk(run / CHECKPOINTS):
                assert start(folder, run, ranks, "--stop-after", "2").wait() == 0
                complete_before = latest_checkpoint(run)
                if not kind.in_mid_run:
                    kind.spoil(run / CHECKPOINTS)
                process = start(folder, run, ranks, "--set", f"checkpoint.on_error={choice}", err=subprocess.PIPE)
                if kind.in_mid_run:
                    while latest_checkpoint(run) == complete_before:
                        time.sleep(0.01)
                    kind.spoil(run / CHECKPOINTS)
                err = process.communicate()[1]
                latest = latest_checkpoint(run)
                assert latest is not None
                verify_checkpoint(latest)
                about = {
                    "exit_code": process.returncode,
                    "steps_trained": len((run / "metrics.jsonl").read_text().splitlines()),
                    "latest": latest.name,
                    "said": [line for line in err.splitlines() if "cannot be" in line][:1],
                    "traceback": "Traceback" in err,
                }
                kind.mend(run / CHECKPOINTS)
                assert start(folder, run, ranks).wait() == 0, "the mended run fails"
                about["bit_equal_after_mending"] = compare(folder, reference, run) == ""
                result[f"{name}, {choice}"] = about
    return result


@dataclass(frozen=True)
class Kind:
    """A disk of checkpoints, and what becomes of it."""

    disk: Callable[[Path], AbstractContextManager[None]]
    spoil: Callable[[Path], None]
    mend: Callable[[Path], None]
    in_mid_run: bool = False


def kinds() -> dict[str, Kind]:
    """Return the kinds of disks to train on; a real quota needs btrfs-progs and loop devices."""
    result = {
        "full": Kind(_disk, _fill, _mend),
        "read-only": Kind(_disk, _forbid, _mend),
        "read-only in mid-run": Kind(_disk, _forbid, _mend, in_mid_run=True),
    }
    if shutil.which("mkfs.btrfs"):
        result["quota"] = Kind(_disk_with_quotas, _limit, _unlimit)
    else:
        print("no quota is tried: apt-get install btrfs-progs", file=sys.stderr)
    return result


@contextmanager
def _disk_with_quotas(mount: Path) -> Iterator[None]:
    mount.mkdir(parents=True, exist_ok=True)
    image = mount.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(BTRFS_BYTES)
    for command in (["mkfs.btrfs", "-q", image], ["mount", "-o", "loop", image, mount], [*QUOTA, "enable", mount]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        subprocess.run(["umount", mount], check=True)
        image.unlink()


def _limit(mount: Path) -> None:
    subprocess.run(["sync", "-f", mount], check=True)
    shown = subprocess.run(["btrfs", "qgroup", "show", "--raw", mount], check=True, capture_output=True, text=True)
    used = next(int(line.split()[1]) for line in shown.stdout.splitlines() if line.startswith("0/5"))
    subprocess.run(["btrfs", "qgroup", "limit", str(used + 10 * PAGE), mount], check=True)


def _unlimit(mount: Path) -> None:
    subprocess.run(["btrfs", "qgroup", "limit", "none", mount], check=True)


def _mend(mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw,size=64m", mount], check=True)


def _fill(mount: Path) -> None:
    _resize(mount, _used_pages(mount) + 10)


def _forbid(mount: Path) -> None:
    for _ in range(1000):  # refused while a file is open for writing
        if subprocess.run(["mount", "-o", "remount,ro", mount], stderr=subprocess.DEVNULL).returncode == 0:
            return
        time.sleep(0.003)
    raise TimeoutError(f"{mount} stays writable")
