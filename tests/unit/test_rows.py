"""Rows by turns: periods, what is the most at once, and totals that are spread over microbatches."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.intervals import Interval, tiles_exactly
from hpctrain.planner.cut import cut_rows
from hpctrain.planner.turns import spread
from hpctrain.rows import Rows, common_period, most_of

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def rows_of(*sizes: int) -> Rows:
    return Rows(tuple(Interval(0, size) for size in sizes))


def test_what_only_repeats_is_left_out():
    assert rows_of(5, 6, 5, 6) == rows_of(5, 6)
    assert rows_of(5, 5) == Rows((Interval(0, 5),))
    assert rows_of(5, 6, 5).period == 3
    assert [rows_of(5, 6).of(m).size for m in range(4)] == [5, 6, 5, 6]
    assert (str(rows_of(5)), str(rows_of(5, 6))) == ("[0, 5]", "[[0, 5], [0, 6]]")
    assert rows_of(5, 6, 6, 6, 5, 5).listed() == [[0, 5], [0, 6, 3], [0, 5, 2]]
    assert common_period([rows_of(5, 6), rows_of(1, 2, 3), rows_of(4)]) == 6


@given(SIZES, st.integers(0, 20))
def test_the_most_of_neighbours_is_that_of_all_that_there_are(sizes, consecutive):
    turns = sizes * (2 + consecutive // len(sizes))
    expected = max(sum(turns[i : i + consecutive]) for i in range(len(sizes)))
    assert most_of(sizes, consecutive) == rows_of(*sizes).most(consecutive) == expected


@st.composite
def totals_of_a_step(draw) -> tuple[list[int], int]:
    microbatches = draw(st.integers(1, 12))
    totals = draw(st.lists(st.integers(microbatches, 5 * microbatches), min_size=1, max_size=6))
    totals[-1] += -sum(totals) % microbatches
    return totals, microbatches


@given(totals_of_a_step())
def test_totals_are_spread_over_whole_microbatches_with_few_changes(drawn):
    totals, microbatches = drawn
    found = spread(totals, microbatches)
    for m in range(microbatches):
        assert tiles_exactly([rows.of(m) for rows in found], Interval(0, sum(totals) // microbatches))
    for rows, total in zip(found, totals, strict=True):
        sizes = [rows.of(m).size for m in range(microbatches)]
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1
        assert sum(a != b for a, b in itertools.pairwise(sizes)) <= 2


@given(st.data(), st.lists(st.sampled_from([0.5, 1.0, 1.7, 3.0]), min_size=1, max_size=3), st.integers(1, 6))
def test_totals_of_a_step_are_as_good_as_brute_force(data, speeds, microbatches):
    num_rows = data.draw(st.integers(len(speeds), 5))

    def slowest(totals) -> float:
        return max(total / speed for total, speed in zip(totals, speeds, strict=True))

    step = num_rows * microbatches
    found = cut_rows(step, [microbatches] * len(speeds), [lambda n, speed=speed: n / speed for speed in speeds])
    assert sum(found) == step and min(found) >= microbatches, "a row of each microbatch"
    cuts = itertools.product(range(microbatches, step + 1), repeat=len(speeds) - 1)
    every = [(*cut, step - sum(cut)) for cut in cuts if step - sum(cut) >= microbatches]
    assert slowest(found) == min(map(slowest, every))
    assert [round(rows.mean * microbatches) for rows in spread(found, microbatches)] == found


def test_five_and_a_half_rows():
    found = spread([44, 44], 8)
    assert [rows.listed() for rows in found] == [[[0, 6, 4], [0, 5, 4]], [[6, 11, 4], [5, 11, 4]]]
    assert [rows.listed() for rows in spread([5, 5], 1)] == [[0, 5], [5, 10]]
