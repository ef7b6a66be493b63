"""Selective recomputing: the bits of a stage that keeps all, from fewer bytes; each result is computed again once."""

import pytest
import torch

from benchmarks.recompute import DEVICE, GLOBAL_BATCH, OLD, SETTINGS, cluster_of
from hpctrain.config.job import load_job
from hpctrain.model.recompute import Dropping, KeepingInputs
from hpctrain.model.stage import Stage
from hpctrain.model.transformer import LayerContext
from hpctrain.planner.prediction.activations import layer_kept
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.search import search
from hpctrain.planner.search.space import Space
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.unit.model.test_model import MODELS, make_stage

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

    def again(given: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return given * 2

    doubled, dropping = leaf * 2, Dropping()
    dropping.drop(doubled, again, leaf)
    with dropping.packing():
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
    dropping, dropped = Dropping(), torch.zeros(3)
    dropping.drop(dropped, lambda given: pytest.fail("nobody needs it"), other)
    with dropping.packing():
        (leaf * other).sum().backward()
        assert dropping.drops(dropped) and not dropping.drops(other)
    assert not dropping.drops(dropped), "only graphs hold what is computed again, and let go of it by operator"
    assert leaf.grad is not None and leaf.grad.tolist() == [5.0] * 3


def test_of_an_operator_with_large_results_inputs_alone_are_kept():
    x, y = (torch.randn(4, 5, generator=torch.manual_seed(seed)).requires_grad_() for seed in (1, 2))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        result = KeepingInputs.apply(lambda a, b: (a @ b.t()).softmax(1) @ b, x, y)
    assert kept == [20, 20]
    expected = torch.autograd.grad((x @ y.t()).softmax(1) @ y, (x, y), torch.ones(4, 5))
    result.backward(torch.ones(4, 5))
    assert x.grad is not None and torch.equal(x.grad, expected[0])
    assert y.grad is not None and torch.equal(y.grad, expected[1])


GRID, ONE_BLOCK = TensorGrid(), Interval(1, 3)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_selective_keeps_what_products_return_and_takes_less_than_all_again(architecture):
    model = MODELS[architecture]
    setup = Setup(model, LENGTH, "fp32", HPCTRAIN)
    none, selective, full = (layer_kept(setup, GRID, ONE_BLOCK, how) for how in ("none", "selective", "full"))
    attention, mlp = setup.branches(ONE_BLOCK)
    assert attention and mlp
    h, q, k = model.hidden_size, attention.query_size, attention.key_size
    dropped = 2 * h + mlp.inner
    if attention.score_cap is not None:  # keys and values of every query head; tanh and exponentials of scores; a mask
        dropped += 2 * q - 2 * k + 2 * attention.heads * LENGTH + LENGTH / 4
    elif attention.rotary:
        dropped += q + k
    assert none - selective == 4 * LENGTH * dropped
    assert full < selective < none
    kept, some, every = (
        layer_cost(setup, GRID, ONE_BLOCK, ROWS, how).backward_input for how in ("none", "selective", "full")
    )
    assert kept.passed_bytes < some.passed_bytes < every.passed_bytes
    assert some.exchanges == kept.exchanges
    assert (some.products == kept.products) == (attention.score_cap is None), "scores with a cap are computed again"


DTYPES = {"linear": torch.bfloat16, "activation": torch.float64, "rotary": torch.float64, "attention": torch.float64}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_operators_that_compute_in_another_dtype_do_so_again(name):
    model = MODELS[name]
    tokens = torch.randint(0, model.vocab_size, (ROWS, LENGTH + 1), generator=torch.manual_seed(3))
    gradients = []
    for recompute in ("selective", "none"):
        made = make_stage(model, recompute)
        stage = Stage(made.tile, LayerContext(model, made.layers[0].axes, made.store, dtypes=DTYPES))
        _, saved = stage.forward(tokens[:, :-1], tokens[:, 1:], True)
        stage.backward(saved, torch.tensor(1.0, dtype=torch.float64))
        gradients.append(stage.store.groups[0].own_grads())
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("memory_bytes", "expected"), [(40e6, "none"), (25e6, "selective"), (20e6, "full")])
def test_the_search_recomputes_on_the_family_that_is_short_of_memory_as_little_as_fits(memory_bytes, expected):
    job = load_job("tiny", list(SETTINGS))
    cluster = cluster_of({"old": OLD.model_copy(update={"memory_bytes": int(memory_bytes)}), "new": DEVICE})
    space = Space(microbatches=(2,), largest_grid=1, offload=("none",))
    best = search(Setup.of_job(job, "fp32"), GLOBAL_BATCH, cluster, space=space).best
    assert {(tile.family, tile.recompute) for tile in best.plan.tiles} == {("old", expected), ("new", "none")}
