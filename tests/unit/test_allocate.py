"""Batch allocation against brute force, and the speed curves that it is made from."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.intervals import cut_evenly
from hpctrain.planner.allocate import Allocation, Replica, allocate, allocate_in_step, share_rows
from hpctrain.planner.curves import Curve

MOST_ROWS = 9
# Of (1, 1), (2, 1.5), (4, 3), (8, 4) at 3, 5, 6 and 7, by scipy's PchipInterpolator.
PCHIP = [2.2974744245524295, 3.379595588235294, 3.698529411764706, 3.9181985294117645]


class Table:
    """Seconds by rows."""

    def __init__(self, seconds):
        self.listed = seconds

    def __call__(self, rows: int) -> float:
        return self.listed[rows - 1]


@st.composite
def some_replicas(draw) -> list[Replica]:
    """One to three; some alike, with steps, and limits of their own."""
    steps = st.lists(st.sampled_from([0.0, 0.1, 1.0, 1.5, 4.0]), min_size=MOST_ROWS + 1, max_size=MOST_ROWS + 1)
    kinds = [
        Replica(Table(list(itertools.accumulate(draw(steps), initial=1.0))), draw(st.integers(1, MOST_ROWS)))
        for _ in range(draw(st.integers(1, 2)))
    ]
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))


def pieces_of(rows: int, parts: int) -> list[int]:
    """As the engine cuts them."""
    return [piece.size for piece in cut_evenly(rows, parts)]


def cuts(total: int, parts: int):
    """Yield all ways to write a number as a sum of so many numbers of one at least."""
    for bars in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in itertools.pairwise((0, *bars, total))]


def seconds_apart(replica: Replica, pieces: list[int]) -> float:
    fits = max(pieces) <= replica.largest_rows
    return sum(map(replica.seconds, pieces)) if fits else math.inf


def check(found: Allocation, replicas, batch: int) -> list[list[int]]:
    """Return the pieces of each replica in a step, all of which must fit."""
    assert found.microbatches * sum(found.rows) == batch
    made = [pieces_of(r, s) * found.microbatches for r, s in zip(found.rows, found.substeps, strict=True)]
    assert all(1 <= p <= replica.largest_rows for replica, ps in zip(replicas, made, strict=True) for p in ps)
    return made


@settings(deadline=None, max_examples=150)
@given(replicas=some_replicas(), batch=st.integers(1, MOST_ROWS))
def test_replicas_that_meet_at_the_end_are_done_as_early_as_brute_force(replicas, batch):
    if batch < len(replicas):
        with pytest.raises(PlanError, match=f"{batch} rows .* too few for {len(replicas)} replicas; one is the least"):
            allocate(replicas, batch)
        return
    best = min(
        max(
            min(seconds_apart(replica, pieces_of(rows, parts)) for parts in range(1, rows + 1))
            for replica, rows in zip(replicas, cut, strict=True)
        )
        for cut in cuts(batch, len(replicas))
    )
    found = allocate(replicas, batch)
    assert found.seconds == pytest.approx(best)
    made = check(found, replicas, batch)
    assert max(map(seconds_apart, replicas, made)) == pytest.approx(best), "it takes what it says"


@settings(deadline=None, max_examples=150)
@given(replicas=some_replicas(), batch=st.integers(1, MOST_ROWS), exchange=st.sampled_from([0.0, 0.2, 3.0]))
def test_replicas_in_step_are_as_fast_as_brute_force(replicas, batch, exchange):
    def seconds(microbatches: int, parts: int, cut: list[int]) -> float:
        largest = [max(pieces_of(rows, parts)) for rows in cut]
        if any(size > replica.largest_rows for replica, size in zip(replicas, largest, strict=True)):
            return math.inf
        slowest = max(replica.seconds(size) for replica, size in zip(replicas, largest, strict=True))
        return microbatches * parts * (slowest + exchange)

    best = min(
        (
            seconds(microbatches, parts, cut)
            for microbatches in range(1, batch + 1)
            if batch % microbatches == 0
            for cut in cuts(batch // microbatches, len(replicas))
            for parts in range(1, min(cut) + 1)
        ),
        default=math.inf,
    )
    if best == math.inf:
        with pytest.raises(PlanError, match=f"{batch} rows of a step cannot be shared by {len(replicas)} replicas"):
            allocate_in_step(replicas, batch, exchange)
        return
    found = allocate_in_step(replicas, batch, exchange)
    assert found.seconds == pytest.approx(best)
    made = check(found, replicas, batch)
    rounds = {len(pieces) for pieces in made}
    assert len(rounds) == 1, "they exchange in each"
    slowest = max(replica.seconds(max(pieces)) for replica, pieces in zip(replicas, made, strict=True))
    assert rounds.pop() * (slowest + exchange) == pytest.approx(best)


def test_a_fast_device_with_little_memory_goes_through_its_rows_in_pieces():
    """Twice as fast, but with room for 2 rows where the other one has room for 16."""
    fast, slow = Replica(Curve([1, 2], [1.0, 1.5]), 2), Replica(Curve([1, 16], [3.0, 24.0]), 16)
    found = allocate([fast, slow], 24)
    assert found == Allocation(1, (16, 8), (8, 1), found.seconds)
    together = allocate_in_step([fast, slow], 24)
    assert together.substeps[0] == together.substeps[1]
    assert together.seconds > found.seconds, "what exchanges all the time waits for the slowest in each round"


def test_what_divides_all_becomes_microbatches():
    alike = Replica(lambda rows: float(rows), 4)
    assert allocate([alike] * 4, 64).microbatches == 4
    assert allocate([alike] * 4, 64).substeps == (1, 1, 1, 1)
    assert allocate([alike] * 3, 7).microbatches == 1


def test_who_has_no_room_for_a_row_is_named():
    with pytest.raises(PlanError, match=r"replica 1 \(and 0 more\) has no room for the whole model with one row"):
        allocate([Replica(float, 3), Replica(float, 0)], 8)


def test_rows_are_shared_within_what_each_must_take():
    assert share_rows(7, [lambda rows: rows, lambda rows: 3 * rows], least=2) == [5, 2]
    with pytest.raises(PlanError, match="3 rows of a microbatch are too few for 2 replicas; 2 are the least"):
        share_rows(3, [float, float], least=2)


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
