"""Another plan for a run that goes on: asked for by a file of its folder. All else of the run stays as it was resolved.

RUN/resize           a number of ranks: the first so many get a plan, the others rest until a later resize
RUN/next-plan.toml   a plan
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpctrain.config.clusters.measured_speeds import names_by_speed, with_speeds
from hpctrain.config.errors import HpctrainError, PlanError
from hpctrain.config.job import Job
from hpctrain.config.paths import read_bytes
from hpctrain.engine.requests import NEXT_PLAN_FILE, RESIZE_FILE
from hpctrain.engine.start.facts import Prepared
from hpctrain.engine.start.resolve import (
    bridge_families,
    check_plan,
    choose_kernels,
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
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.choose import choose_plan

WHY = "another plan"
"""The choice whose reason is why a run got another plan."""


def requested_plan(run: Prepared, requested: Job, folder: Path) -> tuple[Plan, str]:
    """Return the plan that a file of the run folder asks for, and the reason; for one rank.

    `requested` is the job as it was before it was resolved. Raises HpctrainError, also where no file is there.
    """
    resize, given = folder / RESIZE_FILE, folder / NEXT_PLAN_FILE
    if resize.exists():
        text = read_bytes(resize).decode(errors="replace").strip()
        if not text.isdecimal() or not 1 <= int(text) <= run.world.size:
            raise PlanError(f"{resize}: {text!r:.40} is no number of ranks; write one from 1 to {run.world.size}")
        return plan_for(run, requested, int(text)), f"{RESIZE_FILE} asks for {text} ranks"
    plan = parse_plan(read_bytes(given).decode(errors="replace"), str(given))
    checks.check_plan(run.job, plan, str(given))
    if plan.ranks != tuple(range(run.world.size)):
        raise PlanError(
            f"{given}: is for {len(plan.ranks)} ranks, and the run has {run.world.size}; list others in unused"
        )
    return plan, f"{NEXT_PLAN_FILE} asks for it"


def plan_for(run: Prepared, requested: Job, num_ranks: int) -> Plan:
    """Return a plan for the first ranks, in which the others are unused; for one rank. Raises HpctrainError.

    It is the one that the job describes, where that is for so many ranks, else the best that a search finds.
    """
    world, described, plan = run.world, run.described, None
    if requested.plan:
        job = run.job.model_copy(update={"plan": requested.plan})
        with suppress(HpctrainError):
            plan = resolve_plan(job, num_ranks, run.families[:num_ranks]).plan
    if plan is None:
        searched = without_plan(run.but(job=run.job.model_copy(update={"overlap": requested.overlap, "plan": None})))
        cluster = described.cluster
        if num_ranks < world.size:
            cluster = with_speeds(cluster, names_by_speed(cluster, {}, num_ranks))
        setup_of = setups_by_plan(searched.job, priced(searched), world.topology)
        plan = choose_plan(priced(searched), cluster, described.name, setup_of).plan
    return replace(plan, unused=tuple(sorted({*plan.unused, *range(num_ranks, world.size)})))


def with_plan(run: Prepared, requested: Job, plan: Plan, why: str) -> Prepared:
    """Return a run with another plan, and with the choices that depend on it. All ranks must call.

    The same plan keeps every choice, and so every bit. Raises HpctrainError on all ranks.
    """
    reasons = {"plan": f"{plan.describe()}: {why}", WHY: why}
    if plan == run.plan:
        return run.but(reasons)
    kernels, _ = continued_kernels(requested.kernels, run.job.kernels)
    kernels = kernels.model_copy(update={"logits_mib": run.job.kernels.logits_mib})
    job = run.job.model_copy(update={"plan": None, "overlap": requested.overlap, "kernels": kernels})
    run = run.but(reasons, job=job, plan_or_none=plan, previous=None)
    for resolver in (switch_overlaps, check_plan, bridge_families, predict_step, choose_kernels):
        run = resolver(run)
    return run


def replan(run: Prepared, requested: Job, folder: Path | None) -> Prepared | str:
    """Return the run with the plan that a file of `folder` (on rank 0) asks for, or why not. All ranks must call.

    The file is removed; a plan that is refused stays, under another name.
    """

    def choose() -> tuple[Plan, str]:
        assert folder is not None, "of rank 0"
        try:
            return requested_plan(run, requested, folder)
        finally:
            (folder / RESIZE_FILE).unlink(missing_ok=True)

    try:
        plan, why = run.world.on_first_rank(choose)
        result = with_plan(run, requested, plan, why)
    except HpctrainError as error:
        result = str(error)
    if folder is not None and (given := folder / NEXT_PLAN_FILE).exists():
        if isinstance(result, str):
            given.replace(given.with_suffix(".refused.toml"))
        else:
            given.unlink()
    return result
