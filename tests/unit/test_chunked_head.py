"""Where there are many logits, the planner prices the head as the engine computes it: some tokens at a time."""

from dataclasses import replace

import pytest

from hpctrain.config.kernels import LOGITS_BYTES, tokens_at_once
from hpctrain.planner.cost import Setup, layer_cost
from hpctrain.planner.memory import layer_computing, layer_kept
from hpctrain.sharding.grid import TensorGrid
from tests.unit.test_predict import SETUP

POSITIONS = 2048
FEW, MANY = 1024, 128 * 1024
"""Ids: all logits of a row at once, and 512 tokens at a time."""
ALONE, CUT = TensorGrid(), TensorGrid(y=2)


def setup_of(ids: int, dtype: str = "bf16") -> Setup:
    model = SETUP.model.model_copy(update={"vocab_size": ids, "max_positions": POSITIONS})
    return replace(SETUP, model=model, positions=POSITIONS, dtype=dtype)


def head_products(setup: Setup, grid: TensorGrid) -> tuple[int, int]:
    """Return how many products of the head's size there are forward, and backward."""
    cost = layer_cost(setup, grid, setup.head, 1, "none")
    return len(cost.forward.products), len(cost.backward_input.products) + len(cost.backward_weight.products)


@pytest.mark.parametrize("grid", [ALONE, CUT], ids=str)
def test_what_goes_in_chunks_has_one_product_more(grid):
    assert tokens_at_once(POSITIONS, FEW // grid.y) == POSITIONS > tokens_at_once(POSITIONS, MANY // grid.y)
    assert head_products(setup_of(FEW), grid) == (1, 2)
    assert head_products(setup_of(MANY), grid) == (1, 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_memory_has_a_chunk_of_logits_and_keeps_none(dtype):
    few, many = setup_of(FEW, dtype), setup_of(MANY, dtype)
    logits = POSITIONS * FEW * few.item_bytes
    assert layer_kept(few, ALONE, few.head, "none") - layer_kept(many, ALONE, many.head, "none") == logits
    computing = layer_computing(many, ALONE, many.head, "none")
    assert LOGITS_BYTES <= computing < 2.5 * LOGITS_BYTES < POSITIONS * MANY * 4
