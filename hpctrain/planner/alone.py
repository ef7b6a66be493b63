"""What the families of a mixed cluster would do, each on its own: by plans that are thought of exhaustively. Pure.

The yardstick of a mixed cluster is the sum of what its families do alone (HetHub, arXiv 2405.16256), so a weak plan of
one of them would make the mix look good. Every plan of the search's space is weighed for a family alone (tensor grids,
stages, replicas, microbatches, ZeRO, recomputing), and the plans by speed, which have rows by turns and substeps too.
"""

from collections.abc import Sequence

from hpctrain.cluster import Cluster
from hpctrain.errors import PlanError
from hpctrain.job import Job
from hpctrain.planner.cost import Setup
from hpctrain.planner.estimate import Work
from hpctrain.planner.even import resolve_plan_on
from hpctrain.planner.predict import predict
from hpctrain.planner.proportional import SEARCHED, Candidate, Party, proportional_candidates
from hpctrain.planner.search import Found, Limits, search

EVERY_PLAN = Limits(weighed=None, timed=40, per_group=None)
"""All are weighed, and all simulated whose closed form is within 5 % of the best, up to 40."""


def search_families(job: Job, cluster: Cluster, families: Sequence[str], limits: Limits) -> Found:
    """Search for plans of a job, whose dtype is resolved, on some families. Raises PlanError as `search`."""
    return search(Setup.of_job(job), job.train.global_batch, cluster, families, limits=limits)


def searched_candidates(
    job: Job, cluster: Cluster, families: Sequence[str], limits: Limits | None = None
) -> list[Candidate]:
    """Return the plans that a search on some families finds, the fastest first. Raises PlanError if none fits."""
    found = search_families(job, cluster, families, limits or Limits())
    return [_as_candidate(timed.seconds, timed.plan) for timed in found.plans]


def _as_candidate(seconds: float, plan) -> Candidate:
    return Candidate(seconds, SEARCHED, (1 + max(map(plan.depth_to_loss, plan.tiles)),), plan)


def alone_candidates(job: Job, cluster: Cluster, work: Work, party: Party) -> list[Candidate]:
    """Return plans of one family alone, the other ranks unused: by speed, and those of the search near its best.

    In no order, and their seconds in unlike units. Raises PlanError, with the numbers, if the family cannot hold the
    model by any plan.
    """
    made: list[Candidate] = []
    refusal = None
    for make in (
        lambda: proportional_candidates(work, [party], cluster.num_devices),
        lambda: searched_candidates(job, cluster, [party.family], EVERY_PLAN),
    ):
        try:
            made += make()
        except PlanError as error:
            refusal = refusal or error
    if not made:
        raise refusal
    return made


def predicted_even(job: Job, cluster: Cluster) -> float | None:
    """Return the tokens/s that the job is predicted to do cut evenly among all devices; None where that does not fit.

    `job` is resolved.
    """
    try:
        plan = resolve_plan_on(job.model_copy(update={"plan": None}), cluster).plan
        prediction = predict(Setup.of_job(job), plan, cluster)
    except PlanError:
        return None
    return prediction.tokens_per_second if prediction.fits else None


def predicted_alone(job: Job, cluster: Cluster, limits: Limits) -> dict[str, float | None]:
    """Return the tokens/s that each family is predicted to do alone on the same global batch, by the best plan found.

    None for one that cannot hold the model. `job` is resolved: its vocabulary size and dtype are values.
    """
    speeds: dict[str, float | None] = {}
    for family in dict.fromkeys(device.family for device in cluster.devices):
        try:
            speeds[family] = search_families(job, cluster, [family], limits).best.prediction.tokens_per_second
        except PlanError:
            speeds[family] = None
    return speeds
