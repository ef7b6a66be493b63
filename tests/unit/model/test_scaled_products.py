"""Products of 8-bit operands: the numbers that they should have, and the same from torch's own."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config.errors import JobError
from hpctrain.config.job import load_job
from hpctrain.config.precision import ROUNDING_KERNELS
from hpctrain.model.operators import scaled_products
from hpctrain.model.operators.linear import Linear
from hpctrain.model.operators.scaled_products import FP8, FP8_GRADIENT, forward_product, round_to_8_bits, works_on
from hpctrain.model.parallel.axes import ONE_RANK
from hpctrain.model.storage.units import Weight

KINDS = (FP8, FP8_GRADIENT)
CPU = torch.device("cpu")


def numbers(*shape: int, seed: int = 0, deviation: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * deviation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deviation", [1e-30, 1e-6, 1.0, 1e5, 1e30])
def test_numbers_keep_their_leading_bits_whatever_their_size(kind, deviation):
    values = numbers(64, 64, deviation=deviation)
    rounded = round_to_8_bits(values, kind)
    assert rounded.data.dtype == kind and rounded.data.float().isfinite().all()
    error = ((rounded.wide(torch.float32) - values).abs() / values.abs().amax()).max()
    assert 0 < error <= torch.finfo(kind).eps / 2


def test_a_part_of_a_tensor_is_rounded_to_the_same_numbers():
    values = numbers(32, 64)
    whole = round_to_8_bits(values, FP8).wide(torch.float32)
    part = round_to_8_bits(values[:4, :16] / 4, FP8).wide(torch.float32) * 4
    large = values[:4, :16].abs() > 2**-5  # smaller ones have fewer bits, and more of them in the part
    assert torch.equal(whole[:4, :16][large], part[large])


def test_zeros_stay_zeros_and_an_overflow_is_not_saturated():
    assert round_to_8_bits(torch.zeros(4, 4), FP8).wide(torch.float32).eq(0).all()
    values = numbers(4, 4)
    values[1, 1] = torch.inf
    assert round_to_8_bits(values, FP8).wide(torch.float32).isnan().all()
    assert forward_product(values, numbers(4, 4)).isnan().all()


def test_devices_refuse_fp8_by_the_number_of_kernels_that_round():
    class Count(TorchDispatchMode):
        kernels = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.kernels += 1
            return func(*args, **(kwargs or {}))

    operand = torch.ones(32, 32, dtype=torch.bfloat16)
    with Count() as count:
        round_to_8_bits(operand, FP8)
    assert count.kernels == ROUNDING_KERNELS
    job = load_job("tiny", ["train.dtype=fp8"])
    job.precision.check_fp8({"cpu": "cpu"})
    load_job("tiny", ["train.dtype=bf16"]).precision.check_fp8({"h200": "cuda"})
    with pytest.raises(JobError, match=r'h200 computes on devices: .* 19 kernels, so 38 .* set train.dtype = "bf16"'):
        job.precision.check_fp8({"cpu": "cpu", "h200": "cuda"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_scaled_products_give_the_same_numbers(monkeypatch, dtype):
    if not works_on(CPU, dtype):
        pytest.skip(f"this torch has no scaled products in {dtype} on CPUs")
    x, w = numbers(32, 64).to(dtype), numbers(48, 64, seed=1).to(dtype)
    expected = forward_product(x, w)
    monkeypatch.setattr(scaled_products, "has_scaled_products", lambda device, of: True)
    result = forward_product(x, w)
    assert result.dtype == dtype
    assert (result - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
    odd = forward_product(x[:, :50], w[:, :50])
    assert odd.shape == (32, 48), "sizes that torch's do not take are computed without them"


def test_a_layer_has_the_output_and_gradients_of_rounded_operands():
    x, w, dy = numbers(24, 32), numbers(40, 32, seed=1), numbers(24, 40, seed=2)
    weight = Weight("w")
    weight.data, weight.grad = w, torch.ones_like(w)
    given = x.clone().requires_grad_()
    output = Linear([weight], [], ONE_RANK, ONE_RANK, in_8_bits=True)(given)
    output.backward(dy)
    rounded_x, rounded_w = (round_to_8_bits(each, FP8).wide(torch.float32) for each in (x, w))
    rounded_dy = round_to_8_bits(dy, FP8_GRADIENT).wide(torch.float32)
    torch.testing.assert_close(output.detach(), rounded_x @ rounded_w.t())
    torch.testing.assert_close(given.grad, rounded_dy @ rounded_w)
    torch.testing.assert_close(weight.grad, 1 + rounded_dy.t() @ rounded_x)
    assert (output.detach() - x @ w.t()).abs().max() > 1e-2, "they are rounded"


def test_fp8_is_short_for_bf16_with_products_in_fp8():
    job = load_job("tiny", ["train.dtype=fp8"])
    assert job.train.dtype == "bf16" and job.precision.overrides == {"linear": "fp8"}
    job = load_job("tiny", ["train.dtype=fp8", "precision.overrides.linear=fp32", "precision.overrides.head=fp32"])
    assert job.precision.overrides == {"linear": "fp32", "head": "fp32"}
    with pytest.raises(JobError, match="attention cannot compute in fp8, only linear can"):
        load_job("tiny", ["precision.overrides.attention=fp8"])
