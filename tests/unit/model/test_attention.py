"""Attention by a kernel that the job asks for: it is used, near the others, or refused before a step."""

from typing import get_args

import pytest
import torch
import torch.nn.attention as attention_of_torch

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.accelerators.kinds import CUDA
from hpctrain.comm.accelerators.torch_device import TorchAccelerator
from hpctrain.config.errors import JobError
from hpctrain.config.job import Job
from hpctrain.config.kernels import KernelChoice
from hpctrain.engine.start.resolve_kernels import RankTrial, check_attention, try_attention
from hpctrain.model.operators.attention import ATTENTION_BACKENDS, attend
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


def test_every_name_is_one_of_torch_s_kernels():
    assert set(get_args(KernelChoice.model_fields["attention"].annotation)) == {"auto", *ATTENTION_BACKENDS}


def test_the_kernel_that_is_asked_for_computes():
    with torch.profiler.profile() as profiled:
        attended("math")
    assert "aten::_scaled_dot_product_attention_math" in {each.key for each in profiled.key_averages()}
    with torch.profiler.profile() as profiled:
        flash = attended("flash")
    assert "aten::_scaled_dot_product_attention_math" not in {each.key for each in profiled.key_averages()}
    assert torch.allclose(flash, attended("math"), atol=1e-6)


def test_a_version_of_flash_attention_is_selected_or_refused(monkeypatch):
    """Torch has one at a time in a process, so that each call selects its own."""
    active: list[str | None] = [None]
    monkeypatch.setattr(attention_of_torch, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(attention_of_torch, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(attention_of_torch, "restore_flash_attention_impl", lambda: active.append(None))
    for backend in ("flash", "flash3", "flash3", "flash4", "flash", "math"):
        attended(backend)
    assert active == [None, "FA3", "FA4", None]
    monkeypatch.undo()
    ability = try_attention(CPU, small_job("flash3"))
    assert not ability.works and "cannot use FA3: No module named 'flash_attn_interface'" in ability.reason


@pytest.mark.parametrize("shape", [{}, {"window": 16}])
@pytest.mark.parametrize("mask", [False, True])
def test_a_processor_has_two_of_them(shape, mask):
    for backend in ("flash", "math"):
        assert try_attention(CPU, small_job(backend, mask=mask, **shape)).works


def test_what_a_rank_does_not_have_is_refused_with_torch_s_reason():
    job = small_job("cudnn")
    trial = RankTrial(1, "cpu", "node1", attends=try_attention(CPU, job))
    text = r"rank 1 \(cpu\) on node1 has no such kernel for it: .*No viable backend"
    with pytest.raises(JobError, match=text) as error:
        check_attention(job.kernels, [RankTrial(0, "cpu", "node0"), trial])
    assert str(error.value).endswith('= "auto" (cuDNN\'s also needs kernels.deterministic = false)')
    with pytest.raises(JobError, match=r'set kernels.attention = "auto"$'):
        check_attention(small_job("cudnn", deterministic=False).kernels, [trial])


def test_sums_have_one_order_unless_a_job_gives_it_up():
    device = TorchAccelerator(CUDA, 0, "h200", 1, FakeTorchModule(), FakeCupy())
    try:
        for always in (True, False):
            device.sum_in_one_order(always)
            assert torch.are_deterministic_algorithms_enabled() == torch.backends.cudnn.deterministic == always
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
