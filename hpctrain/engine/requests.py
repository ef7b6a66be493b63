"""Requests to end, to save or to go on by another plan: a signal, a file in the run folder, the end of its batch job.

Any rank may notice a request. The sums at the end of a step include requests, so all ranks act at the same step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpctrain.comm.start.process import StopSignals
from hpctrain.comm.watchdog.flight import write_ranks
from hpctrain.comm.world import World
from hpctrain.config.errors import InterruptionError

STOP_FILE, SAVE_FILE = "stop", "save"
RESIZE_FILE, NEXT_PLAN_FILE = "resize", "next-plan.toml"
"""A number of ranks, and a plan, by which a run goes on (`hpctrain.engine.start.replan`)."""
MARGIN_SECONDS = 60.0
"""Seconds kept free before the end of a batch job, in addition to two steps and two checkpoints as long as the longest
so far."""


class StepRequests(NamedTuple):
    """The requests of a step. Ranks sum them, so that a request is true where any rank has it."""

    interrupt: bool = False
    """Save, end, and be started again."""
    stop: bool = False
    """Save, and end for good."""
    save: bool = False
    writing: bool = False
    """A checkpoint is being written; all ranks complete it in the first step in which no rank is writing."""
    moves: bool = False
    """Another plan is asked for; the run goes on by it."""

    @property
    def ends(self) -> bool:
        return self.interrupt or self.stop


NO_REQUESTS = StepRequests()


class EarlyEnd(NamedTuple):
    """The reason why a run ended before its last step."""

    by: str
    continues: bool
    """Whether the run is to be started again."""


@dataclass
class Requests:
    """Looks for requests on one rank."""

    signals: StopSignals
    folder: Path | None = None
    """Folder of request files; set on one rank alone."""
    end_time: float | None = None
    """End of the batch job, in seconds since 1970; set on one rank alone."""
    is_unbalanced: Callable[[], bool] = lambda: False
    """Says whether devices were found to have other speeds; asked on one rank alone."""
    now: Callable[[], float] = time.time
    longest_step: float = field(default=0.0, init=False)
    longest_save: float = field(default=0.0, init=False)

    def check(self) -> StepRequests:
        """Return the requests that this rank notices now."""
        has = lambda name: self.folder is not None and (self.folder / name).exists()  # noqa: E731
        moves = has(RESIZE_FILE) or has(NEXT_PLAN_FILE) or self.is_unbalanced()
        interrupt = bool(self.signals.received) or self._is_late()
        return StepRequests(interrupt, has(STOP_FILE), has(SAVE_FILE), moves=moves)

    def reason(self, asked: StepRequests, world: World) -> str:
        """Return, on rank 0, the reason for an end that all ranks agreed on. All ranks must call."""
        received = world.gather_objects(self.signals.received)
        signals = []
        for name in dict.fromkeys(filter(None, received)):
            ranks = [rank for rank, own in enumerate(received) if own == name]
            signals.append(name if 0 in ranks else f"{name} on rank{'s' * (len(ranks) > 1)} {write_ranks(ranks)}")
        if signals:
            return " and ".join(signals)
        return f"the file {STOP_FILE} in the run folder" if asked.stop else "the end of the batch job"

    def fulfilled(self, asked: StepRequests) -> None:
        """Remove the files of fulfilled requests."""
        for name, is_done in ((STOP_FILE, asked.stop), (SAVE_FILE, asked.save or asked.stop)):
            if self.folder is not None and is_done:
                (self.folder / name).unlink(missing_ok=True)

    def _is_late(self) -> bool:
        if self.end_time is None:
            return False
        return self.now() + MARGIN_SECONDS + 2 * (self.longest_step + self.longest_save) > self.end_time


def refuse_if_interrupted(world: World, signals: StopSignals) -> None:
    """End in order before the first step where a rank received a signal. All ranks must call.

    Raises InterruptionError.
    """
    with world.all_or_none():
        if signals.received:
            raise InterruptionError(
                f"stopped by {signals.received} before the first step of this start; no work is undone,"
                " start the same command again"
            )
