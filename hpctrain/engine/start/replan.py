"""Another plan for a run that goes on: asked for by a file of its folder. All else of the run stays as it was resolved.

RUN/resize           a number of ranks: the first so many get a plan, the others rest until a later resize
RUN/next-plan.toml   a plan
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.measured_speeds import names_by_speed, with_speeds
from hpctrain.config.errors import HpctrainError, LaunchError, PlanError, RankLossError, describe_os_error
from hpctrain.config.job import Job
from hpctrain.config.paths import read_bytes, refused_as, replace_text
from hpctrain.engine.requests import NEXT_PLAN_FILE, RESIZE_FILE
from hpctrain.engine.start.facts import WHY, Prepared
from hpctrain.engine.start.resolve import (
    bridge_families,
    check_plan,
    choose_kernels,
    described_plan,
    predict_step,
    priced,
    switch_overlaps,
    without_plan,
)
from hpctrain.engine.start.resolve_kernels import continued_kernels
from hpctrain.engine.start.resolve_overlap import setups_by_plan
from hpctrain.plan import checks
from hpctrain.plan.file import parse_plan
from hpctrain.plan.tiling import Plan
from hpctrain.plan.uniform import check_families, with_families
from hpctrain.planner.choose import choose_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import Setup

EQUAL = 0.03
"""A device whose time differs from its family's by no more is as fast as others."""
WORTH_STALLS = 3.0
"""A plan by measured speeds is to gain so many times what the change costs, in the steps that are left."""
OF_THE_LAST_PLAN = (
    "runner-up", "before", "planned again", "plan.microbatch", "prediction", "vocabulary", "messages between families"
)  # fmt: skip
"""Reasons that another plan does not keep."""


def resized_plan(run: Prepared, requested: Job, text: str, where: Path) -> tuple[Plan, str]:
    """Return a plan for the number of ranks that a file says, in which the others are unused, and the reason; for one
    rank. Raises HpctrainError.

    It is the plan that the job describes, where that is for so many ranks, else the best that a search finds.
    `requested` is the job as it was before it was resolved.
    """
    world, described, plan, why = run.world, run.described, None, f"{RESIZE_FILE} asks for {text} ranks"
    if not text.isdecimal() or not 1 <= int(text) <= world.size:
        raise PlanError(f"{where}: {text!r:.40} is no number of ranks; write one from 1 to {world.size}")
    num_ranks, cluster = int(text), described.cluster
    if num_ranks < world.size:
        cluster = with_speeds(cluster, names_by_speed(cluster, {}, num_ranks))
    run = run.but(job=run.job.model_copy(update={"overlap": requested.overlap, "plan": requested.plan}))
    if requested.plan:
        try:
            plan = described_plan(run, run.families[:num_ranks], cluster).plan
        except LaunchError:
            pass  # it is for another number of ranks
        except HpctrainError as error:
            why += f"; the job's plan cannot be used: {error}"
    if plan is None:
        asked = run.job.model_copy(update={"plan": None})
        job = priced(without_plan(run.but(job=asked)))
        plan = choose_plan(job, cluster, described.name, setups_by_plan(asked, job, world.topology)).plan
    return replace(plan, unused=tuple(sorted({*plan.unused, *range(num_ranks, world.size)}))), why


def given_plan(run: Prepared, text: str, where: Path) -> Plan:
    """Return the plan that a file has, if it is one for these ranks. Raises HpctrainError."""
    plan = parse_plan(text, str(where))
    checks.check_plan(run.job, plan, str(where))
    if plan.ranks != tuple(range(run.world.size)):
        raise PlanError(
            f"{where}: is for {len(plan.ranks)} ranks, and the run has {run.world.size}; list others in unused"
        )
    check_families(run.job, plan, run.families, str(where))
    return plan


class Unbalanced(NamedTuple):
    """Devices that were found to have other speeds than predicted."""

    times: Mapping[int, float]
    """Of each such rank how many times as long as predicted it computes."""
    text: str
    steps_left: int
    stall_seconds: float
    """What a change of plans costs, in seconds of the devices."""


def rebalanced_plan(run: Prepared, requested: Job, unbalanced: Unbalanced) -> tuple[Plan, str, dict[int, float]]:
    """Return the plan by measured speeds, the reason, and the speeds; for one rank.

    Raises PlanError where it gains too little.
    """
    before = run.speeds or {}
    now_measured = {rank: before.get(rank, 1.0) * time for rank, time in unbalanced.times.items()}
    speeds = {rank: time for rank, time in {**before, **now_measured}.items() if abs(time - 1) > EQUAL}
    measured = run.but(speeds=speeds)
    without = run.job.model_copy(update={"overlap": requested.overlap})
    job, cluster, _ = as_measured(without_plan(measured.but(job=without)))
    setup_of = setups_by_plan(without, job, run.world.topology)
    plan = with_families(choose_plan(job, cluster, run.described.name, setup_of).plan, run.families)
    now, then = (predict_measured(measured.but(plan_or_none=each)).predict().step_seconds for each in (run.plan, plan))
    gain, why = (now - then) * unbalanced.steps_left, unbalanced.text
    change = f"the change takes about {unbalanced.stall_seconds:.2g} s"
    if plan == run.plan or gain <= WORTH_STALLS * unbalanced.stall_seconds:
        raise PlanError(
            f"{why}; a plan by these speeds would gain {max(0.0, gain):.3g} s in {unbalanced.steps_left} steps, and"
            f" {change}"
        )
    return plan, f"{why}; a step takes {then:.4g} s instead of {now:.4g} s, and {change}", speeds


def as_measured(run: Prepared) -> tuple[Job, Cluster, list[str]]:
    """Return the job as it is priced, the cluster, and the family of each rank, by the speeds that were measured."""
    cluster, job = run.described.cluster, priced(run)
    names = names_by_speed(cluster, run.speeds or {}, cluster.num_devices)
    own = {name: family for name, family in zip(names, run.families, strict=True) if name != family}

    def with_measured(by_family: Mapping) -> dict:
        return {**by_family, **{name: by_family[family] for name, family in own.items() if family in by_family}}

    precision = job.precision.model_copy(update={"by_family": with_measured(job.precision.by_family)})
    keys = ("fused_by_family", "attention_by_family")
    kernels = job.kernels.model_copy(update={key: with_measured(getattr(job.kernels, key)) for key in keys})
    job = job.model_copy(update={"precision": precision, "kernels": kernels})
    return job, with_speeds(cluster, names) if own else cluster, names


def predict_measured(run: Prepared) -> Predictor:
    """Return the predictor of a run's plan by the speeds that were measured."""
    job, cluster, names = as_measured(run)
    return Predictor(Setup.of_job(job), with_families(run.plan, names), cluster)


def predict_compute(run: Prepared) -> dict[int, float]:
    """Return in how many seconds of a step each rank is predicted to compute, of those that do."""
    seconds = predict_measured(run).simulated.exposed
    by_ranks = {tile.ranks: parts["compute"] for tile, parts in seconds.items()}
    return {rank: seconds for ranks, seconds in by_ranks.items() for rank in ranks if seconds}


def with_plan(run: Prepared, requested: Job, plan: Plan, why: str, speeds: Mapping[int, float] | None) -> Prepared:
    """Return a run with another plan, and with the choices that depend on it. All ranks must call.

    The same plan keeps every choice, and so every bit. Raises HpctrainError on all ranks.
    """
    reasons = {"plan": f"{plan.describe()}: {why}", WHY: why}
    run = run.but(speeds=speeds)
    if plan == run.plan:
        return run.but(reasons)
    run = replace(run, reasons={key: reason for key, reason in run.reasons.items() if key not in OF_THE_LAST_PLAN})
    kernels, _ = continued_kernels(requested.kernels, run.job.kernels)
    kernels = kernels.model_copy(update={"logits_mib": run.job.kernels.logits_mib})
    job = run.job.model_copy(update={"plan": None, "overlap": requested.overlap, "kernels": kernels})
    run = run.but(reasons, job=job, plan_or_none=plan, previous=None)
    for resolver in (switch_overlaps, check_plan, bridge_families, predict_step, choose_kernels):
        run = resolver(run)
    with run.world.all_or_none():
        if run.prediction and speeds:  # on rank 0
            run = run.but(prediction=predict_measured(run).predict())
    return run


def replan(
    run: Prepared, requested: Job, folder: Path | None, unbalanced: Callable[[], Unbalanced] | None = None
) -> Prepared | str:
    """Return the run with the plan that a file of `folder` asks for, else by what is `unbalanced`; or why not.

    Both are on rank 0. A file is removed when it is read; a plan that is refused is written under another name. Where a
    rank is lost meanwhile, the file is back for the next start. All ranks must call.
    """
    given, source, devices = "", None, run.world.settings.devices

    def choose() -> tuple[Plan, str, dict[int, float] | None]:
        nonlocal given, source
        assert folder is not None, "of rank 0"
        resize, next_plan = folder / RESIZE_FILE, folder / NEXT_PLAN_FILE
        if unbalanced and not resize.exists() and not next_plan.exists():
            return rebalanced_plan(run, requested, unbalanced())
        source = resize if resize.exists() else next_plan
        given = _take(source)
        if source == resize:
            return *resized_plan(run, requested, given.strip(), resize), None
        return given_plan(run, given, next_plan), f"{NEXT_PLAN_FILE} asks for it", None

    try:
        return with_plan(run, requested, *run.world.on_first_rank(choose))
    except RankLossError:
        if source and given and not source.exists():
            with suppress(OSError):
                replace_text(source, given)
        raise
    except HpctrainError as error:
        run.world.configure(devices=devices)  # as the plan that stays has them
        why = str(error)
        if source and given and source.name == NEXT_PLAN_FILE:
            refused = source.with_suffix(".refused.toml")
            try:
                replace_text(refused, given)
            except OSError as failure:
                why += f"; {refused} cannot be written: {describe_os_error(failure)}"
        return why


def _take(file: Path) -> str:
    """Read a request and remove it: one that is written from now on is another one. Raises HpctrainError."""
    with refused_as(PlanError, f"{file}: cannot be taken"):
        text = read_bytes(file).decode(errors="replace")
        file.unlink(missing_ok=True)
    return text
