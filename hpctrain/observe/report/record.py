"""Reads a run folder for its report."""

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpctrain.comm.watchdog.diagnosis import Diagnosis, post_mortem
from hpctrain.comm.watchdog.flight import FOLDER
from hpctrain.config.cluster import Cluster
from hpctrain.config.cluster_file import load_cluster
from hpctrain.config.errors import HpctrainError, JobError
from hpctrain.config.job import Job, load_job
from hpctrain.observe import drift
from hpctrain.observe.events import END, START, read_events
from hpctrain.observe.live import RANKS
from hpctrain.observe.run import CLUSTER, PLAN, RESOLVED, read_metrics
from hpctrain.observe.sample import TIMELINE, TRAFFIC
from hpctrain.observe.trace import SUMMARY
from hpctrain.plan.file import load_plan
from hpctrain.plan.tiling import Plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.timeline import Forecast, forecast


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
    trace: dict | None
    ending: tuple[str, Diagnosis] | None
    """How it stands where it did not end in order, by its flight records."""

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
    def is_rehearsed(self) -> bool:
        return bool(self.start.get("rehearsed"))

    @property
    def yardstick(self) -> dict:
        return self.end.get("yardstick", {})


def read_run(path: Path, name: str) -> RunRecord:
    """Read a run folder. Raises JobError where it is none, and other errors of hpctrain where its files are broken."""
    for file in (RESOLVED, PLAN, CLUSTER):
        if not (path / file).is_file():
            raise JobError(f"{path}: not a run folder with {file}; name the folder that was given as --run")
    return RunRecord(
        path,
        name,
        load_job(str(path / RESOLVED)),
        load_plan(path / PLAN),
        load_cluster(path / CLUSTER),
        read_metrics(path),
        read_events(path),
        drift.read(path),
        _read_json(path / TIMELINE),
        _read_json(path / TRAFFIC),
        _read_json(path / RANKS),
        _read_json(path / SUMMARY),
        post_mortem(path / FOLDER, time.time()),
    )


def read_runs(paths: list[Path]) -> list[RunRecord]:
    """Read several run folders, with names that tell them apart."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
