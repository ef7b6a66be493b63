"""Where a predicted step goes: parts that add up, each the seconds that a step is shorter without one cause."""

from dataclasses import replace

import pytest

from hpctrain.config.clusters.cluster import Cluster, Nodes
from hpctrain.config.tables import given_values
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.forecast import BUSY, CAUSES, INTERACTION, forecast, format_waterfall, waterfall
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER, cluster_with
from tests.unit.planner.test_predict import LAYOUTS, NUM_ITEMS, SETUP, plan_of


def parts_of(plan: Plan, cluster: Cluster = CLUSTER) -> dict[str, float]:
    return waterfall(Predictor(SETUP, plan, cluster))


@pytest.mark.parametrize("plan", LAYOUTS)
def test_parts_are_in_order_and_add_up_to_the_step(plan):
    prediction = forecast(SETUP, plan, CLUSTER).prediction
    parts = prediction.waterfall_seconds
    assert list(parts) == [BUSY, *CAUSES, INTERACTION]
    assert sum(parts.values()) == pytest.approx(prediction.step_seconds)
    assert 0 < parts[BUSY] <= 1.001 * prediction.step_seconds
    assert all(parts[cause] >= -0.02 * prediction.step_seconds for cause in CAUSES), parts


def replicas(rows: tuple[int, ...], microbatches: int = 1, **options) -> Plan:
    """Return a plan of replicas on the two fast devices, or on more, with so many rows each."""
    bounds = [sum(rows[:number]) for number in range(len(rows) + 1)]
    tiles = tuple(
        Tile(Interval(0, NUM_ITEMS), Interval(*bounds[n : n + 2]), (n,), family=("fast", "slow")[n // 2], **options)
        for n in range(len(rows))
    )
    return Plan(tiles, microbatches, sum(rows), unused=tuple(range(len(rows), 4)))


def quick(cluster: Cluster = CLUSTER) -> Cluster:
    """Return the cluster with links and NICs that cost next to nothing."""
    nics = {"send_bytes_per_second": 1e15, "receive_bytes_per_second": 1e15}
    links = {"link_latency_seconds": 0.0, "link_bytes_per_second": 1e15}
    nodes = tuple(
        Nodes(**given_values(table) | links | {"nics": tuple(nic.model_copy(update=nics) for nic in table.nics)})
        for table in cluster.nodes
    )
    fabrics = {
        name: each.model_copy(update={"latency_seconds": 0.0, "bytes_per_second": 1e15})
        for name, each in cluster.fabrics.items()
    }
    return Cluster(families=cluster.families, fabrics=fabrics, nodes=nodes)


def test_uneven_rows_cost_what_the_longest_tile_computes_more():
    even, uneven = (Predictor(SETUP, replicas(rows), CLUSTER) for rows in ((4, 4), (6, 2)))
    longer = uneven.simulated.step_seconds - even.simulated.step_seconds
    assert waterfall(uneven)["whole items and rows"] == pytest.approx(longer, rel=0.05)
    assert waterfall(even)["whole items and rows"] == pytest.approx(0.0, abs=1e-9)


def test_a_bubble_is_what_the_busiest_rank_waits():
    """A stage with nearly all of the work waits for the others in the first and the last microbatch alone."""
    predictor = Predictor(SETUP, plan_of((1, 1, 1), 4, 1, microbatches=8), quick())
    bubbles = [parts["bubble"] for parts in predictor.simulated.parts.values()]
    assert waterfall(predictor)["bubble"] == pytest.approx(min(bubbles)) and min(bubbles) > 0
    assert parts_of(replicas((4, 4)))["bubble"] == pytest.approx(0.0, abs=1e-9)


def test_waits_for_slow_messages_are_no_bubble():
    """With both, the same seconds were counted twice, and the interaction was a sixth of the step."""
    parts = parts_of(plan_of((1, 1, 1), 4, 1, microbatches=8), cluster_with(nic_bytes_per_second=2e4))
    step = sum(parts.values())
    assert parts["messages"] > 0.3 * step
    assert abs(parts[INTERACTION]) < 0.03 * step


def test_messages_cost_what_a_quick_network_saves():
    plan = plan_of((1, 1, 1), 4, 1, microbatches=2)
    parts, quickly = parts_of(plan), Predictor(SETUP, plan, quick())
    saved = Predictor(SETUP, plan, CLUSTER).simulated.step_seconds - quickly.simulated.step_seconds
    others = parts["gradients"] + parts["weights"] + Predictor(SETUP, plan, CLUSTER).costs.agree_seconds
    assert parts["messages"] > 0 and parts["messages"] + others == pytest.approx(saved, rel=0.1)


@pytest.mark.parametrize(
    ("plan", "causes"),
    [
        (replicas((4, 4), zero=0), {"gradients"}),
        (replicas((4, 4), zero=1), {"gradients", "weights"}),
        (replicas((4, 4), zero=3), {"gradients", "weights"}),
        (plan_of((1, 2, 1), pipeline=1, data=1), {"tensor"}),
    ],
)
def test_exchanges_cost_what_a_quick_network_saves(plan, causes):
    predictor, quickly = (Predictor(SETUP, plan, cluster) for cluster in (CLUSTER, quick()))
    parts = waterfall(predictor)
    saved = sum(parts.values()) - quickly.simulated.step_seconds - predictor.costs.agree_seconds
    communicating = {"messages", "gradients", "weights", "tensor"}
    assert {cause for cause in communicating if parts[cause] > 0.01 * saved} == causes
    assert sum(parts[cause] for cause in communicating) == pytest.approx(saved, rel=0.1)


def test_what_is_computed_again_costs_what_a_plan_without_it_saves():
    plan, again = plan_of(), plan_of(recompute="full")
    steps = [Predictor(SETUP, each, CLUSTER).simulated.step_seconds for each in (plan, again)]
    assert parts_of(again)["recompute and offload"] == pytest.approx(steps[1] - steps[0]) != 0
    assert parts_of(plan)["recompute and offload"] == 0
    assert parts_of(again)[BUSY] == pytest.approx(parts_of(plan)[BUSY])


def test_the_optimizer_costs_its_part_of_the_step():
    predictor = Predictor(SETUP, replicas((4, 4)), CLUSTER)
    assert waterfall(predictor)["optimizer"] == pytest.approx(predictor.predict().breakdown_seconds["optimizer"])


def test_unused_devices_cost_their_share_of_the_work():
    """Half of the devices of a family, then a family of which none is used."""
    half = parts_of(replicas((8,)))
    computing = half[BUSY] * 2
    assert half["unused devices"] > 0.5 * computing, "another fast device alone would halve it"
    plan = replicas((4, 4))
    both, fast = parts_of(plan), parts_of(replace(plan, unused=()), _without_slow())
    assert both[BUSY] < fast[BUSY] and fast["unused devices"] == 0 < both["unused devices"]
    assert both["unused devices"] == pytest.approx(fast[BUSY] - both[BUSY], rel=0.05)


def _without_slow() -> Cluster:
    nodes = tuple(table for table in CLUSTER.nodes if "slow" not in table.devices)
    return Cluster(families={"fast": CLUSTER.families["fast"]}, fabrics=CLUSTER.fabrics, nodes=nodes)


def test_the_line_leaves_out_what_is_next_to_nothing():
    assert format_waterfall({BUSY: 9.0, "bubble": 1e-6, INTERACTION: 1.0}) == f"{BUSY} 90.0%, interaction 10.0%"


def test_tiles_that_take_equally_long_are_even_whatever_they_do():
    """Two ranks that wait for each other compute less in the same seconds."""
    tiles = (
        Tile(Interval(0, NUM_ITEMS), Interval(0, 4), (0, 1), TensorGrid(1, 2, 1), family="fast"),
        Tile(Interval(0, NUM_ITEMS), Interval(4, 8), (2,), family="slow"),
    )
    predictor = Predictor(replace(SETUP, overlaps=frozenset()), Plan(tiles, 1, 8, unused=(3,)), CLUSTER)
    costs = predictor.costs
    times = costs.tiles[tiles[0]].seconds / costs.tiles[tiles[1]].seconds
    slow = replace(
        costs.tiles[tiles[1]],
        **{
            name: tuple(replace(one, compute=one.compute * times) for one in getattr(costs.tiles[tiles[1]], name))
            for name in ("forward", "backward")
        },
    )
    predictor.costs = replace(costs, tiles={tiles[0]: costs.tiles[tiles[0]], tiles[1]: slow})
    parts = waterfall(predictor)
    assert costs.tiles[tiles[0]].forward[0].tensor > 1e-3 * costs.tiles[tiles[0]].seconds
    assert parts["whole items and rows"] == pytest.approx(0.0, abs=1e-6 * sum(parts.values()))
