"""The plan that a job with `plan = "auto"` gets on a machine: the result of a search, and its reasons. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import HpctrainError, PlanError, TopologyError
from hpctrain.config.job import Job
from hpctrain.config.precision import TRAINED_DTYPES, choose_dtypes
from hpctrain.plan.checks import check_plan
from hpctrain.plan.tiling import Plan
from hpctrain.plan.uniform import DEVICE_TOKENS, Resolved, resolve_plan
from hpctrain.planner.explain import EQUAL_SHARE, runner_up
from hpctrain.planner.prediction.offload import format_shortage
from hpctrain.planner.prediction.predictor import Prediction, predict
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.search import Limits, SearchResult, search
from hpctrain.planner.search.space import PoolUse, Space
from hpctrain.planner.search.stage_variants import StageShape
from hpctrain.planner.search.stages import StageCosts
from hpctrain.sharding.grid import TensorGrid

CLEAR_SHARE, CLEAR_ROWS = 0.1, 1
"""Share of the rows, and number of rows: the memory model contradicts a profile where it differs by more than both."""
MOST_ROWS = 1 << 24


@dataclass(frozen=True)
class PlanChoice:
    """A plan, and the reason of each value that was resolved rather than given."""

    plan: Plan
    reasons: dict[str, str]


def with_dtypes(job: Job, cluster: Cluster, used: Sequence[str], where: str) -> tuple[Job, str]:
    """Return the job with a dtype for all families, and for those that differ, and the reason where it is `auto`.

    `train.dtype` is that of the family with the most speed. `used` are the families that train; `where` is what errors
    call the cluster. Raises TopologyError if one of them has no speed in what can be trained in.
    """
    if job.train.dtype is not None:
        return job, ""
    speeds = {name: _speeds(name, cluster) for name in used}
    resolved = choose_dtypes(speeds, {name: cluster.families[name].kind for name in used})
    if resolved is None:
        without = next(name for name, of in speeds.items() if not of)
        raise TopologyError(
            f"{where}: family {without} has no dtype to train in ({' or '.join(TRAINED_DTYPES)}); set its"
            " peak_flops_per_second or sustained_flops_per_second"
        )
    dtypes, reason = resolved
    counts = {name: sum(device.family == name for device in cluster.devices) for name in used}
    strongest = max(used, key=lambda name: counts[name] * speeds[name][dtypes[name]])
    common = dtypes[strongest]
    differing = {name: dtype for name, dtype in dtypes.items() if dtype != common} | job.precision.by_family
    job = job.model_copy(
        update={
            "train": job.train.model_copy(update={"dtype": common}),
            "precision": job.precision.model_copy(update={"by_family": differing}),
        }
    )
    return job, f"{common}: {reason}"


def _speeds(name: str, cluster: Cluster) -> dict[str, float]:
    family = cluster.families[name]
    given = family.sustained_flops_per_second | family.peak_flops_per_second
    return {dtype: DeviceModel(name, family).speed(dtype) for dtype in TRAINED_DTYPES if dtype in given}


def families_in(job: Job, cluster: Cluster, where: str) -> list[str]:
    """Return the families that have a speed in their dtype of a job. Raises TopologyError where there is none."""
    having = [
        name
        for name, family in cluster.families.items()
        if job.dtype_of(name) in family.sustained_flops_per_second | family.peak_flops_per_second
    ]
    if not having:
        dtype = job.train.resolved_dtype
        raise TopologyError(
            f"{where}: none of the families {', '.join(cluster.families)} has a speed in {dtype}; set train.dtype, or"
            f" families.*.peak_flops_per_second = {{{dtype} = ...}}"
        )
    return having


def search_best(
    job: Job,
    cluster: Cluster,
    limits: Limits,
    where: str,
    space: Space | None = None,
    setup_of: Callable[[Plan], Setup] | None = None,
) -> SearchResult:
    """Search for the plan of a job whose dtype and overlaps are values, in a space or among all plans.

    Of plans that are as fast as the fastest, the first has the fewest microbatches.

    `setup_of` returns the setup by which a plan is simulated, where that depends on the plan; left out: the job's.
    Raises PlanError where nothing fits, TopologyError where no family computes in the job's dtype.
    """
    families = families_in(job, cluster, where)
    result = search(Setup.of_job(job), job.train.global_batch, cluster, families, space, limits, setup_of=setup_of)
    result = with_fewest_microbatches(result)
    check_plan(job, result.best.plan, "the plan of the search")
    return result


def choose_plan(job: Job, cluster: Cluster, where: str, setup_of: Callable[[Plan], Setup] | None = None) -> PlanChoice:
    """Return the best plan of a search within the job's budget (`[search]`), with the reason and the runner-up.

    `job` is resolved but for its plan. `where` is what messages call the cluster. Raises as `search_best`.
    """
    budget = job.search
    result = search_best(job, cluster, Limits(scored=budget.plans, seconds=budget.seconds), where, None, setup_of)
    best = result.best
    layout = best.describe([pool.name for pool in result.pools])
    is_least = best.seconds <= min(each.seconds for each in result.plans)
    least = "the least" if is_least else f"the fewest microbatches within {EQUAL_SHARE:.1%} of the least"
    reasons = {
        "plan": (
            f"{layout}: predicted {best.seconds:.4g} s a step, {least} of {result.searched['scored']:,} plans"
            f" ({result.searched['timed']} simulated, {result.wall_seconds:.2g} s)"
        ),
        "runner-up": runner_up(result) or "none",
    }
    return PlanChoice(best.plan, reasons)


def with_fewest_microbatches(result: SearchResult) -> SearchResult:
    """Return a result whose first plan has the fewest microbatches of those that are as fast as the fastest.

    Which of them is predicted to be the fastest differs from one measurement of a machine to the next.
    """
    equivalent = [each for each in result.plans if each.seconds <= (1 + EQUAL_SHARE) * result.best.seconds]
    first = min(equivalent, key=lambda each: each.plan.microbatches)
    return replace(result, plans=(first, *(each for each in result.plans if each is not first)))


def with_enough_rows(
    job: Job, resolved: Resolved, families: Sequence[str], cluster: Cluster, setup_of: Callable[[Plan], Setup]
) -> Resolved:
    """Return the plan of a job for devices, with more rows at once where the job leaves their number open.

    The rows are as many as keep the devices busy and fit in memory. `resolved` is the plan with few rows. It stays
    where no plan with more is predicted to fit. `setup_of` is as in `search_best`.
    """
    request = job.plan
    is_open = request is not None and request.file is None and request.microbatch is None
    if not is_open or any(cluster.families[name].kind == "cpu" for name in families):
        return resolved
    for tokens in DEVICE_TOKENS:
        more = resolve_plan(job, len(families), families, tokens)
        if more.plan.rows <= resolved.plan.rows:
            break
        try:
            fits = predict(setup_of(more.plan), more.plan, cluster).fits
        except HpctrainError:  # a figure is missing: `predict_step` says which
            break
        if fits:
            return more
    return resolved


def check_fits(prediction: Prediction, plan: Plan, where: str) -> None:
    """Refuse a plan that is predicted not to fit into memory. Raises PlanError with the numbers."""
    if prediction.fits:
        return
    remedy = "let fewer tiles offload"
    if not prediction.host_shortage:
        remedy = 'set plan = "auto" or use more ranks, or start it all the same with --set search.must_fit=false'
    shortage = format_shortage(prediction.memory, prediction.host_shortage)
    raise PlanError(f"{plan.describe()} is predicted not to fit: {shortage} ({where}); {remedy}")


def memory_warnings(setup: Setup, cluster: Cluster) -> list[str]:
    """Return a warning for each profile of the setup's work that the memory model clearly contradicts.

    Only profiles of as many replicas as the cluster has devices say anything, since these share the state. Where rows
    were limited by the job or by time, not by memory, more may have fit.
    """
    profiles = [
        p
        for p in cluster.profiles
        if p.work in setup.works and p.replicas == cluster.num_devices and p.largest_rows is not None
    ]
    if not profiles:
        return []
    costs, result = StageCosts(setup, cluster, ()), []
    for profile in profiles:
        available = cluster.families[profile.family].usable_bytes
        rows, measured = _rows_that_fit(costs, profile.zero, available), profile.largest_rows or 0
        clear = max(CLEAR_ROWS, CLEAR_SHARE * measured)
        if rows < measured - clear or (profile.limited_by == "memory" and rows > measured + clear):
            result.append(
                f"families.{profile.family}: of the whole model {measured} rows fit when it was profiled (ZeRO"
                f" {profile.zero}), {rows} by the memory model: do not trust its verdicts here; compare peaks in a"
                " short run, or set train.global_batch so that plans keep fewer rows"
            )
    return result


def _rows_that_fit(costs: StageCosts, zero: int, available_bytes: int) -> int:
    """Return how many rows of the whole model fit on a device that is one of as many replicas as there are devices."""
    num_devices, num_blocks = costs.cluster.num_devices, costs.setup.model.num_layers

    def is_short(rows: int) -> bool:
        stage = StageShape(0, PoolUse(TensorGrid(), 1, 1), rows, (True, True), zero=zero, holders=num_devices)
        return costs.needs(stage, "none", 1).device_bytes(num_blocks) > available_bytes

    return bisect_left(range(1, MOST_ROWS), True, key=is_short)
