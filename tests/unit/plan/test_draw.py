"""Drawings of plans: every tile is in its place, and nothing is cut off."""

import re

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.job import Model
from hpctrain.plan.draw import draw_plan, ranges
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.tilings import tilings

MODEL = Model(architecture="gpt2", num_layers=4, hidden_size=16, num_heads=4, vocab_size=13)


def test_a_small_plan_as_it_is_drawn():
    tiles = (
        Tile(Interval(0, 3), Interval(0, 1), (0,), recompute="full"),
        Tile(Interval(0, 3), Interval(1, 4), (1,)),
        Tile(Interval(3, 6), Interval(0, 4), (2, 3), TensorGrid(y=2), "a100", zero=0),
    )
    drawing = draw_plan(Plan(tiles, 2, 4, unused=(4,)))
    assert drawing.splitlines()[3:] == [
        "  0                                   3                                   6",
        "0 ┌───────────────────────────────────┬───────────────────────────────────┐",
        "  │ 0: cpu TP1                        │ 2: a100 TP2                       │",
        "  │ rank 0                            │ ranks 2-3                         │",
        "  │ recompute full                    │ ZeRO 0                            │",
        "1 ├───────────────────────────────────┤                                   │",
        "  │ 1: cpu TP1                        │                                   │",
        "  │ rank 1                            │                                   │",
        "4 └───────────────────────────────────┴───────────────────────────────────┘",
        "unused: 4",
    ]


@given(st.integers(1, 12).flatmap(lambda n: tilings(MODEL, n, 8, 2)))
def test_everything_that_is_in_a_plan_is_in_its_drawing(plan):
    drawing = draw_plan(plan, max_width=10_000, max_lines=10_000)
    for number, tile in enumerate(plan.tiles):
        assert f"{number}: {tile.family} {tile.tensor} " in drawing
        if len(ranges(tile.ranks)) <= 24:
            assert f" {ranges(tile.ranks)} " in drawing
    lines = drawing.splitlines()[4:]
    assert len({len(line) for line in lines if line[-1] in "┐┘│┤"}) == 1, "one right edge"


def test_a_large_plan_is_a_table_with_a_line_for_all_that_is_equal():
    table = draw_plan(even_plan(66, TensorGrid(y=2), 2, 1024, 8, 2048)).splitlines()
    assert table[0] == "TP2 x PP2 x DP1024, ZeRO 1, 8 microbatches of 2048 rows"
    assert [re.split("  +", line) for line in table[3:]] == [
        ["[0, 33]", "0-1023", "2", "cpu", "TP2", "0-2047"],
        ["[33, 66]", "1024-2047", "2", "cpu", "TP2", "2048-4095"],
    ]
    for stages in (2, 10, 30):
        drawing = draw_plan(even_plan(66, TensorGrid(), stages, 3, 8, 6, recompute="full")).splitlines()
        assert max(map(len, drawing)) <= 80 and len(drawing) <= 48


def test_ranges():
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
