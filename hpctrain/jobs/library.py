"""The search for a plan as a function of Python, in place of a command, with all that there is to say of the result."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.job import Job, load_job
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.jobs.common import load_described, with_some_vocabulary, write_out
from hpctrain.jobs.plan import format_search, plan_file, search_and_summarise
from hpctrain.jobs.predict import format_prediction
from hpctrain.plan.draw import draw_plan
from hpctrain.plan.tiling import Plan
from hpctrain.planner.choose import with_dtypes
from hpctrain.planner.prediction.predictor import Prediction
from hpctrain.planner.search.search import Limits, SearchResult
from hpctrain.planner.search.space import by_speed_space, even_space
from hpctrain.rehearsal.miniature import scale_for_finished

SPACES = {"all": None, "by-speed": by_speed_space, "even": even_space}
PAGE_PIXELS = 460
"""The height of a plan's picture in a notebook."""


@dataclass(frozen=True)
class PlanResult:
    """The plan that a search found for a job on a cluster. A notebook shows it as a picture."""

    job: Job
    """The job, with values for its dtype and vocabulary."""
    cluster: Cluster
    plan: Plan
    prediction: Prediction
    """Prediction of a step: seconds by part, memory, interval, assumed inputs."""
    summary: dict
    """Everything that `hpctrain plan search --json` prints."""
    result: SearchResult
    """The search result, with the other plans."""

    @property
    def reasons(self) -> list[str]:
        """Why this plan, in sentences with the numbers."""
        return self.summary["reasons"]

    def draw(self) -> str:
        """Return the plan as tiles of characters: items across, rows down."""
        return draw_plan(self.plan)

    def save(self, path: Path | str) -> Path:
        """Write the plan file that a job names as `plan.file`. Raises JobError."""
        write_out(Path(path), plan_file(self.summary, self.result))
        return Path(path)

    def __str__(self) -> str:
        return f"{self.summary['layout']}\n{format_search(self.summary, self.result, self.cluster, verbose=True)}"

    def __repr__(self) -> str:
        fits = "" if self.prediction.fits else ", does not fit"
        return (
            f"PlanResult({self.summary['layout']}: {self.prediction.step_seconds:.4g} s a step,"
            f" {self.prediction.tokens_per_second:,.0f} tokens/s{fits})"
        )

    def _repr_html_(self) -> str:
        """Return the picture and the prediction for a notebook."""
        from hpctrain.observe.report.page import render_plan

        page = html.escape(render_plan(self.plan, self.job.name))
        text = html.escape(format_prediction(self.summary, self.plan, self.cluster))
        return f'<iframe srcdoc="{page}" width="100%" height="{PAGE_PIXELS}"></iframe><pre>{text}</pre>'


def find_plan(
    job: Job | str,
    cluster: Cluster | str | Path,
    overrides: Sequence[str] = (),
    space: str = "all",
    scored: int | None = None,
    seconds: float | None = None,
) -> PlanResult:
    """Search for the fastest plan of a job on a cluster. Needs neither ranks nor devices.

    `job` and `cluster` are objects, files, or names of ready ones; `overrides` are `"section.key=value"`. What of the
    job is `auto` becomes what a run there would have. `space` is `all`, `by-speed` or `even`, as of `hpctrain plan
    search`. The search ends after so many plans are `scored` (the default of that command) or so many `seconds`.

    Raises JobError, TopologyError, PlanError where nothing fits, ValueError for another space, or for overrides of an
    object.
    """
    if space not in SPACES:
        raise ValueError(f"space = {space!r}: is none of {', '.join(SPACES)}")
    if isinstance(job, Job) and overrides:
        raise ValueError(f"overrides {list(overrides)}: are of a job file or a name; load_job(…, overrides) takes them")
    described = (
        MachineDescription(cluster, "the cluster") if isinstance(cluster, Cluster) else load_described(str(cluster))
    )
    loaded = with_some_vocabulary(job if isinstance(job, Job) else load_job(job, overrides))
    loaded = scale_for_finished(described.truth, loaded)
    limits = Limits(seconds=seconds) if scored is None else Limits(scored=scored, seconds=seconds)
    restricted = SPACES[space]
    result, summary = search_and_summarise(loaded, described, limits, restricted and restricted(), top=5)
    loaded, _ = with_dtypes(loaded, described.cluster, sorted(described.cluster.families), described.name)
    return PlanResult(loaded, described.cluster, result.best.plan, result.best.prediction, summary, result)
