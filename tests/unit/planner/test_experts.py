"""What a mixture of experts costs: the work of a token's own experts, wherever the experts are."""

import math

import pytest

from hpctrain.architectures.registry import presets
from hpctrain.config.job import Model
from hpctrain.planner.prediction.activations import WORST_LOAD, layer_deferred
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


def wide(**more) -> Setup:
    """Experts of four times the hidden size."""
    return Setup(TINY.model_copy(update={"expert_size": 768, "shared_experts": 0, **more}), 64, "bf16", HPCTRAIN)


def test_gradients_of_experts_pass_over_their_weights():
    weight = layer_cost(wide(), TensorGrid(), SPARSE, 4).backward_weight
    assert weight.passed_bytes == wide().passes.weight * (3 * 192 * 768 * 8 + 8 * 192)


def test_choices_of_other_ranks_are_zeros_that_are_added():
    one, two = (layer_cost(wide(), TensorGrid(y=y), SPARSE, 4).forward.passed_bytes for y in (1, 2))
    pairs, of_activation = 4 * 64 * 2, (10 + 3 * 2) * 768
    assert one - two == pytest.approx(pairs * (2 * 192 * (2 - 1) + of_activation / 2))


def test_products_are_one_operation_where_sizes_are_multiples_of_16_bytes():
    counts = [len(layer_cost(wide(expert_size=size), TensorGrid(), SPARSE, 4).forward.products) for size in (768, 764)]
    assert counts[1] - counts[0] == 2 * (8 - 1)


def test_deferred_operands_are_of_the_worst_load_where_a_rank_has_not_all_experts():
    for y, load in (1, 1.0), (2, WORST_LOAD):
        few, many = (layer_deferred(wide(experts_per_token=k), TensorGrid(y=y), SPARSE) for k in (2, 4))
        assert many - few == pytest.approx(64 * 2 / y * load * (2 * 192 + 3 * 768) * 2)


def test_blocks_with_and_without_experts_are_two_kinds():
    assert [math.isclose(share, 0.25 * n) for share, n in zip(SETUP.block_kinds.values(), (1, 3), strict=True)] == [
        True,
        True,
    ]
    assert SETUP.first_equal[SPARSE.start] == SETUP.first_equal[6] != SETUP.first_equal[DENSE.start]
