"""What messages take that share a NIC."""

import pytest

from hpctrain.comm.network import ClusterNetwork
from hpctrain.config.cluster_file import parse_cluster
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.arrivals import arrivals
from hpctrain.planner.cost import Setup
from hpctrain.planner.stack import HPCTRAIN
from hpctrain.sharding.intervals import Interval
from tests import clusters

MODEL = Model(architecture="llama", num_layers=4, hidden_size=64, num_heads=4, vocab_size=64)
POSITIONS = 128
ROW_SECONDS = POSITIONS * MODEL.hidden_size * 4 / 1e5
CLUSTER = clusters.family("a") + clusters.fabric(latency_seconds=1e-6) + clusters.nodes({"a": 1}, 1e5, count=3)


def test_messages_of_a_stage_to_two_tiles_share_its_nic_and_those_of_two_tiles_to_one_too():
    one = Tile(Interval(0, 5), Interval(0, 2), (0,))
    two = [Tile(Interval(5, 10), Interval(row, row + 1), (row + 1,)) for row in (0, 1)]
    network = ClusterNetwork(parse_cluster(CLUSTER, "c.toml"))
    setup = Setup(MODEL, POSITIONS, "fp32", HPCTRAIN)
    seconds = arrivals(setup, Plan((one, *two), 4, 2), network)
    for tile in two:
        assert seconds[one, tile] == pytest.approx(2 * ROW_SECONDS, rel=0.01), "each has one row of two"
        assert seconds[tile, one] == pytest.approx(2 * ROW_SECONDS, rel=0.01)
    single = Tile(Interval(5, 10), Interval(0, 2), (1,))
    assert arrivals(setup, Plan((one, single), 4, 2), network)[one, single] == pytest.approx(2 * ROW_SECONDS, rel=0.01)
