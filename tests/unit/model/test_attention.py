"""Attention by a kernel that the job asks for: it is used, near the others, or refused before a step."""

import itertools
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.nn.attention as attention_of_torch
from torch.nn.attention.flex_attention import create_block_mask

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import CUDA, Ability
from hpctrain.comm.accelerators.torch_device import TorchAccelerator
from hpctrain.config.errors import JobError
from hpctrain.config.job import Job
from hpctrain.config.kernels import AttentionKernel, KernelChoice
from hpctrain.engine.start import resolve_kernels
from hpctrain.engine.start.resolve_kernels import RankTrial, continued_kernels, resolve_attention, try_attention
from hpctrain.model.operators.attention import (
    ATTENTION_BACKENDS,
    Documents,
    _flash4,
    _visible_blocks,
    attend,
    attend_at,
)
from hpctrain.sharding.intervals import Interval, cut_zigzag
from tests.unit.fake_torch import FakeCupy, FakeTorchModule

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 17}
CPU = CpuAccelerator()


def small_job(attention: str, deterministic: bool = True, mask: bool = False, **shape) -> Job:
    return Job.model_validate(
        {
            "name": "a",
            "model": {"architecture": "mistral", **SHAPE, **shape},
            "data": {"tokens": "t.bin", "sequence_length": 64, "mask_documents": mask},
            "train": {"dtype": "fp32"},
            "kernels": {"attention": attention, "deterministic": deterministic},
        }
    )


def attended(backend: str) -> torch.Tensor:
    attention = small_job(backend).model.description.blocks[0].attention
    queries, keys, values = (torch.randn(2, n, 8, 8, generator=torch.manual_seed(n)) for n in (4, 2, 2))
    return attend(queries, keys, values, attention, backend=backend)


def test_every_name_is_a_kernel():
    assert set(get_args(AttentionKernel)) == {"torch", "flash4", "flex", *ATTENTION_BACKENDS}


def visible(window: int | None, starts: torch.Tensor | None) -> torch.Tensor:
    """Return [rows, 1, queries, keys] by the words of a mask, one position after the other."""
    result = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    for row, query, key in itertools.product(range(2), range(LENGTH), range(LENGTH)):
        is_near = window is None or query - key < window
        result[row, 0, query, key] = key <= query and is_near and (starts is None or key >= starts[row, query])
    return result


LENGTH, SIZE = 136, 32
"""On a CPU torch 2.13 is wrong for 40 positions and heads of 16: a trial would refuse it there."""


@pytest.mark.parametrize(
    ("window", "first", "masks"), [(None, 0, False), (9, 0, False), (None, 24, False), (9, 0, True)]
)
def test_flex_attention_sees_what_a_mask_says(window, first, masks):
    """In windows, in documents, and where queries are the last positions. Its gradients need a device."""
    attention = replace(small_job("flex").model.description.blocks[0].attention, window=window)
    drawn = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(2, heads, LENGTH, SIZE, generator=drawn) for heads in (4, 2, 2))
    starts = torch.tensor([[0] * 15 + [15] * (LENGTH - 15), [0] * LENGTH]) if masks else None
    with torch.no_grad():
        documents = None if starts is None else Documents(starts)
        mixed = attend(queries, keys, values, attention, documents=documents, backend="flex")
    scores = queries.double() @ keys.repeat_interleave(2, 1).double().transpose(2, 3) / SIZE**0.5
    scores = scores.masked_fill(~visible(window, starts), -torch.inf)
    assert torch.allclose(mixed.double(), scores.softmax(-1) @ values.repeat_interleave(2, 1).double(), atol=1e-5)


@pytest.mark.parametrize("length", [128, 300, 1024])
@pytest.mark.parametrize("window", [None, 5, 200])
@pytest.mark.parametrize("masks", [False, True])
def test_blocks_of_a_mask_are_those_that_torch_finds_from_all_pairs(length, window, masks):
    starts = torch.tensor([[0] * 100 + [100] * (length - 100), [0] * length]) if masks else None
    ours = _visible_blocks(length, length, window, torch.device("cpu"), starts)
    theirs = create_block_mask(ours.mask_mod, 2 if masks else None, None, length, length, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks), "in these no pair is looked at"


def test_the_package_of_flash_attention_is_given_positions_before_heads(monkeypatch):
    """Of the last queries of all keys in a window, and in one order of sums where torch is to have one."""
    given = {}

    def flash_attn_func(queries, keys, values, **options):
        given.update(options, shapes=[tuple(each.shape) for each in (queries, keys, values)])
        return queries, None

    package = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=package))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    _flash4.cache_clear()
    try:
        attention = replace(small_job("flash4").model.description.blocks[0].attention, window=3)
        queries, keys, values = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
        assert torch.equal(attend(queries, keys, values, attention, first=4, backend="flash4"), queries)
        with pytest.raises(RuntimeError, match="queries are the last positions"):
            attend(queries, keys, values, attention, first=3, backend="flash4")
    finally:
        _flash4.cache_clear()
    assert given["shapes"] == [(2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)]
    expected = {"causal": False, "window_size": (2, 0), "deterministic": False, "softmax_scale": 8**-0.5}
    assert expected.items() <= given.items()


class Drifting:
    """Attention with other bits each time, as an atomic addition gives them; or a wrong one."""

    def __init__(self, factor: float):
        self.factor, self.calls = factor, 0

    def __call__(self, *arguments, backend: str = "torch", **options) -> torch.Tensor:
        self.calls += backend != "torch"
        return attend(*arguments, backend="torch", **options) * (1 + self.factor * self.calls * (backend != "torch"))


@pytest.mark.parametrize(
    ("factor", "deterministic", "reason"),
    [(1e-3, True, "flash4 gives other bits when it computes the same again"), (0.1, False, "is 0.1 from torch's own")],
)
def test_a_trial_shows_sums_without_an_order_and_wrong_ones(monkeypatch, factor, deterministic, reason):
    monkeypatch.setattr(resolve_kernels.operator, "attend", Drifting(factor))
    ability = try_attention(CPU, small_job("flash4", deterministic), "flash4")
    assert not ability.works and reason in ability.reason


def trial(rank: int, family: str, attention: str, works: bool | None = True) -> RankTrial:
    ability = None if works is None else Ability(works, "tried" if works else "no such kernel")
    return RankTrial(rank, family, f"node{rank}", attention=attention, attends=ability)


def test_a_family_has_one_kernel_and_says_why():
    trials = [trial(0, "h100", "flash4"), trial(1, "h100", "flash4"), trial(2, "a100", "torch", None)]
    kernels, reasons = resolve_attention(KernelChoice(), trials)
    assert (kernels.attention_of("h100"), kernels.attention_of("a100")) == ("flash4", "torch")
    assert reasons == {"kernels.attention": "h100 flash4: tried; a100 torch: its own choice by shape and dtype"}
    kernels, reasons = resolve_attention(KernelChoice(), [trial(0, "h100", "flash4"), trial(1, "h100", "flex", False)])
    assert kernels.attention_of("h100") == "torch", "ranks of a family compute the same bits"
    assert reasons == {"kernels.attention": "h100 torch: rank 1 on node1 no such kernel"}
    kernels, reasons = resolve_attention(KernelChoice(), [trial(0, "h100", "flash4"), trial(1, "h100", "flex")])
    assert kernels.attention_of("h100") == "torch" and "flash4 and flex" in reasons["kernels.attention"]


def test_a_run_that_continues_has_the_kernels_that_it_had():
    theirs = KernelChoice(fused=False, attention="flash4", attention_by_family={"a100": "torch"})
    kernels, reasons = continued_kernels(KernelChoice(), theirs)
    assert kernels == theirs and reasons["kernels.attention"] == "flash4, a100 torch"
    old, _ = continued_kernels(KernelChoice(), KernelChoice(fused=False))
    assert old.attention == "torch", "runs from before there was a choice have torch's own"
    assert continued_kernels(KernelChoice(attention="flex"), theirs)[0].attention == "flex"


def test_the_kernel_that_is_asked_for_computes():
    with torch.profiler.profile() as profiled:
        attended("math")
    assert "aten::_scaled_dot_product_attention_math" in {each.key for each in profiled.key_averages()}
    with torch.profiler.profile() as profiled:
        flash = attended("flash")
    assert "aten::_scaled_dot_product_attention_math" not in {each.key for each in profiled.key_averages()}
    assert torch.allclose(flash, attended("math"), atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "cudnn"])
def test_the_last_queries_of_a_row_need_no_mask_of_pairs(monkeypatch, backend):
    """Nor does cuDNN's kernel, for which torch would make one: torch's own choice has its place."""
    monkeypatch.delattr("hpctrain.model.operators.attention.visible")
    attention = small_job("torch").model.description.blocks[0].attention
    queries, keys, values = (torch.randn(2, n, 8, 8, generator=torch.manual_seed(n)) for n in (4, 2, 2))
    whole = attend(queries, keys, values, attention)
    for first in range(1, 8):
        last = attend(queries[:, :, first:], keys, values, attention, first, backend=backend)
        torch.testing.assert_close(last, whole[:, :, first:])


def test_a_start_imports_no_compiler():
    """Dynamo takes as long to import as torch, on every rank."""
    code = "import sys, hpctrain.model.transformer, hpctrain.engine.run; sys.exit('torch._dynamo' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", code], timeout=120).returncode


def test_a_version_of_flash_attention_is_selected_or_refused(monkeypatch):
    """Torch has one at a time in a process, so that each call selects its own."""
    active: list[str | None] = [None]
    monkeypatch.setattr(attention_of_torch, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(attention_of_torch, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention_of_torch, "restore_flash_attention_impl", lambda: active.append(None))
    for backend in ("flash", "flash3", "flash3", "flash", "math"):
        attended(backend)
    assert active == [None, "FA3", None]
    monkeypatch.undo()
    ability = try_attention(CPU, small_job("flash3"), "flash3")
    assert not ability.works and "cannot use FA3: No module named 'flash_attn_interface'" in ability.reason
    ability = try_attention(CPU, small_job("flash4"), "flash4")
    assert not ability.works and "no flash-attn-4: ModuleNotFoundError" in ability.reason


@pytest.mark.parametrize("shape", [{}, {"window": 16}])
@pytest.mark.parametrize("mask", [False, True])
def test_a_processor_has_two_of_them(shape, mask):
    for backend in ("flash", "math"):
        assert try_attention(CPU, small_job(backend, mask=mask, **shape), backend).works


def test_a_kernel_is_tried_with_what_sinks_add_to_heads():
    shape = {"architecture": "gpt_oss", "num_experts": 4, "experts_per_token": 2, "window": 16, "global_every": 2}
    for backend in ("flash", "math"):
        ability = try_attention(CPU, small_job(backend, **shape), backend)
        assert ability.works, ability.reason
    ability = try_attention(CPU, small_job("flex", **shape), "flex")
    assert not ability.works and "computes no attention with sinks" in ability.reason


def test_what_a_rank_does_not_have_is_refused_with_torch_s_reason():
    job = small_job("cudnn")
    refused = RankTrial(1, "cpu", "node1", attention="cudnn", attends=try_attention(CPU, job, "cudnn"))
    text = r"rank 1 \(cpu\) on node1 has no such kernel for it: .*No viable backend"
    with pytest.raises(JobError, match=text) as error:
        resolve_attention(job.kernels, [RankTrial(0, "cpu", "node0"), refused])
    assert str(error.value).endswith('= "torch" (cuDNN\'s also needs kernels.deterministic = false)')
    with pytest.raises(JobError, match=r'set kernels.attention = "torch"$'):
        resolve_attention(small_job("cudnn", deterministic=False).kernels, [refused])


def test_sums_have_one_order_unless_a_job_gives_it_up():
    device = TorchAccelerator(CUDA, 0, "h200", 1, FakeTorchModule(), FakeCupy())
    try:
        for always in (True, False):
            device.sum_in_one_order(always)
            assert torch.are_deterministic_algorithms_enabled() == torch.backends.cudnn.deterministic == always
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("backend", ["torch", "math"])
@pytest.mark.parametrize(
    ("window", "masks", "cap"), [(None, False, None), (9, False, None), (None, True, None), (30, True, 2.0)]
)
def test_the_intervals_of_a_zigzag_attend_as_the_whole_row_does(window, masks, cap, backend):
    """Mixed values and gradients of each rank's intervals, with what causal attention, windows and documents show."""
    plain = small_job("torch").model.description.blocks[0].attention
    attention, length = replace(plain, window=window, score_cap=cap), 48
    drawn = torch.Generator().manual_seed(1)
    given = [torch.randn(2, n, length, 8, generator=drawn, requires_grad=True) for n in (4, 2, 2)]
    upstream = torch.randn(2, 4, length, 8, generator=drawn)
    starts = torch.tensor([[0] * 15 + [15] * (length - 15), [0] * 40 + [40] * (length - 40)]) if masks else None

    def results(parts, use) -> list[torch.Tensor]:
        for each in given:
            each.grad = None
        mixed = torch.empty_like(upstream)
        for intervals in parts:
            own = torch.cat([torch.arange(*each) for each in intervals])
            documents = None if starts is None else Documents(starts)
            part = use(given[0][:, :, own], *given[1:], attention, intervals, [Interval(0, length)], documents)
            part.backward(upstream[:, :, own])
            mixed[:, :, own] = part.detach()
        return [mixed, *(each.grad for each in given)]

    whole = results([(Interval(0, length),)], lambda *of: attend(*of[:4], 0, of[-1]))
    for parts in (1, 2, 4):
        cut = results(cut_zigzag(length, (1,) * parts), partial(attend_at, backend=backend))
        for own, expected in zip(cut, whole, strict=True):
            assert torch.allclose(own, expected, atol=2e-6)
