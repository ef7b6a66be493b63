"""Activations between tiles of unlike grids: every element arrives once, and both ends agree."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.intervals import Interval, cut_evenly
from hpctrain.plan import Plan, TensorGrid, Tile, check_tiling
from hpctrain.transfers import held, receives, sends

HIDDEN = 12
GRIDS = st.builds(TensorGrid, *[st.integers(1, 3)] * 3)


@st.composite
def two_stage_plans(draw) -> Plan:
    """Two stages of unlike data degree, rows and grids."""
    tiles, first, rows = [], 0, 24
    for items in (Interval(0, 2), Interval(2, 4)):
        cuts = sorted({0, rows, *(draw(st.integers(1, rows // 3 - 1)) * 3 for _ in range(draw(st.integers(0, 2))))})
        for start, stop in itertools.pairwise(cuts):
            grid = draw(GRIDS)
            tiles.append(Tile(items, Interval(start, stop), tuple(range(first, first + grid.size)), grid))
            first += grid.size
    return Plan(tuple(tiles), 1, rows)


@pytest.mark.parametrize("forward", [True, False])
@given(plan=two_stage_plans())
def test_every_rank_receives_its_part_exactly_once(forward, plan):
    check_tiling(plan, 4)
    for tile in plan.tiles:
        if not (plan.upstream(tile) if forward else plan.downstream(tile)):
            continue
        for rank in tile.ranks:
            rows, features = held(tile, rank, HIDDEN)
            count = np.zeros((plan.rows, HIDDEN), int)
            for piece in receives(plan, rank, HIDDEN, forward):
                assert piece.receiver == rank
                sender_rows, sender_features = held(plan.tile_of(piece.sender), piece.sender, HIDDEN)
                assert sender_rows.intersect(piece.rows) == piece.rows
                assert sender_features.intersect(piece.features) == piece.features
                count[slice(*piece.rows), slice(*piece.features)] += 1
            expected = np.zeros_like(count)
            expected[slice(*rows), slice(*features)] = 1
            assert np.array_equal(count, expected)


@pytest.mark.parametrize("forward", [True, False])
@given(plan=two_stage_plans())
def test_what_is_sent_is_what_is_received(forward, plan):
    sent = {piece for rank in plan.ranks for piece in sends(plan, rank, HIDDEN, forward)}
    received = {piece for rank in plan.ranks for piece in receives(plan, rank, HIDDEN, forward)}
    assert sent == received


def test_equal_grids_send_to_their_counterpart_alone():
    grid = TensorGrid(2, 2, 2)
    tiles = [Tile(Interval(2 * i, 2 * i + 2), Interval(0, 4), tuple(range(8 * i, 8 * i + 8)), grid) for i in range(2)]
    plan = Plan(tuple(tiles), 1, 4)
    for rank in range(8):
        assert [t.receiver for t in sends(plan, rank, HIDDEN, forward=True)] == [rank + 8]


@pytest.mark.parametrize(("source_y", "target_y"), [(4, 1), (4, 2), (3, 2), (2, 3), (1, 4)])
def test_all_ranks_that_hold_the_same_share_the_sending(source_y, target_y):
    source = Tile(Interval(0, 2), Interval(0, 12), tuple(range(source_y)), TensorGrid(y=source_y))
    target_ranks = tuple(range(source_y, source_y + target_y))
    plan = Plan((source, Tile(Interval(2, 4), Interval(0, 12), target_ranks, TensorGrid(y=target_y))), 1, 12)
    sent = [
        sum(piece.rows.size * piece.features.size for piece in sends(plan, rank, HIDDEN, forward=True))
        for rank in source.ranks
    ]
    assert sum(sent) == target_y * 12 * HIDDEN, "conserved"
    assert max(sent) == min(sent)


@given(st.integers(0, 100), st.integers(1, 12))
def test_even_cuts_are_even(size, parts):
    sizes = [cut.size for cut in cut_evenly(size, parts)]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
