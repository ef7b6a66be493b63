"""Equal ranks, tiles and nodes are asked once: a prediction is the same as if each were asked."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.config.errors import PlanError
from hpctrain.plan.tiling import even_plan
from hpctrain.plan.uniform import with_families
from hpctrain.planner.prediction.arrivals import _Messages
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prediction.simulate import Simulation
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.prices import Prices
from hpctrain.sharding.grid import TensorGrid
from tests.examples import costly
from tests.tilings import tilings
from tests.unit.small_searches import cluster_of, setup_of

NUM_RANKS = 24
NODES = ([("a", 6, 4)], [("a", 4, 3), ("b", 3, 4)], [("a", 8, 1), ("b", 4, 4)], [("a", 8, 3)])


class Forgetful(dict):
    """Keeps values, and says that it has none."""

    def __contains__(self, key: object) -> bool:
        return False

    def get(self, key: object, default: object = None) -> object:
        return default


class Unfolded(Predictor):
    """Asks for each pair of ranks, each tile and each pipeline, whatever is equal."""

    def __init__(self, setup, plan, cluster):
        network = ClusterNetwork(cluster)
        network._number_of_places, network._ports_of_places, network._on_nodes = Forgetful(), Forgetful(), Forgetful()
        super().__init__(setup, plan, cluster, prices=Prices(setup, cluster, network=network))


@st.composite
def regular(draw):
    """An even pipeline with several replicas, on ranks in their order, shifted, or in any order."""
    grid = draw(
        st.sampled_from([TensorGrid(), TensorGrid(y=2), TensorGrid(z=2), TensorGrid(x=2), TensorGrid(y=2, z=2)])
    )
    stages = draw(st.sampled_from([2, 3]))
    data = NUM_RANKS // grid.size // stages
    plan = even_plan(18, grid, stages, data, draw(st.integers(1, 4)), 2 * data, zero=draw(st.integers(0, 3)))
    shift = draw(st.integers(0, NUM_RANKS - 1))
    order = [(rank + shift) % NUM_RANKS for rank in range(NUM_RANKS)]
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    return replace(plan, tiles=tuple(replace(t, ranks=tuple(order[r] for r in t.ranks)) for t in plan.tiles))


@settings(max_examples=costly(120), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from(NODES), st.sampled_from([None, 20_000]), st.integers(1, 3))
def test_what_is_asked_once_is_as_if_each_were_asked(data, nodes, bucket_bytes, num_nics):
    setup = replace(setup_of(8), bucket_bytes=bucket_bytes, overlaps=frozenset(("tensor", "z")))
    cluster = cluster_of(nodes, nic=2e7, nics=[num_nics] * len(nodes))
    plan = data.draw(st.one_of(regular(), regular(), tilings(setup.model, NUM_RANKS, 6, 2)))
    plan = with_families(plan, [device.family for device in cluster.devices])
    folded = Predictor(setup, plan, cluster)
    try:
        expected = folded.predict()
    except PlanError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "originals", lambda self, schedules: {tile: tile for tile in schedules})
        made = _Messages.__init__

        def forgetful(self, *arguments):
            made(self, *arguments)
            self._kinds = Forgetful()

        patch.setattr(_Messages, "__init__", forgetful)
        unfolded = Unfolded(setup, plan, cluster)
        actual = unfolded.predict()
    assert actual.step_seconds == pytest.approx(expected.step_seconds, rel=1e-9)
    assert actual.breakdown_seconds == pytest.approx(expected.breakdown_seconds, rel=1e-9, abs=1e-15)
    assert unfolded.costs.messages == pytest.approx(folded.costs.messages, rel=1e-9)
    for tile, parts in folded.simulated.exposed.items():
        assert unfolded.simulated.exposed[tile] == pytest.approx(parts, rel=1e-9, abs=1e-15)
    assert sorted(stage.memory.total for stage in actual.memory) == sorted(
        stage.memory.total for stage in expected.memory
    )


@settings(max_examples=costly(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(regular(), st.sampled_from(NODES), st.sampled_from([None, 1, 20_000]))
def test_what_two_predictors_share_is_as_if_each_were_alone(plan, nodes, bucket_bytes):
    """They share a plan, in other numbers of parts, or the tiles of one, by other schedules."""
    overlaps = frozenset(("tensor", "z"))
    setup = replace(setup_of(8), bucket_bytes=bucket_bytes, overlaps=overlaps, tensor_parts=1)
    cluster = cluster_of(nodes, 50_000_000)
    families = [device.family for device in cluster.devices]
    plan = with_families(plan, families)
    first = Predictor(setup, plan, cluster)
    first.predict()
    in_parts = replace(setup, tensor_parts=2)
    changed = (
        (in_parts, plan),
        (setup, plan.with_schedule(schedule="zb-h1")),
        (in_parts, plan.with_schedule(microbatches=9)),
    )
    for other, its_plan in changed:
        shared = Predictor(other, its_plan, cluster, prices=first.prices, like=first).predict()
        alone = Predictor(other, its_plan, cluster).predict()
        assert shared.step_seconds == pytest.approx(alone.step_seconds, rel=1e-12)
        assert [stage.memory for stage in shared.memory] == [stage.memory for stage in alone.memory]
