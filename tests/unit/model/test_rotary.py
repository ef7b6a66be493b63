"""Rotary positions take the output of the product of queries, keys and values, and return its gradient in one pass."""

import math

import pytest
import torch
from pydantic import ValidationError

from hpctrain.architectures.description import Rotary
from hpctrain.config.job import RopeScaling
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


LINEAR = {"kind": "linear", "factor": 4.0}
YARN = {"kind": "yarn", "factor": 4.0, "original_positions": 64}
LAST = 4 * math.log(64 / (2 * math.pi), 100.0)
"""Which of four pairs would turn once in 64 positions, to a base of 100: number 2.02. Pair 0 turns 10.2 times."""


@pytest.mark.parametrize(
    ("scaling", "divided", "scale"),
    [
        (LINEAR, [1, 1, 1, 1], 1.0),
        (YARN, [0, 1 / 3, 2 / 3, 1], 1 + math.log(4) / 10),
        (YARN | {"beta_slow": 0.1}, [0, 1 / 5, 2 / 5, 3 / 5], 1 + math.log(4) / 10),
        (YARN | {"truncate": False}, [0, 1 / LAST, 2 / LAST, 1], 1 + math.log(4) / 10),
        (YARN | {"beta_fast": 12.0, "beta_slow": 12.0}, [0, 1, 1, 1], 1 + math.log(4) / 10),
        (YARN | {"attention_factor": 1.25}, [0, 1 / 3, 2 / 3, 1], 1.25),
    ],
    ids=["linear", "yarn", "slow", "not truncated", "one bound", "attention factor"],
)
def test_scaled_tables_are_those_of_float64(scaling, divided, scale):
    turns = Rotary(100.0, RopeScaling.model_validate(scaling))
    angles = [[i * 100.0 ** (-k / 4) * (1 - divided[k] + divided[k] / 4) for k in range(4)] for i in range(80)]
    for table, of in zip(rotary.tables(turns, 80, 4, torch.device("cpu")), (math.cos, math.sin), strict=True):
        expected = torch.tensor([[scale * of(angle) for angle in row] for row in angles], dtype=torch.float64)
        torch.testing.assert_close(table[:, 0].double(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        (YARN | {"beta_fast": 0.5}, "beta_fast = 0.5 is below beta_slow = 1.0; exchange them"),
        (YARN | {"attention_factor": 0.0}, "attention_factor"),
        (LINEAR | {"truncate": False}, 'truncate = False has no effect on kind = "linear"; remove it'),
    ],
)
def test_a_bad_scaling_is_refused(scaling, text):
    with pytest.raises(ValidationError, match=text) as error:
        RopeScaling.model_validate(scaling)
    assert error.value.error_count() == 1
