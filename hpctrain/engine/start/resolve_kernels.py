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
TRIED_POSITIONS, TRIED_ON_CPU = 4096, 128
"""Positions with which attention is tried: with one block of keys no kernel shows whether its sums have a fixed
order."""
TRIED_TIMES = 3
TRIED_DIFFERENCE = 0.02
"""Largest difference of a kernel's results from those of torch's own choice, as a share of their norm: rounding to bf16
gives 0.004."""

HOPPER = (9, 0)
"""Compute capability of Hopper GPUs."""
ON_HOPPER_IN_ONE_ORDER, ON_HOPPER = ("flash4", "flex"), ("flash4", "cudnn")
"""Kernels of attention on Hopper, the fastest first, as measured on an H200 (docs/accelerators.md)."""


class RankTrial(NamedTuple):
    """The answers of one rank about its device."""

    rank: int
    family: str
    host: str
    compiles: Ability | None = None
    """Whether functions compile for the device; None: not tried."""
    attention: str = "torch"
    """The kernel that was tried last."""
    attends: Ability | None = None
    """Whether the device has that kernel for the job's attention; None: not tried."""


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
        described = (block.attention for block in job.model.description.blocks)
        candidates = attention_candidates(job, accelerator)
        for attention in candidates if any(each.score_cap is None for each in described) else ():
            own = own._replace(attention=attention, attends=try_attention(accelerator, job, attention, dtypes))
            if own.attends is None or own.attends.works:
                break
    trials = [trial for trial in world.all_objects(own) if trial.rank in ranks]
    kernels, reasons = resolve_fused(choice, trials)
    kernels, more = resolve_attention(kernels, trials)
    return job.model_copy(update={"kernels": kernels}), reasons | more


def attention_candidates(job: Job, accelerator: Accelerator) -> Sequence[str]:
    """Return the kernels of attention that a rank tries, the best first: the one that the job asks for, or those that
    are faster than torch's own choice on its device in half precision (`benchmarks.gpu --section attention`).
    """
    choice, family, device = job.kernels, accelerator.family, accelerator.device
    asked = choice.attention_by_family.get(family) or choice.attention
    if asked:
        return [asked] if asked != "torch" else []
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != HOPPER:
        return []
    if job.precision.overrides.get("attention", job.dtype_of(family)) == "fp32":
        return []
    return ON_HOPPER_IN_ONE_ORDER if choice.deterministic else ON_HOPPER


def resolve_attention(asked: KernelChoice, trials: Sequence[RankTrial]) -> tuple[KernelChoice, dict[str, str]]:
    """Return values of `attention` by what the ranks of a plan tried, with their reasons. Pure.

    Ranks of a family compute the same bits, so that one without a kernel decides for all of it. Raises JobError where a
    rank lacks the kernel that the job asks for.
    """
    values, reasons = {}, []
    for family in dict.fromkeys(trial.family for trial in trials):
        of_family = [trial for trial in trials if trial.family == family]
        of_its_own = asked.attention_by_family.get(family)
        wanted = of_its_own or asked.attention
        key = f"kernels.attention_by_family.{family}" if of_its_own else "kernels.attention"
        failed = next((trial for trial in of_family if trial.attends and not trial.attends.works), None)
        if failed and failed.attends and wanted:
            needs_other = wanted == "cudnn" and asked.deterministic
            hint = " (cuDNN's also needs kernels.deterministic = false)" if needs_other else ""
            raise JobError(
                f'{key} is "{wanted}", but rank {failed.rank} ({family}) on {failed.host} has no such kernel for it:'
                f' {failed.attends.reason}; set {key} = "torch"{hint}'
            )
        kernels = sorted({trial.attention for trial in of_family})
        values[family] = wanted or (kernels[0] if not failed and len(kernels) == 1 else "torch")
        if failed and failed.attends:
            reasons.append(f"{family} torch: rank {failed.rank} on {failed.host} {failed.attends.reason}")
        elif not wanted and len(kernels) > 1:
            reasons.append(f"{family} torch: its ranks have {' and '.join(kernels)}")
        elif not wanted:
            tried = of_family[0].attends
            reasons.append(
                f"{family} {values[family]}: {tried.reason if tried else 'its own choice by shape and dtype'}"
            )
    common = next(iter(values.values()), "torch")
    result = {
        "attention": common,
        "attention_by_family": {name: value for name, value in values.items() if value != common},
    }
    return asked.model_copy(update=result), {"kernels.attention": "; ".join(reasons)} if reasons else {}


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


def try_attention(accelerator: Accelerator, job: Job, backend: str, dtypes: Sequence[str] = ()) -> Ability:
    """Say whether a rank's device has a kernel for a job's attention, forward and backward. Never raises.

    Without `dtypes` it is tried in that of the rank's family, which is known then. An override of attention replaces
    each. One group of heads is computed, and windows are in proportion. Where sums must have one order it is computed
    several times, since some builds of a kernel pass over what it is asked for.
    """
    names = (job.precision.overrides.get("attention", name) for name in dtypes or (job.dtype_of(accelerator.family),))
    tried = [_try_attention_in(accelerator, job, backend, name) for name in dict.fromkeys(names)]
    return next((ability for ability in tried if not ability.works), tried[0])


def _try_attention_in(accelerator: Accelerator, job: Job, backend: str, name: str) -> Ability:
    with warnings.catch_warnings(record=True) as caught:
        try:
            return _compute_trial(accelerator, job, backend, name)
        except Exception as error:  # whatever a compiler, a package or a device raises, also later than it was asked
            lines = [str(each.message).partition(" (Triggered")[0] for each in caught] + [str(error)]
            return Ability(False, f"in {name}: {' '.join(lines)[:400].rstrip('.')}")


def _compute_trial(accelerator: Accelerator, job: Job, backend: str, name: str) -> Ability:
    dtype, length, device = DTYPES[name], job.data.sequence_length, accelerator.device
    positions = min(length, TRIED_ON_CPU if accelerator.kind == "cpu" else TRIED_POSITIONS)
    starts = torch.zeros(1, positions, dtype=torch.int64, device=device)
    described = dict.fromkeys(block.attention for block in job.model.description.blocks)
    for attention in (each for each in described if each.score_cap is None):
        if attention.window is not None and attention.window < length:
            attention = replace(attention, window=positions // 2)
        drawn, size = torch.Generator().manual_seed(1), attention.head_size
        queries, keys, values = inputs = [
            torch.randn(1, heads, positions, features, generator=drawn).to(device, dtype).requires_grad_()
            for heads, features in (
                (attention.heads // attention.kv_heads, attention.kernel_size),  # with what sinks add to queries
                (1, size),
                (1, size),
            )
        ]
        results = []
        for each in [backend] * (TRIED_TIMES if job.kernels.deterministic else 1) + ["torch"]:
            documents = operator.Documents(starts) if job.data.mask_documents else None
            mixed = operator.attend(queries, keys, values, attention, documents=documents, backend=each)
            results.append([mixed.detach(), *torch.autograd.grad(mixed, inputs, torch.ones_like(mixed))])
        *results, expected = results
        if not all(all(map(torch.equal, results[0], result)) for result in results):
            return Ability(False, f"in {name}: {backend} gives other bits when it computes the same again")
        for one, other in zip(results[0], expected, strict=True):
            apart, norm = float((one.float() - other.float()).norm()), float(other.float().norm())
            if not apart <= TRIED_DIFFERENCE * norm + torch.finfo(dtype).tiny:
                return Ability(False, f"in {name}: {backend} is {apart / max(norm, 1e-30):.2g} from torch's own choice")
    return Ability(True, f"tried forward and backward with {positions} positions in {name}")


def continued_kernels(kernels: KernelChoice, theirs: KernelChoice) -> tuple[KernelChoice, dict[str, str]]:
    """Return the kernels of a run that continues another one, whose bits it must have, with those that were `auto`.

    Runs from before there was such a choice fused nothing, and left attention to torch. Pure.
    """
    values, reasons = {}, {}
    if kernels.fused is None:
        value = bool(theirs.fused)
        values |= {"fused": value, "fused_by_family": theirs.fused_by_family | kernels.fused_by_family}
        reasons["kernels.fused"] = "on" if value else "off"
        if theirs.fused_by_family:
            reasons["kernels.fused"] += f", but {', '.join(theirs.fused_by_family)}"
    if kernels.attention is None:
        of_families = theirs.attention_by_family | kernels.attention_by_family
        values |= {"attention": theirs.attention or "torch", "attention_by_family": of_families}
        reasons["kernels.attention"] = ", ".join([values["attention"], *(f"{n} {k}" for n, k in of_families.items())])
    return kernels.model_copy(update=values), reasons
