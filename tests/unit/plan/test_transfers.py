"""Activations between tiles of different grids: every element arrives once, and both ends agree."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.job import Model
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.role import role_of
from hpctrain.plan.schedule import Action, channel_depth
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.transfers import (
    RowShape,
    Transfer,
    common_part_of,
    everywhere,
    gathers,
    receives,
    sends,
)
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_evenly

POSITIONS, HIDDEN = 12, 12
ROW = RowShape(POSITIONS, HIDDEN)


@st.composite
def grids(draw) -> TensorGrid:
    x, y, z = (draw(st.integers(1, 3)) for _ in "xyz")
    shares = draw(st.sampled_from(((), (), (1, 3), (2, 1))))
    return TensorGrid(x, y, z, 2 if shares else draw(st.integers(1, 2)), draw(st.booleans()), position_shares=shares)


@st.composite
def two_stage_plans(draw) -> Plan:
    """Two stages of different data degree, rows and grids."""
    tiles, first, rows = [], 0, 24
    for items in (Interval(0, 2), Interval(2, 4)):
        cuts = sorted(draw(st.permutations(range(1, rows // 3)))[: draw(st.integers(0, 2))])
        for bounds in itertools.pairwise([0, *(3 * cut for cut in cuts), rows]):
            grid = draw(grids())
            tiles.append(Tile(items, Interval(*bounds), tuple(range(first, first + grid.size)), grid))
            first += grid.size
    return Plan(tuple(tiles), 6, rows)


def cells(plan: Plan, tokens: Interval, features: Interval, positions: Interval | None) -> np.ndarray:
    """Which elements of an activation, [tokens, features], are of some tokens, at some positions of each row."""
    result = np.zeros((plan.rows * POSITIONS, HIDDEN), int)
    result[slice(*tokens), slice(*features)] = 1
    if positions:
        at = np.arange(plan.rows * POSITIONS) % POSITIONS
        result[(at < positions.start) | (at >= positions.stop)] = 0
    return result


def cells_of(plan: Plan, transfer: Transfer) -> np.ndarray:
    result = cells(plan, transfer.tokens, transfer.features, transfer.cut and transfer.cut.positions)
    assert result.sum() == transfer.num_elements
    return result


def held_by(plan: Plan, rank: int) -> np.ndarray:
    tile = plan.tile_of(rank)
    common = common_part_of(tile, rank, ROW)
    return sum(cells(plan, common.tokens, common.features, positions) for positions in common.positions)


@pytest.mark.parametrize("forward", [True, False])
@given(plan=two_stage_plans())
def test_every_rank_receives_its_part_exactly_once(forward, plan):
    check_tiling(plan, 4)
    for tile in plan.tiles:
        if not (plan.upstream(tile) if forward else plan.downstream(tile)):
            continue
        for rank in tile.ranks:
            count = np.zeros((plan.rows * POSITIONS, HIDDEN), int)
            for transfer in receives(plan, tile, rank, ROW, forward):
                assert transfer.receiver == rank
                assert (cells_of(plan, transfer) <= held_by(plan, transfer.sender)).all()
                count += cells_of(plan, transfer)
            assert np.array_equal(count, held_by(plan, rank))


def of_hosts(size: int):
    """Ranks are near those of their host, of which each has so many."""
    return lambda one, other: one // size == other // size


HOSTS = st.integers(1, 12).map(of_hosts)


@pytest.mark.parametrize("forward", [True, False])
@given(plan=two_stage_plans(), near=HOSTS)
def test_what_is_sent_is_what_is_received(forward, plan, near):
    places = [(tile, rank) for tile in plan.tiles for rank in tile.ranks]
    sent = {transfer for place in places for transfer in sends(plan, *place, ROW, forward, near)}
    received = {transfer for place in places for transfer in receives(plan, *place, ROW, forward, near)}
    assert sent == received


@pytest.mark.parametrize("forward", [True, False])
@given(plan=two_stage_plans(), near=HOSTS)
def test_where_parts_are_gathered_each_element_comes_once_to_all_y_together(forward, plan, near):
    for tile in plan.tiles:
        if not gathers(plan, tile, forward, near, ROW):
            continue
        for together in {tile.axis_ranks("y", rank) for rank in tile.ranks}:
            assert all(near(together[0], rank) for rank in together)
            count = np.zeros((plan.rows * POSITIONS, HIDDEN), int)
            for rank in together:
                for transfer in receives(plan, tile, rank, ROW, forward, near):
                    count += cells_of(plan, transfer)
            assert np.array_equal(count, held_by(plan, together[0]))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("cuts", list(itertools.product([1, 2, 4], [1, 2], [1, 2, 4], [1, 2])))
def test_ranks_that_have_the_same_positions_share_the_sending(forward, cuts, rows):
    """Whatever axis made the copies: here y, while another one cuts positions into several intervals a rank."""
    (source_y, source_cuts, target_y, target_cuts), row = cuts, RowShape(48, HIDDEN)
    grids = TensorGrid(y=source_y, c=source_cuts), TensorGrid(y=target_y, c=target_cuts)
    first, second = (tuple(range(start, start + grid.size)) for start, grid in zip((0, 8), grids, strict=True))
    source = Tile(Interval(0, 2), Interval(0, rows), first, grids[0])
    target = Tile(Interval(2, 4), Interval(0, rows), second, grids[1])
    plan = Plan((source, target), 1, rows)
    sending, receiving = (source, target) if forward else (target, source)
    sent = Counter()
    for rank in receiving.ranks:
        count = np.zeros((rows, 48), int)
        for transfer in receives(plan, receiving, rank, row, forward):
            sent[transfer.sender] += transfer.num_elements
            at = np.arange(48 * rows).reshape(rows, 48)
            is_sent = (transfer.tokens.start <= at) & (at < transfer.tokens.stop)
            if transfer.cut:
                is_sent &= (transfer.cut.positions.start <= at % 48) & (at % 48 < transfer.cut.positions.stop)
            count += is_sent
        expected = np.zeros((rows, 48), int)
        for interval in receiving.part(rank).positions(48):
            expected[:, slice(*interval)] = 1
        assert np.array_equal(count, expected)
        if grids[0] == grids[1]:
            senders = {each.sender for each in receives(plan, receiving, rank, row, forward)}
            assert senders == {sending.ranks[receiving.ranks.index(rank)]}
    whole = rows * 48 * HIDDEN
    assert sum(sent.values()) == receiving.tensor.y * whole
    assert set(sent.values()) == {receiving.tensor.y * whole // sending.tensor.size}


@pytest.mark.parametrize(("source_y", "target_y"), [(1, 4), (2, 4), (4, 4), (4, 2), (3, 2)])
def test_one_copy_goes_over_the_slow_link_and_all_senders_share_it(source_y, target_y):
    size = max(source_y, target_y)
    source = Tile(Interval(0, 2), Interval(0, 12), tuple(range(source_y)), TensorGrid(y=source_y))
    into = tuple(range(size, size + target_y))
    target = Tile(Interval(2, 4), Interval(0, 12), into, TensorGrid(y=target_y))
    plan = Plan((source, target), 1, 12, unused=tuple(range(source_y, size)))
    near = of_hosts(size)
    assert gathers(plan, target, True, near, ROW) and not gathers(plan, target, True, everywhere, ROW)

    def bytes_sent(rank: int, near) -> int:
        return sum(transfer.num_elements for transfer in sends(plan, source, rank, ROW, True, near))

    whole = sum(bytes_sent(rank, everywhere) for rank in source.ranks)
    sizes = [bytes_sent(rank, near) for rank in source.ranks]
    assert whole == target_y * 12 * POSITIONS * HIDDEN and sum(sizes) == 12 * POSITIONS * HIDDEN
    assert max(sizes) == min(sizes)


@pytest.mark.parametrize(("source_y", "target_y"), [(2, 2), (3, 3), (2, 3), (3, 1), (1, 2)])
def test_what_y_cuts_by_positions_is_sent_once_and_never_gathered(source_y, target_y):
    size = max(source_y, target_y)
    source = Tile(
        Interval(0, 2), Interval(0, 4), tuple(range(source_y)), TensorGrid(y=source_y, sequence_parallel=source_y > 1)
    )
    into = tuple(range(size, size + target_y))
    target = Tile(Interval(2, 4), Interval(0, 4), into, TensorGrid(y=target_y, sequence_parallel=target_y > 1))
    plan, near = Plan((source, target), 1, 4, unused=tuple(range(source_y, size))), of_hosts(size)
    for forward, tile, others in ((True, target, source), (False, source, target)):
        assert not gathers(plan, tile, forward, near, ROW)
        transfers = [transfer for rank in tile.ranks for transfer in receives(plan, tile, rank, ROW, forward, near)]
        assert sum(transfer.num_elements for transfer in transfers) == 4 * POSITIONS * HIDDEN
        if source_y == target_y:
            assert [(p.sender, p.receiver) for p in transfers] == list(zip(others.ranks, tile.ranks, strict=True))


def test_a_single_row_is_cut_too_and_far_y_are_sent_it_whole():
    source = Tile(Interval(0, 2), Interval(0, 1), (0,))
    target = Tile(Interval(2, 4), Interval(0, 1), (2, 3), TensorGrid(y=2))
    plan, near = Plan((source, target), 1, 1, unused=(1,)), of_hosts(2)
    assert gathers(plan, target, True, near, ROW)
    sizes = [sum(each.num_elements for each in receives(plan, target, rank, ROW, True, near)) for rank in (2, 3)]
    assert sizes == [POSITIONS * HIDDEN // 2] * 2
    assert not gathers(plan, target, True, lambda one, other: {one, other} <= {0, 2}, ROW), "3 is elsewhere"


@settings(max_examples=30, deadline=None)
@given(plan=two_stage_plans(), data=st.data())
def test_channels_hold_the_largest_message(plan, data):
    model = Model(architecture="gpt2", num_layers=2, hidden_size=HIDDEN, num_heads=1, vocab_size=13)
    rank = data.draw(st.sampled_from(plan.ranks))
    needed: dict[int, int] = {}
    depth: dict[int, int] = {}
    tile = plan.tile_of(rank)
    for forward in (True, False):
        sent = [(transfer.receiver, transfer) for transfer in sends(plan, tile, rank, ROW, forward)]
        received = [(transfer.sender, transfer) for transfer in receives(plan, tile, rank, ROW, forward)]
        for transfers in (sent, received):
            for peer, count in Counter(peer for peer, _ in transfers).items():
                in_flight = channel_depth(plan, tile, plan.tile_of(peer))
                depth[peer] = max(depth.get(peer, 0), count * in_flight)
        for peer, transfer in sent + received:
            needed[peer] = max(needed.get(peer, 0), transfer.num_elements)
    role = role_of(model, POSITIONS, plan, rank)
    assert {need.peer: need.elements for need in role.channels} == needed
    assert {need.peer: need.depth for need in role.channels} == depth
    assert role.transfers[0].messages[Action.SEND_ACTIVATION] == sends(plan, tile, rank, ROW, True)
    assert role.transfers[0].messages[Action.RECEIVE_GRADIENT] == receives(plan, tile, rank, ROW, False)


def test_equal_grids_send_to_their_counterpart_alone():
    grid = TensorGrid(2, 2, 2)
    tiles = [Tile(Interval(2 * i, 2 * i + 2), Interval(0, 4), tuple(range(8 * i, 8 * i + 8)), grid) for i in range(2)]
    plan = Plan(tuple(tiles), 1, 4)
    for rank in range(8):
        assert [t.receiver for t in sends(plan, plan.tile_of(rank), rank, ROW, True)] == [rank + 8]


@pytest.mark.parametrize(("source_y", "target_y"), [(4, 1), (4, 2), (3, 2), (2, 3), (1, 4)])
def test_all_ranks_that_hold_the_same_share_the_sending(source_y, target_y):
    source = Tile(Interval(0, 2), Interval(0, 12), tuple(range(source_y)), TensorGrid(y=source_y))
    target_ranks = tuple(range(source_y, source_y + target_y))
    plan = Plan((source, Tile(Interval(2, 4), Interval(0, 12), target_ranks, TensorGrid(y=target_y))), 1, 12)
    sent = [
        sum(transfer.num_elements for transfer in sends(plan, plan.tile_of(rank), rank, ROW, True))
        for rank in source.ranks
    ]
    assert sum(sent) == target_y * 12 * POSITIONS * HIDDEN, "conserved"
    assert max(sent) == min(sent)


@given(st.integers(0, 100), st.integers(1, 12))
def test_even_cuts_are_even(size, parts):
    sizes = [cut.size for cut in cut_evenly(size, parts)]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
