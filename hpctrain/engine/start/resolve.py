"""Resolves a job to everything that a run needs: data, machine, dtype, plan, and a value for each `auto`.

A choice is resolved after those that it depends on; slow ones come last. Commands report mistakes in files before they
import this module, and with it torch. Every choice has a value and a reason.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.architectures.description import Experts
from hpctrain.checkpoint.convert import check_form
from hpctrain.checkpoint.folder import locate_checkpoint
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.state import read_job
from hpctrain.comm.bind import bind_accelerator
from hpctrain.comm.probe.load import LoadWatch
from hpctrain.comm.probe.machine import add_profiles, describe_machine, describe_overflows, with_overflows
from hpctrain.comm.start.launcher import MORE_CORES, few_cores, host_memory_bytes
from hpctrain.comm.start.process import StopSignals
from hpctrain.comm.topology import Place
from hpctrain.comm.world import World
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.clusters.cluster_part import part_of
from hpctrain.config.errors import HpctrainError, JobError, LaunchError, PlanError, TopologyError
from hpctrain.config.job import Job
from hpctrain.data.order import check_targets, check_tokenizer, open_datasets
from hpctrain.engine.requests import refuse_if_interrupted
from hpctrain.engine.routes import choose_bridge
from hpctrain.engine.start.continuing import (
    continue_run,
    count_families,
    describe_change,
    keep,
    without_profiles,
)
from hpctrain.engine.start.facts import MachineDescription, Prepared, with_values
from hpctrain.engine.start.resolve_kernels import resolve_kernels
from hpctrain.engine.start.resolve_overlap import (
    launch_refusal,
    predict_best_parts,
    resolve_for,
    resolve_overlap,
    setups_by_plan,
)
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan, counted
from hpctrain.plan.uniform import Resolved, resolve_plan
from hpctrain.planner.choose import PlanChoice, check_fits, choose_plan, with_dtypes, with_enough_rows
from hpctrain.planner.prediction.forecast import forecast
from hpctrain.planner.prices.curves import has_times
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.intervals import cut_evenly
from hpctrain.sharding.parameters import count_parameters, padded_vocabulary

BLOCKS_VERIFIED_AT_START = 256  # by each rank, of 1 MiB: well under a second
SHORT_PROFILE_SECONDS = 1.5
WORTH_A_NEW_PLAN = 0.02
"""Smallest gain, as a share of a step, for which a run that continues on the same ranks, described anew, gets another
plan."""


def prepare_run(
    world: World,
    job: Job,
    resume_from: Path | None = None,
    described: MachineDescription | None = None,
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
    if job.search.must_fit and described is None and not world.topology.has_devices:
        refuse_too_large(world, job)
    run = Prepared(world, job, *open_datasets(job.data, job.train.seed), resume_from, fresh_probe, described)
    for resolver in RESOLVERS:
        if signals:
            refuse_if_interrupted(world, signals)
        run = resolver(run)
    return run


def refuse_too_large(world: World, job: Job) -> None:
    """Refuse a model whose training no plan could hold in the memory of all hosts, before anything of it is measured:
    on processors a single block may take minutes. All ranks must call. Raises PlanError."""
    hosts = dict(world.all_objects((world.place.host_name, host_memory_bytes())))
    there = sum(hosts.values())
    model = with_values(job, "model", vocab_size=job.model.vocab_size or 1).model
    setup, count = replace(Setup.of_job(job, "fp32"), model=model), count_parameters(model)
    of_each = setup.item_bytes + setup.gradient_bytes + setup.state_bytes()
    if count * of_each <= there:
        return
    has_experts = any(isinstance(block.mlp, Experts) for block in model.description.blocks)
    raise PlanError(
        f"{job.name}: {count / 1e9:,.1f} billion parameters need {count * of_each / 1e9:,.0f} GB for weights, gradients"
        f" and moments, and all memory of {counted(world.size, 'rank')} on {counted(len(hosts), 'host')} is"
        f" {there / 1e9:,.0f} GB. Start it on more hosts, or rehearse it on a described cluster (hpctrain train JOB"
        f" --rehearse CLUSTER), or try a small model: hpctrain train {'tiny-moe' if has_experts else 'tiny'}"
    )


def check_data(run: Prepared) -> Prepared:
    """Check that the tokens are whole, and those of the model; they say how large its vocabulary is."""
    world, job, source = run.world, run.job, run.source
    vocabulary_of: Path | str = job.data.tokens
    if job.train.start_from and run.resume_from is None:
        start = locate_checkpoint(job.train.start_from)
        with world.all_or_none(), Index(start) as index:
            check_tokenizer(source, index.about["tokenizer"], start)
            if job.model.vocab_size is None and not source.declares_vocabulary:
                job = with_values(job, "model", vocab_size=read_job(index).model.vocab_size)
                vocabulary_of = start
    with world.all_or_none():  # small files whole, by all ranks together; the rest when it is first read
        num_blocks = min(source.num_blocks, world.size * BLOCKS_VERIFIED_AT_START)
        source.verify(cut_evenly(num_blocks, world.size)[world.rank])
    check_targets(job.data, run.training, run.validation, job.train.validation_sequences)
    if job.model.vocab_size is None:
        job = with_values(job, "model", vocab_size=source.vocab_size)
    elif job.model.vocab_size < source.least_vocabulary:
        raise JobError(
            f"model.vocab_size {job.model.vocab_size} is less than the {source.least_vocabulary} token ids of"
            f' {job.data.tokens}; set it to {source.least_vocabulary} or more, or "auto"'
        )
    if run.job.model.vocab_size is None:
        run = run.but({"model.vocab_size": f"{job.model.vocab_size}: that of {vocabulary_of}"}, job=job)
    if run.resume_from is None:
        check_form(run.job.model)
    mixed = [block.mlp for block in job.model.description.blocks if isinstance(block.mlp, Experts)]
    if mixed and not mixed[0].balances and not job.train.balance_loss:
        reason = (
            "nothing evens their load, which expert_load of the metrics shows; --set train.balance_loss=0.001 adds a"
            " loss that does"
        )
        run = run.but({"experts": reason})
    return run


def take_given_plan(run: Prepared) -> Prepared:
    """Make the plan that the job describes, on one rank for all of them, whatever their hosts are like."""
    if run.job.plan is None:
        return run
    made = run.world.on_first_rank(lambda: resolve_plan(run.job, run.world.size, run.families))
    return run.but(made.reasons, plan_or_none=made.plan)


def count_cores(run: Prepared) -> Prepared:
    """Warn where a rank with a device has few cores: launchers give one unless they are asked for more."""
    world = run.world
    if not (world.topology.has_devices and world.topology.shares_memory):
        return run
    narrow = few_cores(world.all_objects((world.place.kind, len(os.sched_getaffinity(0)))))
    return run.but({"cores": f"{narrow}; {MORE_CORES} gives more"}) if narrow else run


def know_machine(run: Prepared) -> Prepared:
    """Look up the description of these devices, where none is given, or measure one."""
    world = run.world
    if run.described_or_none is None:
        accelerator = bind_accelerator(world, run.job.kernels.deterministic)
        machine = describe_machine(world, accelerator, run.fresh_probe)
        name = "a probe of this machine while it was busy" if machine.disturbance else str(machine.path)
        described = MachineDescription(machine.cluster, name, path=machine.path, disturbance=machine.disturbance)
        reason = f"{machine.cluster.describe()}: {machine.source}"
        run = run.but({"machine": reason}, described_or_none=described)
    described = run.described
    if not described.is_rehearsed and len(run.families) < described.cluster.num_devices:
        part = part_of(described.cluster, run.families, [place.host for place in world.topology.places])
        if part is not None:
            reason = f"{part.describe()}: a part of {described.name} ({described.cluster.describe()})"
            run = run.but({"machine": reason}, described_or_none=replace(described, cluster=part))
    described = run.described
    with world.all_or_none():
        check_ranks_are_devices(described, world.topology.places)
    cluster = world.on_first_rank(lambda: with_overflows(described.cluster))
    if overflows := describe_overflows(cluster):
        run = run.but({"overflows": overflows}, described_or_none=replace(described, cluster=cluster))
    return run


def size_head(run: Prepared) -> Prepared:
    """Set how many logits may exist at once, by the computing families. A rehearsal, on CPUs, is skipped."""
    kernels, families = run.job.kernels, run.described.cluster.families
    if kernels.logits_mib is not None or run.described.is_rehearsed:
        return run
    used = _computing(run)
    kernels = kernels.with_logits([families[name] for name in used])
    reason = f"{kernels.logits_mib}: of the logits of {', '.join(used)}, as if in fp32"
    return run.but({"kernels.logits_mib": reason}, job=run.job.model_copy(update={"kernels": kernels}))


def _computing(run: Prepared) -> list[str]:
    """Return the families that compute, as far as that is known."""
    ranks = run.plan_or_none.ranks if run.plan_or_none else range(run.world.size)
    return list(dict.fromkeys(run.families[rank] for rank in ranks))


def choose_dtype(run: Prepared) -> Prepared:
    if run.job.train.dtype is not None:
        return run
    with run.world.all_or_none():
        job, reason = with_dtypes(run.job, run.described.cluster, _computing(run), run.described.name)
    return run.but({"train.dtype": reason}, job=job)


def fill_devices(run: Prepared) -> Prepared:
    """Give devices more rows at once than CPUs, where the job describes its plan and leaves that number open."""
    if run.plan_or_none is None or run.job.plan is None:
        return run
    made = run.world.on_first_rank(lambda: described_plan(run, run.families, run.described.cluster))
    return run.but(made.reasons, plan_or_none=made.plan)


def described_plan(run: Prepared, families: Sequence[str], cluster: Cluster) -> Resolved:
    """Return the plan that the job describes for ranks of these families, with rows enough for devices; for one rank.

    Raises as `resolve_plan`.
    """
    job, few = priced(run), resolve_plan(run.job, len(families), families)
    if run.described.is_rehearsed:
        return few
    return with_enough_rows(job, few, families, cluster, setups_by_plan(job, job, run.world.topology))


def profile_job(run: Prepared) -> Prepared:
    """Measure passes of this job's items for the search, where the description is hpctrain's own and has none."""
    described, world, job = run.described, run.world, run.job
    path = described.path
    if run.plan_or_none or path is None or has_times(described.cluster, job, job.train.resolved_dtype):
        return run
    from hpctrain.engine.start.profiler import short_profile

    watch = LoadWatch()
    measured = short_profile(world, bind_accelerator(world), without_plan(run).job, SHORT_PROFILE_SECONDS)
    disturbance = watch.disturbance(world)
    busy, reasons = described.disturbance or disturbance, {}
    text = add_profiles(path, described.cluster, *measured, keeps=not busy) if measured else None
    cluster = parse_cluster(world.broadcast_object(text), described.name)
    if disturbance and not described.disturbance:
        reasons["profile"] = f"passes of this job, measured now and not kept: {busy}; the next start measures again"
    return run.but(reasons, described_or_none=replace(described, cluster=cluster, disturbance=busy))


def search_plan(run: Prepared) -> Prepared:
    """Search on one rank. Overlaps that are `auto` are scored as without a plan, and timed as each plan has them."""
    if run.plan_or_none:
        return run
    job = priced(without_plan(run))
    setup_of = setups_by_plan(run.job, job, run.world.topology)
    choice, again = run.world.on_first_rank(lambda: _choose(job, run, setup_of))
    if again or run.previous is None or run.job_to_keep is None:
        return run.but(({"planned again": again} if again else {}) | choice.reasons, plan_or_none=choice.plan)
    plan, cluster = run.previous
    why = f"{plan.describe()}: that of {run.resume_from}; no plan of a new search is clearly faster"
    return keep(run.but({"plan": why}, plan_or_none=plan, previous=None), run.job_to_keep, cluster)


def without_plan(run: Prepared) -> Prepared:
    """Return a run with the overlaps that it would have without a plan."""
    overlap, _ = resolve_overlap(run.job.overlap, run.world.topology)
    return run.but(job=run.job.model_copy(update={"overlap": overlap}))


def _choose(job: Job, run: Prepared, setup_of: Callable[[Plan], Setup]) -> tuple[PlanChoice, str]:
    """Search; return the result, and why it is better than the plan of the continued run, if it is."""
    described, where = run.described, run.resume_from
    choice = choose_plan(job, described.cluster, described.name, setup_of)
    if run.previous is None or run.job_to_keep is None:
        return choice, ""
    plans = run.previous[0], choice.plan
    kept, best = (predict_best_parts(setup_of(plan), plan, described.cluster)[0].predict() for plan in plans)
    if not kept.fits:
        return choice, f"by {described.name} the plan of {where} does not fit into memory"
    slower = kept.step_seconds / best.step_seconds - 1
    is_clear = slower > WORTH_A_NEW_PLAN
    return choice, f"by {described.name} a step by the plan of {where} takes {slower:.1%} longer" if is_clear else ""


def priced(run: Prepared) -> Job:
    """Return the job as it is priced before ranks have tried which kernels they have."""
    if not run.world.topology.shares_memory:
        return run.job
    return run.job.model_copy(update={"kernels": run.job.kernels.assumed(run.described.cluster)})


def switch_overlaps(run: Prepared) -> Prepared:
    """Give overlaps that are `auto` a value by the plan, on one rank for all of them."""
    topology, cluster = run.world.topology, run.described.cluster
    overlap, reasons = run.world.on_first_rank(lambda: resolve_for(run.job, run.plan, topology, cluster))
    return run.but(reasons, job=run.job.model_copy(update={"overlap": overlap}))


def check_plan(run: Prepared) -> Prepared:
    """Refuse a plan whose schedule could block, and say where it pads the vocabulary."""
    plan, model = run.plan, run.job.model
    reduces_early, topology = bool(run.job.overlap.data), run.world.topology
    has_devices = topology.has_devices and topology.shares_memory

    def check() -> None:
        check_schedules(plan, reduce_early=reduces_early)
        if reduces_early and has_devices and (refusal := launch_refusal(plan)):
            raise PlanError(f"{refusal}, where devices do one collective at a time; set overlap.data = false")

    run.world.on_first_rank(check)
    padded = max(padded_vocabulary(model, tile.tensor) for tile in plan.tiles)
    if padded == model.vocab_size:
        return run
    return run.but({"vocabulary": f"{model.vocab_size} ids are padded to {padded}, a multiple of tensor y"})


def bridge_families(run: Prepared) -> Prepared:
    """Choose how messages between families of devices move, by what is proven for the plan."""
    return run.but(choose_bridge(run.world, run.job, run.plan))


def predict_step(run: Prepared) -> Prepared:
    """Predict a step on rank 0, and refuse a plan that is predicted not to fit."""
    prediction, reasons, described = None, {}, run.described
    with run.world.all_or_none():
        if run.world.rank == 0:
            try:
                prediction = forecast(Setup.of_job(priced(run)), run.plan, described.cluster).prediction
            except HpctrainError as error:
                reasons["prediction"] = f"none, by {described.name}: {error}"
            if prediction and run.previous:
                reasons["before"] = describe_change(run, *run.previous, prediction.step_seconds)
            if prediction and run.job.search.must_fit:
                check_fits(prediction, run.plan, described.name)
    return run.but(reasons, prediction=prediction)


def choose_algorithms(run: Prepared) -> Prepared:
    """Let groups choose their algorithms by the links that the plan was searched with, or those of the checkpoint."""
    world, described = run.world, run.described
    links_of = run.links_of or without_profiles(described.cluster)
    network = ClusterNetwork(links_of)
    world.configure(network=network)
    everybody = range(world.size)
    is_shared = world.topology.route(everybody).kind in ("alone", "shared")
    choice = "none: ranks share one host's memory" if is_shared else network.describe_choice(everybody)
    source = run.resume_from if run.links_of else described.name
    return run.but({"algorithms": f"{choice}, by the links of {source}"}, links_of=links_of)


def choose_kernels(run: Prepared) -> Prepared:
    """Try the requested or open kernels. Compilers take seconds, so this comes last."""
    job, reasons = resolve_kernels(
        run.world, bind_accelerator(run.world, run.job.kernels.deterministic), run.job, run.plan.ranks
    )
    return run.but(reasons, job=job)


RESOLVERS: tuple[Callable[[Prepared], Prepared], ...] = (
    check_data,
    continue_run,
    take_given_plan,
    count_cores,
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
"""The resolvers, each after those that it depends on."""


def check_ranks_are_devices(described: MachineDescription, places: Sequence[Place]) -> None:
    """Refuse ranks that are not the devices of a cluster, in its order. Raises LaunchError or TopologyError."""
    cluster, families = described.cluster, [place.family for place in places]
    devices = [device.family for device in cluster.devices]
    if len(devices) != len(families):
        raise LaunchError(
            f"{described.name} describes {counted(len(devices), 'device')} ({count_families(devices)}), but MPI started"
            f" {counted(len(families), 'rank')}; start it with mpirun -n {len(devices)}"
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
