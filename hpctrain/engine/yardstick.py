"""What every run on a described mixed cluster reports: its share of what the families would do alone."""

from collections.abc import Sequence

from hpctrain.config.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Job
from hpctrain.engine.resolve import Described
from hpctrain.planner.cost import Setup
from hpctrain.planner.predictor import DATASHEET_ERROR
from hpctrain.planner.search import EVERY_PLAN, Limits, search
from hpctrain.planner.space import Space, even_space


def predict_families(job: Job, described: Described) -> dict | None:
    """Return the tokens/s that families are predicted to do alone (None: cannot hold the model), and those of the job
    cut evenly; None where there is one family. `job` is resolved."""
    cluster, limits = described.cluster, EVERY_PLAN if described.is_rehearsed else Limits()
    families = list(dict.fromkeys(device.family for device in cluster.devices))
    if len(families) < 2:
        return None
    predicted: dict = {"predicted_alone": {name: _predicted(job, cluster, [name], limits) for name in families}}
    if even := _predicted(job, cluster, families, limits, even_space()):
        predicted["predicted_even"] = even
    return predicted


def sum_of_families(predicted: dict | None) -> float | None:
    """Return the tokens/s of all families alone, together; None where there is one, or one cannot hold the model."""
    speeds = list(predicted["predicted_alone"].values()) if predicted else []
    return sum(speeds) if speeds and all(speeds) else None


def yardstick(job: Job, described: Described, tokens_per_second: float, predicted: dict | None = None) -> dict | None:
    """Return the tokens/s that families are predicted to do alone, and a run's ratios to their sum, to the best of them
    and to the job cut evenly; None where there is one family. `job` is resolved.

    `predicted` is of `predict_families`, where that is known. No ratio where a family alone cannot hold the model
    (`no_ratio` says which).
    """
    summary = dict(predicted or predict_families(job, described) or {})
    if not summary:
        return None
    if even := summary.get("predicted_even"):
        summary["speedup_over_even"] = tokens_per_second / even
    alone = summary["predicted_alone"]
    if without := [family for family, speed in alone.items() if speed is None]:
        return summary | {"no_ratio": f"{', '.join(without)} alone cannot hold the model"}
    ratios = {
        "fraction_of_sum": tokens_per_second / sum(alone.values()),
        "speedup_over_best_family": tokens_per_second / max(alone.values()),
    }
    return summary | ratios


def _predicted(
    job: Job, cluster: Cluster, families: Sequence[str], limits: Limits, space: Space | None = None
) -> float | None:
    """Return the tokens/s of the best plan on some families; None where no plan fits."""
    try:
        result = search(Setup.of_job(job), job.train.global_batch, cluster, families, space, limits)
    except PlanError:
        return None
    return result.best.prediction.tokens_per_second


def format_yardstick(summary: dict, described: Described) -> str:
    """Say it in a sentence or two."""
    speeds = ", ".join(f"{family} {speed:,.0f}" for family, speed in summary["predicted_alone"].items() if speed)
    if "no_ratio" in summary:
        ratio = f"no ratio: {summary['no_ratio']}"
    else:
        ratio = (
            f"this run is {summary['fraction_of_sum']:.2f} of their sum,"
            f" {summary['speedup_over_best_family']:.2f} times the best of them"
        )
    cut = (
        f"{summary['speedup_over_even']:.2f} times the job cut evenly"
        if "speedup_over_even" in summary
        else "cut evenly the job does not fit"
    )
    measured = f"; measured by `hpctrain bench mixed {described.name}`" if described.is_rehearsed else ""
    return (
        f"yardstick: families alone, each by its best plan, are predicted to do {speeds} tokens/s"
        f" (within {DATASHEET_ERROR:.0%}); {ratio}, {cut}{measured}"
    )
