"""Keeps one step of a run for its report: when each instruction ran, and what every group moved.

timeline.json    the instructions of one step, for the first rank of each tensor grid (of many grids: of `MAX_GRIDS`)
traffic.json     what every group of ranks moved in the same step: tensors, not what an algorithm made of them

The step is the third of a start, which pays for nothing that later ones have; of shorter starts it is the last.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from hpctrain.comm.watchdog.flight import parse_ranks
from hpctrain.observe.folder.schema import TIMELINE, TRAFFIC, SavedCollective, SavedGrid, SavedSend
from hpctrain.observe.folder.spans import EXPOSED, OVERLAPPED, Observed, Observer, Span, mean_by_axis, sums_by_axis
from hpctrain.plan.equal_tiles import tile_groups
from hpctrain.plan.schedule import Instruction
from hpctrain.plan.tiling import Plan, Tile

SAMPLED_STEP = 3
"""The step of a start that is kept, counted from 1."""
MAX_GRIDS = 64
"""Tensor grids whose instructions are kept; a picture of more has no space for a line each."""


class StepSample(Observer):
    """Writes the files of one start. All ranks make one before their groups."""

    def __init__(self, observed: Observed, first_step: Callable[[], int]):
        """`first_step` is the number of the first step of this start, asked for when it is over."""
        self._observed, self._first_step, self._num_steps = observed, first_step, 0
        self._kept: list[Span] | None = None

    def step_is_done(self, seconds: float) -> None:
        """Count a step, and write the files after the one that is kept."""
        if self._num_steps < SAMPLED_STEP:
            self._num_steps += 1
            self._kept = self._observed.recorder.step_spans
            if self._num_steps == SAMPLED_STEP:
                self.finish()

    def finish(self) -> None:
        """Write what was not written, of a start that had fewer steps."""
        if self._kept is None:
            return
        world, accelerator, recorder, plan, files, _ = self._observed
        kept, self._kept = self._kept, None
        step = self._first_step() + self._num_steps - 1
        computed = [(span.name, span.begin, span.end) for span in kept if isinstance(span.name, Instruction)]
        seconds = self._observed.clock(min((since for _, since, _ in computed), default=float("inf")))
        own: SavedGrid | None = None
        if recorder.knows_times and world.rank in [tile.ranks[0] for tile in shown_tiles(plan)]:
            spans = [
                (i.action.value, i.virtual_stage, i.microbatch, seconds(begin), seconds(end))
                for i, begin, end in computed
            ]
            own = {"rank": world.rank, "spans": spans}
        grids = world.gather_objects(own)
        traffic = world.gather_objects(_own_traffic(world.rank, kept))
        sums = world.gather_objects(sums_by_axis(kept, accelerator.time_scale))
        if grids:
            groups = [group for groups in traffic for group in groups]
            files.write(TRAFFIC, {"step": step, "groups": groups, "axes": mean_by_axis(sums)})
            if shown := [grid for grid in grids if grid]:
                files.write(TIMELINE, {"step": step, "grids": shown})


def shown_tiles(plan: Plan) -> Sequence[Tile]:
    """Return the first tiles of the tensor grids whose instructions are kept and drawn.

    Of more than `MAX_GRIDS` only the first of equal ones are drawn.
    """
    if len(plan.first_tiles) <= MAX_GRIDS:
        return plan.first_tiles
    return [group.tile for group in tile_groups(plan)[:MAX_GRIDS]]


def _own_traffic(rank: int, spans: Sequence[Span]) -> list[SavedSend | SavedCollective]:
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
            ends = {"from": rank, "to": to}
        elif members[0] == rank:
            ends = {"ranks": ranks}
        else:
            continue
        entry = {"group": group, "operation": operation, **ends}
        result.append(entry | {"tensor_bytes": num_bytes, "calls": calls[label, operation]})
    return result
