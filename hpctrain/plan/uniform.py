"""Makes the plan that a job asks for: a uniform one (tensor grid x pipeline x data), or that of a plan file. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.config.errors import LaunchError, PlanError
from hpctrain.config.job import Job
from hpctrain.config.parallelism import PlanRequest
from hpctrain.plan.checks import check_passes, check_plan, check_positions, check_ranks
from hpctrain.plan.file import load_plan
from hpctrain.plan.tiling import Plan, counted, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import divisors
from hpctrain.sharding.parameters import check_grid

# A pipeline with so many microbatches for each stage has a small bubble; more would make its products small.
WANTED_MICROBATCHES_PER_STAGE = 4
# One microbatch of one replica: enough for efficient products, small in memory. Devices are asked for the first of
# several that fits into their memory: with 2,048 tokens kernels are so short that the host is late.
WANTED_TOKENS, DEVICE_TOKENS = 2048, (16384, 8192, 4096)


@dataclass(frozen=True)
class Resolved:
    """A plan, and the reason of each value that was resolved rather than given."""

    plan: Plan
    reasons: dict[str, str]


def resolve_plan(
    job: Job, num_ranks: int, families: Sequence[str] | None = None, wanted_tokens: int = WANTED_TOKENS
) -> Resolved:
    """Return the plan that a job describes, checked against model, batch and ranks.

    `families` are those of the ranks that there are, in their order; without them a plan is believed what it says.
    `wanted_tokens` are those of a microbatch of one replica, at the most, where the job leaves its rows open.
    Raises LaunchError if it is for another number of ranks. Raises PlanError if it does not fit the model, the batch or
    the families, or is `auto`, which needs a machine.
    """
    request = job.plan
    if request is None:
        raise PlanError(
            'plan = "auto" is no even plan: set plan.tensor.y, plan.pipeline and plan.data, whose product is'
            f" {num_ranks}, or search: hpctrain plan search JOB --cluster CLUSTER"
        )
    if request.file is not None:
        plan = load_plan(request.file)
        check_plan(job, plan, str(request.file))
        check_ranks(plan, num_ranks)
        if families:
            check_families(job, plan, families, str(request.file))
        return Resolved(plan, {})
    if request.num_ranks != num_ranks:
        grid = "x".join(map(str, request.tensor.sizes.values()))
        raise LaunchError(
            f"the plan (tensor {grid} x pipeline {request.pipeline} x data {request.data}) is for"
            f" {counted(request.num_ranks, 'rank')}, but MPI started {num_ranks}; start it with mpirun -n"
            f' {request.num_ranks}, or set plan = "auto"'
        )
    resolved = _make_even(job, request, wanted_tokens)
    if not families:
        return resolved
    plan = with_families(resolved.plan, families)
    check_families(job, plan, families, "plan")
    return replace(resolved, plan=plan)


def check_families(job: Job, plan: Plan, families: Sequence[str], where: str) -> None:
    """Refuse a plan whose tiles are for other families than those of its ranks, or for several that compute in
    different dtypes, as far as these are known. Raises PlanError."""
    for number, (tile, family) in enumerate(zip(plan.tiles, families_of(plan, families), strict=True)):
        if tile.family != family:
            raise PlanError(
                f"{where}: tile {number} is for family '{tile.family}', but its ranks {list(tile.ranks)} are"
                f" of '{family}'; start the ranks on the hosts that the plan was made for, or make a plan for these"
            )
        dtypes = {each: job.dtype_of(each) for each in family.split("+")} if job.train.dtype else {}
        if len(set(dtypes.values())) > 1:
            raise PlanError(
                f"{where}: tile {number} is for families that compute in different dtypes:"
                f" {', '.join(f'{name} in {dtype}' for name, dtype in dtypes.items())}; give each family tiles of its"
                " own, or set precision.by_family to one dtype for them"
            )


def with_families(plan: Plan, families: Sequence[str]) -> Plan:
    """Return the plan with the families of the ranks named in its tiles."""
    result = zip(plan.tiles, families_of(plan, families), strict=True)
    return replace(plan, tiles=tuple(replace(tile, family=family) for tile, family in result))


def families_of(plan: Plan, families: Sequence[str]) -> list[str]:
    """Return the family of each tile, given those of the ranks."""
    return [joined_family(tile.ranks, families) for tile in plan.tiles]


def joined_family(ranks: Sequence[int], families: Sequence[str]) -> str:
    """Return the family of some ranks, given those of all; "a+b" where they are of several."""
    return "+".join(dict.fromkeys(families[rank] for rank in ranks))


def _make_even(job: Job, request: PlanRequest, wanted_tokens: int) -> Resolved:
    flags = {"sequence_parallel": request.sequence_parallel, "exchanges_heads": request.exchange_heads}
    grid = TensorGrid()._replace(**request.tensor.sizes, **flags)
    z = grid.row_parts
    check_grid(job.model, grid)
    check_positions(job.data.sequence_length, grid, "plan")
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
            per_replica,
            z,
            request.pipeline,
            request.virtual_stages,
            job.data.sequence_length,
            wanted_tokens,
        )
    if per_replica % microbatch:
        raise PlanError(
            f"the {per_replica} sequences of a replica (train.global_batch {batch} / plan.data {request.data}) are not"
            f" divisible by plan.microbatch {microbatch}; set one of {divisors(per_replica)}"
        )
    if microbatch < z:
        raise PlanError(
            f"tensor z = {z} splits the {microbatch} sequences of a microbatch; set plan.microbatch to a divisor"
            f" of {per_replica} that is {z} or more, train.global_batch to more, or lower z"
        )
    shape = job.model.num_items, grid, request.pipeline, request.data
    cut = per_replica // microbatch, microbatch * request.data, request.schedule, request.virtual_stages
    plan = even_plan(*shape, *cut, recompute=request.recompute, zero=request.zero, offload=request.offload)
    check_passes(plan)
    return Resolved(plan, reasons)


def _choose_microbatch(
    per_replica: int, z: int, pipeline: int, virtual_stages: int, sequence_length: int, wanted_tokens: int
) -> tuple[int, str]:
    fitting = [n for n in divisors(per_replica) if n >= z] or [per_replica]
    enough = [n for n in fitting if per_replica // n >= WANTED_MICROBATCHES_PER_STAGE * pipeline or pipeline == 1]
    small = [n for n in enough or fitting[:1] if n * sequence_length <= wanted_tokens * z]
    microbatch = max(small) if small else (enough or fitting)[0]
    count = per_replica // microbatch
    bubble = (pipeline - 1) / (count * virtual_stages + pipeline - 1)
    reason = f"{microbatch * sequence_length} tokens at once"
    if pipeline > 1:
        reason += f"; {count} microbatches over {pipeline} stages leave a bubble of {bubble:.0%} at most"
    return microbatch, reason
