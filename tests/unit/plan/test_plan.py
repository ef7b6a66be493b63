"""Plans are tilings: what fits is accepted and round-trips, what does not is refused with the numbers."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.errors import LaunchError, PlanError
from hpctrain.plan.checks import check_ranks, check_tiling
from hpctrain.plan.file import dump_plan, load_plan, parse_plan
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.sharding.grid import AXES, TensorGrid
from hpctrain.sharding.intervals import Interval


def uneven_plan() -> Plan:
    """Two stages with different data degrees and grids: 3 + 5 rows feed 8 rows."""
    return Plan(
        (
            Tile(Interval(0, 3), Interval(0, 3), (0,)),
            Tile(Interval(0, 3), Interval(3, 8), (1, 2), TensorGrid(y=2)),
            Tile(Interval(3, 6), Interval(0, 8), (3, 4), TensorGrid(z=2)),
        ),
        microbatches=4,
        rows=8,
    )


@given(
    blocks=st.integers(1, 12),
    pipeline=st.integers(1, 6),
    data=st.integers(1, 4),
    grid=st.tuples(*[st.integers(1, 3)] * 3),
    rows=st.integers(1, 4),
)
def test_even_plans_are_tilings(blocks, pipeline, data, grid, rows):
    grid = TensorGrid(*grid)
    rows = rows * grid.z * data
    if pipeline > blocks:
        with pytest.raises(PlanError, match="need as many blocks"):
            even_plan(2 * blocks + 2, grid, pipeline, data, 2, rows)
        return
    num_items = 2 * blocks + 2
    plan = even_plan(num_items, grid, pipeline, data, 2, rows)
    check_tiling(plan, num_items)
    assert plan.ranks == tuple(range(grid.size * pipeline * data))
    sizes = [t.items.size - (t.items.start == 0) - (t.items.stop == num_items) for t in plan.tiles]
    assert max(sizes) - min(sizes) <= 2 and not any(size % 2 for size in sizes), "whole blocks"


@given(st.tuples(*[st.integers(1, 3)] * len(AXES)))
def test_coordinates_and_ranks_are_inverse(sizes):
    grid = TensorGrid(*sizes)
    tile = Tile(Interval(0, 3), Interval(0, 8), tuple(range(7, 7 + grid.size)), grid)
    for rank in tile.ranks:
        assert tile.ranks[tile.tensor.index_of(tile.part(rank).coordinate)] == rank
        assert [len(tile.axis_ranks(axis, rank)) for axis in AXES] == list(sizes)
        assert all(
            tile.axis_ranks(axis, rank)[i] == rank for axis, i in zip(AXES, tile.part(rank).coordinate, strict=True)
        )


def test_neighbours_share_rows():
    plan = uneven_plan()
    a, b, c = plan.tiles
    assert plan.downstream(a) == plan.downstream(b) == (c,) and plan.upstream(c) == (a, b)
    assert plan.downstream(c) == plan.upstream(a) == ()
    apart = replace(plan, tiles=(a, b, replace(c, rows=Interval(3, 8))))
    assert apart.downstream(a) == () and apart.upstream(apart.tiles[2]) == (b,)
    assert [c.part(rank).rows(c.rows) for rank in c.ranks] == [Interval(0, 4), Interval(4, 8)]


@pytest.mark.parametrize(
    "plan",
    [
        uneven_plan(),
        even_plan(18, TensorGrid(2, 2, 2), 2, 2, 4, 8, schedule="zb-h1", zero=0),
        replace(uneven_plan(), tiles=tuple(replace(tile, extra_warmup=1) for tile in uneven_plan().tiles)),
    ],
)
def test_files_round_trip(plan, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(dump_plan(plan))
    assert load_plan(path) == plan


def test_depths_are_those_of_the_longest_paths():
    plan = even_plan(18, TensorGrid(), 4, 2, 4, 2)
    assert [plan.depth_to_loss(t) for t in plan.tiles] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert [plan.depth_from_start(t) for t in plan.tiles] == [0, 0, 1, 1, 2, 2, 3, 3]
    cuts = (((0, 2), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (1, 2)), ((2, 3), (0, 2)), ((3, 4), (0, 2)))
    plan = Plan(tuple(Tile(Interval(*items), Interval(*rows), (i,)) for i, (items, rows) in enumerate(cuts)), 1, 2)
    assert [plan.depth_from_start(t) for t in plan.tiles] == [0, 0, 1, 2, 3]
    assert [plan.depth_to_loss(t) for t in plan.tiles] == [2, 3, 2, 1, 0]


USELESS = (
    "tile 1: extra_warmup = 2, so that it wants 4 microbatches before it sends one back, and tile 0 before it sends 3;"
    " set extra_warmup of that one to 1 or more"
)


def three_stages() -> Plan:
    """Return a pipeline that is cut inside blocks."""
    cuts = Interval(0, 2), Interval(2, 4), Interval(4, 6)
    return Plan(tuple(Tile(items, Interval(0, 2), (rank,)) for rank, items in enumerate(cuts)), 4, 2)


def broken(plan: Plan | None = None, **changes) -> Plan:
    plan = plan or uneven_plan()
    number = changes.pop("tile")
    tiles = list(plan.tiles)
    tiles[number] = replace(tiles[number], **changes)
    return replace(plan, tiles=tuple(tiles))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (broken(tile=0, rows=Interval(0, 2)), r"item 0 is computed for rows \[\[0, 2\], \[3, 8\]\].* not \[0, 8\)"),
        (broken(tile=0, rows=Interval(0, 4)), r"item 0 is computed for rows \[\[0, 4\], \[3, 8\]\]"),
        (broken(tile=2, items=Interval(4, 6)), r"tile 0 .*: no tile starts at item 3 for its rows"),
        (broken(tile=1, ranks=(1, 0)), r"tile 1 .*: rank 0 is already in tile 0"),
        (broken(tile=1, ranks=(1,)), r"tile 1 .*: a grid of TP2 needs 2 ranks, 1 given"),
        (broken(tile=2, ranks=(3, 5)), r"rank 4 is in no tile; list it under unused = \[4\]"),
        (broken(tile=2, items=Interval(3, 7)), r"tile 2 .*: items must lie in \[0, 6\)"),
        (broken(tile=2, rows=Interval(0, 9)), r"tile 2 .*: rows must lie in \[0, 8\)"),
        (
            broken(tile=2, extra_warmup=1),
            r"tile 2: extra_warmup = 1, and nothing comes after it that it could warm up for; set it to 0",
        ),
        (broken(three_stages(), tile=1, extra_warmup=2), USELESS),
        (
            broken(replace(three_stages(), schedule="zb-h1"), tile=0, extra_warmup=1),
            r'tile 0: extra_warmup = 1 is of schedule = "1f1b" with one tile a rank; set it to 0',
        ),
        (
            broken(even_plan(10, TensorGrid(), 2, 1, 4, 2, virtual_stages=2), tile=0, extra_warmup=1),
            r'tile 0: extra_warmup = 1 is of schedule = "1f1b" with one tile a rank; set it to 0',
        ),
        (broken(tile=0, row_chunks=4), r"tile 0 .*: z = 1 and row_chunks = 4 split 3 rows; lower"),
    ],
)
def test_what_is_no_tiling_is_refused(plan, message):
    check_tiling(uneven_plan(), 6)
    with pytest.raises(PlanError, match=message):
        check_tiling(plan, 10 if len(plan.virtual_stages(plan.tiles[0])) > 1 else 6)


def test_wrong_number_of_ranks_says_which_fits():
    check_ranks(uneven_plan(), 5)
    with pytest.raises(LaunchError, match=r"for 5 ranks .* but MPI started 4; start it with mpirun -n 5"):
        check_ranks(uneven_plan(), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows = ", "not valid TOML"),
        ("microbatches = 1\nrows = 1", "tile: missing; set it"),
        (
            "microbatches = 1\nrows = 1\n[[tile]]\nitems = [0, 3]\nrows = [0, 1]\nranks = [0]\ntensor = {w = 1}",
            "w: unknown key; known are: c, x, y, z",
        ),
        (
            "microbatches = 1\nrows = 1\nrow = 2\n[[tile]]\nitems = [0, 3]\nrows = [0, 1]\nranks = [0]",
            "row: unknown key; did you mean 'rows'?",
        ),
        (
            "microbatches = 1\nrows = 1\n[[tile]]\nitems = [0, 3]\nrows = [0]\nranks = [0]",
            "tile.0.rows.1: missing; set it",
        ),
        (
            "microbatches = 1\nrows = 1\n[[tile]]\nitems = [0, 3]\nrows = []\nranks = [0]",
            "tile.0.rows.0: missing; set it",
        ),
        (
            "microbatches = 0\nrows = 1\n[[tile]]\nitems = [0, 3]\nrows = [0, 1]\nranks = [0]",
            "microbatches = 0: input should be greater than or equal to 1",
        ),
        (
            "microbatches = 1\nrows = 1\n[[tile]]\nitems = [0, 3]\nrows = [0, 1]\nranks = [0]\nzeroo = 1",
            "tile.0.zeroo: unknown key; did you mean 'zero'?",
        ),
    ],
)
def test_bad_files_name_the_key(text, message, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True))
def test_ranks_are_written_as_ranges_and_read_from_lists_too(ranks):
    plan = replace(uneven_plan(), unused=tuple(ranks))
    text = dump_plan(plan)
    assert parse_plan(text, "a test") == plan
    listed = re.sub(r"^unused = .*$", f"unused = {ranks}", text, flags=re.MULTILINE)
    assert parse_plan(listed, "a test") == plan
    assert 'unused = "0-99"' in dump_plan(replace(plan, unused=tuple(range(100))))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("7-0", '"7-0" must go up, and no rank is above 99,999'),
        ("0-1000000000", "no rank is above 99,999"),
        ("0..3", 'is no list of ranks; write "0-7"'),
        ("0-99999,0", "has more than 100,000 ranks; list each once"),
    ],
)
def test_ranges_of_ranks_that_mean_nothing_are_refused(ranks, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        parse_plan(
            f'microbatches = 1\nrows = 1\n[[tile]]\nitems = [0, 3]\nrows = [0, 1]\nranks = "{ranks}"\n', "a test"
        )


def test_c_is_written_where_it_is_more_than_one():
    plans = [
        Plan((Tile(Interval(0, 3), Interval(0, 1), (0, 1), grid),), 1, 1) for grid in (TensorGrid(z=2), TensorGrid(c=2))
    ]
    texts = [dump_plan(plan) for plan in plans]
    assert "tensor = {x = 1, y = 1, z = 2}" in texts[0] and "tensor = {x = 1, y = 1, z = 1, c = 2}" in texts[1]
    assert [parse_plan(text, "a plan") for text in texts] == plans
