"""How predictions price overlapped communication: what is waited for, and what is slower meanwhile."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.schedule import one_f_one_b
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.predictor import Predictor, predict
from hpctrain.planner.prediction.simulate import simulate
from hpctrain.planner.prices.cost import PassWork, layer_cost
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.prices import Costs, GradientExchange, PassCost, Site, TileCost, pass_cost, slowed_by
from hpctrain.planner.prices.setup import HPCTRAIN
from hpctrain.planner.prices.work import Exchange
from hpctrain.sharding.grid import STORED, TensorGrid
from hpctrain.sharding.items import BLOCK, layers
from tests.pretended import CLUSTER
from tests.unit.planner.test_predict import LAYOUTS, SETUP, plan_of

OVERLAPPED = [  # (ready, needed) of two sums and gathers of 1 s each, and what they add to a step of 2 x (1 + 2) s
    ((0.0, 0.0), None, 4.0),
    ((1.5, 0.0), None, 3.0),
    ((0.0, 1.5), None, 3.0),
    ((1.5, 0.0), (0.9, 0.9), 2.1),
    ((0.5, 0.0), (0.0, 1.0), 2.5),
    ((2.0, 1.0), (1.0, 2.0), 0.0),
]


@pytest.mark.parametrize(("ready", "needed", "exposed"), OVERLAPPED)
def test_what_is_overlapped_adds_what_is_waited_for(ready, needed, exposed):
    plan = even_plan(6, TensorGrid(), 1, 2, 2, 2)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    cost = TileCost((PassCost(1.0),), (PassCost(2.0),))
    exchanges = tuple(
        GradientExchange(
            plan.tiles,
            1.0,
            1.0,
            lambda _, i=i: ready[i],
            None if needed is None else lambda _, i=i: needed[i],
        )
        for i in (0, 1)
    )
    result = simulate(plan, schedules, Costs(dict.fromkeys(plan.tiles, cost), {}, exchanges))
    assert result.step_seconds == pytest.approx(6.0 + exposed)
    for parts in result.parts.values():
        assert sum(parts.values()) == pytest.approx(result.step_seconds)
        assert parts["data"] == 4.0 and parts["data"] + parts["hidden"] == pytest.approx(exposed)


@pytest.mark.parametrize("plan", [LAYOUTS[0], LAYOUTS[4], LAYOUTS[7], plan_of((1, 1, 2), pipeline=1, data=2)])
def test_overlapped_buckets_save_no_more_than_was_exposed(plan):
    exposed, concurrent = (predict(replace(SETUP, bucket_bytes=size), plan, CLUSTER) for size in (None, 1_000_000))
    assert sum(concurrent.breakdown_seconds.values()) == pytest.approx(concurrent.step_seconds)
    saved = exposed.step_seconds - concurrent.step_seconds
    latencies = 0.001 * exposed.step_seconds  # each bucket has its own
    assert -latencies < saved < exposed.breakdown_seconds["data"] + exposed.breakdown_seconds["bubble"]
    if any(tile.zero == 3 for tile in plan.tiles):
        assert saved > 0, "weights of the next layer are gathered while one computes"


@given(st.floats(0.01, 10), st.floats(0.0, 10), st.floats(1, 3))
def test_a_device_that_communicates_computes_more_slowly_until_either_is_done(alone, moving, times):
    """Both begin at once."""
    computed = alone * times if moving >= alone * times else moving + (alone - moving / times)
    assert alone + slowed_by(min(alone, moving), moving, times) == pytest.approx(computed)


@pytest.mark.parametrize(("seconds", "longer"), [(0.5, 0.25), (1.5, 0.75), (3.0, 2.0), (5.0, 4.0)])
def test_overlapped_sums_slow_the_last_backward_pass(seconds, longer):
    """A pass whose last second makes what is summed, on a device that takes twice as long while bytes move."""
    plan = even_plan(6, TensorGrid(), 1, 2, 1, 2)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    cost = TileCost((PassCost(1.0),), (PassCost(2.0),), overlap_slowdown=2.0)
    exchange = GradientExchange(plan.tiles, seconds, 0.0, lambda _: 1.0)
    result = simulate(plan, schedules, Costs(dict.fromkeys(plan.tiles, cost), {}, (exchange,)))
    assert result.step_seconds == pytest.approx(3.0 + longer)
    for parts in result.parts.values():
        assert sum(parts.values()) == pytest.approx(result.step_seconds)


def test_what_different_pipelines_share_is_exchanged_once():
    """Each of the holders has it among other things, so in another place; a bucket is a block or more."""
    whole, first, last = LAYOUTS[-1].tiles
    of_all, of_blocks = (
        [set(exchange.tiles) for exchange in Predictor(setup, LAYOUTS[-1], CLUSTER).costs.exchanges]
        for setup in (SETUP, replace(SETUP, bucket_bytes=1))
    )
    assert of_all == [{whole, first}, {whole, last}]
    assert of_blocks == [{whole, first}] * len(layers(first.items)) + [{whole, last}] * len(layers(last.items))


TWO_SUMS = [  # times within a pass of 2 s at which two sums of 0.5 and 1 s are ready, and how much longer the step is
    ((1.0, 2.0), 1.0 + 0.25),
    ((1.0, 1.5), 0.75),  # the second from 1.5 s of the pass, which is at 1.75 s; both are done at 2.75 s
    ((0.0, 0.5), 0.75),
]


@pytest.mark.parametrize(("ready", "longer"), TWO_SUMS)
def test_sums_are_ready_later_where_others_slow_what_makes_them(ready, longer):
    plan = even_plan(6, TensorGrid(), 1, 2, 1, 2)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    cost = TileCost((PassCost(1.0),), (PassCost(2.0),), overlap_slowdown=2.0)
    exchanges = tuple(
        GradientExchange(plan.tiles, seconds, 0.0, lambda _, ready_at=ready_at: 2.0 - ready_at)
        for seconds, ready_at in zip((0.5, 1.0), ready, strict=True)
    )
    result = simulate(plan, schedules, Costs(dict.fromkeys(plan.tiles, cost), {}, exchanges))
    assert result.step_seconds == pytest.approx(3.0 + longer)


def test_weights_that_come_slow_what_does_not_wait_for_them():
    """Two gathers of 1 s: the first is waited for, the second comes while a second's work is done before it."""
    plan = even_plan(6, TensorGrid(), 1, 2, 1, 2)
    schedules = {tile: one_f_one_b(plan, tile) for tile in plan.tiles}
    cost = TileCost((PassCost(1.5),), (PassCost(2.0),), overlap_slowdown=2.0)
    exchanges = tuple(
        GradientExchange(plan.tiles, 0.0, 1.0, needed_seconds=lambda _, needed=needed: needed) for needed in (0.0, 1.0)
    )
    result = simulate(plan, schedules, Costs(dict.fromkeys(plan.tiles, cost), {}, exchanges))
    assert result.step_seconds == pytest.approx(3.5 + 1.0 + 0.5)


HIDING = replace(SETUP, overlaps=frozenset(("tensor", "z")))


@pytest.mark.parametrize("plan", LAYOUTS)
def test_what_is_hidden_is_between_nothing_and_all_that_was_exposed(plan):
    exposed, hidden = Predictor(SETUP, plan, CLUSTER).predict(), Predictor(HIDING, plan, CLUSTER).predict()
    compute = exposed.breakdown_seconds["compute"]
    assert hidden.breakdown_seconds["compute"] == pytest.approx(compute)
    assert compute < hidden.step_seconds <= exposed.step_seconds * (1 + 1e-9)
    grids = {max(tile.tensor.x, tile.tensor.y, tile.tensor.z) for tile in plan.tiles}
    assert (hidden.step_seconds < exposed.step_seconds) == (grids != {1})


def test_sums_hide_behind_the_products_of_their_layers_and_z_behind_whole_items():
    tile = plan_of((1, 2, 1), pipeline=2, data=1).tiles[0]
    device = [DeviceModel("fast", CLUSTER.families["fast"])]
    for seconds_of_one in (1e-6, 1e3):  # shorter than any product, and longer than all of them
        one = lambda *_, seconds=seconds_of_one: seconds  # noqa: E731
        network = SimpleNamespace(concurrent=tuple, group_seconds=one, holder_seconds=one)
        cost = layer_cost(SETUP, TensorGrid(y=2), BLOCK, 4)
        exposed, hidden = (pass_cost(s, network, cost.backward, Site(tuple(device), tile)) for s in (SETUP, HIDING))
        behind = [exchange.behind for exchange in cost.backward.exchanges if exchange.behind]
        assert len(behind) == 2, "the sums of the gradients of what attention and the inner layer are given"
        products = sum(device[0].work_seconds(PassWork([*products]), "fp32", HPCTRAIN) for products in behind)
        assert exposed.tensor - hidden.tensor == pytest.approx(min(2 * seconds_of_one, products))
        alone = pass_cost(HIDING, network, cost.backward_input, Site(tuple(device), tile))
        assert alone.tensor == len(cost.backward_input.exchanges) * seconds_of_one, "no product of weights runs then"
        slowed = [DeviceModel("fast", CLUSTER.families["fast"].model_copy(update={"overlap_slowdown": 1.5}))]
        slower = pass_cost(HIDING, network, cost.backward, Site(tuple(slowed), tile))
        rest = len(cost.backward.exchanges) - len(behind)
        assert slower.seconds - exposed.compute - rest * seconds_of_one == pytest.approx(
            2 * seconds_of_one / 3 if seconds_of_one < 1 else 2 * seconds_of_one - products
        )
        over_z = layer_cost(SETUP, TensorGrid(z=2), BLOCK, 4).forward
        result = pass_cost(HIDING, network, over_z, Site(tuple(device), plan_of((1, 1, 2), 2, 1).tiles[0]))
        assert result.seconds == pytest.approx(max(result.compute, 2 * seconds_of_one)), "one for each branch"


def test_weights_and_their_gradients_alone_overlap_other_layers_whatever_else_crosses_the_same_axis():
    """Keys that are gathered over an axis which also stores weights are waited for; so is any other operation."""
    network = SimpleNamespace(concurrent=tuple, group_seconds=lambda *_: 1.0, holder_seconds=lambda *_: 1.0)
    site = Site((DeviceModel("fast", CLUSTER.families["fast"]),), plan_of((1, 1, 2), 2, 1).tiles[0])
    for operation in ("all_gather", "all_to_all"):
        waited = pass_cost(HIDING, network, PassWork(exchanges=[Exchange(STORED, operation, 1)]), site)
        assert (waited.tensor, waited.gathered, waited.scattered) == (1.0, 0.0, 0.0)
    for purpose, expected in (("weights", (1.0, 0.0)), ("gradients", (0.0, 1.0))):
        exchange = Exchange(STORED, "all_gather", 1, purpose=purpose)
        moved = pass_cost(HIDING, network, PassWork(exchanges=[exchange]), site)
        assert (moved.gathered, moved.scattered) == expected
