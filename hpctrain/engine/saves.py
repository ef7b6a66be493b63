"""The checkpoints of a run: when they are written, the messages about them, and what happens where one fails."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.checkpoint.format import step_folder
from hpctrain.checkpoint.saving import Saver
from hpctrain.config.errors import CheckpointError, HpctrainError
from hpctrain.config.job import Checkpoint

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
        begins: Callable[[], None] = lambda: None,
        ends: Callable[[int, Path, float], None] = lambda step, checkpoint, seconds: None,
    ):
        """`latest` is the checkpoint that the run continues from.

        All ranks call `begins` before each snapshot, and `ends` with step, path and seconds of each complete one.
        """
        self.saver, self._keys, self._say = saver, keys, say
        self._begins, self._ends = begins, ends
        self.latest = latest
        """The newest complete checkpoint that this run knows of."""

    def step_is_done(self, metrics: Mapping, is_due: bool, is_last: bool, others_write: bool) -> None:
        """Continue the checkpoint in flight; start one if `is_due`; wait for it if `is_last`.

        `others_write` says whether any rank was writing one in this step. Raises CheckpointError and CorruptionError on
        all ranks.
        """
        if self.saver.in_flight and not others_write:
            self._try(self.saver.advance, is_last)
        if is_due:
            self._wait_for_last()
            self._begins()
            self.saver.start(metrics["step"], metrics.get("validation_loss"))
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
        try:
            if checkpoint := work():
                self.latest = checkpoint
                self._ends(self.saver.step, checkpoint, self.saver.seconds)
        except CheckpointError as error:
            if is_last or self._keys.on_error == "stop":
                raise
            self._say(f"no checkpoint: {error}; training continues, the latest is {self.latest or 'none'}")
