"""One step of a run, kept for its report: when each instruction ran, and what every group moved.

timeline.json    the instructions of one step, for the first rank of each tensor grid (of many grids: of `MOST_GRIDS`)
traffic.json     what every group of ranks moved in the same step: tensors, not what an algorithm made of them

The step is the third of a start, which pays for nothing that later ones have; of shorter starts it is the last.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from hpctrain.comm.tracing import UNTRACED, Tracer
from hpctrain.comm.watchdog.flight import parse_ranks
from hpctrain.config.errors import TrainingError, describe_os_error
from hpctrain.plan.schedule import Instruction, Op
from hpctrain.plan.tiling import Plan

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World

TIMELINE, TRAFFIC = "timeline.json", "traffic.json"
SAMPLED_STEP = 3
"""Of a start, counted from 1."""
MOST_GRIDS = 64
"""Whose instructions are kept; a picture of more has no space for a line each."""


class SampledStep(Tracer):
    """Keeps what one rank does in the step that it is in, up to step `SAMPLED_STEP`; passes everything on."""

    def __init__(self, now: Callable[[], float], then: Tracer = UNTRACED):
        self.now, self._then = now, then
        self.is_running = True
        self.spans: list[tuple[Instruction, float, float]] = []
        self.traffic: Counter[tuple[str, str]] = Counter()
        """Bytes by ranks and operation."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self.moving: Counter[str] = Counter()
        """Seconds of communication by axis, overlapped ones too."""
        self.alone: Counter[str] = Counter()
        """Seconds by axis in which the rank did nothing else."""
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """Forget the step before."""
        with self._lock:
            self.spans, self.traffic, self.calls = [], Counter(), Counter()
            self.moving, self.alone = Counter(), Counter()

    def computed(self, name: object, since: float) -> None:
        if self.is_running and isinstance(name, Instruction):
            self.spans.append((name, since, self.now()))
        self._then.computed(name, since)

    def exposed(self, group: str, operation: str, num_bytes: int, since: float) -> None:
        if self.is_running:
            seconds = self.now() - since
            self._spend(group, seconds, seconds)
        self._then.exposed(group, operation, num_bytes, since)

    def waited(self, group: str, operation: str, since: float) -> None:
        if self.is_running:
            self._spend(group, 0.0, self.now() - since)
        self._then.waited(group, operation, since)

    def overlapped(self, group: str, lane: str, operation: str, num_bytes: int, begin: float, end: float) -> None:
        if self.is_running:
            self._spend(group, end - begin, 0.0)
        self._then.overlapped(group, lane, operation, num_bytes, begin, end)

    def _spend(self, group: str, moving: float, alone: float) -> None:
        with self._lock:
            self.moving[group] += moving  # pyright: ignore[reportArgumentType] - seconds
            self.alone[group] += alone  # pyright: ignore[reportArgumentType]

    def moved(self, ranks: str, operation: str, num_bytes: int) -> None:
        if self.is_running:
            with self._lock:
                self.traffic[ranks, operation] += num_bytes
                self.calls[ranks, operation] += 1
        self._then.moved(ranks, operation, num_bytes)


class StepSample:
    """Writes the files of one start. All ranks make one before their groups, and call the same."""

    def __init__(
        self, world: "World", accelerator: "Accelerator", plan: Plan, folder: Path, first_step: Callable[[], int]
    ):
        """`first_step` is the number of the first step of this start, asked for when it is over."""
        self._world, self._accelerator, self._plan, self._folder = world, accelerator, plan, folder
        self._first_step, self._num_steps = first_step, 0
        self._knows_times = accelerator.shares_memory or accelerator.overrun is not None
        self._sampled = SampledStep(accelerator.now, world.tracer)
        world.configure(tracer=self._sampled)

    def start(self) -> None:
        self._sampled.begin_step()

    def step_is_done(self, seconds: float) -> None:
        """Count a step, and write the files after the one that is kept. Raises TrainingError on all ranks."""
        self._num_steps += 1
        if self._num_steps == SAMPLED_STEP:
            self._write()
        elif self._sampled.is_running:
            self._kept = self._state()
            self._sampled.begin_step()

    def finish(self) -> None:
        """Write what was not written, of a start that had fewer steps. Raises TrainingError on all ranks."""
        if self._sampled.is_running and self._num_steps:
            vars(self._sampled).update(self._kept)
            self._write()

    def _state(self) -> dict:
        names = ("spans", "traffic", "calls", "moving", "alone")
        return {name: getattr(self._sampled, name) for name in names}

    def _write(self) -> None:
        world, sampled = self._world, self._sampled
        sampled.is_running = False
        step = self._first_step() + self._num_steps - 1
        spans = self._world.gather_objects(self._spans())
        traffic = world.gather_objects(_entries(world.rank, sampled))
        scale = self._accelerator.time_scale
        axes = world.gather_objects(
            {axis: (sampled.moving[axis] / scale, s / scale) for axis, s in sampled.alone.items()}
        )
        sampled.begin_step()
        with world.all_or_none():
            if spans:
                groups = [group for of_rank in traffic for group in of_rank]
                write_json(self._folder / TRAFFIC, {"step": step, "groups": groups, "axes": mean_of_axes(axes)})
                grids = [each for each in spans if each]
                if grids:
                    write_json(self._folder / TIMELINE, {"step": step, "grids": grids})

    def _spans(self) -> dict | None:
        """Return this rank's instructions in seconds from the beginning of the step, if they are to be kept."""
        world, scale = self._world, self._accelerator.time_scale
        offset = world.clock_offset()
        computed = of_training(self._sampled.spans)
        begin = min((since for _, since, _ in computed), default=float("inf")) + offset
        first = world.smallest(begin)
        kept = [tile.ranks[0] for tile in shown_tiles(self._plan)]
        if not self._knows_times or world.rank not in kept:
            return None
        spans = [
            [i.op.value, i.virtual_stage, i.microbatch, *((at + offset - first) / scale for at in (since, end))]
            for i, since, end in computed
        ]
        return {"rank": world.rank, "spans": spans}


def of_training(spans: Sequence[tuple[Instruction, float, float]]) -> Sequence[tuple[Instruction, float, float]]:
    """Return the instructions up to the update of weights: what comes after it validates."""
    last = max((i for i, (instruction, *_) in enumerate(spans) if instruction.op is Op.UPDATE), default=len(spans) - 1)
    return spans[: last + 1]


def shown_tiles(plan: Plan) -> list:
    """Return the first tiles of the tensor grids whose instructions are kept and drawn.

    Of more than `MOST_GRIDS` these are of equal ones the first.
    """
    if len(plan.first_tiles) <= MOST_GRIDS:
        return list(plan.first_tiles)
    equal = {(tile.items, tile.rows.size, tile.family, tile.tensor): tile for tile in reversed(plan.first_tiles)}
    return sorted(equal.values(), key=plan.first_tiles.index)[:MOST_GRIDS]


def _entries(rank: int, sampled: SampledStep) -> list[dict]:
    """Return what a rank reports of its groups: what it sent, and of collectives those of which it is the first."""
    result = []
    for (label, operation), num_bytes in sampled.traffic.items():
        group, ranks = label.split(" ")[:2]
        members = parse_ranks(ranks)
        if operation == "send":
            to = next(member for member in members if member != rank)
            what = {"from": rank, "to": to}
        elif members[0] == rank:
            what = {"ranks": ranks}
        else:
            continue
        calls = sampled.calls[label, operation]
        result.append({"group": group, "operation": operation, **what, "tensor_bytes": num_bytes, "calls": calls})
    return result


def write_json(path: Path, value: object) -> None:
    """Write a file of a run folder. Raises TrainingError where the disk refuses."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(value) + "\n")
        partial.replace(path)
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written: {describe_os_error(error)}; free space") from None


def mean_of_axes(ranks: Sequence[dict[str, tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Return for each axis the seconds of communication, hidden and exposed: means over the ranks that have it.

    `ranks` are by axis the seconds in which something moved, and in which a rank did nothing else. The exposed ones
    have waits for slower ranks in them, so that they may be more than moved.
    """
    by_axis: dict[str, list[tuple[float, float]]] = {}
    for each in ranks:
        for axis, seconds in each.items():
            by_axis.setdefault(axis, []).append(seconds)
    return {
        axis: {
            "communication_seconds": fmean(moving for moving, _ in each),
            "hidden_seconds": fmean(max(0.0, moving - alone) for moving, alone in each),
            "exposed_seconds": fmean(alone for _, alone in each),
        }
        for axis, each in sorted(by_axis.items())
    }
