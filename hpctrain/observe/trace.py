"""What every rank did and when: spans of instructions, items, waits and lanes, as one file that Perfetto opens.

trace.json           all ranks' spans in Chrome's trace format: a process for each rank, in it one thread for what the
                     rank computes (steps, instructions, items, and what it waits for in them) and one for each lane
trace-summary.json   for each axis how long it communicated, and how much of that was hidden
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from hpctrain.comm.tracing import Tracer
from hpctrain.config.errors import TrainingError, describe_os_error

if TYPE_CHECKING:
    from hpctrain.comm.accelerators.base import Accelerator
    from hpctrain.comm.world import World

TRACE, SUMMARY = "trace.json", "trace-summary.json"
COMPUTE = "compute"
# Of all ranks together: some 300 MB, more than which viewers do not open.
MOST_SPANS = 2_000_000
# What a span is of, the "category" of Chrome's format.
COMPUTED, EXPOSED, WAITED, OVERLAPPED = "compute", "exposed", "waited", "overlapped"


class Span(NamedTuple):
    """What happened from one time to another, in seconds of `time.monotonic`."""

    kind: str
    name: object
    begin: float
    end: float
    group: str = ""
    lane: str = COMPUTE
    num_bytes: int = 0


class RankTrace(NamedTuple):
    """The spans of one rank, in seconds of the trace."""

    label: str
    spans: list[Span]


class Recording(Tracer):
    """Keeps one rank's spans in memory while it is running."""

    def __init__(self, now: Callable[[], float]):
        self.now = now
        self.spans: list[Span] = []
        self.is_running = False

    def computed(self, name: object, since: float) -> None:
        if self.is_running:
            self.spans.append(Span(COMPUTED, name, since, self.now()))

    def exposed(self, group: str, operation: str, num_bytes: int, since: float) -> None:
        if self.is_running:
            self.spans.append(Span(EXPOSED, operation, since, self.now(), group, COMPUTE, num_bytes))

    def waited(self, group: str, operation: str, since: float) -> None:
        if self.is_running:
            self.spans.append(Span(WAITED, operation, since, self.now(), group))

    def overlapped(self, group: str, lane: str, operation: str, num_bytes: int, begin: float, end: float) -> None:
        if self.is_running:
            self.spans.append(Span(OVERLAPPED, operation, begin, end, group, lane, num_bytes))

    def moved(self, ranks: str, operation: str, num_bytes: int) -> None:
        """Keep nothing: the span has it."""


class RunTrace:
    """The trace of the first steps of a run, as one rank sees it. All ranks must call the same."""

    def __init__(self, world: "World", accelerator: "Accelerator", folder: Path, num_steps: int):
        """Groups of the world that are made from now on are traced."""
        self._world, self._accelerator, self._folder = world, accelerator, folder
        self._num_steps, self._steps_left = 0, num_steps
        self._recording = Recording(accelerator.now)
        world.configure(tracer=self._recording)

    def start(self) -> None:
        self._recording.is_running = True

    def step_is_done(self, seconds: float) -> str | None:
        """Count a step; after the last that is traced write the files, and return on rank 0 what is to be said.

        Fewer steps are traced than were asked for where they have too many spans for a file.
        """
        self._num_steps, self._steps_left = self._num_steps + 1, self._steps_left - 1
        if self._num_steps == 1:  # the others will have as many
            spans = int(self._world.largest(len(self._recording.spans))) * self._world.size
            self._steps_left = min(self._steps_left, MOST_SPANS // max(1, spans) - 1)
        return self.finish() if self._steps_left <= 0 else None

    def finish(self) -> str | None:
        """Write what was not written; return on rank 0 what is to be said.

        Raises TrainingError on all ranks if it cannot be written.
        """
        was_running, self._recording.is_running = self._recording.is_running, False
        if not (was_running and self._num_steps):
            return None
        traces = self._world.gather_objects(self._rank_trace())
        text = None
        with self._world.all_or_none():
            if traces:
                summary = summarise(traces, self._num_steps)
                _write(self._folder, traces, summary)
                text = f"{table(summary)}\ntrace {self._folder / TRACE}: open it at ui.perfetto.dev"
        return text

    def _rank_trace(self) -> RankTrace:
        """Return this rank's spans in seconds of its device from the first of all ranks' on."""
        world, spans = self._world, self._recording.spans
        offset = world.clock_offset()
        first = world.smallest(min((span.begin for span in spans), default=float("inf")) + offset)
        self._recording.spans = []

        def to_local(seconds: float) -> float:
            return (seconds + offset - first) / self._accelerator.time_scale

        kept = [s._replace(name=str(s.name), begin=to_local(s.begin), end=to_local(s.end)) for s in spans]
        return RankTrace(f"{world.place.family} on {world.place.host}", kept)


def _write(folder: Path, traces: Sequence[RankTrace], summary: dict) -> None:
    partial = folder / f"{TRACE}.partial"
    try:
        with partial.open("w") as file:
            write_chrome(file, traces)
        partial.replace(folder / TRACE)
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    except OSError as error:
        raise TrainingError(f"{folder / TRACE}: cannot be written: {describe_os_error(error)}; free space") from None


def write_chrome(file: IO[str], traces: Sequence[RankTrace]) -> None:
    """Write spans in Chrome's trace event format, as "complete events" in microseconds.

    Times are rounded to nanoseconds before they are subtracted, so that what was inside another span still is.
    """
    separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for rank, trace in enumerate(traces):
        for event in _events(rank, trace):
            file.write(separator + json.dumps(event))
            separator = ",\n"
    file.write("\n]}\n")


def _events(rank: int, trace: RankTrace) -> Iterator[dict]:
    lanes = [COMPUTE, *sorted({span.lane for span in trace.spans} - {COMPUTE})]
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank} ({trace.label})"}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for number, lane in enumerate(lanes):
        name = lane if lane == COMPUTE else f"lane {lane}"
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
    # Of spans that begin together the longer one is around the other.
    for span in sorted(trace.spans, key=lambda s: (s.begin, -s.end)):
        begin, end = round(span.begin * 1e9), round(span.end * 1e9)
        name = f"{span.group} {span.name}" if span.group else span.name
        event = {"ph": "X", "pid": rank, "tid": lanes.index(span.lane), "cat": span.kind}
        event |= {"name": f"wait for {name}" if span.kind == WAITED else name}
        event |= {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        yield event | ({"args": {"bytes": span.num_bytes}} if span.num_bytes else {})


def summarise(traces: Sequence[RankTrace], num_steps: int) -> dict:
    """Return for each axis the seconds that a rank communicated, those of them that were exposed, and the rest: hidden.

    Means over the ranks that have the axis, for one step, and all of them by rank. Exposed is what a rank did nothing
    else in: blocking operations, in which it waits for slower ranks too, and waits for lanes. Of the pipeline it is
    also the wait for neighbours' results, which is no communication: it may be more than there is to hide.
    """
    by_axis: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for rank, trace in enumerate(traces):
        for axis, result in _axes_of(trace).items():
            by_axis[axis][rank] = {key: value / num_steps for key, value in result.items()}
    return {
        "steps": num_steps,
        "axes": {
            axis: {key: sum(each[key] for each in ranks.values()) / len(ranks) for key in next(iter(ranks.values()))}
            for axis, ranks in sorted(by_axis.items())
        },
        "ranks": {axis: ranks for axis, ranks in sorted(by_axis.items())},
    }


def _axes_of(trace: RankTrace) -> dict[str, dict[str, float]]:
    """Return of each axis the sums over one rank's spans."""
    moving: dict[str, float] = defaultdict(float)
    alone: dict[str, float] = defaultdict(float)
    num_bytes: dict[str, int] = defaultdict(int)
    for span in trace.spans:
        if span.kind == COMPUTED:
            continue
        seconds = span.end - span.begin
        moving[span.group] += seconds if span.kind != WAITED else 0.0
        alone[span.group] += seconds if span.kind != OVERLAPPED else 0.0
        num_bytes[span.group] += span.num_bytes
    return {
        axis: {
            "communication_seconds": seconds,
            "hidden_seconds": max(0.0, seconds - alone[axis]),
            "exposed_seconds": alone[axis],
            "tensor_bytes": num_bytes[axis],
        }
        for axis, seconds in moving.items()
    }


def table(summary: dict) -> str:
    """Return the summary for people."""
    if not summary["axes"]:
        return "nothing is communicated"
    keys = ("communication", "hidden", "exposed")
    lines = [f"ms of a rank in one step, mean of {summary['steps']}"]
    lines.append(f"  {'':10}" + "".join(f"{key:>15}" for key in keys))
    for axis, each in summary["axes"].items():
        lines.append(f"  {axis:10}" + "".join(f"{each[f'{key}_seconds'] * 1e3:15.2f}" for key in keys))
    return "\n".join(
        [*lines, "  exposed includes waiting: for slower ranks, and in a pipeline for neighbours' results"]
    )
