"""A mixture of experts: choices, products of groups, balance. Losses and gradients are in test_model.py."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.architectures.description import Experts, Norm
from hpctrain.architectures.registry import presets
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.config.training.train import Train
from hpctrain.engine.step.expert_load import ExpertLoad
from hpctrain.engine.step.updates import Updated, UpdateStep, update_balance
from hpctrain.model.operators import activation, experts
from hpctrain.model.operators.experts import (
    BalanceLoss,
    Groups,
    add_balance_loss,
    add_grouped_products,
    add_load,
    choose,
    grouped_product,
    scores_of,
    sort_choices,
    weights_of,
)
from hpctrain.model.operators.experts import _sum_of_pairs as sum_of_pairs
from hpctrain.model.operators.running import Kernels
from hpctrain.model.parallel.axes import ONE_RANK, Axes
from hpctrain.model.stage import Stage
from hpctrain.model.transformer import LayerContext
from hpctrain.planner.prices.cost import CLAMPED_PASSED
from hpctrain.sharding.grid import Coordinate, TensorGrid
from hpctrain.sharding.grid_parts import GridPart
from hpctrain.sharding.intervals import Interval, cut_evenly
from hpctrain.sharding.parameters import all_parameters, check_grid
from tests.unit.model.test_model import EXPERTS, GROUPS, MODELS, SMALL, by_name, make_stage


def mixture(**more) -> Experts:
    return Experts(4, Norm(1e-5), **{"count": 6, "chosen": 2, **more})


def test_groups_are_taken_by_their_two_best_scores_and_the_bias_changes_the_choice_alone():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3]])
    assert sorted(choose(scores, mixture())[0].tolist()) == [0, 2]
    grouped = mixture(groups=3, chosen_groups=1)
    assert sorted(choose(scores, grouped)[0].tolist()) == [2, 3], "1.1 is more than 1.0"
    balance = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.5])
    chosen = choose(scores, grouped, balance)
    assert sorted(chosen[0].tolist()) == [4, 5]
    weights = weights_of(scores, chosen, mixture(scale=2.0))
    torch.testing.assert_close(weights.sort().values, torch.tensor([[0.8, 1.2]]))


@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), min_size=1, max_size=9))
def test_products_of_groups_are_those_of_each_token_on_any_number_of_ranks(choices):
    chosen, generator = torch.tensor(choices), torch.Generator().manual_seed(0)
    x = torch.randn(len(choices), 3, generator=generator, dtype=torch.float64)
    weights, dy = torch.randn(6, 5, 3, generator=generator).double(), torch.randn(len(choices), 2, 5).double()
    expected = torch.einsum("nkoi,ni->nko", weights[chosen], x)
    expected_grad = torch.zeros_like(weights)
    for n, k in torch.cartesian_prod(torch.arange(len(choices)), torch.arange(2)).tolist():
        expected_grad[chosen[n, k]] += dy[n, k].outer(x[n])
    for ranks in (1, 2, 3):
        result, grads = torch.full_like(dy, torch.nan), []
        for own in cut_evenly(6, ranks):
            places, groups = sort_choices(chosen, own, 6)
            result.view(-1, 5)[places] = grouped_product(x[places // 2], weights[slice(*own)], groups)
            grad = torch.full((own.size * 5, 3), torch.nan, dtype=torch.float64)
            add_grouped_products(grad, dy.view(-1, 5)[places], x[places // 2], groups=groups, overwrite=True)
            grads.append(grad)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(torch.cat(grads).view_as(weights), expected_grad)


class Largest(TorchDispatchMode):
    """Records the most numbers of a result of an operation."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.size = max(self.size, result.numel() if isinstance(result, torch.Tensor) else 0)
        return result


@pytest.mark.parametrize("y", [1, 2, 4])
def test_sums_over_choices_never_have_more_numbers_than_a_ranks_pairs(y):
    tokens, count, features = 12, 4, 8
    places = torch.randperm(tokens * count, generator=torch.Generator().manual_seed(y))[: tokens * count // y]
    values = torch.randn(places.numel(), features, generator=torch.Generator().manual_seed(0))
    every = torch.zeros(tokens * count, features).index_copy_(0, places, values)
    with Largest() as largest:
        mixture = SimpleNamespace(y=SimpleNamespace(size=y))
        result = sum_of_pairs(values, places, torch.Size((tokens, count)), mixture)
    torch.testing.assert_close(result, every.view(tokens, count, features).sum(1), rtol=0, atol=0)
    assert largest.size == values.numel()


class OnDevice(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(("features", "has_operation"), [((8, 12), True), ((12, 8), True), ((8, 16), False)])
def test_torchs_grouped_product_is_called_only_where_it_exists_and_takes_the_sizes(
    monkeypatch, features, has_operation
):
    def grouped_mm(*tensors, offs):
        raise AssertionError("its rows are of no multiple of 16 bytes")

    if has_operation:
        monkeypatch.setattr(experts.F, "grouped_mm", grouped_mm, raising=False)
    else:
        monkeypatch.delattr(experts.F, "grouped_mm", raising=False)
    into, out = features
    x, weight = torch.ones(3, into, dtype=torch.bfloat16), torch.ones(2, out, into, dtype=torch.bfloat16)
    result = grouped_product(x.as_subclass(OnDevice), weight, Groups(torch.tensor([1, 3], dtype=torch.int32)))
    assert result.shape == (3, out) and (result == into).all()


def test_activations_of_experts_are_not_compiled_as_their_shapes_change_with_each_choice():
    compiled = []

    def run(function, *tensors, **constants):
        compiled.append((function, tensors[-1].shape))
        return function(*tensors, **constants)

    made = make_stage(MODELS["dots1"], "none")
    stage = Stage(made.tile, LayerContext(MODELS["dots1"], made.layers[0].axes, made.store, Kernels(run)))
    tokens = torch.randint(0, 17, (3, 10), generator=torch.Generator().manual_seed(1))
    _, saved = stage.forward(tokens[:, :-1], tokens[:, 1:], training=True)
    stage.backward(saved, torch.tensor(1.0, dtype=torch.float64))
    shapes = [shape for function, shape in compiled if function in (activation.forward, activation.backward)]
    assert shapes and all(len(shape) == 3 for shape in shapes), "those of the shared expert alone"


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_auxiliary_loss_of_each_row_and_its_gradient_are_those_of_the_formula(kind):
    experts, logits = mixture(scores=kind), torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    chosen = choose(scores_of(logits, experts), experts)
    shares = torch.nn.functional.one_hot(chosen, 6).double().sum((1, 2)) / (5 * 2)
    plain = scores_of(logits, experts)
    means = (plain / plain.sum(-1, keepdim=True)).mean(1)
    expected = 6 * (shares * means).sum()
    own = BalanceLoss(Axes(), torch.tensor(0.25), torch.zeros((), dtype=torch.float64))
    scores = add_balance_loss(scores_of(logits, experts), chosen, own)
    assert torch.equal(scores, plain)
    (grad,) = torch.autograd.grad(scores.square().sum(), logits)
    (wanted,) = torch.autograd.grad(plain.square().sum() + 0.25 * expected, logits)
    torch.testing.assert_close(grad, wanted, rtol=1e-6, atol=1e-9)
    assert own.total.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_bias_moves_against_the_load_by_the_rate_alone():
    grad = torch.full((4,), torch.nan)
    add_load(grad, torch.tensor([[[0, 1], [0, 2], [0, 1]]]), overwrite=True)
    add_load(grad, torch.tensor([[[0, 3]]]), overwrite=False)
    assert grad.tolist() == [2 * 4 - 4, 0, 1 * 2 - 4, 1 * 2 - 4], "4, 2, 1 and 1 of 8 choices, of which each has 2"
    masters = torch.zeros(4)
    step = UpdateStep(Train(balance_rate=0.5, clip_norm=0.1), 0, decays=False)
    update_balance(Updated([masters], [grad * 1e-6], {}), step)
    assert masters.tolist() == [-0.5, 0.0, 0.5, 0.5]


def test_counts_are_of_tokens_and_do_not_depend_on_recomputing():
    tokens = torch.randint(0, 17, (3, 10), generator=torch.Generator().manual_seed(1))
    model, counts, losses = MODELS["dots1"], [], []
    for recompute in ("none", "selective", "full"):
        stage = make_stage(model, recompute)
        counted = ExpertLoad(model, [stage], torch.device("cpu"), Train(balance_loss=0.5, global_batch=3))
        counted.begin(4.0)
        stage.forward(tokens[:, :-1], tokens[:, 1:], training=False)
        _, saved = stage.forward(tokens[:, :-1], tokens[:, 1:], training=True)
        stage.backward(saved, torch.tensor(1.0, dtype=torch.float64))
        counts.append({n: g for n, g in by_name(stage, "grads").items() if n.endswith("balance")})
        excess = dict(zip(counted.layers, counted.tokens * 6 / 2 - 27, strict=True))
        assert {f"blocks.{n}.router.balance": of.tolist() for n, of in excess.items()} == {
            name: load.tolist() for name, load in counts[-1].items()
        }
        most = {n: tokens.max().item() / 9 for n, tokens in zip(counted.layers, counted.tokens, strict=True)}
        expected = (counted.tokens / 9 - 1).std(unbiased=False).item()
        ratio, layer, spread, loss, by_layer = counted.start_sum(ONE_RANK)()
        assert {n: of.max().item() / 9 for n, of in by_layer.items()} == most
        assert ratio == max(most.values()) == most[layer] and not counted.tokens.any()
        assert spread == pytest.approx(expected) and spread > 0
        losses.append(loss)
    assert 0.5 * len(counted.layers) <= losses[0] < 5 and losses == [losses[0]] * 3
    for name, load in counts[0].items():
        assert load.sum() == 0 and load.abs().max() > 0
        assert all(torch.equal(load, other[name]) for other in counts)


def test_the_spread_is_that_of_the_experts_of_each_layer():
    experts = next(each.mlp for each in MODELS["mixtral"].description.blocks)
    blocks = [SimpleNamespace(mlp=replace(experts, count=count)) for count in (2, 4)]
    model = SimpleNamespace(description=SimpleNamespace(blocks=blocks))
    counted = ExpertLoad(model, [], torch.device("cpu"), Train())  # pyright: ignore[reportArgumentType] - no layer is asked
    counted.tokens[:] = torch.tensor([[3, 1, 0, 0], [2, 2, 2, 2]])
    ratio, layer, spread, _, by_layer = counted.start_sum(ONE_RANK)()  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
    assert (ratio, layer) == (1.5, 0) and spread == pytest.approx((2 * 0.25 / 6) ** 0.5)
    assert {n: tokens.tolist() for n, tokens in by_layer.items()} == {0: [3, 1], 1: [2, 2, 2, 2]}


@pytest.mark.parametrize("y", [1, 2, 3])
def test_a_rank_has_whole_experts(y):
    model, covered = MODELS["mixtral"], []
    up, down = (all_parameters(model)[f"blocks.0.experts.{name}.weight"] for name in ("up", "down"))
    for place in range(y):
        part = GridPart(TensorGrid(y=y), Coordinate(y=place))
        rows = [(part.box(up)[0], 20), (part.box(down)[0], 24)]
        assert all(box.start % of_expert == box.stop % of_expert == 0 for box, of_expert in rows)
        (experts,) = {Interval(box.start // of_expert, box.stop // of_expert) for box, of_expert in rows}
        covered.append(experts)
    assert covered == list(cut_evenly(6, y))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (TensorGrid(x=2), "tensor x = 2, and x does not cut experts; set x = 1, and y to cut them"),
        (TensorGrid(y=4), "model.num_experts 6 is not divisible by tensor y = 4; set y to one of 1, 2, 3, 6"),
    ],
)
def test_grids_that_would_cut_inside_of_experts_are_refused(grid, message):
    with pytest.raises(PlanError) as error:
        check_grid(MODELS["mixtral"], grid)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"experts_per_token": 7}, "experts_per_token = 7 must be 1 to num_experts = 6"),
        ({"expert_groups": 4}, "num_experts 6 is not divisible by expert_groups 4"),
        ({"expert_groups": 6, "groups_per_token": 1}, "groups_per_token = 1 have 1 experts, fewer than a token's"),
        ({"dense_layers": 2}, "dense_layers = 2 leaves no layer with experts: num_layers = 2"),
        ({"num_experts": None}, "num_experts and experts_per_token are missing"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        Model.model_validate({"architecture": "dots1", **SMALL, **EXPERTS, **GROUPS, **keys})


def test_heads_with_sinks_are_not_exchanged():
    model = Model(architecture="gpt_oss", **(SMALL | EXPERTS))
    check_grid(model, TensorGrid(c=2))
    with pytest.raises(PlanError, match="exchange_heads does not move the sinks of heads; set exchange_heads to false"):
        check_grid(model, TensorGrid(c=2, exchanges_heads=True))


def test_presets_with_experts_have_first_layers_without():
    model = Model.model_validate(presets()["tiny-moe"] | {"vocab_size": 300})
    assert [isinstance(block.mlp, Experts) for block in model.description.blocks] == [False, True, True, True]


class CountingBytes(TorchDispatchMode):
    """Counts the bytes that operations read and write; views do neither."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
        inputs = [each for each in given if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in inputs}
        if isinstance(result, torch.Tensor):
            is_view = result.untyped_storage().data_ptr() in storages and not func._schema.is_mutable
            self.num_bytes += 0 if is_view else sum(each.nbytes for each in (*inputs, result))
        return result


def test_prices_of_a_clamped_activation_count_what_it_reads_and_writes():
    both, dy = torch.randn(64, 128), torch.randn(64, 64)
    with CountingBytes() as forward:
        activation.forward(both, activation="clamped")
    with CountingBytes() as backward:
        activation.forward(both, activation="clamped")
        activation.backward(dy, both, activation="clamped")
    counted = [each.num_bytes / dy.nbytes for each in (forward, backward)]
    assert counted == [CLAMPED_PASSED[0], pytest.approx(CLAMPED_PASSED[1], abs=1)]
