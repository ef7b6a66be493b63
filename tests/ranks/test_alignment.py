"""Operators and first losses of all ranks' devices, compared with float64 and with fp32."""

import pytest
import torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.config.errors import JobError
from hpctrain.config.kernels import KernelChoice
from hpctrain.engine.alignment import align
from hpctrain.engine.start.profiler import profile, short_profile
from hpctrain.jobs.align import format_alignment, summarise
from hpctrain.model.operators import attention, linear
from hpctrain.model.operators.attention import ATTENTION_BACKENDS
from tests.ranks.small_runs import make_job

DTYPES = ("fp32", "bf16")


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_wrong_operator_of_one_rank_is_named_with_the_rank(world, tokens, monkeypatch):
    job = make_job(tokens, "llama", dtype="fp32")
    right = align(world, CpuAccelerator(), job, DTYPES, 2, 16)
    assert summarise(right, 0.015)["aligned"]
    if world.rank == 1:
        attend = attention.attend

        def wrong(queries, *rest, **more):  # as a device's kernel: what is in float64 is the reference
            return attend(queries * (1.0 if queries.dtype == torch.float64 else 1.3), *rest, **more)

        monkeypatch.setattr(attention, "attend", wrong)
    summary = summarise(align(world, CpuAccelerator(), job, DTYPES, 2, 16), 0.015)
    beyond = [entry for entry in summary["operators"] if entry["beyond"]]
    assert {(entry["operator"], entry["rank"]) for entry in beyond} == {("attention", 1)}
    assert {entry["dtype"] for entry in beyond} == set(DTYPES)
    text = format_alignment(summary | {"rows": 2, "positions": 16})
    assert "rank 1 on" in text and "no dtype mends that" in text and text.endswith("not aligned")


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_first_losses_of_each_dtype_are_near_those_of_fp32(world, tokens, monkeypatch):
    job = make_job(tokens, "llama", dtype="fp32", global_batch=8)
    losses = summarise(align(world, CpuAccelerator(), job, DTYPES, 1, 8, steps=8), 0.015)["losses"]
    differences = {of["dtype"]: of["mean_relative_difference"] for of in losses}
    assert differences["fp32"] == 0 and 0 < differences["bf16"] < 0.015
    if world.rank == 0:  # the first of the family: what trains elsewhere does not count
        wide = linear.add_product

        def negligent(grad, dy, x, overwrite):
            wide(grad, dy if dy.dtype == torch.float32 else 0 * dy, x, overwrite)

        monkeypatch.setattr(linear, "add_product", negligent)
    summary = summarise(align(world, CpuAccelerator(), job, DTYPES, 1, 8, steps=8), 0.015)
    assert [of["aligned"] for of in summary["losses"] if of["dtype"] == "bf16"] == [False]


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_who_measures_or_compares_refuses_kernels_that_a_rank_lacks(world, tokens):
    job = make_job(tokens, "llama", dtype="fp32", global_batch=8).model_copy(
        update={"kernels": KernelChoice(attention="cudnn")}
    )
    for measure in (
        lambda: align(world, CpuAccelerator(), job, DTYPES, 2, 16),
        lambda: profile(world, CpuAccelerator(), job, 1.0),
        lambda: short_profile(world, CpuAccelerator(), job, 0.1),
    ):
        with pytest.raises(JobError, match=r"rank 0 .* has no such kernel for it: in fp32: .*No viable backend"):
            measure()


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_kernel_that_is_named_need_not_have_the_dtype_of_the_reference(world, tokens, monkeypatch):
    """As flash attention of GPUs, which has half precision alone."""
    attend, computed = attention.attend, set()

    def attend_in_half(queries, *rest, backend="torch", **more):
        if backend == "flash" and queries.dtype == torch.float32:
            raise RuntimeError("No available kernel")
        computed.add((backend, queries.dtype))
        factor = 1.0 if queries.dtype == torch.float64 else 1.3  # wrong, so that it is computed again in fp32
        return attend(queries * factor, *rest, backend="torch", **more)

    assert "flash" in ATTENTION_BACKENDS
    monkeypatch.setattr(attention, "attend", attend_in_half)
    job = make_job(tokens, "llama", dtype="bf16", global_batch=8)
    job = job.model_copy(update={"kernels": KernelChoice(attention="flash")})
    summary = summarise(align(world, CpuAccelerator(), job, ("bf16",), 1, 8, steps=1), 0.015)
    assert {entry["operator"] for entry in summary["operators"] if entry["beyond"]} == {"attention"}
    assert ("flash", torch.bfloat16) in computed and ("torch", torch.float32) in computed
    with pytest.raises(JobError, match="in fp32: No available kernel"):
        align(world, CpuAccelerator(), job, DTYPES, 1, 8)
