"""Who holds what: every element has one owner, and all holders of anything agree, whatever the tiling."""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.architectures.description import Description
from hpctrain.comm.groups.group import Group
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.model.parallel.axes import Axes
from hpctrain.model.storage.store import Store
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.holdings import _check_tiling, _Cutter, check_zero, holding_of
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.prices.cost import layer_elements
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.sharding.grid import STORING, TensorGrid
from hpctrain.sharding.grid_parts import GridPart, parts_of
from hpctrain.sharding.intervals import Interval, cut_by_shares, cut_evenly
from hpctrain.sharding.parameters import (
    Parameter,
    _branch,
    all_parameters,
    count_parameters,
    item_parameters,
    item_units,
    units,
    whole_rows,
)
from tests.examples import costly
from tests.tilings import tilings


class TwoWidths(Model):
    """A model whose second block has a feed-forward part of another width than the rest."""

    @property
    def description(self) -> Description:
        given = super().description
        first, second, *others = given.blocks
        wide = replace(second, mlp=replace(second.mlp, inner=second.mlp.inner // 2))
        return replace(given, blocks=(first, wide, *others))


MODELS = [
    Model(architecture="gpt2", num_layers=4, hidden_size=16, num_heads=4, vocab_size=13, tie_head=True),
    Model(architecture="llama", num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=24, vocab_size=13),
    Model(architecture="gpt2", num_layers=2, hidden_size=8, num_heads=4, num_kv_heads=1, ffn_size=24, vocab_size=7),
    TwoWidths(
        architecture="llama", num_layers=3, hidden_size=8, num_heads=4, num_kv_heads=2, ffn_size=24, vocab_size=7
    ),
]
EVEN = st.builds(
    lambda model, x, y, z, c, pipeline, data, zero: (
        model,
        even_plan(model.num_items, TensorGrid(x, y, z, c), min(pipeline, model.num_layers), data, 1, 12, zero=zero),
    ),
    st.sampled_from(MODELS),
    *[st.sampled_from([1, 2, 4])] * 2,
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 3),
)
INTERLEAVED = st.builds(
    lambda model, x, y, z, data, zero: (
        model,
        even_plan(model.num_items, TensorGrid(x, y, z), 2, data, 2, 12, virtual_stages=2, zero=zero),
    ),
    st.sampled_from([model for model in MODELS if model.num_layers >= 4]),
    *[st.sampled_from([1, 2])] * 2,
    *[st.integers(1, 2)] * 2,
    st.integers(0, 3),
)


def any_tiling(exchanging: bool):
    return st.tuples(st.sampled_from(MODELS), st.integers(1, 12)).flatmap(
        lambda pair: st.tuples(st.just(pair[0]), tilings(pair[0], pair[1], 8, 1, exchanging=exchanging))
    )


ANY, AT_ONCE = any_tiling(True), any_tiling(False)


class Position(Group):
    """A communicator that only knows where it is."""

    def __init__(self, rank, size):
        super().__init__(range(size))
        self.rank = rank


def store_of(model: Model, plan, rank: int):
    """Return a rank's store, and its shard groups."""
    tile = plan.tile_of(rank)
    x, y, storing = (
        Position(*tile.tensor.combined(tile.part(rank).coordinate, along)) for along in ("x", "y", STORING)
    )
    axes = Axes(x, y, storing)
    shards = holding_of(model, plan, rank)
    groups = [Position(shard_group.ranks.index(rank), len(shard_group.ranks)) for shard_group in shards.shard_groups]
    return Store(groups, shards, axes, torch.float32, torch.device("cpu")), shards


class Experts(Model):
    """A model of whose feed-forward weights each is whole on one y, and on no other; see `experts`."""


@contextmanager
def experts():
    """Let weights of feed-forward parts be experts: each y has some of them, as a whole, and x has copies."""
    box = GridPart.box

    def box_of(part, parameter):
        if ".ffn." not in parameter.name:
            return box(part, parameter)
        number = ("up", "gate", "down").index(parameter.name.split(".")[-2])
        is_here = part.coordinate.y == min(number, part.grid.y - 1)
        return tuple(Interval(0, length) for length in parameter.shape) if is_here else None

    def uncut(model, item):
        return [replace(p, split=(None,) * len(p.shape)) if ".ffn." in p.name else p for p in _branch(model, item)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridPart, "box", box_of)
        patch.setattr("hpctrain.sharding.parameters._branch", uncut)
        yield


@settings(max_examples=costly(100), deadline=None)
@given(EVEN | INTERLEAVED | ANY)
def test_what_only_some_coordinates_have_is_owned_once_and_its_holders_agree(drawn):
    model, plan = Experts.model_validate(drawn[0].model_dump()), drawn[1]
    with experts():
        assert_each_element_has_one_owner(model, plan)
        assert_holders_agree(model, plan)


def test_what_one_coordinate_has_counts_there_and_memory_is_of_the_one_with_the_most():
    model = Experts.model_validate(MODELS[1].model_dump())
    setup, grid, block = Setup(model, 8, "fp32", HPCTRAIN), TensorGrid(y=2), Interval(2, 3)
    with experts():
        sizes = [sum(part.layout(unit).size for unit in item_units(model, grid, 2)) for part in parts_of(grid)]
        norm, weight = model.hidden_size, model.hidden_size * model.ffn_size
        assert sizes == [norm + weight, norm + 2 * weight]
        assert layer_elements(setup, grid, block) == norm + 2 * weight
        first, last = parts_of(grid._replace(sequence_parallel=True))
        *_, down = item_parameters(model, 2)
        assert (first.partial_axes(down), last.partial_axes(down)) == ((), ()), "nobody to sum it with"
        assert (first.counts(down), last.counts(down)) == (False, True)


@settings(max_examples=costly(100), deadline=None)
@given(EVEN | INTERLEAVED | ANY)
def test_owners_cover_every_element_once(drawn):
    assert_each_element_has_one_owner(*drawn)


def assert_each_element_has_one_owner(model: Model, plan: Plan) -> None:
    check_tiling(plan, model.num_items)
    seen = {name: np.zeros(p.shape, int).reshape(p.shape[0], -1) for name, p in all_parameters(model).items()}
    for rank in plan.ranks:
        store, shards = store_of(model, plan, rank)
        for group, shard_group in zip(store.groups, shards.shard_groups, strict=True):
            owned = shard_group.cuts(group.size)[shard_group.ranks.index(rank)]
            for region in group.regions(owned):
                if region.counts:
                    for rows, columns, _ in whole_rows(region.parameter, region.box, region.elements):
                        seen[region.parameter.name][slice(*rows), columns] += 1
    assert all((count == 1).all() for count in seen.values())


@settings(max_examples=costly(100), deadline=None)
@given(EVEN | INTERLEAVED | ANY)
def test_holders_agree_about_each_other_and_their_order(drawn):
    assert_holders_agree(*drawn)


def assert_holders_agree(model: Model, plan: Plan) -> None:
    of_rank = {rank: store_of(model, plan, rank) for rank in plan.ranks}
    for rank, (_, shards) in of_rank.items():
        sets = [shard_group.ranks for shard_group in shards.shard_groups]
        exchanged_at_once = [shard_group.ranks for shard_group in shards.shard_groups if shard_group.zero < 2]
        assert len(set(exchanged_at_once)) == len(exchanged_at_once)
        for ranks in sets:
            assert rank in ranks
        # the plan-wide order: any two ranks come to their common groups in the same order
        for other, (_, theirs) in of_rank.items():
            common = [ranks for ranks in sets if other in ranks]
            assert common == [shard_group.ranks for shard_group in theirs.shard_groups if rank in shard_group.ranks]
    summary = defaultdict(set)
    for store, shards in of_rank.values():
        said = defaultdict(list)
        for group, shard_group in zip(store.groups, shards.shard_groups, strict=True):
            regions = tuple((p.parameter.name, p.at) for p in group.regions(Interval(0, group.size)))
            said[shard_group.ranks].append((regions, group.size, shard_group.shares, shard_group.zero))
        for ranks, all_of_them in said.items():
            summary[ranks].add(tuple(all_of_them))
    assert {len(different) for different in summary.values()} == {1}


@given(EVEN | INTERLEAVED | ANY)
def test_ranks_at_the_same_place_of_tiles_of_one_kind_hold_the_same(drawn):
    model, plan = drawn
    for tile, first in plan.first_like.items():
        for rank, of_first in zip(tile.ranks, first.ranks, strict=True):
            assert holding_of(model, plan, rank) == holding_of(model, plan, of_first)


def gradient(name: str, shape, salt: int) -> np.ndarray:
    """Whole numbers, so that sums are exact."""
    rng = np.random.default_rng([sum(map(ord, name)), salt])
    return rng.integers(-99, 99, shape).astype(np.float32)


@given(AT_ONCE)
def test_what_holders_add_up_is_the_gradient_of_every_tile_once(drawn):
    """Each tile has a gradient of its own; ranks that share a key/value head have parts of it. So have those that cut
    positions of what acts on hidden states: they add them where grids differ, and by themselves elsewhere."""
    model, plan = drawn
    parameters = all_parameters(model)
    expected = {name: np.zeros(p.shape, np.float32) for name, p in parameters.items()}
    result = {name: np.zeros(p.shape, np.float32) for name, p in parameters.items()}
    sums: dict[tuple, torch.Tensor] = {}
    regions: dict[tuple, list] = {}
    for number, tile in enumerate(plan.tiles):
        for unit in (unit for unit in units(model, tile.tensor) if any(map(tile.contains, unit.items))):
            is_cut = any(user.tensor != tile.tensor for user in plan.users(unit.items))
            for parameter in unit.parameters:
                copies = tile.tensor.y // parameter.heads if parameter.is_shared_over_y(tile.tensor) else 1
                if is_cut:
                    copies *= tile.tensor.num_parts(parts_of(tile.tensor)[0].partial_axes(parameter))
                expected[parameter.name] += copies * gradient(parameter.name, parameter.shape, number)
    for rank in plan.ranks:
        store, shards = store_of(model, plan, rank)
        tile = plan.tile_of(rank)
        number = plan.tiles.index(tile) if not tile.is_idle else -1
        for arrays in store.arrays:  # zero is 0 or 1 here
            for layout, shard, at in arrays.places.placed:
                for parameter, box, placed in layout.placed():
                    inside = placed.intersect(shard)
                    if not inside.size:
                        continue
                    whole = gradient(parameter.name, parameter.shape, number).reshape(parameter.shape[0], -1)
                    where = inside.shift(at - shard.start)
                    for rows, columns, taken in whole_rows(parameter, box, inside.shift(-placed.start)):
                        values = torch.from_numpy(whole[slice(*rows), columns].reshape(-1).copy())
                        first = where.start + taken.start - (inside.start - placed.start)
                        arrays.grads[first : first + values.numel()] = values
        for group, shard_group in zip(store.groups, shards.shard_groups, strict=True):
            sums[shard_group.ranks] = sums.get(shard_group.ranks, 0) + group.own_grads()
            regions[shard_group.ranks] = [p for p in group.regions(Interval(0, group.size)) if p.counts] or regions.get(
                shard_group.ranks, []
            )
    for ranks, total in sums.items():
        for region in regions[ranks]:
            for rows, columns, taken in whole_rows(region.parameter, region.box, region.elements):
                values = total[slice(*taken.shift(region.at.start - region.elements.start))].numpy()
                target = result[region.parameter.name].reshape(region.parameter.shape[0], -1)
                target[slice(*rows), columns] = values.reshape(rows.size, -1)
    for name in parameters:
        assert np.array_equal(result[name], expected[name]), name


def test_equal_grids_exchange_whole_units():
    for model in MODELS:
        shards = holding_of(model, even_plan(model.num_items, TensorGrid(2, 2, 2), 2, 2, 1, 8), 3)
        assert not shards.cut_units
        assert all(shard_group.layouts and not shard_group.regions for shard_group in shards.shard_groups)


def test_shared_heads_and_tied_embeddings_have_more_holders():
    gpt2, llama, *_ = MODELS
    plan = even_plan(llama.num_items, TensorGrid(y=4), 2, 1, 1, 1)
    shared = [h for h in holding_of(llama, plan, 1).shard_groups if any(u.unit.shared_heads for u in h.layouts)]
    assert {p.name.split(".")[-2] for h in shared for u in h.layouts for p in u.unit.parameters} == {"k", "v"}
    assert [h.ranks for h in shared] == [(0, 1)]
    tied = next(h for h in holding_of(gpt2, plan, 1).shard_groups if len(h.layouts[0].unit.items) == 2)
    assert tied.ranks == (1, 5)


def different_pair(**options) -> Plan:
    """Rank 0 computes half of the rows alone, ranks 1 and 2 the others with y = 2."""
    items = Interval(0, MODELS[0].num_items)
    first = Tile(items, Interval(0, 2), (0,), **options)
    return Plan((first, Tile(items, Interval(2, 4), (1, 2), TensorGrid(y=2))), 1, 4)


def test_different_grids_hold_regions_together():
    sets = [shard_group.ranks for shard_group in holding_of(MODELS[0], different_pair(), 0).shard_groups]
    assert sets == [(0, 1), (0, 2), (0, 1, 2)], "a half with each of the two, norms and such with both"
    for rank in (1, 2):
        shards = holding_of(MODELS[0], different_pair(), rank)
        assert [shard_group.ranks for shard_group in shards.shard_groups] == [(0, rank), (0, 1, 2)]


def test_regions_of_blocks_of_two_widths_have_every_element():
    model = MODELS[-1]
    items = Interval(0, model.num_items)
    tiles = [Tile(items, Interval(0, 2), (0,)), Tile(items, Interval(2, 4), (1, 2), TensorGrid(x=2))]
    plan = Plan(tuple(tiles), 1, 4)
    stored = {}
    for rank in (0, 1):
        shards = holding_of(model, plan, rank)
        stored = dict.fromkeys(all_parameters(model), 0)
        for region in (region for group in shards.shard_groups for region in group.regions):
            stored[region.parameter.name] += region.size
        for layout in shards.cut_units:
            for parameter, _, placed in layout.placed():
                assert stored[parameter.name] == placed.size
        assert sum(stored.values()) == sum(layout.size for layout in shards.cut_units)
    assert sum(stored.values()) < count_parameters(model), "x cuts most of it"


def test_elements_in_no_region_are_refused(monkeypatch):
    cut = _Cutter._cut
    monkeypatch.setattr(_Cutter, "_cut", lambda self, *given: list(cut(self, *given))[1:])
    with pytest.raises(PlanError, match="rank 0 stores 208 elements of embedding.weight, and the regions .* have 96"):
        holding_of(MODELS[0], different_pair(), 0)


def test_rectangles_that_do_not_cover_a_parameter_once_are_refused():
    parameter = Parameter("w", (4, 6), ("y", "x"), "normal")
    left, right = Interval(0, 3), Interval(3, 6)
    _check_tiling(parameter, [(Interval(0, 4), left), (Interval(0, 1), right), (Interval(1, 4), right)], TensorGrid())
    for rectangles in ([(Interval(0, 4), left)], [(Interval(0, 4), Interval(0, 6)), (Interval(3, 4), left)], []):
        with pytest.raises(PlanError, match="rows .* of w, which is not each of 6 once"):
            _check_tiling(parameter, rectangles, TensorGrid())


@pytest.mark.parametrize("zero", [0, 1])
def test_everybody_updates_everything_only_where_all_are_equal(zero):
    items, other = Interval(0, MODELS[0].num_items), {"family": "a100"}
    tiles = [Tile(items, Interval(i, i + 1), (i,), zero=0) for i in range(2)]
    stages = [
        (Plan(tuple(tiles), 1, 2), 0),
        (Plan((tiles[0], Tile(items, Interval(1, 2), (1,), zero=1)), 1, 2), 1),
        (Plan((tiles[0], Tile(items, Interval(1, 2), (1,), zero=0, **other)), 1, 2), 1),
        (different_pair(zero=zero), 1),
    ]
    for plan, expected in stages:
        assert {h.zero for h in holding_of(MODELS[0], plan, 0).shard_groups} == {expected}


@given(st.integers(0, 1000), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_cuts_by_shares_are_in_proportion(size, shares):
    cuts = cut_by_shares(size, tuple(shares))
    assert cuts[0].start == 0
    assert cuts[-1].stop == size
    for cut, share in zip(cuts, shares, strict=True):
        assert abs(cut.size - size * share / sum(shares)) <= 1
    assert cut_by_shares(size, (3,) * len(shares)) == cut_evenly(size, len(shares))


def test_zero_2_and_3_go_through_items_together():
    items = Interval(0, MODELS[0].num_items)
    tiles = [Tile(items, Interval(2 * i, 2 * i + 2), (i,), zero=3) for i in range(2)]
    check_zero(Plan(tuple(tiles), 1, 4), "p.toml")
    for change, summary in [
        ({"zero": 1}, "zero: 3 and 1"),
        ({"row_chunks": 2}, "row_chunks: 1 and 2"),
        ({"tensor": TensorGrid(z=2), "ranks": (1, 2)}, r"tensor grids: TP1 and TP2 \(z=2\)"),
        ({"items": Interval(0, 3)}, r"items: \[0, 10\] and \[0, 3\]"),
    ]:
        plan = Plan((tiles[0], replace(tiles[1], **change)), 1, 4)
        with pytest.raises(PlanError, match=f"tiles 0 and 1 share items but have different {summary}; make them equal"):
            check_zero(plan, "p.toml")
    stages = {h.layouts[0].unit.items: h.zero for h in holding_of(MODELS[0], Plan(tuple(tiles), 1, 4), 0).shard_groups}
    assert stages == {(0, 9): 1, **{(item,): 3 for item in range(10)}}, "tied: no more than 1"


def test_a_share_is_that_of_the_tile_which_has_it():
    items = Interval(0, MODELS[0].num_items)
    tiles = (Tile(items, Interval(0, 2), (1,), state_share=3), Tile(items, Interval(2, 4), (0,)))
    (shard_group,) = holding_of(MODELS[0], Plan(tiles, 1, 4), 0).shard_groups
    sizes = dict(zip(shard_group.ranks, (cut.size for cut in shard_group.cuts(400)), strict=True))
    assert sizes == {1: 300, 0: 100}


def test_replicas_with_other_positions_share_weights():
    """Their weights are cut alike, so that they may exchange these while they compute."""
    grids = [TensorGrid(c=2, position_shares=shares) for shares in ((5, 3), (3, 5), ())]
    grids.append(TensorGrid(c=2, exchanges_heads=True))
    items = Interval(0, MODELS[1].num_items)
    tiles = [Tile(items, Interval(i, i + 1), (2 * i, 2 * i + 1), grid, zero=2) for i, grid in enumerate(grids)]
    plan = Plan(tuple(tiles), 1, len(grids))
    check_zero(plan, "a plan")
    equal = replace(plan, tiles=tuple(replace(tile, tensor=TensorGrid(c=2)) for tile in tiles))
    for rank in plan.ranks:
        groups = holding_of(MODELS[1], plan, rank).shard_groups
        assert groups == holding_of(MODELS[1], equal, rank).shard_groups
        assert {group.zero for group in groups if not group.is_tied} == {2}
    with pytest.raises(PlanError, match="different tensor grids"):
        check_zero(replace(plan, tiles=(tiles[0], replace(tiles[1], tensor=TensorGrid(y=2)), *tiles[2:])), "a plan")
