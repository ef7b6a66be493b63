"""Takes from the run to continue its plan and every setting that can change a bit, or starts a new plan."""

from pathlib import Path

from hpctrain.checkpoint.state import check_same_run
from hpctrain.comm.probe.machine import with_overflows
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import load_cluster
from hpctrain.config.errors import HpctrainError
from hpctrain.config.job import Job
from hpctrain.config.tables import toml_value
from hpctrain.engine.start.facts import WHY, Prepared, with_values
from hpctrain.engine.start.resolve_kernels import continued_kernels
from hpctrain.engine.start.resolve_overlap import continued
from hpctrain.observe.folder.run_folder import CLUSTER
from hpctrain.plan import checks
from hpctrain.plan.tiling import Plan
from hpctrain.plan.uniform import families_of
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.setup import Setup


def continue_run(run: Prepared) -> Prepared:
    """Take from the checkpoint the settings that keep the numbers the same; with equal ranks also its plan."""
    where, job = run.resume_from, run.job
    if where is None:
        return run
    gone: list[str] = []
    theirs, plan, cluster, asked = check_same_run(where, job, run.training.identity, gone.append)
    reasons = {"of an older version": "; ".join(gone)} if gone else {}
    if job.train.dtype is None:
        job = with_values(job, "train", dtype=theirs.train.dtype)
        if not job.precision.by_family:
            job = with_values(job, "precision", by_family=theirs.precision.by_family)
        reasons["train.dtype"] = f"{theirs.train.dtype}: that of {where}"
    if changes := describe_changes(job, theirs):
        reasons["changed"] = f"{changes}; the run goes on with the new values"
    if job.kernels.logits_mib is None:
        job = with_values(job, "kernels", logits_mib=theirs.kernels.logits_bytes >> 20)
    request = job.plan
    before = theirs.plan and theirs.plan.model_copy(update={"microbatch": None})
    if request is not None and request == before and request.file is None:
        microbatch = plan.rows // request.data
        job = with_values(job, "plan", microbatch=microbatch)
        reasons["plan.microbatch"] = f"{microbatch}: that of {where}"
    checks.check_plan(job, plan, f"{where}: its plan")
    run = run.but(reasons, job=job)
    if job.plan is None and not is_for(plan, run.families):
        why = (
            f"{where} was written by {describe_ranks(plan)}; these are {count_families(run.families)}, which get a plan"
            " of their own"
        )
        return run.but({"planned again": why}, previous=(plan, cluster) if cluster else None)
    if job.plan is None and cluster and (run.fresh_probe or _is_described_anew(cluster, run)):
        return run.but(previous=(plan, cluster), job_to_keep=theirs)
    if job.plan is None:
        run = run.but({"plan": f"{plan.describe()}: that of {where}"}, plan_or_none=plan)
        if asked:
            run = run.but({WHY: asked}, speeds=None)
    return keep(run, theirs, cluster)


MAY_DIFFER = {
    "data.tokens", "data.more", "data.weight", "data.validation_fraction", "train.start_from", "train.validate_every",
    "train.validation_sequences",
}  # fmt: skip
"""Keys that change training and may differ in a run that continues. The data are compared separately."""


def describe_changes(job: Job, theirs: Job) -> str:
    """Return, with both values, the keys that change training and differ from the run to continue."""
    changes = []
    for section in ("data", "train", "precision"):
        new, old = (getattr(each, section).model_dump(mode="json") for each in (job, theirs))
        changes += [
            f"{section}.{key} = {toml_value(value)} (before: {'none' if old[key] is None else toml_value(old[key])})"
            for key, value in new.items()
            if value != old[key] and f"{section}.{key}" not in MAY_DIFFER
        ]
    return ", ".join(changes)


def _is_described_anew(cluster: Cluster, run: Prepared) -> bool:
    """Say whether a description was given that is not that of the run which is continued, or whether one of its devices
    ran out of memory since."""
    if run.world.on_first_rank(lambda: with_overflows(cluster)) != cluster:
        return True
    return bool(run.described_or_none) and without_profiles(run.described.cluster) != without_profiles(cluster)


def without_profiles(cluster: Cluster) -> Cluster:
    return cluster.model_copy(update={"profiles": ()})


def with_profiles(cluster: Cluster, checkpoint: Path | None) -> Cluster:
    """Return the cluster of a checkpoint with the profiles that its run's folder has, if that describes the same."""
    path = checkpoint.parents[1] / CLUSTER if checkpoint else None
    if path is None or not path.is_file():
        return cluster
    described = load_cluster(path)
    return described if without_profiles(described) == without_profiles(cluster) else cluster


def keep(run: Prepared, theirs: Job, cluster: Cluster | None) -> Prepared:
    """Take over every setting that can change a bit of the result, from a run that continues by its own plan."""
    overlap, taken = continued(run.job.overlap, theirs.overlap)
    kernels, also_taken = continued_kernels(run.job.kernels, theirs.kernels)
    why = {key: f"{value}: that of {run.resume_from}" for key, value in (taken | also_taken).items()}
    has_links = cluster and [device.family for device in cluster.devices] == run.families
    job = run.job.model_copy(update={"overlap": overlap, "kernels": kernels})
    return run.but(why, job=job, links_of=cluster if has_links else None)


def describe_change(run: Prepared, plan: Plan, cluster: Cluster, seconds: float) -> str:
    """Say what changes in plan and predicted step for a run that continues on other devices than those of `cluster`."""
    cluster = with_profiles(cluster, run.resume_from)
    try:
        before = f"{predict(Setup.of_job(run.job), plan, cluster).step_seconds:.4g} s a step"
    except HpctrainError as error:
        before = f"a step that cannot be predicted ({error})"
    return (
        f"{plan.describe()} on {cluster.describe()}, predicted {before}; now {run.plan.describe()}, predicted"
        f" {seconds:.4g} s. The global batch of {run.job.train.global_batch} rows and the order of data stay"
    )


def is_for(plan: Plan, families: list[str]) -> bool:
    """Say whether a plan is for ranks of these families."""
    tiles = [tile.family for tile in plan.tiles]
    return len(plan.ranks) == len(families) and families_of(plan, families) == tiles


def describe_ranks(plan: Plan) -> str:
    """Say which ranks a plan is for, such as `4 a100 and 4 v100`."""
    return count_families(
        [tile.family for tile in plan.first_tiles for _ in tile.ranks] + ["unused"] * len(plan.unused)
    )


def count_families(families: list[str]) -> str:
    return " and ".join(f"{families.count(name)} {name}" for name in dict.fromkeys(families))
