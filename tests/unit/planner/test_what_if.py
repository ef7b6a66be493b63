"""What another machine is worth: never less for more, plans that move with their devices, energy, prices, losses."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.clusters.changed_cluster import ClusterChanges
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.job import Model
from hpctrain.config.prices import FamilyPrice, PriceFile
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.planner.search.search import Limits, search
from hpctrain.planner.search.space import Space
from hpctrain.planner.what_if import RESTART_SECONDS, ComparedMachine, PossibleMachine, moved_plan, what_if
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.examples import costly
from tests.unit.small_searches import cluster_of, setup_of

SETUP, BATCH = setup_of(2), 4
FEW = Limits(scored=6, simulated=1)
"""So few plans that a search misses the best one."""


def rows_of(*clusters: Cluster, limits: Limits = FEW, **options) -> list[ComparedMachine]:
    def best(cluster: Cluster, known_seconds: float) -> Predictor:
        seeded = replace(limits, known_seconds=known_seconds)
        return search(SETUP, BATCH, cluster, space=Space(zero=(1,)), limits=seeded).best.predictor

    machines = [PossibleMachine(f"machine {number}", cluster) for number, cluster in enumerate(clusters)]
    return what_if(machines, best, lambda cluster, plan: Predictor(SETUP, plan, cluster), **options)


TABLES = st.lists(st.tuples(st.sampled_from("abc"), st.just(1), st.integers(1, 2)), min_size=1, max_size=2)


@settings(max_examples=costly(24), deadline=None, suppress_health_check=list(HealthCheck))
@given(TABLES, TABLES, st.sampled_from([1.0, 4.0]), st.sampled_from([1.0, 8.0]))
def test_more_of_anything_is_never_worse(tables, more, bandwidth, memory):
    """Devices, bytes a second and bytes; in either order of the two machines."""
    small = cluster_of(tables, nic=1e7)
    large = cluster_of([*tables, *more], nic=1e7 * bandwidth)
    large = Cluster(
        families={
            name: family.model_copy(update={"memory_bytes": int(family.memory_bytes * memory)})
            for name, family in large.families.items()
        },
        fabrics=large.fabrics,
        nodes=large.nodes,
    )
    for less, greater in (rows_of(small, large), rows_of(large, small)[::-1]):
        assert greater.tokens_per_second >= less.tokens_per_second * (1 - 1e-3)


def test_fully_connected_nodes_are_faster_with_links_twice_as_fast(tmp_path):
    """The catalogue has them; a bandwidth that is set is that of each link, not of one in their place."""
    (tmp_path / "c.toml").write_text('[families.mi300x]\nmodel = "MI300X"\n[[nodes]]\ndevices = {mi300x = 8}\n')
    changes = ClusterChanges(tmp_path / "c.toml")
    model = Model(architecture="llama", num_layers=2, hidden_size=4096, num_heads=32, vocab_size=1024)
    setup = Setup(model, 4096, "bf16", HPCTRAIN)
    plan = Plan((Tile(Interval(0, 6), Interval(0, 1), tuple(range(8)), TensorGrid(y=8)),), 4, 1)
    clusters = changes.changed().cluster, changes.machines([], [], [])["in nodes: twice the GB/s"].cluster
    machines = [PossibleMachine(f"machine {number}", cluster) for number, cluster in enumerate(clusters)]
    now, twice = what_if(machines, lambda c, _: Predictor(setup, plan, c), lambda c, p: Predictor(setup, p, c))
    assert twice.tokens_per_second > 1.02 * now.tokens_per_second


def test_where_a_plan_is_known_only_what_may_be_faster_is_refined():
    cluster = cluster_of([("a", 2, 1), ("b", 1, 2), ("c", 1, 2)], nic=1e7)

    def searched(known_seconds: float) -> tuple[float, int]:
        limits = Limits(scored=40, simulated=8, known_seconds=known_seconds)
        result = search(SETUP, BATCH, cluster, space=Space(zero=(1,)), limits=limits)
        return result.best.seconds, result.searched["scored"] + result.searched["timed"]

    best, work = searched(float("inf"))
    assert searched(1.001 * best)[0] == best, "a plan that is slower changes nothing"
    seconds, less = searched(0.5 * best)
    assert seconds >= best and less < work


def test_a_plan_moves_with_its_devices():
    """Out of a cluster without the family in its middle, and back."""
    three = cluster_of([("a", 2, 1), ("b", 1, 2), ("c", 1, 2)])
    two = cluster_of([("a", 2, 1), ("c", 1, 2)])
    plan = search(SETUP, BATCH, two, space=Space(zero=(1,)), limits=FEW).best.plan
    there = moved_plan(plan, two, three)
    assert there is not None
    assert [tile.ranks for tile in there.tiles] == [
        tuple(rank if rank < 2 else rank + 2 for rank in tile.ranks) for tile in plan.tiles
    ]
    assert not {2, 3} & set(there.ranks) and len(there.ranks) == len(plan.ranks)
    assert moved_plan(there, three, two) == plan
    of_b = search(SETUP, BATCH, three, ["b"], space=Space(zero=(1,)), limits=FEW).best.plan
    assert moved_plan(of_b, three, two) is None


def test_a_difference_that_a_search_may_miss_is_none():
    cluster, faster = (cluster_of([("a", 1, 2)], nic=nic) for nic in (1e7, 1e12))
    same, other = rows_of(cluster, faster)
    assert same.change is None and other.change is None, "no byte leaves the node"
    _, twice = rows_of(cluster_of([("a", 1, 1)]), cluster)
    assert twice.change is not None and 0.5 < twice.change < 1.1


def test_a_machine_without_a_plan_says_why():
    small = cluster_of([("a", 1, 1)], memory=110_000)
    now, none = rows_of(cluster_of([("a", 1, 1)]), small)
    assert none.plan is None and none.tokens_per_second == 0 and none.change == -1
    assert "MiB too few" in none.bounded_by and now.plan is not None


PRICED = PriceFile(
    kwh=0.5,
    years=1.0,
    families={
        "a": FamilyPrice(device_hour=2.0, watts=300.0, idle_watts=100.0),
        "b": FamilyPrice(purchase=8766.0, watts=200.0, idle_watts=50.0),
    },
)


def test_devices_take_power_and_money_while_they_wait_too():
    cluster = cluster_of([("a", 1, 2), ("b", 1, 1)])
    (row,) = rows_of(cluster, prices=PRICED)
    assert row.plan is not None and row.watts is not None
    simulated = Predictor(SETUP, row.plan, cluster).simulated
    powers = {"a": (300.0, 100.0), "b": (200.0, 50.0)}
    watts = sum(powers[cluster.devices[rank].family][1] for rank in row.plan.unused)
    for tile, parts in simulated.parts.items():
        waits = parts["bubble"] / simulated.step_seconds
        busy, idle = powers[cluster.devices[tile.ranks[0]].family]
        watts += len(tile.ranks) * (busy * (1 - waits) + idle * waits)
    assert row.watts == pytest.approx(watts)
    assert row.money_per_hour == pytest.approx(2 * 2.0 + 1.0 + 0.5 * watts / 1000)
    assert row.tokens_per_kwh == pytest.approx(row.tokens_per_second * 3.6e6 / watts)
    assert row.tokens_per_money == pytest.approx(row.tokens_per_second * 3600 / row.money_per_hour)


def test_what_is_not_known_is_said():
    cluster = cluster_of([("a", 1, 1), ("c", 1, 1)])
    (row,) = rows_of(cluster, prices=PRICED)
    assert row.watts is None and row.tokens_per_kwh is None
    assert any("families.c: no power is known" in text for text in row.assumed)
    assert any("families.c costs nothing" in text for text in row.assumed)
    assert any("no energy is counted" in text for text in row.assumed)


@pytest.mark.parametrize(("checkpoint_steps", "devices"), [(0, 1), (0, 2), (100, 1), (100, 2)])
def test_losses_take_their_share(checkpoint_steps, devices):
    hours = 10 * 3600.0
    (row,) = rows_of(cluster_of([("a", 1, devices)]), mtbf_seconds=hours, checkpoint_steps=checkpoint_steps)
    assert row.prediction is not None
    between = checkpoint_steps * row.prediction.step_seconds if checkpoint_steps else 3600.0
    lost = RESTART_SECONDS + between / 2
    assert row.effective_share == pytest.approx(hours / devices / (hours / devices + lost))
    assert row.tokens_per_second == pytest.approx(row.prediction.tokens_per_second * row.effective_share)
    low, high = row.interval
    assert low < row.tokens_per_second < high
