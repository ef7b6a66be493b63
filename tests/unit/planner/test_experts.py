"""What a mixture of experts costs: the work of a token's own experts, wherever the experts are."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.architectures.description import Experts
from hpctrain.architectures.registry import presets
from hpctrain.config.job import Model
from hpctrain.planner.prediction.activations import WORST_SPREADS, layer_deferred
from hpctrain.planner.prices.cost import busiest_share, layer_cost, load_guesses, model_flops, unit_elements
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.software.run import DescribedRun

TINY = Model.model_validate(presets()["tiny-moe"] | {"vocab_size": 512})
SETUP = Setup(TINY, 64, "bf16", HPCTRAIN, expert_spread=0.0)
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


@pytest.mark.parametrize("grid", [TensorGrid(c=2), TensorGrid(y=2, c=2, sequence_parallel=True), TensorGrid(y=2)])
def test_an_auxiliary_loss_sums_the_load_of_rows_whose_positions_are_cut(grid):
    plain, more = (layer_cost(setup, grid, SPARSE, 3) for setup in (SETUP, replace(SETUP, balances_rows=True)))
    added = [each for each in more.forward.exchanges if each not in plain.forward.exchanges]
    sums = [(each.axis, each.operation, each.num_bytes) for each in added if getattr(grid, each.axis) > 1]
    assert sums == [(axis, "all_reduce", 3 * 8 * 4) for axis in "cy"[: 0 if grid.c == 1 else grid.sequence_parts]]


def wide(**more) -> Setup:
    """Experts of four times the hidden size."""
    return Setup(
        TINY.model_copy(update={"expert_size": 768, "shared_experts": 0, **more}),
        64,
        "bf16",
        HPCTRAIN,
        expert_spread=0.0,
    )


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


def experts_of(name: str) -> Experts:
    mlp = Model.model_validate(presets()[name] | {"vocab_size": 512}).description.blocks[-1].mlp
    assert isinstance(mlp, Experts)
    return mlp


@pytest.mark.parametrize(("name", "y"), [("tiny-moe", 2), ("mixtral-8x7b", 4), ("qwen3-30b-a3b", 8)])
def test_the_busiest_rank_has_as_many_tokens_as_the_largest_of_random_sums(name, y):
    experts, spread = experts_of(name), 0.25
    loads = np.random.default_rng(1).normal(1.0, spread, (20_000, y, experts.count // y))
    expected = (loads.mean(2).max(1) / loads.mean((1, 2))).mean()
    assert busiest_share(experts, y, spread) * y == pytest.approx(expected, abs=0.012)
    assert busiest_share(experts, 1, spread) == 1.0 and busiest_share(experts, y, 0.0) == 1 / y


def test_a_rank_has_no_more_pairs_than_all_its_experts_for_each_token():
    assert busiest_share(experts_of("mixtral-8x7b"), 8, spread=10.0) == 1 / 2
    assert busiest_share(experts_of("tiny-moe"), 2, spread=10.0) == 1.0


def test_products_are_of_the_busiest_rank_and_memory_allows_for_more():
    grid, uneven = TensorGrid(y=2), replace(SETUP, expert_spread=0.4)
    even, busiest = (flops(layer_cost(each, grid, SPARSE, 64).forward) for each in (SETUP, uneven))
    of_experts = 2 * 64 * SETUP.positions * 3 * 192 * 192 * 2
    assert busiest - even == pytest.approx((busiest_share(experts_of("tiny-moe"), 2, 0.4) - 0.5) * of_experts, rel=0.01)
    few, many = (layer_deferred(replace(wide(experts_per_token=k), expert_spread=0.4), grid, SPARSE) for k in (2, 4))
    worst = busiest_share(experts_of("tiny-moe"), 2, WORST_SPREADS * 0.4)
    assert many - few == pytest.approx(64 * 2 * worst * (2 * 192 + 3 * 768) * 2)


@pytest.mark.parametrize("accelerator", ["H100", "A100-80"])
def test_an_expert_may_have_any_number_of_tokens(accelerator):
    """No number of them is slow, as an odd vocabulary is: their rows begin at multiples of the features."""
    run = DescribedRun(1024, 4, 16, 1024, 1, 1, 1, 1, 1, accelerator)
    device = DeviceModel("a", run.cluster.families[accelerator])
    setup = Setup(Model.model_validate(presets()["qwen3-30b-a3b"]), 4096, "bf16", HPCTRAIN)
    costs = [layer_cost(replace(setup, expert_spread=spread), TensorGrid(y=2), SPARSE, 1) for spread in (0.0, 0.2)]
    for name in ("forward", "backward_input", "backward_weight"):
        even, uneven = (getattr(cost, name) for cost in costs)
        assert {p.tokens for p in even.products} == {0, 256} and {p.tokens for p in uneven.products} == {0, 260}
        ratio = device.work_seconds(uneven, "bf16", HPCTRAIN) / device.work_seconds(even, "bf16", HPCTRAIN)
        assert 1.0 < ratio < 1.5, name


def test_predictions_say_what_they_assume_of_the_load():
    (said,) = load_guesses(replace(SETUP, expert_spread=0.4), [TensorGrid(), TensorGrid(y=2), TensorGrid(y=8)])
    assert said == "search.expert_spread = 0.4: the busiest rank of a layer computes 1.57 times the mean of experts"
    assert not load_guesses(SETUP, [TensorGrid()])


def test_blocks_with_and_without_experts_are_two_kinds():
    assert [math.isclose(share, 0.25 * n) for share, n in zip(SETUP.block_kinds.values(), (1, 3), strict=True)] == [
        True,
        True,
    ]
    assert SETUP.first_equal[SPARSE.start] == SETUP.first_equal[6] != SETUP.first_equal[DENSE.start]
