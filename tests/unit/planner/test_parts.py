"""Products that are cut by rows: what their collectives add to a pass, and which number of parts is chosen."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpctrain.comm.topology import Place, Topology
from hpctrain.config.parallelism import Overlap
from hpctrain.engine.start.resolve_overlap import continued, resolve_overlap, resolve_parts
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prices.cost import layer_cost
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.linear_cost import gathering_linear, linear, scattering_linear
from hpctrain.planner.prices.prices import Site, part_counts, pass_cost
from hpctrain.planner.prices.work import LayerCost, PassWork
from hpctrain.planner.search.search import search
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.items import BLOCK, EMBEDDING
from tests.pretended import CLUSTER, cluster_with
from tests.unit.planner.test_overlap import job_of
from tests.unit.planner.test_predict import SETUP, plan_of
from tests.unit.small_searches import EVERYTHING, cluster_of, setup_of

Y, POSITIONS = TensorGrid(y=2), TensorGrid(y=2, sequence_parallel=True)
INTO, OUT = 256, 384
OVERLAPPED = replace(SETUP, overlaps=frozenset(("tensor",)))
DEVICE = DeviceModel("fast", CLUSTER.families["fast"].model_copy(update={"kind": "cpu"}))


def costs(parts: int, rows: int = 8) -> dict[str, LayerCost]:
    return {
        "sum": linear(SETUP, rows * SETUP.positions, INTO, OUT, ("y", "x"), {"x": 1, "y": 2}, parts),
        "gather": gathering_linear(SETUP, rows, INTO, OUT, POSITIONS, True, parts),
        "scatter": scattering_linear(SETUP, rows, INTO, OUT, POSITIONS, parts),
    }


def seconds_in_order(computing: list[float], message_seconds: float, gathers: bool) -> float:
    """Return when all is done: products one after the other, and so messages, which wait for one another in pairs."""
    now = lane = 0.0
    for seconds in computing:
        if gathers:
            lane += message_seconds
            now = max(now, lane) + seconds
        else:
            now += seconds
            lane = max(now, lane) + message_seconds
    return max(now, lane)


@pytest.mark.parametrize("name", ["sum", "gather", "scatter"])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0, 3.0])
def test_a_pass_in_parts_takes_what_its_products_and_messages_take_in_order(name, parts, share):
    work = costs(parts)[name].forward
    assert len(work.products) == len(work.exchanges) == parts
    computing = [DEVICE.work_seconds(PassWork([product]), "fp32", SETUP.engine) for product in work.products]
    message = share * computing[0]
    network = SimpleNamespace(concurrent=tuple, group_seconds=lambda *_: message, holder_seconds=lambda *_: message)
    result = pass_cost(OVERLAPPED, network, work, Site((DEVICE,), plan_of(Y, 1, 1).tiles[0]))
    rest = DEVICE.work_seconds(work, "fp32", SETUP.engine) - sum(computing)
    assert result.seconds == pytest.approx(seconds_in_order(computing, message, name == "gather") + rest)
    backward = costs(parts)["scatter"].backward_input
    assert sum(not exchange.behind for exchange in backward.exchanges) == 1, "dy is gathered while dX is computed"


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_parts_compute_and_move_the_same_and_are_no_more_than_there_are_rows(rows):
    def flops(work: PassWork) -> float:
        return sum(2.0 * p.m * p.k * p.n for p in work.products)

    for parts in (2, 4, 64):
        for name, cost in costs(parts, rows).items():
            whole = costs(1, rows)[name]
            for which in ("forward", "backward_input", "backward_weight"):
                ours, theirs = getattr(cost, which), getattr(whole, which)
                assert flops(ours) == flops(theirs)
                assert sum(e.num_bytes for e in ours.exchanges) == sum(e.num_bytes for e in theirs.exchanges)
            if name != "sum" and rows > 1:
                assert len(cost.forward.products) == min(parts, rows)
            elif name != "sum":
                assert cost.forward.passed_bytes > whole.forward.passed_bytes, "positions are put in their place"


def test_rows_of_their_own_need_no_copy():
    some, each = (costs(parts, rows=4)["gather"].forward.passed_bytes for parts in (2, 4))
    assert some == costs(1, rows=4)["gather"].forward.passed_bytes > 0
    assert each == 0


def test_blocks_are_cut_where_sums_are_overlapped():
    cut = replace(OVERLAPPED, tensor_parts=4)
    ours, whole = (layer_cost(setup, Y, BLOCK, 4).forward.products for setup in (cut, SETUP))
    assert len(ours) == len(whole) + 2 * 3, "the last products of both branches"
    for setup in (replace(SETUP, tensor_parts=4), replace(OVERLAPPED, tensor_parts=None)):
        assert layer_cost(setup, Y, BLOCK, 4) == layer_cost(SETUP, Y, BLOCK, 4)
    for layer in (EMBEDDING, SETUP.head):
        assert layer_cost(cut, Y, layer, 4) == layer_cost(SETUP, Y, layer, 4)


def test_the_number_is_open_only_where_something_can_be_cut():
    is_open = replace(OVERLAPPED, tensor_parts=None)
    assert part_counts(is_open, [TensorGrid(), Y]) == (1, 2, 4, 8)
    assert part_counts(replace(is_open, tensor_parts=3), [Y]) == (3,)
    assert part_counts(is_open, [TensorGrid(z=2)]) == (1,)
    assert part_counts(is_open, [Y, TensorGrid(x=2, y=2, sequence_parallel=True)]) == (1,)
    assert part_counts(replace(SETUP, tensor_parts=None), [Y]) == (1,)


def test_a_search_times_plans_in_the_number_of_parts_that_is_best():
    """One row, so that only a tensor grid uses both devices."""
    cluster = cluster_of([("a", 1, 2)], link=4e7, latency=0.0)
    whole = replace(setup_of(2), positions=1024, overlaps=frozenset(("tensor",)))
    best = {
        parts: search(replace(whole, tensor_parts=parts), 1, cluster, limits=EVERYTHING).best for parts in (1, 4, None)
    }
    assert {tile.tensor.y for each in best.values() for tile in each.plan.tiles} == {2}
    assert best[None].seconds <= best[4].seconds < 0.99 * best[1].seconds
    assert best[None].prediction.breakdown_seconds["tensor"] < best[1].prediction.breakdown_seconds["tensor"]


FOUR = TensorGrid(y=4)


@pytest.mark.parametrize(
    ("grid", "overlap", "cluster", "expected"),
    [
        (FOUR, {"tensor": True}, cluster_with(5e6), ((2, 4, 8), "a step is predicted to take 0.")),
        (FOUR, {"tensor": True}, cluster_with(1e12), ((1,), "1: with no other number")),
        (FOUR, {"tensor": False}, cluster_with(5e6), ((1,), "1: overlap.tensor is off")),
        (FOUR, {"tensor": True, "tensor_parts": 3}, cluster_with(5e6), ((3,), None)),
        (TensorGrid(), {"tensor": True}, cluster_with(5e6), ((1,), "1: no tile has x or y")),
        (
            TensorGrid(2, 2, sequence_parallel=True),
            {"tensor": True},
            cluster_with(5e6),
            ((1,), "1: positions are gathered over y"),
        ),
    ],
)
def test_auto_is_the_number_that_is_predicted_to_pay(grid, overlap, cluster, expected):
    plan = even_plan(14, grid, 1, 4 // grid.size, 1, 16)
    result, reasons, _ = resolve_parts(job_of(**overlap), plan, cluster)
    parts, reason = expected
    assert result.tensor_parts in parts
    assert reason in reasons["overlap.tensor_parts"] if reason else "overlap.tensor_parts" not in reasons
    assert result.model_validate(result.model_dump()) == result, "it can be saved, and read again"


def test_parts_that_are_asked_for_have_sums_overlapped():
    result, reasons = resolve_overlap(Overlap(tensor_parts=2), Topology((Place("a", "cpu"),) * 2))
    assert result.tensor is True and reasons["overlap.tensor"] == "on: overlap.tensor_parts needs it"
    assert resolve_overlap(Overlap(tensor_parts=1), Topology((Place("a", "cpu"),) * 2))[0].tensor is False


def test_a_run_that_is_continued_keeps_the_number():
    saved = Overlap(tensor=True, data=False, z=False, tensor_parts=4)
    assert continued(Overlap(), saved)[0] == saved
    assert continued(Overlap(), saved)[1]["overlap.tensor_parts"] == "4"
    before = Overlap(tensor=True, data=False, z=False)
    assert continued(Overlap(), before)[0].tensor_parts == 1
    assert continued(Overlap(tensor_parts=2), saved)[0].tensor_parts == 2
