"""What c costs: its part of products and activations, keys and values of the whole row; and when a search takes it."""

from dataclasses import replace

import pytest
import torch

from hpctrain.config.errors import PlanError
from hpctrain.model.operators import attention as attention_of_model
from hpctrain.planner.prediction.activations import layer_kept, mask_bytes, row_bytes
from hpctrain.planner.prices.buffers import message_bytes
from hpctrain.planner.prices.cost import _attention, computed_pairs, heads_on, layer_cost
from hpctrain.planner.prices.setup import LEAST_CONTEXT, Setup
from hpctrain.planner.search.pools import Pool
from hpctrain.planner.search.search import search
from hpctrain.sharding.grid import ONE_RANK, TensorGrid
from hpctrain.sharding.intervals import cut_zigzag
from hpctrain.sharding.items import BLOCK
from tests.pretended import cluster_with
from tests.unit.planner.test_predict import SETUP

ROWS, C = 2, 4
GRID = TensorGrid(c=C)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ranks_of_c_have_the_products_of_one_rank_together(recompute):
    """Attention too, which is the same of each rank: an early interval sees few keys, a late one many."""
    whole, own = (layer_cost(SETUP, grid, BLOCK, ROWS, recompute) for grid in (ONE_RANK, GRID))
    for name in ("forward", "backward_input", "backward_weight"):
        expected, flops = (
            sum(p.m * p.k * p.n * p.batch * p.share for p in getattr(cost, name).products) for cost in (whole, own)
        )
        assert C * flops == pytest.approx(expected)


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 1), ("selective", 2), ("full", 2)])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(recompute, gathers):
    attention, _ = SETUP.branches(BLOCK)
    cost = layer_cost(SETUP, GRID, BLOCK, ROWS, recompute)
    moved = [e for work in (cost.forward, cost.backward_input, cost.backward_weight) for e in work.exchanges]
    whole = ROWS * SETUP.positions * 2 * heads_on(attention, GRID)[1] * SETUP.item_bytes
    of_c = [(e.operation, e.num_bytes) for e in moved if e.axis == "c"]
    assert sorted(of_c) == [("all_gather", whole)] * gathers + [("reduce_scatter", whole)]


def test_a_rank_keeps_its_positions_and_sends_them():
    assert message_bytes(SETUP, GRID, ROWS) * C == message_bytes(SETUP, ONE_RANK, ROWS)
    kept, own = (row_bytes(SETUP, grid, [BLOCK], "full", splits=False, rows=1).kept for grid in (ONE_RANK, GRID))
    assert own * C == pytest.approx(kept)
    of_rank = SETUP.on(GRID)
    assert of_rank.positions * C == SETUP.positions and SETUP.on(ONE_RANK) is SETUP
    none, again = (layer_kept(of_rank, GRID, BLOCK, recompute) for recompute in ("none", "selective"))
    assert again < none < layer_kept(SETUP, ONE_RANK, BLOCK, "none")


def test_short_rows_have_no_more_grids_and_long_ones_those_of_y_and_c():
    nodes = (tuple(range(8)),)
    pool = Pool("fast", ("fast",), None, nodes)  # pyright: ignore[reportArgumentType] - no device is asked
    sizes = replace(SETUP, positions=LEAST_CONTEXT).context_sizes
    assert sizes == [] and pool.grids(sizes) == pool.grids()
    sizes = replace(SETUP, positions=6 * LEAST_CONTEXT).context_sizes
    assert sizes == [2, 3, 4, 6]
    more = set(pool.grids(sizes)) - set(pool.grids())
    assert more == {TensorGrid(y=y, c=c) for c in sizes for y in range(1, 8 // c + 1)}


def test_a_row_of_odd_length_is_not_cut():
    assert replace(SETUP, positions=2 * LEAST_CONTEXT + 1).context_sizes == []


@pytest.mark.parametrize("window", [None, 8, 24, 1000])
@pytest.mark.parametrize("c", [1, 2, 4, 8])
def test_masks_and_scores_are_those_of_the_rank_with_the_most_pairs(monkeypatch, c, window):
    """The pairs are those of the keys that attention is given for the queries of each interval."""
    shapes: list[int] = []

    def count(queries, keys, *_, backend):
        shapes[-1] += queries.shape[2] * keys.shape[2]
        return queries

    monkeypatch.setattr(attention_of_model, "attend", count)
    grid, attention = TensorGrid(c=c), replace(SETUP.branches(BLOCK)[0], window=window)
    row = torch.empty(1, 1, SETUP.positions, 1)
    for intervals in cut_zigzag(SETUP.positions, c):
        shapes.append(0)
        attention_of_model.attend_at(row[:, :, : SETUP.positions // c], row, row, attention, intervals)
    setup = replace(SETUP, masks_documents=True).on(grid)
    assert computed_pairs(setup, window) == max(shapes)
    assert mask_bytes(setup, grid, attention, "none", 1) == max(shapes) * setup.item_bytes


@pytest.mark.parametrize("cap", [None, 50.0])
def test_documents_and_caps_are_priced_by_the_pairs_that_are_computed(cap):
    """Without a window the last rank computes (2c + 2) / 4c of c times its own positions squared."""
    attention = replace(SETUP.branches(BLOCK)[0], score_cap=cap)
    setup = replace(SETUP, masks_documents=True)
    (whole, _), (own, _) = (_attention(setup.on(grid), attention, ROWS, grid) for grid in (ONE_RANK, GRID))
    flops, own_flops = (sum(p.m * p.k * p.n * p.batch * p.share for p in work.products) for work in (whole, own))
    assert own_flops / flops == pytest.approx((C + 1) / 2 / C**2)
    assert own.passed_bytes == pytest.approx(whole.passed_bytes * (C + 1) / 2 / C**2)
    assert (whole.passed_bytes > 0) == (cap is not None)


def test_a_row_that_fits_in_no_other_way_is_cut_by_c(monkeypatch):
    """There is one row, of one block, whose two heads allow y = 2 at most."""
    model = SETUP.model.model_copy(update={"num_heads": 2, "num_kv_heads": 2, "num_layers": 1})
    setup = replace(SETUP, model=model, positions=8 * LEAST_CONTEXT)
    plenty = cluster_with(5e7, devices=4)
    size = {"memory_bytes": 500_000_000, "reserve_bytes": 0}
    families = {name: family.model_copy(update=size) for name, family in plenty.families.items()}
    cluster = plenty.model_copy(update={"families": families})
    assert max(tile.tensor.c for tile in search(setup, 1, cluster).best.plan.tiles) > 1
    monkeypatch.setattr(Setup, "context_sizes", [])
    with pytest.raises(PlanError):
        search(setup, 1, cluster)
