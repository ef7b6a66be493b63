"""Operators and first losses of all ranks' devices, compared with float64 and with fp32."""

import pytest
import torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.engine.alignment import align
from hpctrain.jobs.align import format_alignment, summarise
from hpctrain.model import functions, linear_layers
from tests.ranks.small_runs import make_job

DTYPES = ("fp32", "bf16")


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_wrong_operator_of_one_rank_is_named_with_the_rank(world, tokens, monkeypatch):
    job = make_job(tokens, "llama", dtype="fp32")
    right = align(world, CpuAccelerator(), job, DTYPES, 2, 16)
    assert summarise(right, 0.015)["aligned"]
    if world.rank == 1:
        attend = functions.attend
        monkeypatch.setattr(functions, "attend", lambda q, k, v, attention, **more: attend(q * 1.3, k, v, attention))
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
        wide = linear_layers.add_product

        def negligent(grad, dy, x, fresh):
            wide(grad, dy if dy.dtype == torch.float32 else 0 * dy, x, fresh)

        monkeypatch.setattr(linear_layers, "add_product", negligent)
    summary = summarise(align(world, CpuAccelerator(), job, DTYPES, 1, 8, steps=8), 0.015)
    assert [of["aligned"] for of in summary["losses"] if of["dtype"] == "bf16"] == [False]
