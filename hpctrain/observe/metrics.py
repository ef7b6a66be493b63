"""Figures of all ranks for each logged step: collected while ranks continue, written by rank 0.

A line of metrics.jsonl has the figures that all ranks have in common. Of those that differ it has the minimum, the
median and the maximum, with the ranks that have them:

    {"step": 3, "loss": 5.9, ...,
     "compute_seconds": {"min": 2.1, "min_rank": 5, "median": 2.9, "max": 3.0, "max_rank": 0}}
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.observe.folder.schema import SavedExperts, SavedFigures, SavedMetrics, SavedSpread
from hpctrain.observe.folder.spans import Observed
from hpctrain.planner.prediction.simulate import EXPOSED

if TYPE_CHECKING:
    from hpctrain.comm.progress.operation import Operation

OWN_WORK = ("compute", "optimizer")
"""The parts of a step in which a rank waits for no other one."""
FIGURES = ("memory_peak_bytes", "memory_share", *(f"{part}_seconds" for part in EXPOSED))
"""The figures of each rank in a step. The share is the peak over what the device has for the rank; ranks of a host
share its memory evenly. Seconds are NaN where a device computes asynchronously."""


def median(values: np.ndarray) -> float:
    """Return the median, without what the first call of `np.median` loads between two steps: 6 ms."""
    ordered, size = np.sort(values), len(values)
    return float(ordered[(size - 1) // 2] + ordered[size // 2]) / 2


def spread(values: np.ndarray, ranks: Sequence[int]) -> SavedSpread:
    """Return the least, the median and the most of a figure of some ranks, and which ranks have them."""
    least, most = int(np.argmin(values)), int(np.argmax(values))
    low, high = values[least].item(), values[most].item()
    return {"min": low, "min_rank": ranks[least], "median": median(values), "max": high, "max_rank": ranks[most]}


def summarise_ranks(figures: np.ndarray, used: Sequence[int]) -> SavedFigures:
    """Return the figures of all ranks [ranks, figures] as metrics; `used` are the ranks that have work."""
    all_ranks = range(len(figures))
    peak = spread(figures[:, 0].astype(int), all_ranks)
    peak["median"] = int(peak["median"])  # bytes are whole
    summary: SavedFigures = {"memory_peak_bytes": peak, "memory_share": spread(figures[:, 1], all_ranks)}
    parts = figures[list(used), 2:]
    if not len(parts) or np.isnan(parts).any():
        return summary
    by_part = dict(zip(EXPOSED, parts.T, strict=True))
    own = np.sum([by_part[part] for part in OWN_WORK], axis=0)
    waits = {part: by_part[part] for part in EXPOSED if part not in OWN_WORK}
    slowest = int(np.argmax(own))
    summary["compute_seconds"] = spread(by_part["compute"], used)
    summary["waiting_seconds"] = spread(np.sum(list(waits.values()), axis=0), used)
    summary["slowest"] = {
        "rank": used[slowest],
        "computing_seconds": float(own[slowest]),
        "waiting_seconds": float(sum(values[slowest] for values in waits.values())),
        "waits_for": max(waits, key=lambda part: waits[part][slowest]),
    }
    return summary


def add_shares(metrics: SavedMetrics, mfu_seconds: float | None, sum_of_families: float | None) -> None:
    """Add to the metrics of a step what its speed is a share of, as far as that is known.

    `mfu_seconds` is the MFU of a step times its seconds, `sum_of_families` the tokens/s of all that families do alone.
    """
    if mfu_seconds:
        metrics["mfu"] = mfu_seconds / metrics["step_seconds"]
    if sum_of_families:
        metrics["fraction_of_sum"] = metrics["tokens_per_second"] / sum_of_families


class RunMetrics:
    """Collects the figures of logged steps. All ranks make one and call the same."""

    def __init__(self, observed: Observed, write: Callable[[SavedMetrics, np.ndarray, SavedExperts | None], None]):
        """`write` gets each complete line, the figures of all ranks and the load of experts, on rank 0."""
        self._observed, self._write = observed, write
        world, plan = observed.world, observed.plan
        self._used = [rank for tile in plan.first_tiles for rank in tile.ranks]
        self._sharers = world.topology.ranks_on_host(world.rank) if observed.accelerator.shares_memory else 1
        self._pending: deque[tuple[SavedMetrics, SavedExperts | None, Operation]] = deque()
        self.latest: SavedFigures = {}
        """The metrics of the last step whose figures have come, on rank 0."""

    def record(self, metrics: SavedMetrics, experts: SavedExperts | None = None) -> None:
        """Send this rank's figures of the step that has just ended; write those that have come meanwhile.

        The load of `experts` in the same step is given on rank 0, where there are any.
        """
        memory, recorder = self._observed.accelerator.memory(), self._observed.recorder
        parts = recorder.parts().values() if recorder.knows_times else [float("nan")] * len(EXPOSED)
        figures = [memory.peak, memory.peak * self._sharers / memory.total, *parts]
        self._pending.append((metrics.copy(), experts, self._observed.world.gather_numbers(figures)))
        while self._pending and self._pending[0][2].done():
            self._write_first()

    def flush(self) -> None:
        """Write all that was recorded. All ranks must call."""
        while self._pending:
            self._write_first()

    def _write_first(self) -> None:
        metrics, experts, pending = self._pending.popleft()
        figures = pending.wait()
        if self._observed.world.rank == 0:
            self.latest = summarise_ranks(figures, self._used)
            self._write({**metrics, **self.latest}, figures, experts)
