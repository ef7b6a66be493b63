"""Rows by turns: periods, what is the most at once, and totals that are spread over microbatches."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.intervals import Interval, tiles_exactly
from hpctrain.planner.proportional import TURNS_TOLERANCE, cut_rows, cut_rows_by_turns
from hpctrain.planner.turns import spread
from hpctrain.rows import Rows, common_period, most_of

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)
SPEEDS = st.lists(st.sampled_from([0.5, 1.0, 1.7, 3.0]), min_size=1, max_size=3)


def rows_of(*sizes: int) -> Rows:
    return Rows(tuple(Interval(0, size) for size in sizes))


def test_what_only_repeats_is_left_out():
    assert rows_of(5, 6, 5, 6) == rows_of(5, 6)
    assert rows_of(5, 5) == Rows((Interval(0, 5),))
    assert rows_of(5, 6, 5).period == 3
    assert [rows_of(5, 6).of(m).size for m in range(4)] == [5, 6, 5, 6]
    assert (str(rows_of(5)), str(rows_of(5, 6))) == ("[0, 5]", "[[0, 5], [0, 6]]")
    assert common_period([rows_of(5, 6), rows_of(1, 2, 3), rows_of(4)]) == 6


@given(SIZES, st.integers(0, 20))
def test_the_most_of_neighbours_is_that_of_all_that_there_are(sizes, consecutive):
    turns = sizes * (2 + consecutive // len(sizes))
    expected = max(sum(turns[i : i + consecutive]) for i in range(len(sizes)))
    assert most_of(sizes, consecutive) == rows_of(*sizes).most(consecutive) == expected


@st.composite
def totals_of_a_period(draw) -> tuple[list[int], int]:
    period = draw(st.integers(1, 12))
    totals = draw(st.lists(st.integers(period, 5 * period), min_size=1, max_size=6))
    totals[-1] += -sum(totals) % period
    return totals, period


@given(totals_of_a_period())
def test_totals_are_spread_evenly_and_every_microbatch_is_whole(drawn):
    totals, period = drawn
    found = spread(totals, period)
    for microbatch in range(period):
        assert tiles_exactly([rows.of(microbatch) for rows in found], Interval(0, sum(totals) // period))
    for rows, total in zip(found, totals, strict=True):
        assert sum(rows.of(m).size for m in range(period)) == total
        assert max(rows.sizes) - min(rows.sizes) <= 1
        for consecutive in range(1, period):
            assert rows.most(consecutive) < rows.mean * consecutive + 2, "not all in a row"


@given(st.data(), SPEEDS, st.sampled_from([1, 2, 3, 4, 6]))
def test_rows_by_turns_are_as_good_as_brute_force(data, speeds, microbatches):
    num_rows = data.draw(st.integers(len(speeds), 5))

    def slowest(totals) -> float:
        return max(total / speed for total, speed in zip(totals, speeds, strict=True))

    found = cut_rows_by_turns(num_rows, speeds, microbatches)
    period = math.lcm(*(rows.period for rows in found))
    assert microbatches % period == 0
    step = num_rows * microbatches
    cuts = itertools.product(range(microbatches, step + 1), repeat=len(speeds) - 1)
    every = [(*cut, step - sum(cut)) for cut in cuts if step - sum(cut) >= microbatches]
    best = min(map(slowest, every))
    assert best * (1 - 1e-9) <= slowest([rows.mean * microbatches for rows in found]) <= best * (1 + TURNS_TOLERANCE)
    for shorter in (p for p in range(1, period) if microbatches % p == 0):
        totals = cut_rows(num_rows * shorter, speeds, least=shorter)
        assert slowest(totals) / shorter > best / microbatches * (1 + TURNS_TOLERANCE) * (1 - 1e-9), "and no longer"


def test_five_and_a_half_rows():
    found = cut_rows_by_turns(11, [1.0, 1.0], 8)
    assert [rows.listed() for rows in found] == [[[0, 6], [0, 5]], [[6, 11], [5, 11]]]
    assert [rows.listed() for rows in cut_rows_by_turns(10, [1.0, 1.0], 8)] == [[0, 5], [5, 10]]
