"""Chooses kernels: a value and a reason where the job leaves it open, and whether ranks have what it asks for."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from hpctrain.comm.accelerators.base import Accelerator
from hpctrain.comm.accelerators.kinds import Ability
from hpctrain.comm.bind import DTYPES
from hpctrain.comm.world import World
from hpctrain.config.errors import JobError
from hpctrain.config.job import Job
from hpctrain.config.kernels import KernelChoice
from hpctrain.model.operators import attention as operator

ON_CPU = "on CPUs it depends on the model whether it pays, and it needs a C++ compiler"
TRIED_POSITIONS = 128


class RankTrial(NamedTuple):
    """The answers of one rank about its device."""

    rank: int
    family: str
    host: str
    compiles: Ability | None = None
    """Whether functions compile for it; None: not tried."""
    attends: Ability | None = None
    """Whether it has the kernel that the job asks for; None: not tried."""


def resolve_kernels(
    world: World, accelerator: Accelerator, job: Job, ranks: Sequence[int], dtypes: Sequence[str] = ()
) -> tuple[Job, dict[str, str]]:
    """Return the job with values for its kernels, and the reasons of those that were `auto`.

    All ranks must call, with their devices bound; those of the plan, `ranks`, try what matters. Attention is tried in
    `dtypes`, by default in that of the rank's family. Raises JobError on all ranks where one cannot do what the job
    asks for.
    """
    family, choice = world.place.family, job.kernels
    accelerator.sum_in_one_order(choice.deterministic)
    own = RankTrial(world.rank, family, world.place.host)
    if world.rank in ranks:
        asked = choice.fused_of(family)
        is_processor = accelerator.kind == "cpu" and world.topology.shares_memory  # a pretended device says why not
        if asked or (asked is None and not is_processor):
            own = own._replace(compiles=accelerator.compiles())
        if choice.attention != "auto":
            own = own._replace(attends=try_attention(accelerator, job, dtypes))
    trials = [trial for trial in world.all_objects(own) if trial.rank in ranks]
    check_attention(choice, trials)
    kernels, reasons = resolve_fused(choice, trials)
    return job.model_copy(update={"kernels": kernels}), reasons


def resolve_fused(asked: KernelChoice, trials: Sequence[RankTrial]) -> tuple[KernelChoice, dict[str, str]]:
    """Return values of `fused` by what the ranks of a plan tried, with their reasons. Pure.

    Ranks of a family share weights and sum each other's gradients: one that cannot compile decides for all of it.
    Raises JobError where that is not what the job asks for.
    """
    values, reasons = {}, []
    for family in dict.fromkeys(trial.family for trial in trials):
        wanted, of_family = asked.fused_of(family), [trial for trial in trials if trial.family == family]
        tried = [(trial, trial.compiles) for trial in of_family if trial.compiles]
        failed = next(((trial, ability) for trial, ability in tried if not ability.works), None)
        if wanted and failed:
            raise JobError(
                f"kernels.fused is true, but rank {failed[0].rank} ({family}) on {failed[0].host} cannot compile:"
                f" {failed[1].reason}; set kernels.fused_by_family = {{{family} = false}}, or kernels.fused = false"
            )
        values[family] = bool(tried) and failed is None if wanted is None else wanted
        if wanted is None:
            why = ON_CPU if not tried else (failed or tried[0])[1].reason
            where = f" (rank {failed[0].rank} on {failed[0].host})" if failed else ""
            reasons.append(f"{family} {'on' if values[family] else 'off'}: {why}{where}")
    fused = any(values.values())
    result = {"fused": fused, "fused_by_family": {name: value for name, value in values.items() if value != fused}}
    return asked.model_copy(update=result), {"kernels.fused": "; ".join(reasons)} if reasons else {}


def try_attention(accelerator: Accelerator, job: Job, dtypes: Sequence[str] = ()) -> Ability:
    """Say whether a rank's device has the attention kernel that a job asks for, forward and backward. Never raises.

    Without `dtypes` it is tried in that of the rank's family, which is known then. An override of attention replaces
    each. Positions are few, and windows in proportion.
    """
    names = (job.precision.overrides.get("attention", name) for name in dtypes or (job.dtype_of(accelerator.family),))
    tried = [_try_attention_in(accelerator, job, name) for name in dict.fromkeys(names)]
    return next((ability for ability in tried if not ability.works), tried[0])


def _try_attention_in(accelerator: Accelerator, job: Job, name: str) -> Ability:
    backend, dtype = job.kernels.attention, DTYPES[name]
    positions = min(job.data.sequence_length, TRIED_POSITIONS)
    starts = torch.zeros(1, positions, dtype=torch.int64, device=accelerator.device)
    for attention in dict.fromkeys(block.attention for block in job.model.description.blocks):
        if attention.window is not None and attention.window < job.data.sequence_length:
            attention = replace(attention, window=positions // 2)
        try:
            with warnings.catch_warnings(record=True) as said:
                queries, keys, values = (
                    torch.ones(1, heads, positions, attention.head_size, dtype=dtype, device=accelerator.device)
                    for heads in (attention.heads, attention.kv_heads, attention.kv_heads)
                )
                operator.attend(
                    queries.requires_grad_(),
                    keys,
                    values,
                    attention,
                    documents=operator.Documents(starts) if job.data.mask_documents else None,
                    backend=backend,
                ).sum().backward()
        except RuntimeError as error:
            lines = [str(each.message).partition(" (Triggered")[0] for each in said] + [str(error)]
            return Ability(False, f"in {name}: {' '.join(lines)[:400].rstrip('.')}")
    return Ability(True, "tried forward and backward")


def check_attention(asked: KernelChoice, trials: Sequence[RankTrial]) -> None:
    """Raise JobError where a rank does not have the attention kernel that the job asks for. Pure."""
    for trial in trials:
        if trial.attends and not trial.attends.works:
            needs_other = asked.attention == "cudnn" and asked.deterministic
            hint = " (cuDNN's also needs kernels.deterministic = false)" if needs_other else ""
            raise JobError(
                f'kernels.attention is "{asked.attention}", but rank {trial.rank} ({trial.family}) on {trial.host} has'
                f' no such kernel for it: {trial.attends.reason}; set kernels.attention = "auto"{hint}'
            )


def continued_kernels(kernels: KernelChoice, theirs: KernelChoice) -> tuple[KernelChoice, dict[str, str]]:
    """Return the kernels of a run that continues another one, whose bits it must have, with those that were `auto`.

    Runs from before there was such a choice fused nothing. Pure.
    """
    if kernels.fused is not None:
        return kernels, {}
    value = bool(theirs.fused)
    values = {"fused": value, "fused_by_family": theirs.fused_by_family | kernels.fused_by_family}
    text = "on" if value else "off"
    if theirs.fused_by_family:
        text += f", but {', '.join(theirs.fused_by_family)}"
    return kernels.model_copy(update=values), {"kernels.fused": text}
