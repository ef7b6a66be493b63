"""From what a job asks for to a plan: the even plan it describes, or one chosen for the ranks that there are.

Every choice comes back as a value and a reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpctrain.cluster import Cluster
from hpctrain.errors import LaunchError, PlanError
from hpctrain.holders import check_zero
from hpctrain.job import Job, PlanRequest, TensorSizes
from hpctrain.parameters import check_grid, count_parameters
from hpctrain.plan import Plan, TensorGrid, even_plan
from hpctrain.plan_checks import check_ranks, check_tiling
from hpctrain.plan_file import load_plan

# Floating-point operations that a rank does in the time in which it sends one byte to a neighbour, on unknown
# machines. 25 is a CPU rank on shared memory (50 GFLOP/s, 2 GB/s); a planner with a measured cluster replaces it.
NOMINAL_FLOPS_PER_BYTE = 25.0
# Work of a rank that adds this share of bubble is no worse than what more microbatches cost in small products.
WANTED_MICROBATCHES_PER_STAGE = 4
# One microbatch of one replica: enough for efficient products, small in memory.
WANTED_TOKENS = 2048
# Of one parameter in fp32: weight and gradient; both moments; the summed gradient of a shard.
WEIGHT_BYTES, MOMENT_BYTES, GRADIENT_SHARD_BYTES = 8, 8, 4


@dataclass(frozen=True)
class Resolved:
    """A plan, and for each thing that was chosen rather than given its reason."""

    plan: Plan
    reasons: dict[str, str]


def resolve_plan_on(job: Job, cluster: Cluster) -> Resolved:
    """Return the plan that a job asks for on all devices of a cluster; see `resolve_plan`."""
    families = [device.family for device in cluster.devices]
    memory_bytes = min(cluster.families[family].memory_bytes for family in families)
    return resolve_plan(job, cluster.num_devices, memory_bytes, families)


def resolve_plan(
    job: Job, num_ranks: int, memory_bytes_per_rank: int | None = None, families: Sequence[str] | None = None
) -> Resolved:
    """Return the plan that a job asks for, checked against model, batch and ranks.

    `families` are those of the ranks that there are, in their order; without them a plan is believed what it says.
    Raises LaunchError if it is for another number of ranks, PlanError if it does not fit the model, the batch or the
    families.
    """
    resolved = _resolve(job, num_ranks, memory_bytes_per_rank)
    if families is None:
        return resolved
    plan = resolved.plan
    found = families_of(plan, families)
    if job.plan is None or job.plan.file is None:
        tiles = tuple(replace(tile, family=family) for tile, family in zip(plan.tiles, found, strict=True))
        return replace(resolved, plan=replace(plan, tiles=tiles))
    for number, (tile, family) in enumerate(zip(plan.tiles, found, strict=True)):
        if tile.family != family:
            raise PlanError(
                f"{job.plan.file}: tile {number} is for family '{tile.family}', but its ranks {list(tile.ranks)} are"
                f" of '{family}'; start the ranks on the hosts that the plan was made for, or make a plan for these"
            )
    return resolved


def families_of(plan: Plan, families: Sequence[str]) -> list[str]:
    """Return the family of each tile, given those of the ranks; "a+b" where its ranks are of several."""
    return ["+".join(dict.fromkeys(families[rank] for rank in tile.ranks)) for tile in plan.tiles]


def _resolve(job: Job, num_ranks: int, memory_bytes_per_rank: int | None) -> Resolved:
    if job.plan is None:
        return _choose(job, num_ranks, memory_bytes_per_rank)
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


def _choose(job: Job, num_ranks: int, memory_bytes_per_rank: int | None) -> Resolved:
    """Take the even layout with the least estimated time per token, by operations, bubble and bytes sent."""
    found = []
    refusal: PlanError | None = None
    for request in _factorisations(num_ranks):
        try:
            resolved = _even(job, request)
        except PlanError as error:
            refusal = error
            continue
        seconds, needed = _estimate(job, request, resolved.plan)
        fits = memory_bytes_per_rank is None or needed <= memory_bytes_per_rank
        found.append((not fits, seconds, needed, request, resolved))
    if not found:
        raise PlanError(f"no even layout of {num_ranks} ranks fits this job; the last one tried says: {refusal}")
    overflows, _, needed, _, resolved = min(found, key=lambda f: f[:2])
    if overflows:
        raise PlanError(
            f"no even layout of {num_ranks} ranks fits in memory: weights, gradients and moments need at least"
            f" {min(f[2] for f in found) / 2**30:.1f} GiB a rank, and there are"
            f" {memory_bytes_per_rank / 2**30:.1f} GiB; start more ranks"
        )
    reason = (
        f"{resolved.plan.describe()}: least estimated work, bubble and bytes sent of {len(found)} even layouts;"
        f" states need {needed / 2**20:.0f} MiB a rank"
    )
    return Resolved(resolved.plan, {"plan": reason, **resolved.reasons})


def _factorisations(num_ranks: int) -> Iterator[PlanRequest]:
    for data in _divisors(num_ranks):
        for pipeline in _divisors(num_ranks // data):
            rest = num_ranks // data // pipeline
            for x in _divisors(rest):
                for y in _divisors(rest // x):
                    tensor = TensorSizes(x=x, y=y, z=rest // x // y)
                    yield PlanRequest(data=data, pipeline=pipeline, tensor=tensor)


def _estimate(job: Job, request: PlanRequest, plan: Plan) -> tuple[float, float]:
    """Return the relative time of a step (in FLOP of one rank) and the bytes of state that a rank keeps.

    Bytes sent by a rank: activations all-reduced over x and y (AxoNN's model), weights and gradients over z and data.
    """
    model, t = job.model, request.tensor
    parameters = count_parameters(model)
    tokens = job.train.global_batch * job.data.sequence_length
    flops = 6 * parameters * tokens / request.num_ranks
    bubble = (request.pipeline - 1) / plan.microbatches
    local = parameters / (t.x * t.y * request.pipeline)
    tokens_here = tokens / (request.data * t.z)
    blocks = model.num_layers / request.pipeline

    def ring(n: int) -> float:
        return (n - 1) / n

    over_x = (3 * model.hidden_size + 2 * model.ffn) / t.y  # outputs of qkv and up, gradients of out and down
    over_y = 4 * model.hidden_size / t.x
    activations = 2 * 4 * tokens_here * blocks * (ring(t.x) * over_x + ring(t.y) * over_y)
    between = 2 * 4 * tokens_here * model.hidden_size / t.x * (request.pipeline > 1)
    weights = 4 * local * (3 * ring(t.z) * plan.microbatches + 2 * ring(request.data) / t.z)
    sent = activations + between + weights
    share = request.data if request.zero and request.data > 1 else 1
    gathered = GRADIENT_SHARD_BYTES if share > 1 else 0
    state = local / t.z * (WEIGHT_BYTES + (MOMENT_BYTES + gathered) / share)
    return flops * (1 + bubble) + NOMINAL_FLOPS_PER_BYTE * sent, state
