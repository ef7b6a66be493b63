"""Selective recomputing: the bits of a stage that keeps all, from fewer bytes; each result is computed again once."""

import pytest
import torch

from hpctrain.model.recompute import dropping, keeping_inputs
from tests.unit.test_model import MODELS, make_stage

ROWS, LENGTH = 3, 12


def differentiated(name: str, recompute: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradients of weights of two microbatches, both of which are in flight."""
    stage = make_stage(MODELS[name], recompute)
    tokens = torch.randint(0, MODELS[name].vocab_size, (2, ROWS, LENGTH + 1), generator=torch.manual_seed(3))
    passes = [stage.forward(rows[:, :-1], rows[:, 1:], True) for rows in tokens]
    for _, saved in passes:
        stage.backward(saved, torch.tensor(1.0, dtype=torch.float64))
    return torch.stack([loss for loss, _ in passes]), stage.store.groups[0].own_grads()


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_same_bits(name):
    for ours, theirs in zip(differentiated(name, "selective"), differentiated(name, "none"), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_dropped_is_computed_once_for_all_of_its_uses_and_gone_after_the_last():
    leaf, calls = torch.arange(6.0).requires_grad_(), []

    def again() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return leaf.detach() * 2

    doubled = leaf * 2
    with dropping(doubled, again):
        result = (doubled[:3] * doubled[3:]).sum()
    address = doubled.untyped_storage().data_ptr()
    del doubled
    assert calls == [] and address
    result.backward()
    assert calls == [False]
    assert leaf.grad is not None and leaf.grad.tolist() == [12, 16, 20, 0, 4, 8]


def test_an_operand_of_other_storage_is_kept():
    leaf = torch.ones(3, requires_grad=True)
    other = torch.full((3,), 5.0)
    with dropping(torch.zeros(3), lambda: pytest.fail("nobody needs it")):
        (leaf * other).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [5.0] * 3


def test_of_an_operator_with_large_results_inputs_alone_are_kept():
    x, y = (torch.randn(4, 5, generator=torch.manual_seed(seed)).requires_grad_() for seed in (1, 2))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        result = keeping_inputs(lambda a, b: (a @ b.t()).softmax(1) @ b, x, y)
    assert kept == [20, 20]
    expected = torch.autograd.grad((x @ y.t()).softmax(1) @ y, (x, y), torch.ones(4, 5))
    result.backward(torch.ones(4, 5))
    assert x.grad is not None and torch.equal(x.grad, expected[0])
    assert y.grad is not None and torch.equal(y.grad, expected[1])
