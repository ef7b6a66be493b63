"""Descriptions of networks: ports and paths."""

import pytest

from hpctrain.config.clusters.cluster import Nic
from tests.described_networks import make_network, make_nic

LINK = (100e9, 2e-6)
FABRICS = {"ib": 5e-6, "ethernet": 30e-6, "roce": 5e-6}


def nic(fabric: str, bandwidth: float) -> Nic:
    return make_nic(fabric, bandwidth, bandwidth / 2)


def test_devices_of_a_node_have_ports_of_their_own():
    network = make_network([(3, ())], {}, LINK)
    (out, into), latency = network.paths[0 * 3 + 1]
    assert (network.bandwidths[out], network.bandwidths[into], latency) == (100e9, 100e9, 2e-6)
    other_out, other_in = network.paths[1 * 3 + 0].ports
    assert len({out, into, other_out, other_in}) == 4, "both directions at once"
    assert network.paths[0 * 3 + 2].ports[0] == out


def test_devices_share_the_nics_of_their_node_in_turn():
    nodes = [(3, [nic("ib", 50e9), nic("ethernet", 1e9), nic("ib", 40e9)]), (1, [nic("ib", 25e9)])]
    network = make_network(nodes, FABRICS, LINK)
    sending = [network.paths[rank * 4 + 3] for rank in range(3)]
    assert [network.bandwidths[path.ports[0]] for path in sending] == [50e9, 40e9, 50e9]
    assert {path.ports[1] for path in sending} == {sending[0].ports[1]}
    assert network.bandwidths[sending[0].ports[1]] == 12.5e9
    assert {path.latency_seconds for path in sending} == {5e-6}
    back = network.paths[3 * 4 + 1]
    assert [network.bandwidths[port] for port in back.ports] == [25e9, 20e9]


def test_the_fastest_common_fabric_is_taken():
    fast, slow = [nic("ib", 50e9), nic("ethernet", 10e9)], [nic("roce", 50e9), nic("ethernet", 1e9)]
    network = make_network([(1, fast), (1, slow), (1, fast)], FABRICS, LINK)
    assert network.paths[0 * 3 + 1].latency_seconds == 30e-6
    assert network.paths[0 * 3 + 2].latency_seconds == 5e-6


def test_dilation_multiplies_all_times():
    nodes = [(2, [nic("ib", 50e9)]), (1, [nic("ib", 50e9)])]
    plain, dilated = (make_network(nodes, FABRICS, LINK, dilation) for dilation in (1.0, 100.0))
    for before, after in zip(plain.paths, dilated.paths, strict=True):
        assert after.ports == before.ports
        assert after.latency_seconds == pytest.approx(100 * before.latency_seconds)
    assert dilated.bandwidths == pytest.approx([value / 100 for value in plain.bandwidths])
