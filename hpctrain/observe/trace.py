"""Writes what every rank did and when: spans of instructions, items, waits and lanes, as a file that Perfetto opens.

trace.json           all ranks' spans in Chrome's trace format: a process for each rank, in it one thread for what the
                     rank computes (steps, instructions, items, and what it waits for in them) and one for each lane.
                     After a change of plans it is in the folder of the new leg
trace-summary.json   for each axis how long it communicated, and how much of that was hidden
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.comm.topology import Place
from hpctrain.observe.folder.schema import TRACE_SUMMARY, SavedTraceSummary
from hpctrain.observe.folder.spans import OVERLAPPED, WAITED, Observed, Observer, Span, mean_by_axis, sums_by_axis
from hpctrain.observe.text_tables import table, text_of

TRACE = "trace.json"
COMPUTE = "compute"
"""The thread of what a rank computes, and of what it waits for."""
MAX_SPANS = 2_000_000
"""Of all ranks together: some 300 MB; viewers open no larger trace."""


class RunTrace(Observer):
    """The trace of the first steps of a run, as one rank sees it."""

    def __init__(self, observed: Observed, num_steps: int):
        self._observed = observed
        self._num_steps, self._steps_left = 0, num_steps
        self._spans: list[Span] = []
        self._is_done = False

    def step_is_done(self, seconds: float) -> str | None:
        """Count a step; after the last that is traced write the files, and return on rank 0 the text for people.

        Fewer steps are traced than were asked for where they have too many spans for a file.
        """
        if self._is_done:
            return None
        world = self._observed.world
        self._spans += self._observed.recorder.spans
        self._num_steps, self._steps_left = self._num_steps + 1, self._steps_left - 1
        if self._num_steps == 1:  # the others will have as many
            spans = int(world.largest(len(self._spans))) * world.size
            self._steps_left = min(self._steps_left, MAX_SPANS // max(1, spans) - 1)
        return self.finish() if self._steps_left <= 0 else None

    def finish(self) -> str | None:
        """Write what was not written; return on rank 0 the text for people."""
        if self._is_done or not self._num_steps:
            return None
        self._is_done, world, files = True, self._observed.world, self._observed.files
        spans, self._spans = self._spans, []
        seconds = self._observed.clock(min((span.begin for span in spans), default=float("inf")))
        own = [s._replace(name=str(s.name), begin=seconds(s.begin), end=seconds(s.end)) for s in spans]
        ranks = world.gather_objects(own)
        if not ranks:
            return None
        summary, folder = (
            summarise(ranks, self._num_steps),
            files.leg_path if self._observed.is_continued else files.path,
        )
        path = folder / TRACE
        files.write(TRACE_SUMMARY, summary, indent=1)
        is_written = files.attempt(path, lambda: write_chrome(path, ranks, world.topology.places))
        return format_summary(summary) + f"\ntrace {path}: open it at ui.perfetto.dev" * is_written


def write_chrome(path: Path, ranks: Sequence[Sequence[Span]], places: Sequence[Place]) -> None:
    """Write the spans of all ranks in Chrome's trace event format, as "complete events" in microseconds.

    Times are rounded to nanoseconds before they are subtracted, so that what was inside another span still is. The file
    is there whole or not at all. Raises OSError.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # what is there may be a pipe
    separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'
    with partial.open("x") as file:
        for rank, (spans, place) in enumerate(zip(ranks, places, strict=True)):
            for event in _events(rank, spans, place):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")
    partial.replace(path)


def _events(rank: int, spans: Sequence[Span], place: Place) -> Iterator[dict]:
    lanes = [COMPUTE, *sorted({span.lane for span in spans if span.kind == OVERLAPPED})]
    label = f"rank {rank} ({place.family} on {place.host})"
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": label}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for number, lane in enumerate(lanes):
        name = lane if lane == COMPUTE else f"lane {lane}"
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
    # Of spans that begin together the longer one is around the other.
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        begin, end = round(span.begin * 1e9), round(span.end * 1e9)
        name = f"{span.group} {span.name}" if span.group else span.name
        event = {
            "ph": "X",
            "pid": rank,
            "tid": lanes.index(span.lane) if span.kind == OVERLAPPED else 0,
            "cat": span.kind,
        }
        event |= {"name": f"wait for {name}" if span.kind == WAITED else name}
        event |= {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        yield event | ({"args": {"bytes": span.num_bytes}} if span.num_bytes else {})


def summarise(ranks: Sequence[Sequence[Span]], num_steps: int) -> SavedTraceSummary:
    """Return what each axis took in one step: means over the ranks that have the axis, and all of them by rank."""
    sums = [sums_by_axis(spans, num_steps) for spans in ranks]
    axes = mean_by_axis(sums)
    by_rank = {axis: {rank: own[axis] for rank, own in enumerate(sums) if axis in own} for axis in axes}
    return {"steps": num_steps, "axes": axes, "ranks": by_rank}


def format_summary(summary: SavedTraceSummary) -> str:
    """Return the summary for people."""
    if not summary["axes"]:
        return "nothing is communicated"
    keys = ("communication_seconds", "hidden_seconds", "exposed_seconds")
    names = [key.removesuffix("_seconds") for key in keys]
    rows = table("axis", *names, numbers=names)
    for axis, seconds in summary["axes"].items():
        rows.add_row(axis, *(f"{seconds[key] * 1e3:.2f}" for key in keys))
    return (
        f"ms of a rank in one step, mean of {summary['steps']}\n{text_of(rows)}\n"
        "exposed includes waiting: for slower ranks, and in a pipeline for neighbours' results"
    )
