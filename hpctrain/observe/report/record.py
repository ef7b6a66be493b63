"""Reads a run folder for its report. A file or line without what it needs is left out, and named on the page."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo

from hpctrain.comm.watchdog.diagnosis import Diagnosis, post_mortem
from hpctrain.comm.watchdog.flight import FOLDER, parse_ranks
from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_file import load_cluster
from hpctrain.config.errors import HpctrainError, JobError, describe_os_error
from hpctrain.config.job import Job, load_job
from hpctrain.config.paths import exists, is_file, is_folder, read_bytes
from hpctrain.config.tables import Table
from hpctrain.observe import drift
from hpctrain.observe.live import RANKS
from hpctrain.observe.run import CLUSTER, END, EVENTS, METRICS, PLAN, RESOLVED, START, parse_metrics, read_events
from hpctrain.observe.sample import TIMELINE, TRAFFIC
from hpctrain.plan.file import load_plan
from hpctrain.plan.tiling import Plan
from hpctrain.planner.predictor import Forecast, forecast
from hpctrain.planner.setup import Setup

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Loss = Annotated[float, Field(allow_inf_nan=True)]


def _is_of_the_plan(rank: int, info: ValidationInfo) -> int:
    size: Any = info.context
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is none of the plan's {size}")
    return rank


def _are_of_the_plan(ranks: str, info: ValidationInfo) -> str:
    for rank in parse_ranks(ranks):
        _is_of_the_plan(rank, info)
    return ranks


def _has_all_ranks(column: list, info: ValidationInfo) -> list:
    if len(column) != info.context:
        raise ValueError(f"has {len(column)} ranks, and the plan {info.context}")
    return column


Rank = Annotated[int, AfterValidator(_is_of_the_plan)]
Ranks = Annotated[str, AfterValidator(_are_of_the_plan)]
Column = Annotated[list[NonNegative | None], AfterValidator(_has_all_ranks)]
"""A figure of every rank; None where a device does not know it."""


class SavedTable(Table):
    """A table that may have more keys than a report shows. A default only says that a key may be missing."""

    model_config = ConfigDict(extra="allow")


class SavedSpread(SavedTable):
    max: NonNegative
    max_rank: int


class SavedSlowest(SavedTable):
    rank: int
    computing_seconds: NonNegative
    waiting_seconds: NonNegative
    waits_for: str


class SavedMetrics(SavedTable):
    """A line of metrics.jsonl."""

    step: int
    loss: Loss
    validation_loss: Loss = 0.0
    step_seconds: Positive
    tokens_per_second: Positive
    mfu: Positive = 1.0
    fraction_of_sum: Positive = 1.0
    memory_share: SavedSpread | None = None
    slowest: SavedSlowest | None = None


class SavedYardstick(SavedTable):
    predicted_alone: dict[str, float | None] = Field(default_factory=dict)
    fraction_of_sum: float = 0.0
    speedup_over_best_family: float = 0.0
    speedup_over_even: float = 0.0


class SavedEvent(SavedTable):
    """A line of events.jsonl, with what starts and ends have."""

    time: float
    event: str
    step: int
    text: str
    ranks: int = 0
    planned_again: bool = False
    rehearsed: bool = False
    predicted_seconds: Positive = 1.0
    reasons: dict[str, str] = Field(default_factory=dict)
    stopped_by: str | None = None
    overrun: NonNegative = 0.0
    yardstick: SavedYardstick = Field(default_factory=SavedYardstick)


class SavedGrid(SavedTable):
    rank: Rank
    spans: list[tuple[str, int, int, float, float]]
    """Kind, virtual stage, micro-batch, begin and end of an instruction."""


class SavedTimeline(SavedTable):
    """timeline.json"""

    step: int
    grids: list[SavedGrid] = Field(min_length=1)


class SavedSend(SavedTable):
    """Of traffic.json: what one rank sent to another."""

    sender: Rank = Field(alias="from")
    to: Rank
    tensor_bytes: int


class SavedCollective(SavedTable):
    """Of traffic.json: what a group of ranks moved together."""

    operation: str
    ranks: Ranks
    tensor_bytes: int


class SavedAxis(SavedTable):
    communication_seconds: NonNegative
    hidden_seconds: NonNegative
    exposed_seconds: NonNegative


class SavedTraffic(SavedTable):
    """traffic.json"""

    step: int
    groups: list[SavedSend | SavedCollective]
    axes: dict[str, SavedAxis] = Field(default_factory=dict)


class SavedRanks(SavedTable):
    """ranks.json"""

    step: int
    memory_peak_bytes: Column
    compute_seconds: Column
    tensor_seconds: Column
    pipeline_seconds: Column
    data_seconds: Column
    optimizer_seconds: Column


def read_saved(path: Path, table: type[Table], num_ranks: int, left_out: list[str]) -> dict | None:
    """Return a file of a run folder; None where there is none, or it is damaged, which `left_out` then says."""
    if not exists(path):
        return None
    try:
        return table.model_validate_json(read_bytes(path), context=num_ranks).model_dump(
            by_alias=True, exclude_unset=True
        )
    except OSError as error:
        left_out.append(f"{path.name} cannot be read: {describe_os_error(error)}")
    except ValidationError as error:
        left_out.append(f"{path.name} is damaged or of another version: {_first(error)}")
    return None


def check_lines(name: str, lines: Iterable[dict], table: type[Table], left_out: list[str]) -> list[dict]:
    """Return those lines of a file that are as they should be; `left_out` says which is the first of the others."""
    good, mistakes = [], []
    for number, line in enumerate(lines, 1):
        try:
            good.append(table.model_validate(line).model_dump(exclude_unset=True))
        except ValidationError as error:
            mistakes.append(f"line {number}: {_first(error)}")
    if mistakes:
        left_out.append(
            f"{name}: {len(mistakes):,} lines are damaged or of another version; the first is {mistakes[0]}"
        )
    return good


def _first(error: ValidationError) -> str:
    """Return the first mistake with where it is, such as `grids.0.rank: ...`."""
    mistake = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}"


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds, file by file; what the run did not write is None or empty."""

    path: Path
    name: str
    """What the report calls it; different from those of other runs in it."""
    job: Job
    plan: Plan
    cluster: Cluster
    metrics: list[dict]
    events: list[dict]
    drift: dict | None
    timeline: dict | None
    traffic: dict | None
    ranks: dict | None
    ending: tuple[str, Diagnosis] | None
    """Its last state by its flight records, if it did not end in order."""
    left_out: tuple[str, ...] = ()
    """Files and lines that are damaged or of another version, a sentence for each."""

    @cached_property
    def forecast(self) -> Forecast | None:
        """The step as the simulator predicts it from job, plan and cluster; None where they cannot be predicted."""
        try:
            return forecast(Setup.of_job(self.job), self.plan, self.cluster)
        except HpctrainError:
            return None

    @property
    def start(self) -> dict:
        """The event of the latest start; empty where there is none."""
        return next((event for event in reversed(self.events) if event["event"] == START), {})

    @property
    def end(self) -> dict:
        """The event by which the latest start ended in order; empty where it did not, or has not yet."""
        return self.events[-1] if self.events and self.events[-1]["event"] == END else {}

    @property
    def is_live(self) -> bool:
        """Whether the run still trains."""
        return not self.end and self.ending is not None and self.ending[0].startswith("in flight")

    @property
    def is_rehearsed(self) -> bool:
        return bool(self.start.get("rehearsed"))

    @property
    def yardstick(self) -> dict:
        return self.end.get("yardstick", {})


def read_run(path: Path, name: str) -> RunRecord:
    """Read a run folder. Raises JobError where it is none, and other errors of hpctrain where its files are broken.

    Without what a run measured there still is a report: such a file is left out if it is damaged.
    """
    if not is_folder(path):
        raise JobError(f"{path}: there is no such folder; name one that was given as --run")
    for file in (RESOLVED, PLAN, CLUSTER):
        if not is_file(path / file):
            raise JobError(
                f"{path}: has no {file}, so it is no run folder, or one of an older version; name a folder that was"
                " given as --run"
            )
    plan, left_out = load_plan(path / PLAN), []
    try:
        metrics, mistakes = parse_metrics(path / METRICS)
    except OSError as error:
        metrics, mistakes = [], [f"{path / METRICS} cannot be read: {describe_os_error(error)}"]
    if mistakes:
        left_out.append(mistakes[0] + (f" (and {len(mistakes) - 1:,} lines more)" if mistakes[1:] else ""))
    try:
        compared = drift.read(path)
    except JobError as error:
        compared = None
        left_out.append(str(error))
    size = len(plan.ranks)
    return RunRecord(
        path,
        name,
        load_job(str(path / RESOLVED), say=left_out.append),
        plan,
        load_cluster(path / CLUSTER),
        check_lines(METRICS, metrics, SavedMetrics, left_out),
        check_lines(EVENTS, read_events(path), SavedEvent, left_out),
        compared,
        read_saved(path / TIMELINE, SavedTimeline, size, left_out),
        read_saved(path / TRAFFIC, SavedTraffic, size, left_out),
        read_saved(path / RANKS, SavedRanks, size, left_out),
        post_mortem(path / FOLDER, time.time()),
        tuple(left_out),
    )


def read_runs(paths: list[Path]) -> list[RunRecord]:
    """Read several run folders, with names that distinguish them."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]
