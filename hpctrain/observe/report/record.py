"""Reads a run folder for its report. A file or line without what it needs is left out, and named on the page."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hpctrain.comm.watchdog.diagnosis import Diagnosis, post_mortem
from hpctrain.comm.watchdog.flight import FOLDER
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.errors import HpctrainError, JobError, describe_os_error
from hpctrain.config.job import Job, load_job
from hpctrain.config.paths import is_file, is_folder
from hpctrain.observe.folder import schema
from hpctrain.observe.folder.run_folder import CLUSTER, END, PLAN, RESOLVED, SAVE, START
from hpctrain.observe.report.svg import sourced
from hpctrain.plan.equal_tiles import TileGroup, tile_groups
from hpctrain.plan.file import load_plan
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.forecast import Forecast, forecast
from hpctrain.planner.prices.setup import Setup


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder, file by file; what the run did not write is None or empty."""

    path: Path
    name: str
    """The name in the report; different from those of other runs in it."""
    job: Job
    plan: Plan
    cluster: Cluster
    metrics: list[schema.SavedMetrics]
    events: list[schema.SavedEvent]
    drift: schema.SavedComparison | None
    timeline: schema.SavedTimeline | None
    traffic: schema.SavedTraffic | None
    ranks: schema.SavedRanks | None
    experts: schema.SavedExperts | None
    ending: tuple[str, Diagnosis] | None
    """Its last state by its flight records, if it did not end in order."""
    left_out: list[str] = field(default_factory=list)
    """Files and lines that are damaged or of another version, a sentence for each."""

    @cached_property
    def forecast(self) -> Forecast | None:
        """The step as the simulator predicts it from job, plan and cluster; None where they cannot be predicted."""
        try:
            return forecast(Setup.of_job(self.job), self.plan, self.cluster)
        except HpctrainError:
            return None

    @cached_property
    def groups(self) -> list[TileGroup]:
        return tile_groups(self.plan)

    @property
    def start(self) -> schema.SavedEvent | dict[str, Any]:
        """The event of the latest start; empty where there is none."""
        return next((event for event in reversed(self.events) if event["event"] == START), {})

    @property
    def end(self) -> schema.SavedEvent | dict[str, Any]:
        """The event by which the latest start ended in order; empty where it did not, or has not yet.

        Others may come after it: output that was lost, say.
        """
        last = next((event for event in reversed(self.events) if event["event"] in (START, END)), {})
        return last if last.get("event") == END else {}

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The diagnosis of a run that did not end in order, or has not yet; None of others."""
        return self.ending[1] if self.ending and not self.end else None

    @property
    def saved_step(self) -> int | None:
        """The step of the latest checkpoint; None where there is none."""
        return next((event["step"] for event in reversed(self.events) if event["event"] == SAVE), None)

    @property
    def is_live(self) -> bool:
        """Say whether the run still trains."""
        return not self.end and self.ending is not None and self.ending[0].startswith("in flight")

    @cached_property
    def _tables(self) -> dict[str, Sequence[Any]]:
        """The tables of each file in which figures are looked up, the latest first."""
        return {
            schema.METRICS.name: self.metrics[::-1],
            schema.EVENTS.name: [self.end],
            schema.DRIFT.name: [self.drift],
            schema.TRAFFIC.name: [self.traffic],
            schema.TIMELINE.name: [self.timeline],
            schema.RANKS.name: [self.ranks],
            schema.EXPERTS.name: [self.experts],
            RESOLVED: [self.job],
            CLUSTER: [self.cluster],
            "forecast": [self.forecast and self.forecast.prediction],
        }

    def value(self, file: str, *keys: object) -> Any:
        """Return what a file has under some keys; None where it does not have it."""
        for value in self._tables[file]:
            for key in keys:
                if isinstance(value, Mapping):
                    value = value.get(key)
                elif isinstance(value, list) and isinstance(key, int):
                    value = value[key]
                else:
                    value = getattr(value, str(key), None)
            if value is not None:
                return value
        return None

    def figure(self, show: Callable[[float], str], file: str, *keys: object) -> Markup | str:
        """Return the number that a file has under some keys, as people read it and with its source; "" without one."""
        value = self.value(file, *keys)
        return "" if value is None else sourced(value, show(value), f"{self.name}/{file}:{'.'.join(map(str, keys))}")


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
    left_out: list[str] = []
    plan = load_plan(path / PLAN, left_out.append)
    job, cluster = load_job(str(path / RESOLVED), say=left_out.append), load_cluster(path / CLUSTER)

    def read_lines(file: schema.SavedFile) -> list[Any]:
        try:
            lines, mistakes = schema.read_lines(path / file.name, file.table)
        except OSError as error:
            lines, mistakes = [], [f"{path / file.name} cannot be read: {describe_os_error(error)}"]
        if mistakes:
            left_out.append(mistakes[0] + (f" (and {len(mistakes) - 1:,} lines more)" if mistakes[1:] else ""))
        return lines

    def read(file: schema.SavedFile[schema.T]) -> schema.T | None:
        try:
            return schema.read_saved(path, file, len(plan.ranks))
        except JobError as error:
            left_out.append(str(error))
            return None

    lines = read_lines(schema.METRICS), read_lines(schema.EVENTS)
    files = read(schema.DRIFT), read(schema.TIMELINE), read(schema.TRAFFIC), read(schema.RANKS), read(schema.EXPERTS)
    ending = post_mortem(path / FOLDER, time.time())
    return RunRecord(path, name, job, plan, cluster, *lines, *files, ending, left_out)


def read_runs(paths: list[Path]) -> list[RunRecord]:
    """Read several run folders, with names that distinguish them."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]
