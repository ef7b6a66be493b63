"""What c costs: its part of products and activations, keys and values of the whole row; and when a search takes it."""

from dataclasses import replace
from itertools import chain, starmap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.errors import PlanError
from hpctrain.config.job import Model
from hpctrain.model.operators import attention as attention_of_model
from hpctrain.plan.checks import check_positions
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.explain import reasons
from hpctrain.planner.prediction.activations import _context_kept, layer_kept, mask_bytes, row_bytes
from hpctrain.planner.prediction.predictor import Predictor, predict
from hpctrain.planner.prices.buffers import message_bytes
from hpctrain.planner.prices.cost import _attention, computed_pairs, heads_on, layer_cost
from hpctrain.planner.prices.devices import DeviceModel
from hpctrain.planner.prices.prices import Site, pass_cost
from hpctrain.planner.prices.setup import LEAST_CONTEXT, Setup
from hpctrain.planner.prices.work import PassWork
from hpctrain.planner.search.changes import Simulator
from hpctrain.planner.search.mixed_tiles import positions_by_worth, shares_of
from hpctrain.planner.search.pools import Pool, pools_of
from hpctrain.planner.search.search import Limits, search
from hpctrain.planner.search.stages import StageCosts
from hpctrain.sharding.grid import ONE_RANK, TensorGrid
from hpctrain.sharding.intervals import Interval, cut_zigzag
from hpctrain.sharding.items import BLOCK
from hpctrain.sharding.parameters import check_grid
from hpctrain.software.run import DescribedRun
from tests.pretended import cluster_with
from tests.unit.planner.test_predict import SETUP

ROWS, C = 2, 4
GRID = TensorGrid(c=C)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ranks_of_c_have_the_products_of_one_rank_together(recompute):
    """Attention too, which is the same of each rank: an early interval sees few keys, a late one many."""
    whole, own = (layer_cost(SETUP, grid, BLOCK, ROWS, recompute) for grid in (ONE_RANK, GRID))
    for name in ("forward", "backward_input", "backward_weight"):
        expected, flops = (
            sum(p.m * p.k * p.n * p.batch * p.share for p in getattr(cost, name).products) for cost in (whole, own)
        )
        assert C * flops == pytest.approx(expected)


UNEQUAL = TensorGrid(c=2, position_shares=(3, 1))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_rank_of_c_has_its_share_of_products_and_activations(recompute):
    whole, kept = layer_cost(SETUP, ONE_RANK, BLOCK, ROWS, recompute), []
    for place, share in enumerate(UNEQUAL.position_shares):
        setup = SETUP.at(place)
        own = layer_cost(setup, UNEQUAL, BLOCK, ROWS, recompute)
        for name in ("forward", "backward_input", "backward_weight"):
            flops, expected = (
                sum(p.m * p.k * p.n * p.batch * p.share for p in getattr(cost, name).products) for cost in (own, whole)
            )
            assert flops == pytest.approx(expected * share / 4)
        moved = [e.num_bytes for e in own.forward.exchanges if e.axis == "c"]
        numbers = ROWS * 2 * heads_on(SETUP.branches(BLOCK)[0], UNEQUAL)[1] * SETUP.item_bytes
        assert moved == [2 * SETUP.positions * 3 // 4 * numbers], "as if all had as many as the first"
        kept.append(row_bytes(setup, UNEQUAL, [BLOCK], recompute, splits=False, rows=ROWS).kept)
    assert kept[0] > kept[1] and message_bytes(SETUP, UNEQUAL, 1) == 3 * message_bytes(SETUP.at(1), UNEQUAL, 1)
    if recompute == "full":
        assert kept[0] == 3 * kept[1]


def test_a_tile_of_unlike_devices_is_as_slow_as_its_slowest_rank():
    """The first device is twice as fast as the other, and has twice the memory. The other counts."""
    cluster, items = cluster_with(5e7, devices=1), Interval(0, SETUP.model.num_items)

    def predicted(shares: tuple[int, ...], ranks: tuple[int, ...] = (0, 1)):
        grid = TensorGrid(c=2, position_shares=shares)
        return predict(SETUP, Plan((Tile(items, Interval(0, ROWS), ranks, grid, "fast+slow"),), 1, ROWS), cluster)

    by_worth, equal, against = predicted((5, 3)), predicted(()), predicted((3, 5))
    assert predicted((3, 5), (1, 0)).step_seconds == by_worth.step_seconds
    compute = [each.breakdown_seconds["compute"] for each in (by_worth, equal, against)]
    assert compute[0] < 0.85 * compute[1] < 0.75 * compute[2]
    (stage,), (of_equal,), (other,) = by_worth.memory, equal.memory, against.memory
    assert stage.available_bytes == of_equal.available_bytes == cluster.families["slow"].usable_bytes
    assert 0.7 < stage.memory.activations / of_equal.memory.activations < 0.85
    assert 1.15 < other.memory.activations / of_equal.memory.activations < 1.3


def test_memory_is_judged_by_the_devices_at_each_place():
    """Two tiles of the same families, of whose ranks the second has most positions: of one tile it is a slow device,
    which has less memory."""
    cluster, items = cluster_with(5e7, devices=5), Interval(0, SETUP.model.num_items)
    grid, places = TensorGrid(c=4, position_shares=(2, 4, 1, 1)), ((0, 1, 5, 6), (2, 7, 8, 9))
    tiles = [Tile(items, Interval(i, i + 1), ranks, grid, "fast+slow") for i, ranks in enumerate(places)]
    stages = predict(SETUP, Plan(tuple(tiles), 1, 2, unused=(3, 4)), cluster).memory
    assert [stage.ranks for stage in stages] == list(places)
    assert stages[1].memory.activations > 3 * stages[0].memory.activations


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 1), ("selective", 2), ("full", 2)])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(recompute, gathers):
    attention, _ = SETUP.branches(BLOCK)
    cost = layer_cost(SETUP, GRID, BLOCK, ROWS, recompute)
    moved = [e for work in (cost.forward, cost.backward_input, cost.backward_weight) for e in work.exchanges]
    whole = ROWS * SETUP.positions * 2 * heads_on(attention, GRID)[1] * SETUP.item_bytes
    of_c = [(e.operation, e.num_bytes) for e in moved if e.axis == "c"]
    assert sorted(of_c) == [("all_gather", whole)] * gathers + [("reduce_scatter", whole)]


@pytest.mark.parametrize(("shares", "place"), [((), 0), ((1, 3, 2, 2), 1), ((1, 3, 2, 2), 3)])
def test_a_window_has_sent_what_it_shows(shares, place):
    """As if all sent as much as the rank that sends or receives the most. Where a rank sees all, all is gathered."""
    grid, attention = TensorGrid(c=C, position_shares=shares), SETUP.branches(BLOCK)[0]
    of_windows = replace(SETUP, model=Model(**SETUP.model.model_dump() | {"architecture": "mistral", "window": 9}))
    contexts = [{*chain(*starmap(range, own))} for own in cut_zigzag(SETUP.positions, grid.context_shares)]
    seen = [{k for q in own for k in range(max(0, q - 8), q + 1)} for own in contexts]
    received = [[len(own & seen[n]) * (own is not contexts[n]) for own in contexts] for n in range(C)]
    most = max(map(sum, [*received, *zip(*received, strict=True)]))
    numbers = ROWS * 2 * heads_on(attention, grid)[1] * SETUP.item_bytes
    cost = layer_cost(of_windows.at(place), grid, BLOCK, ROWS)
    exchanges = [*cost.forward.exchanges, *cost.backward_input.exchanges]
    moved = [(each.operation, each.num_bytes) for each in exchanges if each.axis == "c"]
    assert moved == [("all_to_all", numbers * (most * C // (C - 1)))] * 2
    keys = {1: len(seen[1]), 3: len(seen[3]), 0: max(map(len, seen))}[place]
    kept = [_context_kept(of_windows.at(place).on(grid), grid, replace(attention, window=w), False) for w in (9, None)]
    assert kept[1] - kept[0] == pytest.approx((SETUP.positions - keys) * numbers / ROWS)
    wide = replace(of_windows, model=of_windows.model.model_copy(update={"window": SETUP.positions}))
    exchanges = layer_cost(wide.at(place), grid, BLOCK, ROWS).forward.exchanges
    assert [e.operation for e in exchanges if e.axis == "c"] == ["all_gather"]


def test_with_sinks_nothing_is_gathered_again():
    """Attention keeps copies of all keys and values."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 2, "vocab_size": 64}
    model = Model(architecture="gpt_oss", num_experts=4, experts_per_token=2, **sizes)
    cost = layer_cost(replace(SETUP, model=model), GRID, BLOCK, ROWS, "selective")
    moved = [e for work in (cost.forward, cost.backward_input) for e in work.exchanges if e.axis == "c"]
    assert sorted(e.operation for e in moved) == ["all_gather", "reduce_scatter"]


@pytest.mark.parametrize("name", ["forward", "backward_input"])
def test_attention_of_some_heads_hides_the_gather_of_the_next(name):
    """Of two parts the first gather, or the last scatter, is waited for. The other takes what outlasts attention."""
    device = DeviceModel("fast", cluster_with(5e7, devices=4).families["fast"])
    tile = Tile(Interval(0, 10), Interval(0, ROWS), (0, 1, 2, 3), GRID)
    hiding = replace(SETUP, overlaps=frozenset({"tensor"}), tensor_parts=2)
    attention = Interval(1, 2)
    for seconds in (1e-9, 1e3):
        one = lambda *_, each=seconds: each  # noqa: E731
        network = SimpleNamespace(concurrent=tuple, group_seconds=one, holder_seconds=one)
        exposed, hidden = (
            pass_cost(setup, network, getattr(layer_cost(setup, GRID, attention, ROWS), name), Site((device,), tile))
            for setup in (replace(hiding, overlaps=frozenset()), hiding)
        )
        core = _attention(hiding.on(GRID), SETUP.branches(BLOCK)[0], ROWS, GRID, 2)[name == "backward_input"]
        half = PassWork(core.products[: len(core.products) // 2])
        of_part = device.work_seconds(half, hiding.dtype, hiding.engine)
        assert hidden.tensor - exposed.tensor == pytest.approx(max(0.0, seconds - of_part))


@pytest.mark.parametrize("score_cap", [None, 50.0])
def test_nothing_overlaps_what_selective_recompute_gathers_again(score_cap):
    """Each gather waits for the scatter before it, and attention for the gather."""
    capped = {"architecture": "gemma2", "score_cap": score_cap} if score_cap else {}
    hiding = replace(SETUP, model=SETUP.model.model_copy(update=capped), overlaps=frozenset({"tensor"}), tensor_parts=2)
    both = ["all_gather", "reduce_scatter"]
    for recompute, kinds in (("none", both[1:]), ("selective", []), ("full", both)):
        work = layer_cost(hiding, GRID, BLOCK, ROWS, recompute).backward_input
        assert [e.operation for e in work.exchanges if e.axis == "c" and e.behind] == kinds


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kv_heads", [SETUP.model.num_heads, 1])
def test_exchanged_heads_are_moved_there_and_back(recompute, kv_heads):
    """Ranks have as many products as where keys and values are gathered. Selective recomputing moves nothing again."""
    setup = replace(SETUP, model=SETUP.model.model_copy(update={"num_kv_heads": kv_heads}))
    grid = TensorGrid(c=2)
    exchanging, attention = grid._replace(exchanges_heads=True), setup.branches(BLOCK)[0]
    cost, gathered = (layer_cost(setup, each, BLOCK, ROWS, recompute) for each in (exchanging, grid))
    works = [[getattr(each, name) for name in ("forward", "backward_input")] for each in (cost, gathered)]
    flops = [
        sum(p.m * p.k * p.n * p.batch * p.share for p in products) for products in (own.products for own in works[0])
    ]
    assert flops == pytest.approx([sum(p.m * p.k * p.n * p.batch * p.share for p in w.products) for w in works[1]])
    moved = [(e.operation, e.num_bytes) for work in works[0] for e in work.exchanges if e.axis == "c"]
    there, back = (
        ROWS * SETUP.positions // 2 * SETUP.item_bytes * size
        for size in (attention.query_size + 2 * attention.head_size * max(kv_heads, 2), attention.query_size)
    )
    assert sorted(moved) == sorted([("all_to_all", there), ("all_to_all", back)] * (3 if recompute == "full" else 2))


def test_an_exchange_that_cannot_cut_heads_is_refused():
    model = SETUP.model.model_copy(update={"num_heads": 12, "num_kv_heads": 6, "ffn_size": 768})
    for c, y in ((2, 1), (3, 1), (6, 1), (3, 2), (2, 6)):
        check_grid(model, TensorGrid(y=y, c=c, exchanges_heads=True))
    for c, y in ((4, 1), (8, 1), (12, 2), (2, 12)):
        with pytest.raises(PlanError, match="exchange_heads cuts a rank's"):
            check_grid(model, TensorGrid(y=y, c=c, exchanges_heads=True))
    with pytest.raises(PlanError, match="tensor c = 1; remove it, or raise c"):
        check_positions(64, TensorGrid(exchanges_heads=True), "plan")


def test_a_search_takes_the_quicker_way_for_long_rows():
    """With as many key and value heads as queries an exchange moves less; with one for all queries it moves more."""
    cluster = cluster_with(5e7, devices=4)
    for kv_heads, exchanges in ((16, True), (1, False)):
        model = SETUP.model.model_copy(update={"num_heads": 16, "num_kv_heads": kv_heads, "num_layers": 1})
        setup = replace(SETUP, model=model, positions=C * LEAST_CONTEXT)
        costs = StageCosts(setup, cluster, pools_of(cluster, list(cluster.families), setup))
        grids = [grid for grid in costs.grids[0] if grid == TensorGrid(c=C, exchanges_heads=grid.exchanges_heads)]
        ways = {grid.exchanges_heads: sum(costs.passes(0, grid, BLOCK, 1)) for grid in grids}
        assert min(ways, key=ways.__getitem__) == exchanges and True in ways


def test_a_search_cuts_positions_by_worth_where_devices_are_unlike():
    """A row at a time on both devices is faster than a pipeline of them, and than equal parts."""
    cluster = cluster_with(5e7, devices=1)
    families = {name: family.model_copy(update={"memory_bytes": 10**10}) for name, family in cluster.families.items()}
    cluster = cluster.model_copy(update={"families": families})
    setup = replace(SETUP, model=SETUP.model.model_copy(update={"num_layers": 2}), positions=2 * LEAST_CONTEXT)
    result = search(setup, 2, cluster)
    best, text = result.best, "; ".join(reasons(result))
    assert "stage 0 (2 blocks on fast+slow)" in text and "a row is computed by ranks of several families" in text
    assert "2 microbatches of 1 row;" in text and "in flight" not in text and "side by side" not in text
    plans = [each.plan for each in search(setup, 2, cluster, limits=Limits(None, None, None)).plans]
    assert plans[0] == best.plan and len(set(plans)) == len(plans) > 1
    (tile,) = best.plan.tiles
    fast, slow = tile.tensor.position_shares
    assert tile.family == "fast+slow" and 1.9 < fast / slow < 2.2 and best.plan.microbatches == 2
    equal = replace(best.plan, tiles=(replace(tile, tensor=TensorGrid(c=2)),))
    assert predict(setup, equal, cluster).step_seconds > 1.3 * best.seconds
    assert best.plain_seconds is not None and best.plain_seconds > 1.3 * best.seconds
    assert search(replace(setup, positions=LEAST_CONTEXT), 2, cluster).best.plan.tiles[0].tensor.c == 1


def test_a_search_cuts_one_row_over_nodes_of_a_family():
    """Of two nodes a pipeline would leave one idle, for there is one row. Eight rows are a pipeline, or replicas."""
    run = DescribedRun(
        hidden=512,
        layers=2,
        heads=8,
        positions=4 * LEAST_CONTEXT,
        architecture="llama",
        tensor=1,
        pipeline=1,
        data=4,
        microbatch=1,
        global_batch=4,
        devices_per_node=2,
        accelerator="H100",
        network="NDR",
        dtype="bf16",
    )
    setup = replace(SETUP, model=run.model, positions=4 * LEAST_CONTEXT, dtype="bf16")
    one, many = (search(setup, rows, run.cluster) for rows in (1, 8))
    (tile,), text = one.best.plan.tiles, "; ".join(reasons(one))
    assert tile.tensor == TensorGrid(c=4) and "a row is computed by ranks of several nodes" in text
    assert one.best.plain_seconds is not None and one.best.plain_seconds > 1.2 * one.best.seconds
    assert not many.best.is_mixed


def test_tiles_of_each_size_are_tried_once(monkeypatch):
    cluster, tried = cluster_with(5e7, devices=2), []
    families = {name: family.model_copy(update={"memory_bytes": 10**10}) for name, family in cluster.families.items()}
    cluster = cluster.model_copy(update={"families": families})
    make = Simulator._predictor

    def recorded(self, plan, *rest):
        tried.extend([plan] if plan.tiles[0].family == "fast+slow" else [])
        return make(self, plan, *rest)

    monkeypatch.setattr(Simulator, "_predictor", recorded)
    setup = replace(SETUP, model=SETUP.model.model_copy(update={"num_layers": 2}), positions=4 * LEAST_CONTEXT)
    search(setup, 2, cluster)
    whole = [plan for plan in tried if not plan.unused]
    assert [len(plan.tiles) for plan in whole] == [1, 2] and len(set(tried)) == len(tried)


def test_devices_of_unlike_dtypes_have_no_tile_together():
    cluster, items = cluster_with(5e7, devices=1), Interval(0, SETUP.model.num_items)
    setup = replace(SETUP, positions=2 * LEAST_CONTEXT)
    tiles = tuple(Tile(items, Interval(i, i + 1), (i,), family=name) for i, name in enumerate(("fast", "slow")))
    predictor = Predictor(setup, Plan(tiles, 1, 2), cluster)
    assert [plan.tiles[0].recompute for plan in positions_by_worth(predictor)] == ["none", "selective", "full"]
    predictor.setup = replace(setup, by_family=(("slow", "fp16"),))
    assert list(positions_by_worth(predictor)) == []


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=8), st.integers(3, 12).map(lambda power: 3 << power))
def test_shares_are_whole_and_near_the_speeds(speeds, units):
    shares, total = shares_of(speeds, units), 48 if units >= 48 else units
    if not shares:
        assert max(speeds) - min(speeds) < 2 * sum(speeds) / total
        return
    assert units % sum(shares) == 0 and min(shares) >= 1
    for share, speed in zip(shares, speeds, strict=True):
        wanted = max(1, speed * sum(shares) / sum(speeds))
        assert abs(share - wanted) < len(speeds)


def test_a_rank_keeps_its_positions_and_sends_them():
    assert message_bytes(SETUP, GRID, ROWS) * C == message_bytes(SETUP, ONE_RANK, ROWS)
    kept, own = (row_bytes(SETUP, grid, [BLOCK], "full", splits=False, rows=1).kept for grid in (ONE_RANK, GRID))
    assert own * C == pytest.approx(kept)
    of_rank = SETUP.on(GRID)
    assert of_rank.positions * C == SETUP.positions and SETUP.on(ONE_RANK) is SETUP
    none, again = (layer_kept(of_rank, GRID, BLOCK, recompute) for recompute in ("none", "selective"))
    assert again < none < layer_kept(SETUP, ONE_RANK, BLOCK, "none")


def test_short_rows_have_no_more_grids_and_long_ones_those_of_y_and_c():
    nodes = (tuple(range(8)),)
    pool = Pool("fast", ("fast",), None, nodes)  # pyright: ignore[reportArgumentType] - no device is asked
    sizes = replace(SETUP, positions=LEAST_CONTEXT).context_sizes
    assert sizes == [] and pool.grids(sizes) == pool.grids()
    sizes = replace(SETUP, positions=6 * LEAST_CONTEXT).context_sizes
    assert sizes == [2, 3, 4, 6]
    more = set(pool.grids(sizes)) - set(pool.grids())
    both = [TensorGrid(c=c, exchanges_heads=exchanges) for c in sizes for exchanges in (False, True)]
    assert more == {grid._replace(y=y) for grid in both for y in range(1, 8 // grid.c + 1)}


def test_a_row_of_odd_length_is_not_cut():
    assert replace(SETUP, positions=2 * LEAST_CONTEXT + 1).context_sizes == []


@pytest.mark.parametrize("window", [None, 8, 24, 1000])
@pytest.mark.parametrize("c", [1, 2, 4, 8])
def test_masks_and_scores_are_those_of_the_rank_with_the_most_pairs(monkeypatch, c, window):
    """The pairs are those of the keys that attention is given for the queries of each interval."""
    shapes: list[int] = []

    def count(queries, keys, *_, backend):
        shapes[-1] += queries.shape[2] * keys.shape[2]
        return queries

    monkeypatch.setattr(attention_of_model, "attend", count)
    grid, attention = TensorGrid(c=c), replace(SETUP.branches(BLOCK)[0], window=window)
    row, everything = torch.empty(1, 1, SETUP.positions, 1), Interval(0, SETUP.positions)
    for intervals in cut_zigzag(SETUP.positions, (1,) * c):
        shapes.append(0)
        attention_of_model.attend_at(row[:, :, : SETUP.positions // c], row, row, attention, intervals, [everything])
    setup = replace(SETUP, masks_documents=True).on(grid)
    assert computed_pairs(setup, window) == max(shapes)
    assert mask_bytes(setup, grid, attention, "none", 1) == max(shapes) * setup.item_bytes


@pytest.mark.parametrize("cap", [None, 50.0])
def test_documents_and_caps_are_priced_by_the_pairs_that_are_computed(cap):
    """Without a window the last rank computes (2c + 2) / 4c of c times its own positions squared."""
    attention = replace(SETUP.branches(BLOCK)[0], score_cap=cap)
    setup = replace(SETUP, masks_documents=True)
    (whole, _), (own, _) = (_attention(setup.on(grid), attention, ROWS, grid) for grid in (ONE_RANK, GRID))
    flops, own_flops = (sum(p.m * p.k * p.n * p.batch * p.share for p in work.products) for work in (whole, own))
    assert own_flops / flops == pytest.approx((C + 1) / 2 / C**2)
    assert own.passed_bytes == pytest.approx(whole.passed_bytes * (C + 1) / 2 / C**2)
    assert (whole.passed_bytes > 0) == (cap is not None)


def test_a_row_that_fits_in_no_other_way_is_cut_by_c(monkeypatch):
    """There is one row, of one block, whose two heads allow y = 2 at most."""
    model = SETUP.model.model_copy(update={"num_heads": 2, "num_kv_heads": 2, "num_layers": 1})
    setup = replace(SETUP, model=model, positions=8 * LEAST_CONTEXT)
    plenty = cluster_with(5e7, devices=4)
    size = {"memory_bytes": 500_000_000, "reserve_bytes": 0}
    families = {name: family.model_copy(update=size) for name, family in plenty.families.items()}
    cluster = plenty.model_copy(update={"families": families})
    assert max(tile.tensor.c for tile in search(setup, 1, cluster).best.plan.tiles) > 1
    monkeypatch.setattr(Setup, "context_sizes", [])
    with pytest.raises(PlanError):
        search(setup, 1, cluster)
