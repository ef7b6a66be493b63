"""The checkpoints of a run: when they are written, the messages about them, and what happens where one fails."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.checkpoint.format import step_folder
from hpctrain.checkpoint.saving import Saver
from hpctrain.config.errors import CheckpointError, HpctrainError, RankLossError
from hpctrain.config.job import Checkpoint
from hpctrain.engine.copies import Copying

SAID_SECONDS = 1.0
"""Seconds of waiting for the last checkpoint above which the wait is printed."""


class CheckpointSchedule:
    """Starts and completes the checkpoints of a run. All ranks create one, and all call each method."""

    def __init__(
        self,
        saver: Saver,
        keys: Checkpoint,
        say: Callable[[str], None],
        latest: Path | None,
        step: int = 0,
        copying: Copying | None = None,
        begins: Callable[[], None] = lambda: None,
        ends: Callable[[int, Path, float], None] = lambda step, checkpoint, seconds: None,
    ):
        """`latest` is the newest checkpoint that the run folder has, `step` the last that is done.

        Copies are made where there is a `copying`.

        All ranks call `begins` before each snapshot, and `ends` with step, path and seconds of each complete one.
        """
        self.saver, self._keys, self._say, self.copying = saver, keys, say, copying
        self.copy_seconds: list[float] = []
        """Seconds that each copy took from training."""
        self._begins, self._ends = begins, ends
        self._state_of = step
        """The step whose state was last written, or read."""
        self.latest = latest
        """The newest complete checkpoint that this run knows of."""

    def may_copy(self, step: int) -> bool:
        """Say whether a copy begins after a step, unless a checkpoint does."""
        is_due = self.copying is not None and step >= self._state_of + self.copying.every
        return is_due and not self.saver.in_flight

    def step_is_done(self, metrics: Mapping, is_due: bool, is_last: bool, others_write: bool) -> None:
        """Continue the checkpoint in flight; start one if `is_due`; wait for it if `is_last`.

        `others_write` says whether any rank was writing one in this step. Raises CheckpointError and CorruptionError on
        all ranks.
        """
        copies = self.may_copy(metrics["step"])
        if self.saver.in_flight and not others_write:
            self._try(self.saver.advance, is_last)
        if is_due:
            self._wait_for_last()
            self._begins()
            self.saver.start(metrics["step"], metrics.get("validation_loss"))
            self._state_of = metrics["step"]
        elif copies and self.copying:
            since, self._state_of = time.monotonic(), metrics["step"]
            self._begins()
            self.saver.start(metrics["step"], copies=self.copying.copies)
            self.copy_seconds.append(time.monotonic() - since)
        if is_last:
            self._try(self.saver.finish, is_last)

    def complete(self) -> None:
        """Wait for the checkpoint in flight; training continues. Raises as `step_is_done`."""
        self._try(self.saver.finish, False)

    def end(self, step: int | None = None) -> Path | None:
        """Complete the checkpoint in flight, and write the state after `step` if it is not there; return the newest.

        Raises CheckpointError and CorruptionError on all ranks.
        """
        try:
            self.complete()
        except RankLossError:
            raise
        except HpctrainError as error:  # the run ends for a reason of its own
            self._say(f"no checkpoint: {error}")
        if step is not None:
            self.saver.check_finite(step)
        if step is not None and (self.latest is None or self.latest.name != step_folder(step)):
            self.step_is_done({"step": step}, is_due=True, is_last=True, others_write=False)
        return self.latest

    def _wait_for_last(self) -> None:
        since = time.monotonic()
        self.complete()
        seconds = time.monotonic() - since
        if seconds > SAID_SECONDS:
            self._say(
                f"training waited {seconds:.1f} s for the last checkpoint, which was still being written; save less"
                " often (checkpoint.every), or to a faster disk"
            )

    def _try(self, work: Callable[[], Path | None], is_last: bool) -> None:
        is_copy, since = self.saver.copies is not None, time.monotonic()
        try:
            checkpoint = work()
            if is_copy:
                self.copy_seconds[-1] += time.monotonic() - since
            elif checkpoint:
                self.latest = checkpoint
                self._ends(self.saver.step, checkpoint, self.saver.seconds)
        except CheckpointError as error:
            if is_copy:
                self.copying = None
                self._say(f"no more copies in the memory of hosts: {error}")
            elif is_last or self._keys.on_error == "stop":
                raise
            else:
                self._say(f"no checkpoint: {error}; training continues, the latest is {self.latest or 'none'}")
