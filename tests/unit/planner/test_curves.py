"""Speed curves: through what was measured, smooth between, and never falling."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.clusters.cluster import Profile, RowTimes
from hpctrain.planner.prices.curves import Curve, model_seconds

# Of (1, 1), (2, 1.5), (4, 3), (8, 4) at 3, 5, 6 and 7, by scipy's PchipInterpolator.
PCHIP = [2.2974744245524295, 3.379595588235294, 3.698529411764706, 3.9181985294117645]

points = st.lists(st.tuples(st.integers(1, 40), st.floats(1e-3, 1e3)), min_size=1, max_size=6, unique_by=lambda p: p[0])


@settings(deadline=None)
@given(points=points)
def test_a_curve_goes_through_its_points_and_never_falls(points):
    rows, seconds = zip(*sorted(points), strict=True)
    curve = Curve(rows, seconds)
    drawn = [curve(n) for n in range(1, 2 * rows[-1] + 2)]
    assert all(a <= b for a, b in itertools.pairwise(drawn))
    for n, highest in zip(rows, itertools.accumulate(seconds, max), strict=True):
        assert curve(n) == pytest.approx(highest)
    assert curve(2 * rows[-1]) == pytest.approx(2 * max(seconds)), "as fast as at the end"


def test_between_its_points_a_curve_is_smooth_and_near():
    """Of a device that takes a constant and a time for each row: exact. Of one with steps: between them."""
    straight = Curve([1, 2, 8, 32], [1.1, 1.2, 1.8, 4.2])
    assert straight(5) == pytest.approx(1.5) and straight(20) == pytest.approx(3.0)
    bent = Curve([1, 2, 4, 8], [1.0, 1.5, 3.0, 4.0])
    assert [bent(n) for n in (3, 5, 6, 7)] == pytest.approx(PCHIP)
    steps = Curve([1, 4, 5, 8], [1.0, 1.0, 2.0, 2.0])
    assert [steps(n) for n in (1, 2, 3, 4, 5, 6, 7, 8)] == [1.0] * 4 + [2.0] * 4


def test_the_whole_model_takes_what_its_items_take():
    times = [
        RowTimes(rows=n, embedding_seconds=(n, n), block_seconds=(2 * n, 3 * n), head_seconds=(n, 4 * n))
        for n in (1, 2, 4)
    ]
    profile = Profile(
        origin="measured", family="a", work="any", zero=1, replicas=1, largest_rows=4, update_seconds=1.0, times=times
    )
    assert model_seconds(profile, num_blocks=10, rows=3) == pytest.approx(3 * (2 + 10 * 5 + 5))
