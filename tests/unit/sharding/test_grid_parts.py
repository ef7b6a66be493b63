"""What a coordinate has: the parts of all places of a grid cover everything once, and each says what counts."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.job import Model
from hpctrain.sharding.grid import AXES, RANK_ORDER, Coordinate, TensorGrid
from hpctrain.sharding.grid_parts import parts_of, same_elements
from hpctrain.sharding.intervals import Interval, cut_zigzag, place_in, section, tiles_exactly
from hpctrain.sharding.parameters import all_parameters, box_size, units

MODEL = Model(architecture="gpt2", num_layers=1, hidden_size=16, num_heads=4, num_kv_heads=2, vocab_size=13)
SHARES = (1, ()), (2, ()), (4, ()), (2, (3, 1)), (2, (1, 3))
GRIDS = st.builds(
    lambda x, y, z, c, is_cut: TensorGrid(x, y, z, c[0], is_cut, position_shares=c[1]),
    *[st.sampled_from([1, 2, 4])] * 2,
    st.integers(1, 3),
    st.sampled_from(SHARES),
    st.booleans(),
)
WHOLE = Interval(0, 16)


def test_the_table_names_the_fields_of_grids_and_coordinates():
    assert tuple(AXES) == Coordinate._fields == TensorGrid._fields[: len(AXES)]
    assert sorted(RANK_ORDER) == sorted(AXES)


@given(GRIDS)
def test_parts_cover_rows_features_and_positions_of_hidden_states(grid):
    """Each token and feature is held once, or as often as there are y where these do not cut positions."""
    held = Counter(
        (part.rows(Interval(3, 9)), part.features(16), interval)
        for part in parts_of(grid)
        for interval in part.positions(16)
    )
    assert set(held.values()) == {grid.copies} == {1 if grid.sequence_parallel else grid.y}
    rows, features, positions = (list({key[i] for key in held}) for i in range(3))
    assert tiles_exactly(rows, Interval(3, 9)) and tiles_exactly(features, WHOLE) and tiles_exactly(positions, WHOLE)


@given(GRIDS)
def test_boxes_that_count_cover_each_parameter_once(grid):
    for parameter in all_parameters(MODEL).values():
        firsts = [part for part in parts_of(grid) if part.stored_place == 0]
        boxes = [part.box(parameter) for part in firsts if part.counts(parameter)]
        size = box_size(tuple(Interval(0, n) for n in parameter.padded_shape(grid)))
        copies = grid.y // parameter.heads if parameter.is_shared_over_y(grid) else 1
        assert sum(map(box_size, boxes)) == size * copies
        assert len(set(boxes)) * copies == len(boxes)
        for part in firsts:  # what does not count has a copy that does
            assert part.box(parameter) in boxes


@given(GRIDS)
def test_what_adds_is_what_counts_and_what_is_partial(grid):
    for parameter in all_parameters(MODEL).values():
        for part in parts_of(grid):
            is_partial = grid.sequence_parallel and "y" not in parameter.split
            assert part.partial_axes(parameter) == (("y",) if is_partial else ())
            along = {part.coordinate._replace(y=0)} if is_partial else {part.coordinate}
            assert part.adds(parameter) == any(part._replace(coordinate=c).counts(parameter) for c in along)


@given(GRIDS)
def test_all_of_c_have_their_share_of_positions_and_of_causal_work(grid):
    """An interval and its mirror; those of the last rank meet in the middle of the row. y cuts what c has."""
    contexts = {part.context(16): grid.context_shares[part.coordinate.c] for part in parts_of(grid)}
    assert tiles_exactly([each for context in contexts for each in context], WHOLE) and len(contexts) == grid.c
    total = sum(grid.context_shares)
    for context, share in contexts.items():
        assert sum(each.size for each in context) * total == 16 * share
        assert sum(2 * i + 1 for each in context for i in range(*each)) * total == 16 * 16 * share
    assert {len(context) for context in contexts} == ({1} if grid.c == 1 else {1, 2})
    for part in parts_of(grid):
        along = [part._replace(coordinate=part.coordinate._replace(y=y)) for y in range(grid.y)]
        own = [i for each in along for interval in each.positions(16) for i in range(*interval)]
        assert own == [i for interval in part.context(16) for i in range(*interval)] * (
            1 if grid.sequence_parallel else grid.y
        )


@given(st.integers(0, 400), st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple))
def test_a_cut_by_shares_covers_each_position_once_and_rounds_by_less_than_two(size, shares):
    parts = cut_zigzag(size, shares)
    assert sorted(i for part in parts for each in part for i in range(*each)) == list(range(size))
    for part, share in zip(parts, shares, strict=True):
        wanted = size * share / sum(shares)
        assert abs(sum(each.size for each in part) - wanted) < 2
        work = sum(i + 0.5 for each in part for i in range(*each))
        assert abs(work - wanted * size / 2) <= 2 * size, "the work of two positions at the most"


@given(GRIDS)
def test_one_loss_counts_of_each_part_of_the_rows(grid):
    parts = [part for part in parts_of(grid) if part.counts_loss]
    tokens = [(row, i) for p in parts for row in range(*p.rows(WHOLE)) for each in p.context(16) for i in range(*each)]
    assert sorted(tokens) == list(itertools.product(range(16), range(16)))


@given(GRIDS)
def test_what_ranks_store_of_a_unit_is_all_of_it(grid):
    for unit in units(MODEL, grid):
        stored = {}
        for part in parts_of(grid):
            layout = part.layout(unit)
            assert part.stored(layout) in part.stored_cuts(layout)
            stored.setdefault(part.coordinate[:2], []).append(part.stored(layout))
        for intervals in stored.values():
            assert tuple(intervals) == part.stored_cuts(layout)
            assert tiles_exactly(intervals, Interval(0, layout.size))


def test_ranks_of_one_head_store_the_same_elements():
    grid = TensorGrid(x=2, y=4, z=2)
    assert same_elements(grid, 0) == tuple((index,) for index in range(grid.size))
    pairs = same_elements(grid, 2)
    assert pairs[:8] == ((0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7))
    assert all(len({parts_of(grid)[i].coordinate[::2] for i in pair}) == 1 for pair in pairs), "of one x and z"


def test_the_place_in_intervals_that_lie_one_after_the_other():
    zigzag = [Interval(2, 4), Interval(8, 12)]
    assert place_in(zigzag, Interval(3, 4)) == Interval(1, 2)
    assert place_in(zigzag, Interval(8, 12)) == Interval(2, 6)
    with pytest.raises(ValueError, match="is inside of none"):
        place_in(zigzag, Interval(3, 9))


def test_a_section_of_intervals_that_lie_one_after_the_other():
    zigzag = [Interval(2, 4), Interval(8, 12)]
    assert section(zigzag, Interval(0, 6)) == tuple(zigzag)
    assert section(zigzag, Interval(1, 4)) == (Interval(3, 4), Interval(8, 10))
    assert section(zigzag, Interval(3, 5)) == (Interval(9, 11),)
