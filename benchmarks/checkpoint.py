"""What checkpoints of a job cost, compared with plain files of the same bytes on the same disk."""

import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from hpctrain.checkpoint.folder import CHECKPOINTS, latest_checkpoint
from hpctrain.checkpoint.state import load, writing
from hpctrain.cli import main
from hpctrain.comm.bind import bind_accelerator
from hpctrain.comm.world import World
from hpctrain.data.order import AnySequences
from hpctrain.engine.requests import StepRequests
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.step.phases import phases_of
from hpctrain.engine.trainer import Trainer
from hpctrain.jobs.arguments import COUNT, PATH, override_option
from hpctrain.jobs.common import load_job_on, started_world

AT_ONCE_BYTES = 8 << 20
"""Of a plain file, in one call."""
SAMPLED_SECONDS = 0.002
STEPS_OF_A_SAVE = 200
"""After so many steps a save is waited for."""


class PeakMemory:
    """Follows the memory of this process that is no file's, as the kernel counts it."""

    def __init__(self):
        self.peak_bytes = self.start_bytes = _anonymous_bytes()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._ends.wait(SAMPLED_SECONDS):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        yield
        self._ends.set()
        self._thread.join()


def _anonymous_bytes() -> int:
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class CheckpointBenchmark:
    """Saves and loads the state of a trainer in a folder. All ranks create one, and all call each method."""

    def __init__(self, world: World, trainer: Trainer, training: AnySequences, folder: Path):
        self._world, self._trainer, self._training, self._folder = world, trainer, training, folder
        self._plain = folder / f"plain-{world.rank:05d}"
        self._saver = trainer.saver(folder, {})
        self._num_bytes = self._saver.own_bytes
        self.state_bytes = sum(world.all_objects(self._num_bytes))
        """Weights and moments of all ranks, each element once."""

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return how long the slowest rank takes for something that all begin together."""
        self._world.agree(None)
        since = time.perf_counter()
        work()
        return self._world.largest(time.perf_counter() - since)

    def memory(self) -> float:
        """Return the most host memory that the first save takes on top, as a share of the state."""
        peak = PeakMemory()
        with peak.watching():
            self._save()
        extra = self._world.gather_objects(peak.peak_bytes - peak.start_bytes)
        return self._world.broadcast_object(sum(extra)) / self.state_bytes

    def files(self, rounds: int) -> dict:
        """Return how fast checkpoints are written and read, and plain files, which alternate with them."""
        plain = torch.ones(self._num_bytes, dtype=torch.uint8)
        written, plainly_written, read, plainly_read, snapshots, copies = [], [], [], [], [], []
        target, stored = torch.ones_like(plain), 0
        for number in range(rounds + 1):
            if number == 1:  # the first is of memory and disk that were never used
                for times in (written, plainly_written, read, plainly_read, snapshots, copies):
                    times.clear()
            copies.append(self._seconds(lambda: target.copy_(plain)))
            self._clear()
            for is_plain in (number % 2 == 0, number % 2 == 1):  # the first of two may see an idle disk
                if is_plain:
                    with writing(self._plain):
                        plainly_written.append(self._seconds(lambda: self._write(plain)))
                else:
                    snapshots.append(self._seconds(lambda: self._saver.start(self._trainer.steps_done)))
                    written.append(self._seconds(self._saver.finish))
            self._forget()
            plainly_read.append(self._seconds(lambda: self._read(target)))
            path = latest_checkpoint(self._folder)
            assert path is not None, "it was just written"
            stored = sum(file.stat().st_size for file in path.iterdir())
            read.append(self._seconds(lambda path=path: load(self._world, path, self._trainer.optimizer.shards)))
        self._clear()
        return {
            "stored_of_state": stored / self.state_bytes,
            "write_bytes_per_second": self.state_bytes / statistics.median(written),
            "plain_write_bytes_per_second": self.state_bytes / statistics.median(plainly_written),
            "write_of_plain": _ratio(plainly_written, written),
            "read_bytes_per_second": self.state_bytes / statistics.median(read),
            "plain_read_bytes_per_second": self.state_bytes / statistics.median(plainly_read),
            "read_of_plain": _ratio(plainly_read, read),
            "snapshot_seconds": statistics.median(snapshots),
            "host_copy_seconds": statistics.median(copies),
            "snapshot_of_copy": _ratio(snapshots, copies),
        }

    def stalls(self, saves: int, steps: int) -> dict:
        """Return how long training waits for saves, and how much slower the steps behind which one is written are."""
        alone, behind, stalls = [], [], []
        for _ in range(saves):
            for _ in range(steps):
                alone.append(self._step())
            stall = self._timed(lambda: self._saver.start(self._trainer.steps_done))
            for _ in range(STEPS_OF_A_SAVE):
                if not self._saver.in_flight:
                    break
                asked_writing = self._step_behind(behind)
                if not asked_writing:
                    stall += self._timed(self._saver.advance)
            stall += self._timed(self._saver.finish)
            stalls.append(stall)
            self._clear()
        step, waited = statistics.median(alone), self._world.largest(statistics.median(stalls))
        return {
            "step_seconds": step,
            "stall_seconds": waited,
            "stall_of_step": waited / step,
            "steps_behind": len(behind) / saves,
            "step_behind_seconds": statistics.median(behind),
            "slower_behind": statistics.median(behind) / step - 1,
        }

    def _step(self) -> float:
        return self._trainer.step(self._training)[0]["step_seconds"]

    def _step_behind(self, seconds: list[float]) -> bool:
        """Train a step and keep its time; return whether any rank was writing."""
        metrics, asked = self._trainer.step(self._training, StepRequests(writing=self._saver.is_writing))
        seconds.append(metrics["step_seconds"])
        return asked.writing

    @staticmethod
    def _timed(work: Callable[[], object]) -> float:
        since = time.perf_counter()
        work()
        return time.perf_counter() - since

    def _save(self) -> None:
        self._saver.start(self._trainer.steps_done)
        self._saver.finish()
        self._clear()

    def _clear(self) -> None:
        """Delete what was written, outside of what is timed."""
        self._world.agree(None)
        self._plain.unlink(missing_ok=True)
        if self._world.rank == 0:
            shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
        self._world.agree(None)

    def _forget(self) -> None:
        """Let the kernel forget the contents of what was written, so that it is read from the disk."""
        for path in (self._plain, *self._folder.rglob("*.h5"), *self._folder.rglob("*.bin")):
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)

    def _write(self, data: torch.Tensor) -> None:
        handle, view = os.open(self._plain, os.O_CREAT | os.O_WRONLY, 0o666), data.numpy().data
        try:
            for start in range(0, len(view), AT_ONCE_BYTES):
                some = view[start : start + AT_ONCE_BYTES]
                while some:
                    some = some[os.write(handle, some) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    def _read(self, target: torch.Tensor) -> None:
        view = target.numpy().data
        with self._plain.open("rb", buffering=0) as file:
            for start in range(0, len(view), AT_ONCE_BYTES):
                some = view[start : start + AT_ONCE_BYTES]
                while some:
                    some = some[file.readinto(some) :]


def _ratio(ones: list[float], others: list[float]) -> float:
    """Return the median over rounds of one time over another of the same round."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


@click.command("benchmarks.checkpoint")
@click.argument("job")
@override_option
@click.option("--folder", type=PATH, default=Path(), help="On the disk to measure, seen by all ranks. Default: here.")
@click.option("--rounds", default=3, show_default=True, type=COUNT, help="Saves and loads that are timed.")
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps timed before each save that they hide.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(job, overrides, folder, rounds, steps, as_json):
    """Save and load the state of JOB on the ranks that were started, and write and read as many bytes plainly.

    \b
    mpirun -n 2 python -m benchmarks.checkpoint tiny --folder /scratch --json

    Both are timed alternately, in one run, in a new folder that is removed. Every file is synced, and read from the
    disk rather than from memory. Ratios are medians over rounds. The folder needs space for twice the state.
    """
    with started_world() as world:
        prepared = prepare_run(world, load_job_on(world, job, overrides))

        with writing(folder / "bench-checkpoint"):
            made = tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) if world.rank == 0 else None
        where = Path(world.broadcast_object(made.name if made else None))
        try:
            trainer = Trainer(world, bind_accelerator(world), prepared.job, prepared.plan)
            trainer.initialise()
            world.enter(phases_of(prepared.job.observe).first_step)
            for _ in range(2):
                trainer.step(prepared.training)
            benchmark = CheckpointBenchmark(world, trainer, prepared.training, where)
            summary = {
                "plan": prepared.plan.describe(),
                "ranks": world.size,
                "state_bytes": benchmark.state_bytes,
                "extra_memory_of_state": benchmark.memory(),
                **benchmark.stalls(rounds, steps),
                **benchmark.files(rounds),
            }
        finally:
            if made:
                made.cleanup()
        if world.rank == 0:
            print(json.dumps(summary) if as_json else "\n".join(f"{k:28} {v}" for k, v in summary.items()), flush=True)


if __name__ == "__main__":
    main(command)
