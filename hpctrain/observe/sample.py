"""One step of a run, kept for its report: when each instruction ran, and what every group moved.

timeline.json    the instructions of one step, for the first rank of each tensor grid (of many grids: of `MOST_GRIDS`)
traffic.json     what every group of ranks moved in the same step: tensors, not what an algorithm made of them

The step is the third of a start, which pays for nothing that later ones have; of shorter starts it is the last.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpctrain.comm.watchdog.flight import parse_ranks
from hpctrain.observe.recorder import EXPOSED, OVERLAPPED, Span, StepRecorder, mean_by_axis, sums_by_axis
from hpctrain.observe.run import ReportFiles
from hpctrain.plan.schedule import Instruction
from hpctrain.plan.tiling import Plan

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World

TIMELINE, TRAFFIC = "timeline.json", "traffic.json"
SAMPLED_STEP = 3
"""Of a start, counted from 1."""
OF_AXES = ("communication_seconds", "hidden_seconds", "exposed_seconds")
MOST_GRIDS = 64
"""Whose instructions are kept; a picture of more has no space for a line each."""


class StepSample:
    """Writes the files of one start. All ranks make one before their groups, and call the same."""

    def __init__(
        self,
        world: "World",
        accelerator: "Accelerator",
        recorder: StepRecorder,
        plan: Plan,
        files: ReportFiles,
        first_step: Callable[[], int],
    ):
        """`first_step` is the number of the first step of this start, asked for when it is over."""
        self._world, self._accelerator, self._recorder = world, accelerator, recorder
        self._plan, self._files = plan, files
        self._first_step, self._num_steps = first_step, 0
        self._kept: list[Span] | None = None

    def step_is_done(self, seconds: float) -> None:
        """Count a step, and write the files after the one that is kept."""
        if self._num_steps < SAMPLED_STEP:
            self._num_steps += 1
            self._kept = self._recorder.step_spans
            if self._num_steps == SAMPLED_STEP:
                self.finish()

    def finish(self) -> None:
        """Write what was not written, of a start that had fewer steps."""
        if self._kept is None:
            return
        kept, self._kept, world = self._kept, None, self._world
        step = self._first_step() + self._num_steps - 1
        spans = world.gather_objects(self._spans(kept))
        traffic = world.gather_objects(_entries(world.rank, kept))
        sums = world.gather_objects(sums_by_axis(kept, self._accelerator.time_scale))
        if spans:
            groups = [group for of_rank in traffic for group in of_rank]
            axes = {axis: {key: each[key] for key in OF_AXES} for axis, each in mean_by_axis(sums).items()}
            self._files.write(TRAFFIC, {"step": step, "groups": groups, "axes": axes})
            grids = [each for each in spans if each]
            if grids:
                self._files.write(TIMELINE, {"step": step, "grids": grids})

    def _spans(self, spans: Sequence[Span]) -> dict | None:
        """Return this rank's instructions in seconds from the beginning of the step, if they are to be kept."""
        world, scale = self._world, self._accelerator.time_scale
        offset = world.clock_offset()
        computed = [(span.name, span.begin, span.end) for span in spans if isinstance(span.name, Instruction)]
        first = world.smallest(min((since for _, since, _ in computed), default=float("inf")) + offset)
        kept = [tile.ranks[0] for tile in shown_tiles(self._plan)]
        if not self._recorder.knows_times or world.rank not in kept:
            return None
        timeline = [
            [i.op.value, i.virtual_stage, i.microbatch, *((at + offset - first) / scale for at in (since, end))]
            for i, since, end in computed
        ]
        return {"rank": world.rank, "spans": timeline}


def shown_tiles(plan: Plan) -> list:
    """Return the first tiles of the tensor grids whose instructions are kept and drawn.

    Of more than `MOST_GRIDS` these are of equal ones the first.
    """
    if len(plan.first_tiles) <= MOST_GRIDS:
        return list(plan.first_tiles)
    equal = {(tile.items, tile.rows.size, tile.family, tile.tensor): tile for tile in reversed(plan.first_tiles)}
    return sorted(equal.values(), key=plan.first_tiles.index)[:MOST_GRIDS]


def _entries(rank: int, spans: Sequence[Span]) -> list[dict]:
    """Return what a rank reports of its groups: what it sent, and of collectives those of which it is the first."""
    result, traffic, calls = [], Counter(), Counter()
    for span in spans:
        # A message counts when it is given to a lane, not once more when that has sent it.
        if span.kind == EXPOSED or (span.kind == OVERLAPPED and span.name != "send"):
            traffic[span.lane, str(span.name)] += span.num_bytes
            calls[span.lane, str(span.name)] += 1
    for (label, operation), num_bytes in traffic.items():
        group, ranks = label.split(" ")[:2]
        members = parse_ranks(ranks)
        if operation == "send":
            to = next(member for member in members if member != rank)
            what = {"from": rank, "to": to}
        elif members[0] == rank:
            what = {"ranks": ranks}
        else:
            continue
        how = {"tensor_bytes": num_bytes, "calls": calls[label, operation]}
        result.append({"group": group, "operation": operation, **what, **how})
    return result
