"""Records what one rank does in a step as spans of time. All figures of times and traffic are sums over spans.
Observers of a run read them after each step.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.comm.probe.clocks import clock_offset
from hpctrain.comm.progress.instruments import Tracer
from hpctrain.observe.folder.run_folder import RunFolder
from hpctrain.observe.folder.schema import SavedAxis
from hpctrain.plan.schedule import COMPUTING, Action, Instruction
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.simulate import EXPOSED as PARTS
from hpctrain.sharding.grid import AXES

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World

# What a span is of, the "category" of Chrome's format.
COMPUTED, EXPOSED, WAITED, OVERLAPPED = "compute", "exposed", "waited", "overlapped"
PART_OF_GROUP = dict.fromkeys(AXES, "tensor") | {"pipeline": "pipeline", "everyone": "pipeline"}
"""Whoever waits for all ranks waits for the slowest pipeline; other groups share weights."""
PART_OF_ACTION = {**dict.fromkeys(COMPUTING, "compute"), Action.UPDATE: "optimizer", Action.REDUCE_GRADIENTS: "data"}
"""Other instructions are of the pipeline."""


class Span(NamedTuple):
    """An event with its begin and its end, in seconds of `time.monotonic`."""

    kind: str
    name: object
    begin: float
    end: float
    group: str = ""
    lane: str = ""
    """The group with its ranks, such as `y 0-3`."""
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class StepRecorder(Tracer):
    """Keeps what one rank does since the last step began. Any thread may report to it."""

    def __init__(self, accelerator: "Accelerator"):
        self.now, self._accelerator = accelerator.now, accelerator
        self.knows_times = accelerator.shares_memory or accelerator.overrun is not None
        """Whether the host knows when something was computed: not of devices that compute while it continues."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what happened so far."""
        self.spans: list[Span] = []
        self.step_spans: list[Span] = []
        """The spans of the step itself, once it is over: what follows, a validation, is no part of it."""
        self._parts: dict[str, float] | None = None

    def computed(self, name: object, since: float) -> None:
        self.spans.append(Span(COMPUTED, name, since, self.now()))
        if isinstance(name, str) and name.startswith("step "):
            self.step_spans = list(self.spans)

    def exposed(self, group: str, lane: str, operation: str, num_bytes: int, since: float) -> None:
        self.spans.append(Span(EXPOSED, operation, since, self.now(), group, lane, num_bytes))

    def waited(self, group: str, operation: str, since: float) -> None:
        self.spans.append(Span(WAITED, operation, since, self.now(), group))

    def overlapped(self, group: str, lane: str, operation: str, num_bytes: int, begin: float, end: float) -> None:
        self.spans.append(Span(OVERLAPPED, operation, begin, end, group, lane, num_bytes))

    def parts(self) -> dict[str, float]:
        """Return the seconds of the step by part, in time of the device; zeros where nobody knows them."""
        if self._parts is None:
            parts: dict[str, float] = {part: 0.0 for part in PARTS}
            alone = 0.0  # of the instruction, in which the rank communicated
            for span in self.step_spans if self.knows_times else ():
                if span.kind in (EXPOSED, WAITED):
                    alone += span.seconds
                    parts[PART_OF_GROUP.get(span.group, "data")] += span.seconds
                elif isinstance(span.name, Instruction):
                    parts[PART_OF_ACTION.get(span.name.action, "pipeline")] += span.seconds - alone
                    alone = 0.0
            self._parts = {part: seconds / self._accelerator.time_scale for part, seconds in parts.items()}
        return self._parts


class Observed(NamedTuple):
    """One rank's view of a run: what its observers look at, and the files that they write on rank 0."""

    world: "World"
    accelerator: "Accelerator"
    recorder: StepRecorder
    plan: Plan
    files: RunFolder
    is_continued: bool = False
    """Whether it is of a leg that continues another one of this start."""

    def clock(self, first: float) -> Callable[[float], float]:
        """Return a function from times of this rank to seconds of its device since the `first` of any rank. All ranks
        must call."""
        offset, scale = clock_offset(self.world), self.accelerator.time_scale
        origin = self.world.smallest(first + offset)
        return lambda time: (time + offset - origin) / scale


class Observer:
    """Watches the steps of a run. All ranks call each method; rank 0 prints what they return."""

    def start(self, steps_done: int) -> str | None:
        """Begin, before the first step of this start."""

    def step_is_done(self, seconds: float) -> str | None:
        """Take note of a step and its seconds, in a rehearsal those of the pretended devices."""

    def finish(self) -> str | None:
        """End, after the last step."""


def sums_by_axis(spans: Sequence[Span], scale: float = 1.0) -> dict[str, SavedAxis]:
    """Return for each axis the seconds that a rank communicated, those of them that were exposed, and the rest: hidden.

    Exposed is the time in which a rank did nothing else: blocking operations, in which it waits for slower ranks too,
    and waits for lanes. The pipeline's includes the wait for neighbours' results. That is no communication, so it may
    be more than there is to hide. Seconds and bytes are divided by `scale`.
    """
    sums: dict[str, list[float]] = {}
    for span in spans:
        if span.kind != COMPUTED:
            axis = sums.setdefault(span.group, [0.0, 0.0, 0.0])
            axis[0] += span.seconds / scale if span.kind != WAITED else 0.0
            axis[1] += span.seconds / scale if span.kind != OVERLAPPED else 0.0
            axis[2] += span.num_bytes / scale
    return {
        axis: {
            "communication_seconds": moving,
            "hidden_seconds": max(0.0, moving - alone),
            "exposed_seconds": alone,
            "tensor_bytes": num_bytes,
        }
        for axis, (moving, alone, num_bytes) in sums.items()
    }


def mean_by_axis(ranks: Sequence[Mapping[str, SavedAxis]]) -> dict[str, SavedAxis]:
    """Return the means of `sums_by_axis` over the ranks that have the axis."""
    having = {axis: [rank[axis] for rank in ranks if axis in rank] for axis in sorted(set().union(*ranks))}
    keys = SavedAxis.__annotations__
    return {axis: SavedAxis(**{key: fmean(rank[key] for rank in of) for key in keys}) for axis, of in having.items()}
