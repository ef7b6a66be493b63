"""From what a job asks for to a plan: the even plan that it describes, or the best even one of a cluster.

Every choice comes back as a value and a reason.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpctrain.cluster import Cluster
from hpctrain.errors import LaunchError, PlanError
from hpctrain.holders import check_zero
from hpctrain.job import Job, PlanRequest, TensorSizes
from hpctrain.parameters import check_grid
from hpctrain.plan import Plan, TensorGrid, even_plan
from hpctrain.plan_checks import check_ranks, check_tiling
from hpctrain.plan_file import load_plan
from hpctrain.planner.cost import Setup
from hpctrain.planner.predict import predict

# Work of a rank that adds this share of bubble is no worse than what more microbatches cost in small products.
WANTED_MICROBATCHES_PER_STAGE = 4
# One microbatch of one replica: enough for efficient products, small in memory.
WANTED_TOKENS = 2048


@dataclass(frozen=True)
class Resolved:
    """A plan, and for each thing that was chosen rather than given its reason."""

    plan: Plan
    reasons: dict[str, str]


def resolve_plan_on(job: Job, cluster: Cluster) -> Resolved:
    """Return the even plan of a job on all devices of a cluster; where its plan is `auto`, the best even one.

    Raises as `resolve_plan` and `best_even`.
    """
    families = [device.family for device in cluster.devices]
    return best_even(job, cluster) if job.plan is None else resolve_plan(job, cluster.num_devices, families)


def resolve_plan(job: Job, num_ranks: int, families: Sequence[str] | None = None) -> Resolved:
    """Return the plan that a job describes, checked against model, batch and ranks.

    `families` are those of the ranks that there are, in their order; without them a plan is believed what it says.
    Raises LaunchError if it is for another number of ranks, PlanError if it does not fit the model, the batch or the
    families, or is `auto`, which needs a machine.
    """
    resolved = _resolve(job, num_ranks)
    if families is None:
        return resolved
    if job.plan is None or job.plan.file is None:
        return replace(resolved, plan=_with_families(resolved.plan, families))
    for number, (tile, family) in enumerate(
        zip(resolved.plan.tiles, families_of(resolved.plan, families), strict=True)
    ):
        if tile.family != family:
            raise PlanError(
                f"{job.plan.file}: tile {number} is for family '{tile.family}', but its ranks {list(tile.ranks)} are"
                f" of '{family}'; start the ranks on the hosts that the plan was made for, or make a plan for these"
            )
    return resolved


def best_even(job: Job, cluster: Cluster) -> Resolved:
    """Return the even plan with the least predicted step: tensor parallelism inside a node, pipeline, data, ZeRO 1.

    `job` is resolved but for its plan. Where nothing fits with all activations kept, blocks are recomputed. Raises
    PlanError where no even plan fits.
    """
    setup, families = Setup.of_job(job), [device.family for device in cluster.devices]
    shortest: tuple[float, Resolved] | None = None
    nearest: tuple[float, str] = (math.inf, "no even cut of this job into so many ranks")
    for recompute in ("none", "full"):
        for request in _even_requests(cluster, recompute):
            try:
                resolved = _even(job, request)
                plan = _with_families(resolved.plan, families)
                prediction = predict(setup, plan, cluster)
            except PlanError as error:
                nearest = min(nearest, (math.inf, str(error)))
                continue
            if not prediction.fits:
                missing = max(stage.memory.total - stage.available_bytes for stage in prediction.memory)
                nearest = min(nearest, (missing, f"{plan.describe()} lacks {missing / 2**20:,.1f} MiB on a rank"))
            elif shortest is None or prediction.step_seconds < shortest[0]:
                shortest = prediction.step_seconds, replace(resolved, plan=plan)
        if shortest:
            break
    if shortest is None:
        raise PlanError(f"no even plan of {cluster.describe()} fits; the nearest: {nearest[1]}")
    seconds, resolved = shortest
    reason = f"{resolved.plan.describe()}: {seconds:.4g} s a step, the least predicted of the even plans"
    return Resolved(resolved.plan, {"plan": reason, **resolved.reasons})


def _even_requests(cluster: Cluster, recompute: str) -> Iterator[PlanRequest]:
    num_ranks = cluster.num_devices
    smallest_node = min(nodes.num_devices for nodes in cluster.nodes)
    for y in _divisors(math.gcd(num_ranks, smallest_node)):
        for pipeline in _divisors(num_ranks // y):
            data = num_ranks // y // pipeline
            yield PlanRequest(data=data, pipeline=pipeline, tensor=TensorSizes(y=y), recompute=recompute)


def _with_families(plan: Plan, families: Sequence[str]) -> Plan:
    found = zip(plan.tiles, families_of(plan, families), strict=True)
    return replace(plan, tiles=tuple(replace(tile, family=family) for tile, family in found))


def families_of(plan: Plan, families: Sequence[str]) -> list[str]:
    """Return the family of each tile, given those of the ranks; "a+b" where its ranks are of several."""
    return ["+".join(dict.fromkeys(families[rank] for rank in tile.ranks)) for tile in plan.tiles]


def _resolve(job: Job, num_ranks: int) -> Resolved:
    if job.plan is None:
        raise PlanError(
            'plan = "auto" is searched for on a described machine: give --cluster CLUSTER, or set plan.tensor.y,'
            f" plan.pipeline and plan.data, whose product is {num_ranks}"
        )
    if job.plan.file is not None:
        plan = load_plan(job.plan.file)
        check_plan(job, plan, str(job.plan.file))
        check_ranks(plan, num_ranks)
        return Resolved(plan, {})
    if job.plan.num_ranks != num_ranks:
        t = job.plan.tensor
        raise LaunchError(
            f"the plan (tensor {t.x}x{t.y}x{t.z} x pipeline {job.plan.pipeline} x data {job.plan.data}) is for"
            f" {job.plan.num_ranks} ranks, but {num_ranks} were started; start it with mpirun -n"
            f' {job.plan.num_ranks}, or set plan = "auto"'
        )
    return _even(job, job.plan)


def check_plan(job: Job, plan: Plan, where: str) -> None:
    """Refuse a plan that cannot run this job; `where` is what the message calls it. Raises PlanError."""
    check_tiling(plan, job.model.num_items)
    for tile in plan.tiles:
        check_grid(job.model, tile.tensor)
    check_zero(plan, where)
    if plan.microbatches * plan.rows != job.train.global_batch:
        raise PlanError(
            f"{where}: microbatches {plan.microbatches} x rows {plan.rows} = {plan.microbatches * plan.rows}, but"
            f" train.global_batch is {job.train.global_batch}; make them equal"
        )


def _even(job: Job, request: PlanRequest) -> Resolved:
    grid = TensorGrid(request.tensor.x, request.tensor.y, request.tensor.z)
    check_grid(job.model, grid)
    batch = job.train.global_batch
    if batch % request.data:
        raise PlanError(
            f"train.global_batch {batch} is not divisible by plan.data {request.data};"
            f" set it to a multiple of {request.data}"
        )
    per_replica = batch // request.data
    reasons = {}
    microbatch = request.microbatch
    if microbatch is None:
        microbatch, reasons["plan.microbatch"] = _choose_microbatch(
            per_replica, grid.z, request.pipeline, request.chunks, job.data.sequence_length
        )
    if per_replica % microbatch:
        raise PlanError(
            f"the {per_replica} sequences of a replica (train.global_batch {batch} / plan.data {request.data}) are not"
            f" divisible by plan.microbatch {microbatch}; set one of {_divisors(per_replica)}"
        )
    if microbatch < grid.z:
        raise PlanError(
            f"tensor z = {grid.z} splits the {microbatch} sequences of a microbatch; set plan.microbatch to"
            f" {grid.z} or more (it divides {per_replica}), or lower z"
        )
    plan = even_plan(
        job.model.num_items,
        grid,
        request.pipeline,
        request.data,
        per_replica // microbatch,
        microbatch * request.data,
        request.schedule,
        request.chunks,
        recompute=request.recompute,
        zero=request.zero,
    )
    return Resolved(plan, reasons)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _choose_microbatch(per_replica: int, z: int, pipeline: int, chunks: int, sequence_length: int) -> tuple[int, str]:
    fitting = [n for n in _divisors(per_replica) if n >= z]
    if not fitting:
        raise PlanError(
            f"tensor z = {z} splits the {per_replica} sequences of a replica;"
            f" set train.global_batch to {z} sequences a replica or more, or lower z"
        )
    enough = [n for n in fitting if per_replica // n >= WANTED_MICROBATCHES_PER_STAGE * pipeline or pipeline == 1]
    small = [n for n in enough or fitting[:1] if n * sequence_length <= WANTED_TOKENS * z]
    chosen = max(small) if small else (enough or fitting)[0]
    count = per_replica // chosen
    bubble = (pipeline - 1) / (count * chunks + pipeline - 1)
    reason = f"{chosen * sequence_length} tokens at once"
    if pipeline > 1:
        reason += f"; {count} microbatches over {pipeline} stages leave a bubble of {bubble:.0%} at most"
    return chosen, reason
