"""Figures of all ranks for each logged step: collected while ranks continue, written by rank 0.

A line of metrics.jsonl has the figures that all ranks have in common. Of those that differ it has the minimum, the
median and the maximum, with the ranks that have them:

    {"step": 3, "loss": 5.9, ...,
     "compute_seconds": {"min": 2.1, "min_rank": 5, "median": 2.9, "max": 3.0, "max_rank": 0}}
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.planner.simulate import EXPOSED

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.waiting import PendingNumbers
    from hpctrain.comm.world import World
    from hpctrain.observe.recorder import StepRecorder

OWN_WORK = ("compute", "optimizer")
"""The parts of a step in which a rank waits for nobody."""


FIGURES = ("memory_peak_bytes", "memory_share", *(f"{part}_seconds" for part in EXPOSED))
"""What each rank says of a step. The share is the peak over what the device has for the rank; a host's memory is shared
evenly. Seconds are not a number where a device computes by itself."""


def median(values: np.ndarray) -> float:
    """Return the median, without what the first call of `np.median` loads between two steps: 6 ms."""
    ordered, size = np.sort(values), len(values)
    return float(ordered[(size - 1) // 2] + ordered[size // 2]) / 2


def spread(values: np.ndarray) -> dict[str, float]:
    """Return the least, the median and the most of a figure by rank, and which ranks have them."""
    least, most = int(np.argmin(values)), int(np.argmax(values))
    return {
        "min": float(values[least]),
        "min_rank": least,
        "median": median(values),
        "max": float(values[most]),
        "max_rank": most,
    }


def summarise_ranks(figures: np.ndarray, used: Sequence[int]) -> dict:
    """Return the figures of all ranks [ranks, figures] as metrics; `used` are the ranks that have work."""
    peak = {name: int(value) for name, value in spread(figures[:, 0]).items()}  # bytes are whole
    summary: dict = {"memory_peak_bytes": peak, "memory_share": spread(figures[:, 1])}
    parts = figures[list(used), 2:]
    if not len(parts) or np.isnan(parts).any():
        return summary
    by_part = dict(zip(EXPOSED, parts.T, strict=True))
    own = np.sum([by_part[part] for part in OWN_WORK], axis=0)
    waits = {part: by_part[part] for part in EXPOSED if part not in OWN_WORK}
    for name, values in (("compute", by_part["compute"]), ("waiting", np.sum(list(waits.values()), axis=0))):
        each = spread(values)
        each |= {key: used[int(each[key])] for key in ("min_rank", "max_rank")}
        summary[f"{name}_seconds"] = each
    slowest = int(np.argmax(own))
    longest = max(waits, key=lambda part: waits[part][slowest])
    summary["slowest"] = {
        "rank": used[slowest],
        "computing_seconds": float(own[slowest]),
        "waiting_seconds": float(sum(values[slowest] for values in waits.values())),
        "waits_for": longest,
    }
    return summary


@dataclass(frozen=True)
class Rates:
    """What turns a step's seconds into shares, on rank 0."""

    mfu_seconds: float | None = None
    """The MFU of a step times its seconds; None where the cluster cannot be predicted."""
    sum_of_families: float | None = None
    """The tokens/s that all families do alone, together; None where there is one family, or one cannot."""

    def of_step(self, step_seconds: float, tokens_per_second: float) -> dict[str, float]:
        shares = {}
        if self.mfu_seconds:
            shares["mfu"] = self.mfu_seconds / step_seconds
        if self.sum_of_families:
            shares["fraction_of_sum"] = tokens_per_second / self.sum_of_families
        return shares


class RunMetrics:
    """Collects the figures of logged steps. All ranks make one and call the same."""

    def __init__(
        self,
        world: "World",
        accelerator: "Accelerator",
        recorder: "StepRecorder",
        used: Sequence[int],
        write: Callable[[dict, np.ndarray], None],
    ):
        """`write` gets each complete line and the figures of all ranks, on rank 0; `used` are the ranks with work."""
        self._world, self._accelerator, self._recorder = world, accelerator, recorder
        self._used, self._write = tuple(used), write
        self._sharers = world.topology.ranks_on_host(world.rank) if accelerator.shares_memory else 1
        self._pending: deque[tuple[dict, PendingNumbers]] = deque()
        self.latest: dict = {}
        """Of the last step whose figures have come, on rank 0."""

    def record(self, metrics: dict) -> None:
        """Send this rank's figures of the step that has just ended; write those that have come meanwhile."""
        self._pending.append((dict(metrics), self._world.gather_numbers(self._figures())))
        while self._pending and self._pending[0][1].done():
            self._write_first()

    def flush(self) -> None:
        """Write all that was recorded. All ranks must call."""
        while self._pending:
            self._write_first()

    def _figures(self) -> list[float]:
        memory, recorder = self._accelerator.memory(), self._recorder
        parts = recorder.parts().values() if recorder.knows_times else [float("nan")] * len(EXPOSED)
        return [memory.peak, memory.peak * self._sharers / memory.total, *parts]

    def _write_first(self) -> None:
        metrics, pending = self._pending.popleft()
        figures = pending.wait()
        if self._world.rank == 0:
            self.latest = metrics | summarise_ranks(figures, self._used)
            self._write(self.latest, figures)
