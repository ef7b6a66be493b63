"""What a mixture of experts costs: the work of a token's own experts, wherever the experts are."""

import math

import pytest

from hpctrain.architectures.registry import presets
from hpctrain.config.job import Model
from hpctrain.planner.prices.cost import layer_cost, model_flops, unit_elements
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval

TINY = Model.model_validate(presets()["tiny-moe"] | {"vocab_size": 512})
SETUP = Setup(TINY, 64, "bf16", HPCTRAIN)
DENSE, SPARSE = Interval(2, 3), Interval(4, 5)
"""The feed-forward parts of the first layer, and of one with experts."""


def test_flops_count_the_experts_of_a_token_alone():
    setup = Setup(Model.model_validate(presets()["qwen3-30b-a3b"]), 1, "bf16", HPCTRAIN)
    weights = (model_flops(setup, 1) - 12 * 48 * 32 * 128) / 6
    assert weights / 1e9 == pytest.approx(3.04, abs=0.02), "3.3 billion active, of which 0.3 are embeddings"


def flops(work) -> float:
    return sum(2.0 * p.m * p.k * p.n * p.batch for p in work.products)


@pytest.mark.parametrize("y", [1, 2])
def test_products_are_of_equal_load_and_weights_of_whole_experts(y):
    grid, rows, hidden, inner = TensorGrid(y=y), 4, 192, 192
    cost = layer_cost(SETUP, grid, SPARSE, rows)
    tokens = rows * SETUP.positions
    of_token = 3 * hidden * inner * (2 + 1) / y + 8 * hidden  # two experts and the shared one; the router is on all y
    for work in (cost.forward, cost.backward_input, cost.backward_weight):
        assert flops(work) == pytest.approx(2 * tokens * of_token)
    sums = [each for each in cost.forward.exchanges if each.operation == "all_reduce"]
    assert [each.num_bytes for each in sums] == [2 * tokens * hidden] * (0 if y == 1 else 2), "shared and others"
    elements = unit_elements(SETUP, grid, SPARSE.start)
    assert elements == 3 * hidden * inner * 9 / y + 8 * hidden + 8 + hidden
    assert unit_elements(SETUP, grid, DENSE.start) == 3 * hidden * 512 / y + hidden


def test_blocks_with_and_without_experts_are_two_kinds():
    assert [math.isclose(share, 0.25 * n) for share, n in zip(SETUP.block_kinds.values(), (1, 3), strict=True)] == [
        True,
        True,
    ]
    assert SETUP.first_equal[SPARSE.start] == SETUP.first_equal[6] != SETUP.first_equal[DENSE.start]
