"""What messages take that share NICs: compared with the fluid that a rehearsal's network is."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.job import Model
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.transfers import RowShape, gathers, receives
from hpctrain.planner.prediction.arrivals import arrivals
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.rehearsal.fabric import PretendedNetwork, max_min_rates
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_by_shares, cut_evenly
from tests import clusters

MODEL = Model(architecture="llama", num_layers=4, hidden_size=64, num_heads=8, vocab_size=64)
SETUP = Setup(MODEL, 128, "fp32", HPCTRAIN)
ROW_SECONDS = SETUP.positions * MODEL.hidden_size * 4 / 1e5
GRIDS = [TensorGrid(), TensorGrid(y=2), TensorGrid(z=2), TensorGrid(x=2), TensorGrid(y=4), TensorGrid(y=2, z=2)]
GRIDS += [TensorGrid(y=2, sequence_parallel=True)]


def network_of(num_nodes: int, num_devices: int = 4) -> ClusterNetwork:
    """Return equal nodes, each with a NIC by which a row takes `ROW_SECONDS`, and links that take no time."""
    fast = {"link_latency_seconds": 1e-12, "link_bytes_per_second": 1e15}
    nodes = clusters.nodes({"a": num_devices}, 1e5, count=num_nodes, **fast)
    return ClusterNetwork(parse_cluster(clusters.family("a") + clusters.fabric(latency_seconds=1e-9) + nodes, ""))


def two_stages(grids: tuple[TensorGrid, TensorGrid], devices: tuple[int, int], shares: tuple[int, ...] = ()) -> Plan:
    """Return a pipeline of two stages with replicas on all of their devices. Rows of the first are cut by `shares`."""
    replicas = [count // grid.size for grid, count in zip(grids, devices, strict=True)]
    rows = 4 * max(replicas)
    cuts = cut_by_shares(rows, shares or (1,) * replicas[0]), cut_evenly(rows, replicas[1])
    first = (0, devices[0])
    tiles = [
        Tile(Interval(5 * stage, 5 * stage + 5), part, tuple(range(at + i * grid.size, at + (i + 1) * grid.size)), grid)
        for stage, (grid, at, parts) in enumerate(zip(grids, first, cuts, strict=True))
        for i, part in enumerate(parts)
    ]
    return Plan(tuple(tiles), 4, rows)


def fluid(network: ClusterNetwork, plan: Plan, forward: bool) -> Mapping[tuple[Tile, Tile], float]:
    """Return when the last message of each tile to each other one ends, where all start at once and share max-min
    fairly."""
    ports, tile_of = PretendedNetwork(network.cluster), {rank: tile for tile in plan.tiles for rank in tile.ranks}
    row = RowShape(SETUP.positions, MODEL.hidden_size)
    left = {
        (transfer.sender, rank): 4.0 * transfer.num_elements
        for tile in plan.tiles
        for rank in tile.ranks
        for transfer in receives(plan, tile, rank, row, forward, network.is_near)
    }
    now, result = 0.0, {}
    while left:
        paths = [ports.paths[sender * ports.num_ranks + receiver].ports for sender, receiver in left]
        rates = dict(zip(left, max_min_rates(paths, ports.bandwidths), strict=True))
        passed = min(num_bytes / rates[ends] for ends, num_bytes in left.items())
        now += passed
        left = {ends: num_bytes - rates[ends] * passed for ends, num_bytes in left.items()}
        for ends in [ends for ends, num_bytes in left.items() if num_bytes < 1e-6]:
            result[tile_of[ends[0]], tile_of[ends[1]]] = now
            del left[ends]
    return result


@pytest.mark.parametrize("nodes", [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("grids", list(itertools.product(GRIDS, GRIDS)))
def test_messages_of_replicas_on_any_number_of_nodes_take_as_long_as_by_a_fluid(nodes, grids):
    network, plan = network_of(sum(nodes)), two_stages(grids, (4 * nodes[0], 4 * nodes[1]))
    seconds = arrivals(SETUP, plan, network)
    for forward in (True, False):
        for pair, expected in fluid(network, plan, forward).items():
            assert seconds[pair].seconds == pytest.approx(expected, rel=1e-3)


@given(st.data())
def test_messages_of_different_sizes_share_nics_about_as_by_a_fluid(data):
    nodes = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    grids = data.draw(st.tuples(st.sampled_from(GRIDS), st.sampled_from(GRIDS)))
    replicas = 4 * nodes[0] // grids[0].size
    shares = data.draw(st.lists(st.integers(1, 4), min_size=replicas, max_size=replicas))
    network, plan = network_of(sum(nodes)), two_stages(grids, (4 * nodes[0], 4 * nodes[1]), tuple(shares))
    seconds = arrivals(SETUP, plan, network)
    for forward in (True, False):
        expected = fluid(network, plan, forward)
        last, ours = max(expected.values()), max(seconds[pair].seconds for pair in expected)
        assert 0.8 * last < ours < 1.001 * last


def test_nodes_are_as_fast_as_all_links_of_a_device():
    """The short file of the pages: one link of an MI300X has 48 GB/s, and a NIC 50. Each rank receives a quarter."""
    page = (Path(__file__).parents[3] / "docs/cluster-file.md").read_text()
    text = page.partition("Save this as `site.toml`")[2].partition("```toml")[2].partition("```")[0]
    network, row = ClusterNetwork(parse_cluster(text, "the page")), RowShape(SETUP.positions, MODEL.hidden_size)
    ranks = (0, 1, 2, 3), (8, 9, 10, 11)
    assert [network.is_near(*pair) for pair in ((0, 3), (8, 11), (0, 4), (0, 8), (8, 0))] == [True] * 2 + [False] * 3
    for order in (ranks, ranks[::-1]):  # from H100 to MI300X, and the other way round
        cuts = zip(cut_evenly(10, 2), order, strict=True)
        plan = Plan(tuple(Tile(Interval(*cut), Interval(0, 1), each, TensorGrid(y=4)) for cut, each in cuts), 4, 1)
        for tile, forward in ((plan.tiles[1], True), (plan.tiles[0], False)):
            assert gathers(plan, tile, forward, network.is_near, row)
            for rank in tile.ranks:
                received = receives(plan, tile, rank, row, forward, network.is_near)
                assert sum(each.num_elements for each in received) == SETUP.positions * MODEL.hidden_size / 4


@pytest.mark.parametrize("order, num_messages", [((0, 1, 2, 3), 0), ((0, 2, 1, 3), 3)])
def test_stages_that_share_a_port_of_a_node_wait_for_it(order, num_messages):
    """Stages 0 and 2 on one node, 1 and 3 on the other: its port carries three messages for each microbatch."""
    network, microbatches = network_of(2, 2), 32
    tiles = [Tile(Interval(*cut), Interval(0, 1), (rank,)) for cut, rank in zip(cut_evenly(10, 4), order, strict=True)]
    plan = Plan(tuple(tiles), microbatches, 1)
    step = predict(SETUP, plan, network.cluster).step_seconds / ROW_SECONDS
    least = num_messages or 1  # of a port that one stage has, a message each way
    assert step > (microbatches - 4) * least
    assert step < (microbatches + 10) * least


def test_ports_of_all_ranks_are_shared_not_those_of_the_first_alone():
    """Each y of the first two stages has a NIC of its own; the third stage, of one rank, is behind the second NIC."""
    fast = {"link_latency_seconds": 1e-12, "link_bytes_per_second": 1e15}
    two_nics, one = clusters.nodes({"a": 4}, 1e5, num_nics=2, **fast), clusters.nodes({"a": 2}, 1e5, **fast)
    text = clusters.family("a") + clusters.fabric(latency_seconds=1e-9) + two_nics + one
    network = ClusterNetwork(parse_cluster(text, ""))
    cuts, places = cut_evenly(10, 3), ((0, 1), (4, 5), (3,))
    tiles = [
        Tile(Interval(*cut), Interval(0, 1), ranks, TensorGrid(y=len(ranks)))
        for cut, ranks in zip(cuts, places, strict=True)
    ]
    found = arrivals(SETUP, Plan(tuple(tiles), 4, 1), network)
    there, on = (set(found[pair].ports) for pair in ((tiles[0], tiles[1]), (tiles[2], tiles[1])))
    assert there & on, "the second rank of stage 0 leaves by the NIC by which the gradients of stage 2 leave"
    assert max(found[tiles[0], tiles[1]].ports.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("rows", [(3, 2), (2, 2)])
def test_ports_of_equivalent_pipelines_alone_have_one_number(rows):
    """Two pipelines of four stages each, which alternate between two nodes."""
    network, tiles = network_of(4, 2), []
    for first_node, part in zip((0, 2), (Interval(0, rows[0]), Interval(rows[0], sum(rows))), strict=True):
        ranks = [2 * (first_node + stage % 2) + stage // 2 for stage in range(4)]
        tiles += [Tile(Interval(*cut), part, (rank,)) for cut, rank in zip(cut_evenly(10, 4), ranks, strict=True)]
    found = arrivals(SETUP, Plan(tuple(tiles), 4, sum(rows)), network)
    one, other = (
        {port for pair in found if pair[0] in own for port in found[pair].ports} for own in (tiles[:4], tiles[4:])
    )
    assert one and other and (one == other if rows[0] == rows[1] else one.isdisjoint(other))
