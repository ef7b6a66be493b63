"""Predictions that a mixed run is compared with: of its families, each alone, and of the job cut evenly.

yardstick.json   in the run folder: the predictions, so that a start that continues need not search for them again
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.errors import JobError, PlanError
from hpctrain.config.job import Job
from hpctrain.config.paths import exists, read_json, write_text
from hpctrain.planner.prices.profiled import device_models
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.search import Limits, search
from hpctrain.planner.search.space import Space, even_space

YARDSTICK = "yardstick.json"
TIMED = 5
"""Plans of each family that are simulated: the estimate is within 3 % of the simulation."""


def keep_families(folder: Path, job: Job, cluster: Cluster) -> dict | None:
    """Return the predictions of `predict_families`: those in the run folder, if they are of this job and machine, else
    new ones.

    A file that cannot be read or written counts as absent.
    """
    setup = Setup.of_job(job)
    worth = _worth_by_family(cluster, setup)
    known = f"{setup} {job.train.global_batch} {job.search} {dump_cluster(cluster)} {worth}"
    path, digest = folder / YARDSTICK, sha256(known.encode()).hexdigest()
    with suppress(JobError):
        kept = read_json(path, JobError, "a yardstick") if exists(path) else None
        if isinstance(kept, dict) and kept.pop("of", None) == digest:
            return kept
    predicted = predict_families(job, cluster)
    if predicted:
        with suppress(JobError):
            write_text(path, json.dumps({"of": digest} | predicted) + "\n", JobError, "free space")
    return predicted


def predict_families(job: Job, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> dict | None:
    """Return the tokens/s that families are predicted to do alone (None: cannot hold the model), and those of the job
    cut evenly; None where there is one family. `job` is resolved.

    All searches together score no more plans, and take no more seconds, than `[search]` allows for the plan.
    """
    setup = Setup.of_job(job)
    worth = _worth_by_family(cluster, setup)
    families = list(worth)
    if len(families) < 2:
        return None
    end, num_left = clock() + job.search.seconds, len(families) + 1
    scored = max(1, job.search.plans // num_left)

    def predicted(used: Sequence[str], space: Space | None = None) -> float | None:
        """Return the tokens/s of the best plan on some families; None where no plan fits."""
        nonlocal num_left
        limits = Limits(scored=scored, simulated=TIMED, seconds=max(0.0, end - clock()) / num_left)
        num_left -= 1
        try:
            result = search(setup, job.train.global_batch, cluster, used, space, limits)
        except PlanError:
            return None
        return result.best.prediction.tokens_per_second

    summary: dict = {"predicted_alone": {name: predicted([name]) for name in families}, "worth": worth}
    if even := predicted(families, even_space()):
        summary["predicted_even"] = even
    return summary


def _worth_by_family(cluster: Cluster, setup: Setup) -> dict[str, str]:
    """Return by family, in the order of ranks, how far a prediction of it may be off."""
    models = device_models(cluster, setup)
    return {device.family: models[device.family].worth for device in cluster.devices}


def sum_of_families(predicted: dict | None) -> float | None:
    """Return the tokens/s of all families alone, together; None where there is one, or one cannot hold the model."""
    speeds = list(predicted["predicted_alone"].values()) if predicted else []
    return sum(speeds) if speeds and all(speeds) else None


def yardstick(predicted: dict, tokens_per_second: float) -> dict:
    """Return the predictions of `predict_families`, and three ratios of a run: to the sum of the families, to the best
    of them, and to the job cut evenly.

    There is no ratio where a family alone cannot hold the model (`no_ratio` says which).
    """
    summary = dict(predicted)
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


def format_yardstick(summary: dict) -> str:
    """Return the summary of `yardstick` as a sentence."""
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
    worths, of_all = summary["worth"], set(summary["worth"].values())
    shares = of_all if len(of_all) == 1 else (f"{family} {worth}" for family, worth in worths.items())
    return (
        f"yardstick: families alone, each by its best plan, are predicted to do {speeds} tokens/s"
        f" ({', '.join(shares)}); {ratio}, {cut}"
    )
