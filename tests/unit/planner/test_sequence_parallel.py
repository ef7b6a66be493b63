"""What a tile that cuts positions over y costs: as many bytes as its all-reduces, less memory, less work of norms."""

from dataclasses import replace

import pytest

from hpctrain.planner.prediction.activations import layer_kept
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.buffers import message_bytes
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.search.search import search
from hpctrain.planner.search.space import Space
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.items import BLOCK, EMBEDDING
from tests.pretended import CLUSTER
from tests.unit.planner.test_predict import SETUP, plan_of
from tests.unit.small_searches import EVERYTHING, cluster_of, setup_of

WHOLE, CUT = TensorGrid(y=4), TensorGrid(y=4, sequence_parallel=True)
ROWS = 3
MOVED = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often each byte crosses an axis, but for the own part."""


def moved_bytes(layer, grid: TensorGrid, recompute: str) -> int:
    cost = layer_cost(SETUP, grid, layer, ROWS, recompute)
    works = (cost.forward, cost.backward_input, cost.backward_weight)
    return sum(MOVED[e.operation] * e.num_bytes for work in works for e in work.exchanges if e.axis == "y")


HIDDEN_BYTES = ROWS * SETUP.positions * SETUP.model.hidden_size * 4


@pytest.mark.parametrize(
    ("layer", "recompute", "more"),
    [(BLOCK, "none", 2), (BLOCK, "full", 0), (EMBEDDING, "none", 0), (SETUP.head, "none", 1)],
)
def test_y_moves_the_bytes_of_all_reduces_and_inputs_that_are_not_kept_once_more(layer, recompute, more):
    """What the embedding gathers backward, its all-reduce has moved forward."""
    whole, cut = (moved_bytes(layer, grid, recompute) for grid in (WHOLE, CUT))
    assert cut - whole == more * HIDDEN_BYTES


def test_norms_take_a_part_and_products_the_same():
    whole, cut = (layer_cost(SETUP, grid, BLOCK, 1) for grid in (WHOLE, CUT))
    for name in ("forward", "backward_input", "backward_weight"):
        assert getattr(whole, name).products == getattr(cut, name).products
    passed = [each.forward.passed_bytes + each.backward_input.passed_bytes for each in (whole, cut)]
    hidden = SETUP.positions * SETUP.model.hidden_size
    of_norms = 2 * sum(SETUP.passes.norm) + sum(SETUP.passes.residual)
    assert passed[0] - passed[1] == pytest.approx(hidden * of_norms * 3 / 4)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_kept_of_hidden_states_and_messages_are_a_part(recompute):
    kept, less = (layer_kept(SETUP, grid, BLOCK, recompute) for grid in (WHOLE, CUT))
    hidden = SETUP.positions * SETUP.model.hidden_size * 4
    states, scales = (4, 2) if recompute == "none" else (1, 0)
    assert kept - less == pytest.approx((states * hidden + scales * SETUP.positions * 4) * 3 / 4)
    assert message_bytes(SETUP, CUT, ROWS) * 4 == message_bytes(SETUP, WHOLE, ROWS)


def test_messages_of_stages_on_different_nodes_take_less():
    plan = plan_of((1, 2, 1), pipeline=2, data=1)
    tiles = (replace(each, tensor=each.tensor._replace(sequence_parallel=True)) for each in plan.tiles)
    cut = replace(plan, tiles=tuple(tiles))
    seconds, less = (max(Predictor(SETUP, each, CLUSTER).costs.messages.values()) for each in (plan, cut))
    assert less < seconds


def test_a_search_takes_it_where_y_divides_the_positions():
    """Of one row, so that nothing else cuts the work; of 15 positions y = 2 has no half."""
    cluster = cluster_of([("a", 1, 2)], link=1e12, latency=0.0)
    grids = []
    for positions in (16, 15):
        setup = replace(setup_of(1), positions=positions)
        result = search(setup, 1, cluster, space=Space(), limits=EVERYTHING)
        grids.append({tile.tensor for tile in result.best.plan.tiles})
    assert grids == [{TensorGrid(y=2, sequence_parallel=True)}, {TensorGrid(y=2)}]
