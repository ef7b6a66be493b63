"""Descriptions of networks: ports, paths, and what is refused."""

import pytest

from hpctrain.config.errors import TopologyError
from hpctrain.rehearsal.fabric import Node, SharedFabric, SharedNetwork, SharedNic

LINK = (100e9, 2e-6)
IB, ETHERNET = SharedFabric("ib", 5e-6), SharedFabric("ethernet", 30e-6)


def nic(fabric: str, bandwidth: float) -> SharedNic:
    return SharedNic(fabric, bandwidth, bandwidth / 2)


def test_devices_of_a_node_have_ports_of_their_own():
    network = SharedNetwork((Node((0, 1, 2), *LINK),))
    (out, into), latency = network.paths[0 * 3 + 1]
    assert (network.bandwidths[out], network.bandwidths[into], latency) == (100e9, 100e9, 2e-6)
    other_out, other_in = network.paths[1 * 3 + 0].ports
    assert len({out, into, other_out, other_in}) == 4, "both directions at once"
    assert network.paths[0 * 3 + 2].ports[0] == out


def test_devices_share_the_nics_of_their_node_in_turn():
    node = Node((0, 1, 2), *LINK, (nic("ib", 50e9), nic("ethernet", 1e9), nic("ib", 40e9)))
    network = SharedNetwork((node, Node((3,), *LINK, (nic("ib", 25e9),))), (IB, ETHERNET))
    sending = [network.paths[rank * 4 + 3] for rank in range(3)]
    assert [network.bandwidths[path.ports[0]] for path in sending] == [50e9, 40e9, 50e9]
    assert {path.ports[1] for path in sending} == {sending[0].ports[1]}
    assert network.bandwidths[sending[0].ports[1]] == 12.5e9
    assert {path.latency_seconds for path in sending} == {5e-6}
    back = network.paths[3 * 4 + 1]
    assert [network.bandwidths[port] for port in back.ports] == [25e9, 20e9]


def test_the_fastest_common_fabric_is_taken():
    fast, slow = (nic("ib", 50e9), nic("ethernet", 10e9)), (nic("roce", 50e9), nic("ethernet", 1e9))
    nodes = (Node((0,), *LINK, fast), Node((1,), *LINK, slow), Node((2,), *LINK, fast))
    network = SharedNetwork(nodes, (IB, ETHERNET, SharedFabric("roce", 5e-6)))
    assert network.paths[0 * 3 + 1].latency_seconds == 30e-6
    assert network.paths[0 * 3 + 2].latency_seconds == 5e-6


def test_dilation_multiplies_all_times():
    nodes = (Node((0, 1), *LINK, (nic("ib", 50e9),)), Node((2,), *LINK, (nic("ib", 50e9),)))
    plain, dilated = SharedNetwork(nodes, (IB,)), SharedNetwork(nodes, (IB,), dilation=100.0)
    for before, after in zip(plain.paths, dilated.paths, strict=True):
        assert after.ports == before.ports
        assert after.latency_seconds == pytest.approx(100 * before.latency_seconds)
    assert dilated.bandwidths == pytest.approx([value / 100 for value in plain.bandwidths])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((Node((0, 2), *LINK),), r"2 devices list ranks 0 to 1 each once; wrong are \[1, 2\]"),
        ((Node((0, 0, 1), *LINK),), r"3 devices list ranks 0 to 2 each once; wrong are \[0, 2\]"),
        (
            (Node((0,), *LINK, (nic("ethernt", 1e9),)),),
            r"node of ranks \(0,\) is on fabric 'ethernt'; did you mean 'ethernet'\?",
        ),
        ((Node((0,), 0.0, 0.0),), r"positive numbers, not 0\.0"),
    ],
)
def test_what_is_not_whole_is_refused(nodes, message):
    with pytest.raises(TopologyError, match=message):
        SharedNetwork(nodes, (IB, ETHERNET))


def test_nodes_without_a_common_fabric_are_named():
    network = SharedNetwork((Node((0,), *LINK, (nic("ib", 1e9),)), Node((1,), *LINK)), (IB,))
    with pytest.raises(TopologyError, match=r"ranks 0 and 1 are on nodes without a fabric in common \(ib; none\)"):
        _ = network.paths
