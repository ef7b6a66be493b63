"""The fluid model: fair rates, conserved bytes, and times that do not depend on who looks when."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hpctrain.rehearsal.fabric import FlowNetwork, max_min_rates

NUM_PORTS = 6
PATHS = [(a, b) for a in range(3) for b in range(3, 6)] + [(a,) for a in range(3)]
BANDWIDTHS = st.lists(st.floats(1e6, 1e11), min_size=NUM_PORTS, max_size=NUM_PORTS)
ANY_PATH = st.integers(0, len(PATHS) - 1)
START = 1e6  # seconds since boot, so that rounding is that of a real clock


@st.composite
def flows(draw, paths=ANY_PATH):
    """Tuples of start, path, bytes; in the order of their starts."""
    one = st.tuples(st.floats(0, 2), paths, st.integers(0, 10**9))
    return [(START + start, path, size) for start, path, size in sorted(draw(st.lists(one, min_size=1, max_size=12)))]


def fluid_of(bandwidths, paths=PATHS, num_slots=16) -> FlowNetwork:
    fluid = FlowNetwork(bandwidths, paths, memoryview(bytearray(8 * FlowNetwork.num_doubles(num_slots))).cast("d"))
    fluid.reset()
    return fluid


def ends(bandwidths, started, looks=(), paths=PATHS) -> list[float]:
    """Return when each flow left, if somebody looks at these times too."""
    fluid = fluid_of(bandwidths, paths)
    looks = sorted(looks)
    for slot, (start, path, size) in enumerate(started):
        while looks and looks[0] <= start:
            fluid.advance(looks.pop(0))
        fluid.start(slot, path, size, start)
    for look in looks:
        fluid.advance(look)
    fluid.advance(1e300)
    return [fluid.left(slot) for slot in range(len(started))]


@given(BANDWIDTHS, st.lists(st.sampled_from(PATHS), max_size=20))
def test_rates_are_max_min_fair(bandwidths, paths):
    rates = max_min_rates(paths, bandwidths)
    carried = [sum(rate for rate, path in zip(rates, paths, strict=True) if port in path) for port in range(NUM_PORTS)]
    assert all(used <= bandwidth * (1 + 1e-9) for used, bandwidth in zip(carried, bandwidths, strict=True))
    for rate, path in zip(rates, paths, strict=True):
        others = {port: [r for r, p in zip(rates, paths, strict=True) if port in p] for port in path}
        full = [port for port in path if carried[port] >= bandwidths[port] * (1 - 1e-9)]
        assert any(rate >= max(others[port]) * (1 - 1e-9) for port in full), "limited by no port"


@given(BANDWIDTHS, flows(), st.lists(st.floats(START, START + 100), max_size=20))
def test_who_looks_when_changes_nothing(bandwidths, started, looks):
    alone, watched = ends(bandwidths, started), ends(bandwidths, started, looks)
    assert watched == pytest.approx(alone, rel=0, abs=1e-7)


@given(BANDWIDTHS, flows())
def test_no_flow_is_faster_than_its_ports_and_no_port_carries_more_than_it_can(bandwidths, started):
    left = ends(bandwidths, started)
    for (start, path, size), end in zip(started, left, strict=True):
        assert end - start >= size / min(bandwidths[port] for port in PATHS[path]) - 1e-7
    for port in range(NUM_PORTS):
        crossing = [(s, e, size) for (s, path, size), e in zip(started, left, strict=True) if port in PATHS[path]]
        for begin, _, _ in crossing:  # all that lies in any interval was carried in it
            for _, stop, _ in crossing:
                inside = sum(size for s, e, size in crossing if begin <= s and e <= stop)
                assert inside <= max(0.0, stop - begin + 1e-7) * bandwidths[port] * (1 + 1e-6)


@given(st.floats(1e6, 1e11), flows(paths=st.just(0)))
def test_a_single_bottleneck_is_never_idle_while_there_is_work(bandwidth, started):
    busy_until = 0.0
    for start, _, size in started:
        busy_until = max(busy_until, start) + size / bandwidth
    assert max(ends([bandwidth], started, paths=[(0,)])) == pytest.approx(busy_until, rel=0, abs=1e-6)


@given(BANDWIDTHS, flows(), st.integers(1, 10**9), st.integers(2, 4))
def test_equal_flows_end_together(bandwidths, started, size, copies):
    last = started[-1][0]
    left = ends(bandwidths, started + [(last, 0, size)] * copies)
    assert len(set(left[-copies:])) == 1


@settings(max_examples=50)
@given(BANDWIDTHS, flows(), st.floats(0, 1))
def test_no_flow_ends_before_its_earliest_end(bandwidths, started, share):
    """Unless one that starts later slows a third one down: so none starts later here."""
    fluid = fluid_of(bandwidths)
    for slot, (_, path, size) in enumerate(started):
        fluid.start(slot, path, size, START)
    fluid.advance(START + share * (fluid.next_end - START))
    summary = [fluid.earliest_end(slot) for slot in range(len(started))]
    fluid.advance(1e300)
    assert all(fluid.left(slot) >= earliest - 1e-7 for slot, earliest in enumerate(summary))


def test_what_a_narrow_flow_leaves_goes_to_the_others():
    # A NIC of 10 to one of 2 and to one of 10: the second flow gets 8, and after its end nothing is faster.
    left = ends([10.0, 2.0, 10.0], [(0.0, 0, 20), (0.0, 1, 80)], paths=[(0, 1), (0, 2)])
    assert left == pytest.approx([10.0, 10.0])


def test_a_follower_starts_when_the_earlier_has_left_though_nobody_looks():
    fluid = fluid_of([100.0], [(0,)])
    fluid.start(0, 0, 200, 10.0)
    fluid.start(1, 0, 300, 10.5, behind=0)
    fluid.start(2, 0, 100, 10.5, behind=1)
    assert fluid.left(0) == math.inf
    fluid.advance(1000.0)
    assert [fluid.left(slot) for slot in range(3)] == [12.0, 15.0, 16.0]
    fluid.start(3, 0, 100, 1000.0, behind=2)  # has left long since
    fluid.advance(1001.0)
    assert fluid.left(3) == 1001.0
