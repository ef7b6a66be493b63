"""Reads a run folder for its report."""

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpctrain.comm.watchdog.diagnosis import Diagnosis, post_mortem
from hpctrain.comm.watchdog.flight import FOLDER
from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_file import load_cluster
from hpctrain.config.errors import HpctrainError, JobError, describe_os_error
from hpctrain.config.job import Job, load_job
from hpctrain.config.paths import is_file, is_folder
from hpctrain.observe import drift
from hpctrain.observe.events import END, EVENTS, START, read_events
from hpctrain.observe.live import RANKS
from hpctrain.observe.report.saved import (
    SavedEvent,
    SavedMetrics,
    SavedRanks,
    SavedTimeline,
    SavedTraffic,
    check_lines,
    read_saved,
)
from hpctrain.observe.run import CLUSTER, METRICS, PLAN, RESOLVED, parse_metrics
from hpctrain.observe.sample import TIMELINE, TRAFFIC
from hpctrain.plan.file import load_plan
from hpctrain.plan.tiling import Plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.predictor import Forecast, forecast


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
        load_job(str(path / RESOLVED)),
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
