"""Says in what several runs of one page differ: their settings, their speeds, their losses."""

from collections.abc import Sequence
from typing import Any

from hpctrain.config.tables import flatten
from hpctrain.observe.report.record import RunRecord

FIGURES = (("loss, last step", "loss"), ("validation loss, last", "validation_loss"))
SKIPPED = ("name", "plan.file")
"""Settings that differ between any two runs."""


def difference_rows(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return a row for each result and for each setting in which runs differ: its name, then its value in each run."""
    rows: list[tuple[str, ...]] = []
    # The first step of a run allocates memory: it counts where it is the only one.
    logged = [sorted(line["tokens_per_second"] for line in run.metrics[1:] or run.metrics) for run in runs]
    if all(logged):
        speeds = [ordered[len(ordered) // 2] for ordered in logged]
        others = [f"{speed:,.0f} ({speed / speeds[0]:.2f} times)" for speed in speeds[1:]]
        rows.append(("tokens/s, median step", f"{speeds[0]:,.0f}", *others))
    for name, key in FIGURES:
        values = [_last(run, key) for run in runs]
        if any(value is not None for value in values):
            rows.append((name, *("-" if value is None else f"{value:.4f}" for value in values)))
    settings = [_settings(run) for run in runs]
    for key in dict.fromkeys(key for table in settings for key in table):
        values = [table.get(key) for table in settings]
        if any(value != values[0] for value in values):
            rows.append((key, *("-" if value is None else str(value) for value in values)))
    return rows


def _last(run: RunRecord, key: str) -> float | None:
    return next((line[key] for line in reversed(run.metrics) if key in line), None)


def _settings(run: RunRecord) -> dict[str, Any]:
    """Return what a run was trained with, by dotted key; plan and cluster in words."""
    done = run.metrics[-1]["step"] if run.metrics else 0
    plain = {"plan": run.plan.describe(), "cluster": run.cluster.describe(), "steps done": done}
    job = run.job.model_dump(exclude={"plan"})
    leaves = ((key, value) for key, value in flatten(job) if not (value and isinstance(value, dict)))
    return plain | {key: value for key, value in leaves if key not in SKIPPED}
