"""Gradients of weights are summed in fp32; heads are repeated where no kernel shares them."""

from types import SimpleNamespace

import pytest
import torch

from hpctrain.model.functions import add_product, repeats_heads
from hpctrain.model.products import has_wide_products

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_microbatch_is_added_without_being_rounded_to_half_precision(dtype):
    """64 microbatches, of which each adds what is exact in fp32, and not in half precision: 1 + 2^-12."""
    dy = torch.ones(2, 3).to(dtype)
    dy[1] = 2.0**-12
    x = torch.ones(2, 4).to(dtype)
    grad = torch.full((3, 4), torch.nan)
    for microbatch in range(64):
        add_product(grad, dy, x, fresh=microbatch == 0)
    assert (grad == 64 * (1 + 2.0**-12)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_near_to_float64_as_its_operands_allow(dtype):
    generator = torch.Generator().manual_seed(3)
    dy, x = (torch.randn(256, size, generator=generator).to(dtype) for size in (16, 24))
    grad = torch.zeros(16, 24)
    add_product(grad, dy, x, fresh=True)
    exact = dy.double().t() @ x.double()
    assert ((grad - exact).abs() / exact.abs().max()).max() < 1e-6, "half precision is off by 1e-3"
    assert not has_wide_products(torch.device("cpu"), dtype)


def test_heads_are_repeated_where_no_kernel_shares_them(monkeypatch):
    def asks(device: str, dtype=torch.bfloat16, is_causal=True, hip=None, heads=(8, 2)) -> bool:
        monkeypatch.setattr(torch.version, "hip", hip)
        queries, keys = (SimpleNamespace(shape=(1, n, 4, 8), dtype=dtype, device=torch.device(device)) for n in heads)
        return repeats_heads(queries, keys, is_causal)

    assert asks("cuda", torch.float32), "no fast kernel shares heads in fp32"
    assert asks("cuda", is_causal=False), "nor with a mask"
    assert asks("cuda", hip="6.4") and asks("xpu")
    assert not asks("cuda") and not asks("cpu", torch.float32) and not asks("cuda", torch.float32, heads=(8, 8))
