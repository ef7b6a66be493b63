"""Messages on shared ports, against the network that a rehearsal pretends, which is written apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.schedule import Action
from hpctrain.plan.schedule_run import Runner
from hpctrain.plan.tiling import Tile
from hpctrain.planner.prediction.shared_ports import PricedWire, SharedPorts, speeds
from hpctrain.rehearsal.fabric import FlowNetwork
from hpctrain.sharding.intervals import Interval


def wire_of(place: int, ports: dict[int, float], seconds: float) -> PricedWire:
    ends = tuple(Tile(Interval(i, i + 1), Interval(0, 1), (i,)) for i in (place, place + 1))
    nobody = Runner((), [])
    return PricedWire(ends, Action.SEND_ACTIVATION, nobody, nobody, 1, seconds=seconds, ports=ports)


def ends_of(shared: SharedPorts) -> list[tuple[PricedWire, float]]:
    ends = []
    while wire := shared.next_left():
        ends.append((wire, wire.free_at))
    return ends


@given(st.data())
def test_they_leave_when_those_of_a_rehearsal_do(data):
    paths = data.draw(st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=2).map(sorted), min_size=1, max_size=5))
    sizes = [data.draw(st.floats(0.1, 5.0)) for _ in paths]
    sent = sorted(data.draw(st.lists(st.tuples(st.floats(0.0, 8.0), st.integers(0, len(paths) - 1)), max_size=9)))
    wires = [
        wire_of(i, dict.fromkeys(path, 1.0), size) for i, (path, size) in enumerate(zip(paths, sizes, strict=True))
    ]
    network = FlowNetwork([1.0] * 4, paths, memoryview(bytearray(8 * FlowNetwork.num_doubles(9))).cast("d"))
    network.reset()
    shared, before = SharedPorts(), {}
    for slot, (at, number) in enumerate(sent):
        network.start(slot, number, sizes[number], at, before.get(number))
        shared.send(wires[number], at)
        before[number] = slot
    network.advance(1e9)
    expected = sorted((number, network.left(slot)) for slot, (_, number) in enumerate(sent))
    found = sorted((wires.index(wire), left) for wire, left in ends_of(shared))
    assert [number for number, _ in found] == [number for number, _ in expected]
    assert [left for _, left in found] == pytest.approx([left for _, left in expected])


def test_a_wider_port_is_busy_for_a_part_of_a_message():
    shared, ports = SharedPorts(), {0: 0.5}
    for place in (0, 1, 2):
        shared.send(wire_of(place, ports, 1.0), 0.0)
    assert [left for _, left in ends_of(shared)] == pytest.approx([1.5] * 3)


def test_replicas_share_a_port_in_their_seconds():
    shared = SharedPorts()
    for _ in range(4):
        shared.send(wire_of(0, {0: 1.0}, 4.0), 0.0)
    assert [left for _, left in ends_of(shared)] == pytest.approx([4.0] * 4)


def assert_not_overfull(wires: list[PricedWire]) -> None:
    """Messages of one place count once."""
    found = speeds(wires)
    for port in {port for wire in wires for port in wire.ports}:
        by_place: dict[object, float] = {}
        for wire in wires:
            by_place[wire.place] = max(by_place.get(wire.place, 0.0), found[wire] * wire.ports.get(port, 0.0))
        assert sum(by_place.values()) <= 1 + 1e-9


def test_a_message_of_a_place_still_counts_when_another_is_decided():
    """Those of place 0 pass port 2, one of them also the fuller port 1."""
    ports = (0, {1: 1.0, 2: 1.0}), (0, {2: 1.0}), (1, {1: 1.0}), (2, {1: 1.0}), (3, {2: 1.0})
    assert_not_overfull([wire_of(place, on, 1.0) for place, on in ports])


@given(st.data())
def test_no_port_carries_more_than_it_has(data):
    shares = st.dictionaries(st.integers(0, 3), st.floats(0.1, 1.0), min_size=1, max_size=3)
    wires = data.draw(st.lists(st.tuples(st.integers(0, 3), shares), min_size=1, max_size=8))
    assert_not_overfull([wire_of(place, on, 1.0) for place, on in wires])
