"""Rotary positions take the output of the product of queries, keys and values, and return its gradient in one pass."""

import pytest
import torch

from hpctrain.architectures.description import Rotary
from hpctrain.model.operators import rotary
from hpctrain.model.operators.running import run_eagerly

ROWS, POSITIONS, HEADS, SIZE = 2, 5, (4, 2, 2), 8
TURNS = Rotary(100.0)


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["fp32", "pinned"])
@pytest.mark.parametrize("counts", [HEADS, HEADS[:2]], ids=["with values", "without"])
def test_one_pass_turns_gradients_back_and_puts_them_together(counts, dtype):
    calls = []

    def run(function, *tensors, **constants):
        calls.append(function)
        return run_eagerly(function, *tensors, **constants)

    x = torch.randn(ROWS, POSITIONS, sum(counts), SIZE, generator=torch.manual_seed(0)).requires_grad_()
    cos, sin = rotary.tables(TURNS, POSITIONS, SIZE // 2, x.device)
    heads = rotary.rotate(x, cos, sin, counts, run, dtype)
    assert [each.shape[2] for each in heads] == list(counts)
    assert heads[0].untyped_storage().data_ptr() == heads[1].untyped_storage().data_ptr(), "dropped together"
    gradients = [torch.randn(each.shape, generator=torch.manual_seed(1)) for each in heads]
    torch.autograd.backward(heads, gradients)
    assert calls == [rotary.forward, rotary.backward]

    exact = x.detach().double().requires_grad_()
    turned, *values = exact.split([sum(counts[:2]), *counts[2:]], dim=2)
    angles = rotary.angles(TURNS, POSITIONS, SIZE // 2)
    pairs = torch.complex(*turned.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([torch.cat([pairs.real, pairs.imag], dim=-1), *values], dim=2)
    assert torch.allclose(torch.cat(heads, dim=2).double(), expected, atol=1e-6)
    expected.backward(torch.cat(gradients, dim=2).double())
    assert torch.allclose(x.grad.double(), exact.grad, atol=1e-6)
