"""In which way products are computed: one choice for a family, the same numbers, and none that was forgotten."""

from types import SimpleNamespace

import pytest

from hpctrain.config.job import Overlap, Products
from hpctrain.data.order import open_datasets
from hpctrain.engine import tuning
from hpctrain.engine.tuning import Tuned, tune_products
from hpctrain.model.operand_layouts import LAYOUTS_BY_NAME, OperandLayouts
from hpctrain.model.products import Product, products_of
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import Alone, largest_relative_difference, make_job, make_trainer

# (items, rows, ranks, grid, row_chunks): y above the key/value heads, x beside z, rows that do not divide, row_chunks.
PLANS = {
    2: [[((0, 5), (0, 5), (0,), (1, 1, 1), 2), ((0, 5), (5, 8), (1,), (1, 1, 1), 1)]],
    4: [
        [((0, 5), (0, 8), (0, 1, 2, 3), (1, 4, 1), 1)],
        [((0, 2), (0, 8), (0, 1), (2, 1, 1), 1), ((2, 5), (0, 8), (2, 3), (1, 1, 2), 3)],
    ],
}


def pytest_generate_tests(metafunc):
    if "plan" in metafunc.fixturenames:
        from mpi4py import MPI

        plans = [plan_of(tiles) for tiles in PLANS.get(MPI.COMM_WORLD.size, [])]
        metafunc.parametrize("plan", plans, ids=Plan.describe)


def plan_of(tiles) -> Plan:
    made = (Tile(Interval(*i), Interval(*r), ranks, TensorGrid(*g), row_chunks=s) for i, r, ranks, g, s in tiles)
    return Plan(tuple(made), microbatches=2, rows=8)


def small_job(tokens, model: str, **products):
    job = make_job(tokens, model, shape={"num_layers": 3})
    return job.model_copy(update={"products": Products(**{"tune": "auto", **products})})


def curve(world, job, plan: Plan, steps: int = 3) -> list[float]:
    _, training, validation = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.initialise()
        result = [trainer.step(training)[0] for _ in range(steps)]
        return [m[key] for m in result for key in ("loss", "grad_norm")] + [trainer.validate(validation)]


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("model", "in_halves"), [("gpt2", False), ("llama", False), ("llama", True)])
def test_the_products_that_are_measured_are_those_that_are_computed(world, tokens, plan, model, in_halves, monkeypatch):
    job = small_job(tokens, model, tune=False)
    job = job.model_copy(update={"overlap": Overlap(forward=in_halves)})
    asked = set()
    layout_of = OperandLayouts._layout

    def noted(layouts, use, a, b):
        asked.add(Product(use, "fp32", *a.shape, b.shape[1]))
        return layout_of(layouts, use, a, b)

    monkeypatch.setattr(OperandLayouts, "_layout", noted)
    curve(world, job, plan, 1)
    tile = plan.tile_of(world.rank)
    everywhere = world.broadcast_object(world.gather_objects((plan.tiles.index(tile), asked)))
    of_tile = set().union(*(products for number, products in everywhere if plan.tiles[number] == tile))
    assert of_tile == set(products_of(job.model, plan, tile, "fp32", job.data.sequence_length, in_halves))


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_another_way_gives_the_losses_of_one_rank_and_the_same_bits_again(world, tokens, plan):
    job = small_job(tokens, "llama", tune=False)
    whole = Plan((Tile(Interval(0, 5), Interval(0, 8), (0,)),), microbatches=2, rows=8)
    expected = world.broadcast_object(curve(Alone(), job, whole) if world.rank == 0 else None)
    names = {str(p) for t in plan.tiles for p in products_of(job.model, plan, t, "fp32", job.data.sequence_length)}
    turned = small_job(tokens, "llama", tune=False, layouts={"cpu": dict.fromkeys(names, "both")})
    result = curve(world, turned, plan)
    assert largest_relative_difference(result, expected) < 1e-5
    assert curve(world, turned, plan) == result


@pytest.mark.timeout(60)
def test_a_family_follows_its_first_rank_and_what_is_known_is_not_measured(world, tokens, monkeypatch):
    half = world.size // 2
    ranks = tuple(range(half)), tuple(range(half, world.size))
    tiles = (
        Tile(Interval(0, 2), Interval(0, 8), ranks[0], TensorGrid(1, half, 1), "cpu"),
        Tile(Interval(2, 5), Interval(0, 8), ranks[1], TensorGrid(1, half, 1), "other"),
    )
    plan = Plan(tiles, microbatches=2, rows=8)
    measured = []

    def pretended(accelerator, products, seconds=1.0):
        measured.extend(products)
        own = list(LAYOUTS_BY_NAME)[world.rank % len(LAYOUTS_BY_NAME)]
        return {str(p): Tuned(own, 1.5) for p in products[:-1]} | {str(products[-1]): Tuned("plain", 0.0)}

    monkeypatch.setattr(tuning, "measure", pretended)
    job = small_job(tokens, "llama")
    of = [products_of(job.model, plan, tile, "fp32", job.data.sequence_length) for tile in tiles]
    known = {"cpu": {str(of[0][0]): "second"}}
    resolved, reasons = tune_products(world, small_job(tokens, "llama", layouts=known), plan)
    assert len(set(map(repr, world.broadcast_object(world.gather_objects(resolved))))) == 1
    assert resolved.tune is True
    assert resolved.layouts["cpu"] == {**known["cpu"], **{str(p): "plain" for p in of[0][1:]}}
    assert [resolved.layouts["other"][str(p)] for p in of[1]] == [list(LAYOUTS_BY_NAME)[half]] * (len(of[1]) - 1) + [
        "plain"
    ]
    assert measured == {0: of[0][1:], half: of[1]}.get(world.rank, [])
    assert f"cpu: 1 of {len(of[0])} products as they were" in reasons["products.layouts"]
    assert "1 without copies, too large to be measured in 1 s" in reasons["products.layouts"]
    measured.clear()  # what was too large is known too: with more time for it, it could change
    assert tune_products(world, small_job(tokens, "llama", layouts=resolved.layouts), plan)[0] == resolved
    assert measured == []


def test_a_rehearsal_measures_nothing_and_says_so(tokens):
    pretended = SimpleNamespace(topology=SimpleNamespace(shares_memory=False))
    resolved, reasons = tune_products(pretended, small_job(tokens, "llama"), plan_of(PLANS[2][0]))
    assert resolved == Products(tune=False)
    assert reasons["products.tune"].startswith("off: what a pretended device takes")
    assert tune_products(pretended, small_job(tokens, "llama", tune=False), plan_of(PLANS[2][0]))[1] == {}
