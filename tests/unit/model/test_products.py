"""Gradients of weights are summed in fp32; heads are repeated where no kernel shares them."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config import kernels
from hpctrain.model.operators import loss as losses
from hpctrain.model.operators.activation import capped
from hpctrain.model.operators.attention import repeats_heads
from hpctrain.model.operators.linear import add_product, has_wide_products
from hpctrain.model.operators.running import Kernels
from hpctrain.model.parallel.axes import Axes
from hpctrain.model.storage.units import Weight

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_microbatch_is_added_without_being_rounded_to_half_precision(dtype):
    """64 microbatches, of which each adds what is exact in fp32, and not in half precision: 1 + 2^-12."""
    dy = torch.ones(2, 3).to(dtype)
    dy[1] = 2.0**-12
    x = torch.ones(2, 4).to(dtype)
    grad = torch.full((3, 4), torch.nan)
    for microbatch in range(64):
        add_product(grad, dy, x, overwrite=microbatch == 0)
    assert (grad == 64 * (1 + 2.0**-12)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_near_to_float64_as_its_operands_allow(dtype):
    generator = torch.Generator().manual_seed(3)
    dy, x = (torch.randn(256, size, generator=generator).to(dtype) for size in (16, 24))
    grad = torch.zeros(16, 24)
    add_product(grad, dy, x, overwrite=True)
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


def loss_of(num_ids: int, cap: float | None, logits_bytes: int) -> losses.TokenLoss:
    return losses.TokenLoss(Axes(), Kernels(logits_bytes=logits_bytes), 0, num_ids, cap)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
def test_the_loss_of_some_tokens_at_a_time_is_that_of_all(cap, at_once):
    """Against the product, the cap and the cross entropy of all tokens, with padding, and targets that do not count."""
    generator = torch.Generator().manual_seed(1)
    ids, columns, tokens, features = 11, 12, (2, 5), 6
    weight = Weight("head.weight")
    weight.data = torch.randn(columns, features, generator=generator)
    weight.grad = torch.zeros(columns, features)
    hidden = torch.randn(*tokens, features, generator=generator).requires_grad_()
    targets = torch.randint(-1, ids, tokens, generator=generator)
    loss = losses.head_loss(hidden, weight, targets, loss_of(ids, cap, at_once * columns * 4))
    (3 * loss).backward()

    double, table = hidden.detach().double().requires_grad_(), weight.data.double().requires_grad_()
    logits = double @ table.t()
    logits = logits if cap is None else capped(logits, cap)
    real = logits[..., :ids].flatten(0, 1)
    exact = torch.nn.functional.cross_entropy(real, targets.flatten(), ignore_index=-1, reduction="sum")
    (3 * exact).backward()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert torch.allclose(hidden.grad.double(), double.grad, atol=1e-5)
    assert torch.allclose(weight.grad.double(), table.grad, atol=1e-5)


def test_no_more_logits_are_there_than_may_be():
    columns, tokens = 64, 1000
    most = 100 * columns * 4
    assert kernels.tokens_at_once(tokens, columns, most) == 100 and kernels.tokens_at_once(50, columns, most) == 50
    assert kernels.tokens_at_once(tokens, columns // 8, most) == 768, "of 800, a multiple of 256"
    weight = Weight("head.weight")
    weight.data, weight.grad = torch.randn(columns, 8), torch.zeros(columns, 8)
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    hidden = torch.randn(1, tokens, 8, requires_grad=True)
    with Watch():
        targets = torch.randint(64, (1, tokens))
        loss = losses.head_loss(hidden, weight, targets, loss_of(columns, None, most))
        loss.backward()
    assert max(largest) <= max(100 * columns, tokens * 8), "all logits would be 64,000 numbers"
