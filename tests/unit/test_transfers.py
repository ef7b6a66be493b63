"""Activations between tiles of unlike grids: every element arrives once, and both ends agree."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.intervals import Interval, cut_evenly
from hpctrain.job import Model
from hpctrain.plan import Plan, TensorGrid, Tile
from hpctrain.plan_checks import check_tiling
from hpctrain.role import role_of
from hpctrain.transfers import everywhere, gathered_rows, gathers, held, receives, sends

HIDDEN = 12
GRIDS = st.builds(TensorGrid, *[st.integers(1, 3)] * 3)


@st.composite
def two_stage_plans(draw) -> Plan:
    """Two stages of unlike data degree, rows and grids."""
    tiles, first, rows = [], 0, 24
    for items in (Interval(0, 2), Interval(2, 4)):
        cuts = sorted(draw(st.permutations(range(1, rows // 3)))[: draw(st.integers(0, 2))])
        for bounds in itertools.pairwise([0, *(3 * cut for cut in cuts), rows]):
            grid = draw(GRIDS)
            tiles.append(Tile(items, Interval(*bounds), tuple(range(first, first + grid.size)), grid))
            first += grid.size
    return Plan(tuple(tiles), 6, rows)


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
            for piece in receives(plan, tile, rank, HIDDEN, forward):
                assert piece.receiver == rank
                sender_rows, sender_features = held(plan.tile_of(piece.sender), piece.sender, HIDDEN)
                assert sender_rows.intersect(piece.rows) == piece.rows
                assert sender_features.intersect(piece.features) == piece.features
                count[slice(*piece.rows), slice(*piece.features)] += 1
            expected = np.zeros_like(count)
            expected[slice(*rows), slice(*features)] = 1
            assert np.array_equal(count, expected)


def of_hosts(size: int):
    """Ranks are near those of their host, of which each has so many."""
    return lambda one, other: one // size == other // size


HOSTS = st.integers(1, 12).map(of_hosts)


@pytest.mark.parametrize("forward", [True, False])
@given(plan=two_stage_plans(), near=HOSTS)
def test_what_is_sent_is_what_is_received(forward, plan, near):
    places = [(tile, rank) for tile in plan.tiles for rank in tile.ranks]
    sent = {piece for place in places for piece in sends(plan, *place, HIDDEN, forward, near)}
    received = {piece for place in places for piece in receives(plan, *place, HIDDEN, forward, near)}
    assert sent == received


@pytest.mark.parametrize("forward", [True, False])
@given(plan=two_stage_plans(), near=HOSTS)
def test_where_pieces_are_gathered_each_element_comes_once_to_all_y_together(forward, plan, near):
    for tile in plan.tiles:
        if not gathers(plan, tile, forward, near):
            continue
        for x, z in itertools.product(range(tile.tensor.x), range(tile.tensor.z)):
            together = [tile.rank_at(x, y, z) for y in range(tile.tensor.y)]
            assert all(near(together[0], rank) for rank in together)
            rows, features = held(tile, together[0], HIDDEN)
            count = np.zeros((plan.rows, HIDDEN), int)
            for rank in together:
                own = gathered_rows(tile, rank)
                for piece in receives(plan, tile, rank, HIDDEN, forward, near):
                    assert own.intersect(piece.rows) == piece.rows
                    count[slice(*piece.rows), slice(*piece.features)] += 1
            expected = np.zeros_like(count)
            expected[slice(*rows), slice(*features)] = 1
            assert np.array_equal(count, expected)


@pytest.mark.parametrize(("source_y", "target_y"), [(1, 4), (2, 4), (4, 4), (4, 2), (3, 2)])
def test_one_copy_goes_over_the_slow_link_and_all_senders_share_it(source_y, target_y):
    size = max(source_y, target_y)
    source = Tile(Interval(0, 2), Interval(0, 12), tuple(range(source_y)), TensorGrid(y=source_y))
    into = tuple(range(size, size + target_y))
    target = Tile(Interval(2, 4), Interval(0, 12), into, TensorGrid(y=target_y))
    plan = Plan((source, target), 1, 12, unused=tuple(range(source_y, size)))
    near = of_hosts(size)
    assert gathers(plan, target, True, near) and not gathers(plan, target, True, everywhere)

    def bytes_sent(rank: int, near) -> int:
        return sum(piece.rows.size * piece.features.size for piece in sends(plan, source, rank, HIDDEN, True, near))

    whole = sum(bytes_sent(rank, everywhere) for rank in source.ranks)
    pieces = [bytes_sent(rank, near) for rank in source.ranks]
    assert whole == target_y * 12 * HIDDEN and sum(pieces) == 12 * HIDDEN
    assert max(pieces) == min(pieces)


def test_few_rows_and_far_y_are_sent_whole():
    source = Tile(Interval(0, 2), Interval(0, 2), (0,))
    target = Tile(Interval(2, 4), Interval(0, 2), (2, 3, 4), TensorGrid(y=3))
    plan = Plan((source, target), 1, 2, unused=(1,))
    assert not gathers(plan, target, True, lambda one, other: min(one, other) >= 2), "two rows for three y"
    plan = Plan((replace(source, rows=Interval(0, 3)), replace(target, rows=Interval(0, 3))), 1, 3, unused=(1,))
    assert gathers(plan, plan.tiles[1], True, lambda one, other: min(one, other) >= 2)
    assert not gathers(plan, plan.tiles[1], True, lambda one, other: {one, other} <= {2, 3}), "4 is elsewhere"


@settings(max_examples=30, deadline=None)
@given(plan=two_stage_plans(), data=st.data())
def test_channels_hold_the_largest_message(plan, data):
    model = Model(architecture="gpt2", num_layers=2, hidden_size=HIDDEN, num_heads=1, vocab_size=13)
    rank = data.draw(st.sampled_from(plan.ranks))
    needed: dict[int, int] = {}
    tile = plan.tile_of(rank)
    for forward in (True, False):
        pieces = [(piece.receiver, piece) for piece in sends(plan, tile, rank, HIDDEN, forward)]
        pieces += [(piece.sender, piece) for piece in receives(plan, tile, rank, HIDDEN, forward)]
        for peer, piece in pieces:
            needed[peer] = max(needed.get(peer, 0), piece.rows.size * piece.features.size)
    role = role_of(model, plan, rank)
    assert {need.peer: need.elements for need in role.channels} == needed
    assert role.transfers[0].send_activation == sends(plan, tile, rank, HIDDEN, True)
    assert role.transfers[0].receive_gradient == receives(plan, tile, rank, HIDDEN, False)


def test_equal_grids_send_to_their_counterpart_alone():
    grid = TensorGrid(2, 2, 2)
    tiles = [Tile(Interval(2 * i, 2 * i + 2), Interval(0, 4), tuple(range(8 * i, 8 * i + 8)), grid) for i in range(2)]
    plan = Plan(tuple(tiles), 1, 4)
    for rank in range(8):
        assert [t.receiver for t in sends(plan, plan.tile_of(rank), rank, HIDDEN, True)] == [rank + 8]


@pytest.mark.parametrize(("source_y", "target_y"), [(4, 1), (4, 2), (3, 2), (2, 3), (1, 4)])
def test_all_ranks_that_hold_the_same_share_the_sending(source_y, target_y):
    source = Tile(Interval(0, 2), Interval(0, 12), tuple(range(source_y)), TensorGrid(y=source_y))
    target_ranks = tuple(range(source_y, source_y + target_y))
    plan = Plan((source, Tile(Interval(2, 4), Interval(0, 12), target_ranks, TensorGrid(y=target_y))), 1, 12)
    sent = [
        sum(piece.rows.size * piece.features.size for piece in sends(plan, plan.tile_of(rank), rank, HIDDEN, True))
        for rank in source.ranks
    ]
    assert sum(sent) == target_y * 12 * HIDDEN, "conserved"
    assert max(sent) == min(sent)


@given(st.integers(0, 100), st.integers(1, 12))
def test_even_cuts_are_even(size, parts):
    sizes = [cut.size for cut in cut_evenly(size, parts)]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
