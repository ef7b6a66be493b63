"""Resolves a job to all that a run needs: data, machine, dtype, plan, and a value for everything that is `auto`.

The order is that of what depends on what. Mistakes in files are reported before torch is imported; what takes time
comes last. Every choice comes back as a value and a reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.network import ClusterNetwork
from hpctrain.comm.start.process import StopSignals
from hpctrain.comm.topology import Place
from hpctrain.config.clusters.cluster import part_of
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import HpctrainError, JobError, LaunchError, PlanError, TopologyError
from hpctrain.config.job import Job
from hpctrain.engine.requests import refuse_if_interrupted
from hpctrain.engine.start.continuing import (
    continue_run,
    count_families,
    describe_change,
    keep,
    with_profiles,
    without_profiles,
)
from hpctrain.engine.start.facts import Described, Facts, Resolution, with_values
from hpctrain.engine.start.resolve_kernels import resolve_kernels
from hpctrain.engine.start.resolve_overlap import (
    launch_refusal,
    resolve_overlap,
    resolve_parts,
    setups_by_plan,
    spreads,
)
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.intervals import cut_evenly
from hpctrain.sharding.parameters import padded_vocabulary

if TYPE_CHECKING:
    from hpctrain.comm.world import World
    from hpctrain.data.order import AnySequences
    from hpctrain.data.tokens import TokenSource
    from hpctrain.planner.choose import PlanChoice
    from hpctrain.planner.prediction.predictor import Prediction
    from hpctrain.planner.prices.setup import Setup

BLOCKS_VERIFIED_AT_START = 256  # a rank, of 1 MiB: well under a second
SHORT_PROFILE_SECONDS = 1.5
WORTH_A_NEW_PLAN = 0.02
"""Of a step: a run that continues on the same ranks, described anew, gets another plan if it is faster by more."""


@dataclass(frozen=True)
class Prepared:
    """All that a run needs to know before its weights are made."""

    job: Job
    plan: Plan
    reasons: dict[str, str]
    source: "TokenSource"
    training: "AnySequences"
    validation: "AnySequences | None"
    data_identity: str
    """Identifies the token file and its training part; a run that is continued must have the same."""
    described: Described
    prediction: "Prediction | None" = None
    """Of a step; on rank 0."""


def prepare_run(
    world: "World",
    job: Job,
    resume_from: Path | None = None,
    described: Described | None = None,
    fresh_probe: bool = False,
    signals: StopSignals | None = None,
) -> Prepared:
    """Open the data, replace what is `auto` by values, make the plan. All ranks must call.

    With `resume_from` (a checkpoint) values that can change a bit of the result are taken from it, as long as the ranks
    are those of its plan. `described` is what the ranks run on, where that is given; with `fresh_probe` what is known
    of the machine is measured anew. Groups made afterwards choose their algorithms by the links of what is described.

    A signal that comes meanwhile ends it between two resolvers.

    Raises JobError, DataError, CheckpointError, TopologyError, LaunchError, InterruptionError; PlanError
    also where the plan is predicted not to fit into memory.
    """
    facts, reasons = Facts(world, resume_from, fresh_probe, described), {}
    for resolver in RESOLVERS:
        if signals:
            refuse_if_interrupted(world, signals)
        job, facts, why = resolver(job, facts)
        reasons |= why
    return Prepared(
        job, facts.plan, reasons, *facts.data, facts.data_identity, facts.described, prediction=facts.prediction
    )


def open_data(job: Job, facts: Facts) -> Resolution:
    from hpctrain.data.order import open_datasets

    world, reasons = facts.world, {}
    source, training, validation = open_datasets(job.data, job.train.seed)
    if job.train.start_from and facts.resume_from is None:
        from hpctrain.checkpoint.folder import locate_checkpoint
        from hpctrain.checkpoint.index import Index
        from hpctrain.data.order import check_tokenizer

        start = locate_checkpoint(job.train.start_from)
        with world.all_or_none(), Index(start) as index:
            check_tokenizer(source, index.about["tokenizer"], start)
    with world.all_or_none():  # small files whole, by all ranks together; the rest when it is first read
        num_blocks = min(source.num_blocks, world.size * BLOCKS_VERIFIED_AT_START)
        source.verify(cut_evenly(num_blocks, world.size)[world.rank])
    if job.model.vocab_size is None:
        job = with_values(job, "model", vocab_size=source.vocab_size)
        reasons["model.vocab_size"] = f"{source.vocab_size}: that of {job.data.tokens}"
    elif job.model.vocab_size < source.vocab_size:
        raise JobError(
            f"model.vocab_size {job.model.vocab_size} is less than the {source.vocab_size} token ids of"
            f' {job.data.tokens}; set it to {source.vocab_size} or more, or "auto"'
        )
    return Resolution(job, replace(facts, data_or_none=(source, training, validation)), reasons)


def take_given_plan(job: Job, facts: Facts) -> Resolution:
    """Make the plan that the job describes, on one rank for all of them, whatever their hosts are like."""
    from hpctrain.plan.uniform import resolve_plan

    if job.plan is None:
        return Resolution(job, facts)
    made = facts.world.on_first_rank(lambda: resolve_plan(job, facts.world.size, facts.families))
    return Resolution(job, replace(facts, plan_or_none=made.plan), made.reasons)


def check_precision(job: Job, facts: Facts) -> Resolution:
    """Refuse what is not computed on the devices that there are; a rehearsal computes on CPUs."""
    topology = facts.world.topology
    if topology.shares_memory:
        job.precision.check_fp8({place.family: place.kind for place in topology.places})
    return Resolution(job, facts)


def know_machine(job: Job, facts: Facts) -> Resolution:
    """Look up the description of these devices, where none is given, or measure one."""
    world, reasons = facts.world, {}
    if facts.described_or_none is None:
        from hpctrain.comm.bind import bind_accelerator
        from hpctrain.comm.probe.machine import describe_machine

        machine = describe_machine(world, bind_accelerator(world), facts.fresh_probe)
        name = "a probe of this machine while it was busy" if machine.disturbance else str(machine.path)
        measured = {"path": machine.path, "disturbance": machine.disturbance}
        facts = replace(facts, described_or_none=Described(machine.cluster, name, **measured))
        reasons["machine"] = f"{machine.cluster.describe()}: {machine.source}"
    described = facts.described
    if not described.is_rehearsed and len(facts.families) < described.cluster.num_devices:
        part = part_of(described.cluster, facts.families, [place.host for place in world.topology.places])
        if part is not None:
            reasons["machine"] = f"{part.describe()}: a part of {described.name} ({described.cluster.describe()})"
            facts = replace(facts, described_or_none=replace(described, cluster=part))
    with world.all_or_none():
        check_ranks_are_devices(facts.described, world.topology.places)
    from hpctrain.comm.probe.machine import describe_overflows, with_overflows

    described = facts.described
    cluster = world.on_first_rank(lambda: with_overflows(described.cluster))
    if overflows := describe_overflows(cluster):
        reasons["overflows"] = overflows
        facts = replace(facts, described_or_none=replace(described, cluster=cluster))
    return Resolution(job, facts, reasons)


def size_head(job: Job, facts: Facts) -> Resolution:
    """Say how many logits may be there at once, by the families that compute: a rehearsal computes on CPUs."""
    if job.kernels.logits_mib is not None or facts.described.is_rehearsed:
        return Resolution(job, facts)
    known, plan = facts.described.cluster.families, facts.plan_or_none
    used = [facts.families[rank] for rank in plan.ranks] if plan else facts.families
    kernels = job.kernels.with_logits([known[name] for name in dict.fromkeys(used)])
    reason = f"{kernels.logits_mib}: of the logits of {', '.join(dict.fromkeys(used))}, as if in fp32"
    return Resolution(job.model_copy(update={"kernels": kernels}), facts, {"kernels.logits_mib": reason})


def choose_dtype(job: Job, facts: Facts) -> Resolution:
    if job.train.dtype is not None:
        return Resolution(job, facts)
    from hpctrain.planner.choose import with_dtypes

    with facts.world.all_or_none():
        used = facts.plan_or_none and [facts.families[rank] for rank in facts.plan_or_none.ranks]
        families = list(dict.fromkeys(used or facts.families))
        job, reason = with_dtypes(job, facts.described.cluster, families, facts.described.name)
    return Resolution(job, facts, {"train.dtype": reason})


def fill_devices(job: Job, facts: Facts) -> Resolution:
    """Give devices more rows at once than CPUs, where the job describes its plan and leaves their number open."""
    topology, plan = facts.world.topology, facts.plan_or_none
    if plan is None or job.plan is None or facts.described.is_rehearsed:
        return Resolution(job, facts)
    from hpctrain.plan.uniform import Resolved
    from hpctrain.planner.choose import with_enough_rows

    priced, few = _priced(job, facts), Resolved(plan, {})
    setup_of = setups_by_plan(priced, priced, topology)
    made = facts.world.on_first_rank(
        lambda: with_enough_rows(priced, few, facts.families, facts.described.cluster, setup_of)
    )
    return Resolution(job, replace(facts, plan_or_none=made.plan), made.reasons)


def profile_job(job: Job, facts: Facts) -> Resolution:
    """Measure passes of this job's items for the search, where the description is hpctrain's own and has none."""
    from hpctrain.planner.prices.curves import has_times

    described, world = facts.described, facts.world
    path = described.path
    if facts.plan_or_none or path is None or has_times(described.cluster, job, job.train.resolved_dtype):
        return Resolution(job, facts)
    from hpctrain.comm.bind import bind_accelerator
    from hpctrain.comm.probe.load import LoadWatch
    from hpctrain.comm.probe.machine import add_profiles
    from hpctrain.engine.start.profiler import short_profile

    overlap, _ = resolve_overlap(job.overlap, world.topology)
    profiled = job.model_copy(update={"overlap": overlap})
    watch = LoadWatch()
    measured = short_profile(world, bind_accelerator(world), profiled, SHORT_PROFILE_SECONDS)
    disturbance = watch.disturbance(world)
    busy, reasons = described.disturbance or disturbance, {}
    text = add_profiles(path, described.cluster, *measured, keeps=not busy) if measured else None
    cluster = parse_cluster(world.broadcast_object(text), described.name)
    if disturbance and not described.disturbance:
        reasons["profile"] = f"passes of this job, measured now and not kept: {busy}; the next start measures again"
    described = replace(described, cluster=cluster, disturbance=busy)
    return Resolution(job, replace(facts, described_or_none=described), reasons)


def search_plan(job: Job, facts: Facts) -> Resolution:
    """Search on one rank. Overlaps that are `auto` are scored as without a plan, and timed as each plan has them."""
    if facts.plan_or_none:
        return Resolution(job, facts)
    overlap, _ = resolve_overlap(job.overlap, facts.world.topology)
    asked = _priced(job.model_copy(update={"overlap": overlap}), facts)
    setup_of = setups_by_plan(job, asked, facts.world.topology)
    choice, again = facts.world.on_first_rank(lambda: _choose(asked, facts, setup_of))
    if facts.previous is None or facts.job_to_keep is None:
        return Resolution(job, replace(facts, plan_or_none=choice.plan), choice.reasons)
    if again:
        return Resolution(job, replace(facts, plan_or_none=choice.plan), {"planned again": again} | choice.reasons)
    plan, cluster = facts.previous
    why = f"{plan.describe()}: that of {facts.resume_from}; no plan of a new search is clearly faster"
    kept = replace(facts, plan_or_none=plan, previous=None)
    return keep(job, facts.job_to_keep, kept, cluster, {"plan": why})


def _choose(job: Job, facts: Facts, setup_of: "Callable[[Plan], Setup]") -> "tuple[PlanChoice, str]":
    """Search; return the result, and why it is better than the plan of the run that is continued, if it is."""
    from hpctrain.planner.choose import choose_plan
    from hpctrain.planner.prediction.predictor import predict

    described, where = facts.described, facts.resume_from
    choice = choose_plan(job, described.cluster, described.name, setup_of)
    if facts.previous is None or facts.job_to_keep is None:
        return choice, ""
    plans = facts.previous[0], choice.plan
    kept, best = (predict(setup_of(plan), plan, described.cluster) for plan in plans)
    if not kept.fits:
        return choice, f"by {described.name} the plan of {where} does not fit into memory"
    slower = kept.step_seconds / best.step_seconds - 1
    is_clear = slower > WORTH_A_NEW_PLAN
    return choice, f"by {described.name} a step by the plan of {where} takes {slower:.1%} longer" if is_clear else ""


def _priced(job: Job, facts: Facts) -> Job:
    """Return the job as it is priced before ranks have tried which kernels they have."""
    if not facts.world.topology.shares_memory:
        return job
    return job.model_copy(update={"kernels": job.kernels.assumed(facts.described.cluster)})


def switch_overlaps(job: Job, facts: Facts) -> Resolution:
    """Give overlaps that are `auto` a value by the plan."""
    world, plan, cluster = facts.world, facts.plan, facts.described.cluster
    has_devices = world.topology.has_devices and world.topology.shares_memory
    refusal = world.on_first_rank(lambda: launch_refusal(plan) if has_devices else None)
    overlap, reasons = resolve_overlap(job.overlap, world.topology, spreads(world, job, plan), refusal)
    job = job.model_copy(update={"overlap": overlap})
    overlap, why = world.on_first_rank(lambda: resolve_parts(job, plan, cluster))
    return Resolution(job.model_copy(update={"overlap": overlap}), facts, reasons | why)


def check_plan(job: Job, facts: Facts) -> Resolution:
    """Refuse a plan whose schedule could block, and say where it pads the vocabulary."""
    plan, reasons = facts.plan, {}
    reduces_early, topology = bool(job.overlap.data), facts.world.topology
    has_devices = topology.has_devices and topology.shares_memory

    def check() -> None:
        check_schedules(plan, reduce_early=reduces_early)
        if reduces_early and has_devices and (refusal := launch_refusal(plan)):
            raise PlanError(f"{refusal}, where devices do one collective at a time; set overlap.data = false")

    facts.world.on_first_rank(check)
    padded = max(padded_vocabulary(job.model, tile.tensor) for tile in plan.tiles)
    if padded != job.model.vocab_size:
        reasons["vocabulary"] = f"{job.model.vocab_size} ids are padded to {padded}, a multiple of tensor y"
    return Resolution(job, facts, reasons)


def bridge_families(job: Job, facts: Facts) -> Resolution:
    """Say how messages between families of devices go, by what is proven for the plan."""
    from hpctrain.engine.routes import choose_bridge

    return Resolution(job, facts, choose_bridge(facts.world, job, facts.plan))


def predict_step(job: Job, facts: Facts) -> Resolution:
    """Predict a step on rank 0, and refuse a plan that is predicted not to fit."""
    prediction, reasons, described = None, {}, facts.described
    with facts.world.all_or_none():
        if facts.world.rank == 0:
            from hpctrain.planner.choose import check_fits
            from hpctrain.planner.prediction.predictor import predict
            from hpctrain.planner.prices.setup import Setup

            try:
                prediction = predict(Setup.of_job(_priced(job, facts)), facts.plan, described.cluster)
            except HpctrainError as error:
                reasons["prediction"] = f"none, by {described.name}: {error}"
            if prediction and facts.previous:
                plan, cluster = facts.previous
                cluster = with_profiles(cluster, facts.resume_from)
                reasons["before"] = describe_change(job, plan, cluster, facts.plan, prediction.step_seconds)
            if prediction and job.search.must_fit:
                check_fits(prediction, facts.plan, described.name)
    return Resolution(job, replace(facts, prediction=prediction), reasons)


def choose_algorithms(job: Job, facts: Facts) -> Resolution:
    """Let groups choose their algorithms by the links that the plan was searched with, or those of the checkpoint."""
    world, described = facts.world, facts.described
    network = ClusterNetwork(facts.links_of or without_profiles(described.cluster))
    world.configure(network=network)
    everybody = range(world.size)
    is_shared = world.topology.route(everybody).kind in ("alone", "shared")
    choice = "none: ranks share one host's memory" if is_shared else network.describe_choice(everybody)
    source = facts.resume_from if facts.links_of else described.name
    return Resolution(job, facts, {"algorithms": f"{choice}, by the links of {source}"})


def choose_kernels(job: Job, facts: Facts) -> Resolution:
    """Try what the kernels need that the job asks for, or leaves open: compilers take seconds, so this comes last."""
    from hpctrain.comm.bind import bind_accelerator

    world = facts.world
    job, reasons = resolve_kernels(world, bind_accelerator(world), job, facts.plan.ranks)
    return Resolution(job, facts, reasons)


RESOLVERS: tuple[Callable[[Job, Facts], Resolution], ...] = (
    open_data,
    continue_run,
    take_given_plan,
    check_precision,
    know_machine,
    size_head,
    choose_dtype,
    fill_devices,
    profile_job,
    search_plan,
    switch_overlaps,
    check_plan,
    bridge_families,
    predict_step,
    choose_algorithms,
    choose_kernels,
)
"""In the order of what depends on what."""


def check_ranks_are_devices(described: Described, places: Sequence[Place]) -> None:
    """Refuse ranks that are not the devices of a cluster, in its order. Raises LaunchError or TopologyError."""
    cluster, families = described.cluster, [place.family for place in places]
    devices = [device.family for device in cluster.devices]
    if len(devices) != len(families):
        raise LaunchError(
            f"{described.name} describes {len(devices)} devices ({count_families(devices)}), but {len(families)} ranks"
            f" were started; start it with mpirun -n {len(devices)}"
        )
    wrong = next((rank for rank, pair in enumerate(zip(devices, families, strict=True)) if pair[0] != pair[1]), None)
    if wrong is not None:
        raise TopologyError(
            f"{described.name}: rank {wrong} is a device of family '{devices[wrong]}' there, but '{families[wrong]}'"
            " here; start the ranks in the order of the file's nodes, name the families as the ranks do"
            " (HPCTRAIN_FAMILY), or describe this machine (hpctrain probe)"
        )
    for rank, place in enumerate(() if described.is_rehearsed else places):
        kind = cluster.families[place.family].kind
        if kind != place.kind:
            raise TopologyError(
                f"{described.name}: family '{place.family}' is of kind {kind} there, but rank {rank} on host"
                f" {place.host} computes on {place.kind}; start it where hpctrain doctor shows such devices,"
                " impersonate them with --rehearse, or describe this machine (hpctrain probe)"
            )
