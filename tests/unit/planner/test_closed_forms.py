"""What ranks plans before they are simulated: near what decides, and cut as no other cut is better."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpctrain.planner.search.cut as cut
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.errors import PlanError
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.tiling import Plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.search.cut import GIVEN_ONE_BY_ONE, CutShape, cut_blocks, deal_out
from hpctrain.planner.search.pools import Pool
from hpctrain.planner.search.search import Search, search
from hpctrain.planner.search.shortlist import SLOWEST_SHARE, Shortlists
from hpctrain.planner.search.space import PoolUse, Shape, Space, arrangements
from hpctrain.planner.search.stage_variants import BlockLine, StageVariant, StageVariants
from hpctrain.sharding.grid import ONE_RANK
from tests.examples import costly
from tests.unit.small_searches import (
    ALL_IN_ONE,
    BUCKETS,
    EVERYTHING,
    cases,
    cluster_of,
    every_arrangement,
    setup_of,
    step_seconds,
)


def lie_the_same(pool: Pool, size: int, replicas: int) -> bool:
    """Say whether all stages of so many replicas, of `size` ranks each, have equal places on a pool's nodes."""
    in_node = {len(ranks) // size for ranks in pool.nodes}
    return len(in_node) == len(pool.families) == 1 and not (replicas % min(in_node) and min(in_node) % replicas)


@settings(max_examples=costly(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(buckets=(*BUCKETS, ALL_IN_ONE)))
def test_an_estimate_is_near_what_is_simulated(case):
    setup, batch, cluster, space = case
    searching = Search(setup, batch, cluster, None, space, EVERYTHING, lambda: 0.0)
    searching.run()
    for layout in searching.layouts[:20]:
        seconds = step_seconds(setup, searching.scorer.plan(layout), cluster)
        # As if all ranks of a pool exchanged at once: it does not know that those of stages inside a node, and unused
        # ones, go through no NIC.
        resolved = zip(itertools.chain(*layout.shape.pipelines), itertools.chain(*layout.shape.choices), strict=True)
        if all(lie_the_same(searching.costs.pools[pool], c.grid.size, c.replicas) for pool, c in resolved):
            assert 0.4 * seconds <= layout.seconds <= 2 * seconds, "what ranks plans is near what decides"


SETUP = setup_of(8)
NEAR = {"a": 1e9, "b": 1.01e9}
"""Speeds of families that are two pools, and take about as long."""


def on_the_same_nodes(cluster: Cluster) -> Cluster:
    """Return the cluster with a device of each family on each node."""
    nodes = cluster.nodes[0].model_copy(update={"devices": dict.fromkeys(cluster.families, 1)})
    return cluster.model_copy(update={"nodes": (nodes,)})


def estimated_by_simulated(shape: Shape, cluster: Cluster) -> float:
    """Return a step's estimated seconds by those of its simulation, where each replica has a row."""
    layout, plan = layout_and_plan(shape, cluster)
    return layout.seconds / step_seconds(SETUP, plan, cluster)


def layout_and_plan(shape: Shape, cluster: Cluster) -> tuple[CutShape, Plan]:
    rows = sum(max(choice.replicas for choice in row) for row in shape.choices)
    space = Space((shape.microbatches,), 1, (shape.zero,))
    scorer = Search(SETUP, shape.microbatches * rows, cluster, None, space, EVERYTHING, lambda: 0.0).scorer
    layout = scorer.score(shape)
    assert layout
    return layout, scorer.plan(layout)


@pytest.mark.parametrize("nic", [2e5, 5e5, 1e6, 2e6, 5e6])
@pytest.mark.parametrize(
    "pools, devices, pipelines",
    [
        pytest.param("a", 1, ((0,),), id="a stage on each node"),
        pytest.param("a", 2, ((0,),), id="two stages on each node"),
        pytest.param("ab", 1, ((0,), (1,)), id="two pipelines on the same nodes"),
    ],
)
def test_an_estimate_knows_messages_that_share_ports_of_nodes(pools, devices, pipelines, nic):
    """By the simulation, which lets messages share ports as a fluid, and has an extra warm-up where that is faster."""
    cluster = cluster_of([(name, 4 // devices, devices) for name in pools], speeds=NEAR, nic=nic)
    if len(pools) > 1:
        cluster = on_the_same_nodes(cluster)
    shape = Shape(pipelines, ((PoolUse(ONE_RANK, 4, 1),),) * len(pools), 16, 1)
    assert estimated_by_simulated(shape, cluster) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("nic", [2e5, 1e6, 5e6])
@pytest.mark.parametrize(
    "tables, uses",
    [
        pytest.param([("a", 4, 2)], [(2, 4)], id="replicas on two nodes"),
        pytest.param([("a", 3, 4)], [(4, 3)], id="replicas that straddle a node"),
        pytest.param([("a", 6, 4)], [(4, 6)], id="replicas on one node and a half"),
        pytest.param([("a", 4, 1), ("a", 1, 4)], [(2, 4)], id="from small nodes to a large one"),
        pytest.param([("a", 1, 4), ("a", 4, 1)], [(2, 4)], id="from a large node to small ones"),
        pytest.param([("a", 8, 1), ("b", 1, 8)], [(1, 8), (1, 8)], id="from a pool of small nodes to a large one"),
        pytest.param([("a", 1, 8), ("b", 8, 1)], [(1, 8), (1, 8)], id="from a pool of a large node to small ones"),
        pytest.param([("a", 1, 2), ("b", 2, 4)], [(1, 2), (1, 8)], id="from few replicas to many"),
        pytest.param([("a", 2, 4), ("b", 1, 2)], [(1, 8), (1, 2)], id="from many replicas to few"),
    ],
)
def test_an_estimate_knows_how_replicas_lie_on_nodes(tables, uses, nic):
    choices = tuple(PoolUse(ONE_RANK, *use) for use in uses)
    shape = Shape((tuple(range(len(uses))),), (choices,), 16, 1)
    assert estimated_by_simulated(shape, cluster_of(tables, speeds=NEAR, nic=nic)) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("nic", [2e5, 1e6, 5e6])
@pytest.mark.parametrize("are_apart", [True, False])
def test_an_estimate_knows_which_nodes_pipelines_have_together(are_apart, nic):
    """Two stages exchange with four: on the same nodes all but one do so with stages of other nodes."""
    cluster = cluster_of([("a", 4, 1), ("b", 4, 1)], speeds=NEAR, nic=nic)
    shape = Shape(((0,), (1,)), ((PoolUse(ONE_RANK, 4, 1),), (PoolUse(ONE_RANK, 2, 1),)), 16, 1)
    ratio = estimated_by_simulated(shape, cluster if are_apart else on_the_same_nodes(cluster))
    assert ratio == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("zero", [2, 3])
def test_exchanges_in_every_pass_know_how_replicas_lie_on_nodes(zero):
    """Of four stages with three replicas each, on nodes of four, two are inside a node."""
    cluster = cluster_of([("a", 3, 4)], nic=1e6)
    layout, plan = layout_and_plan(Shape(((0,),), ((PoolUse(ONE_RANK, 4, 3),),), 16, zero), cluster)
    costs, (stages,) = Predictor(SETUP, plan, cluster).costs, layout.stages
    for stage, tile in zip(stages, plan.tiles[::3], strict=True):
        forward, backward, _ = stage.variant.passes(stage.blocks)
        own = costs.tiles[tile]
        assert forward == pytest.approx(sum(each.seconds for each in own.forward))
        assert backward == pytest.approx(sum(each.seconds for each in own.backward))
    seconds = [stage.variant.passes(1).both for stage in stages]
    assert min(seconds[1:3]) > 5 * max(seconds[0], seconds[3])


@settings(max_examples=costly(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=cases(batches=(4, 6, 16), buckets=(*BUCKETS, ALL_IN_ONE)), share=st.sampled_from([0.2, 0.35, 0.5, 0.7, 0.9])
)
def test_what_is_scored_fits_where_memory_is_short(case, share):
    """Then stages recompute, have more or fewer blocks, or go through their rows in chunks."""
    setup, batch, cluster, space = case
    space = replace(space, recompute=("none", "full"))
    most = max(stage.memory.total for stage in search(setup, batch, cluster, None, space).best.prediction.memory)
    tight = {name: f.model_copy(update={"memory_bytes": int(most * share)}) for name, f in cluster.families.items()}
    cluster = cluster.model_copy(update={"families": tight})
    searching = Search(setup, batch, cluster, None, space, EVERYTHING, lambda: 0.0)
    try:
        searching.run()
    except PlanError as error:
        assert "MiB too few" in str(error)
        return
    for layout in searching.layouts[:20]:
        plan = searching.scorer.plan(layout)
        check_tiling(plan, setup.model.num_items)
        for stage in Predictor(setup, plan, cluster).memory:
            assert stage.memory.total <= 1.02 * stage.available_bytes, "what is scored has about the memory it needs"


@settings(max_examples=costly(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(), st.integers(2, 6))
def test_choices_that_are_not_scored_are_none_of_the_best(case, per_group):
    setup, batch, cluster, space = case
    scorer = Search(setup, batch, cluster, None, space, EVERYTHING, lambda: 0.0).scorer
    lists = Shortlists(scorer, per_group)
    (microbatches,), row = space.microbatches, tuple(range(len(scorer.costs.pools)))
    rows = batch // microbatches
    for pool in row:
        result = lists.choices(microbatches, pool, row, (row,))
        every, best = lists._rates(pool, rows)
        others = sum(lists._rates(other, rows)[1] for other in row if other != pool)
        considered = [(rate, choice) for rate, choice in every if rate >= best * SLOWEST_SHARE]
        scores = [
            lists._score(pool, choice, rate, others, rows, microbatches, len(row) == 1) for rate, choice in considered
        ]
        order = sorted(range(len(scores)), key=lambda i: (scores[i], i))
        assert result == [considered[i][1] for i in order[: len(result)]]
        assert len(result) >= min(2, len(considered))


def test_unknown_host_memory_makes_no_choice_short_of_memory():
    """A choice that is short ranks last, so where all were, all had to be looked at."""
    for host_bytes in (None, 10**12):
        cluster = cluster_of([("a", 2, 4), ("b", 2, 4)], 40_000_000)
        nodes = (node.model_copy(update={"host_memory_bytes": host_bytes}) for node in cluster.nodes)
        cluster = cluster.model_copy(update={"nodes": tuple(nodes)})
        scorer = Search(setup_of(6), 16, cluster, None, Space(), EVERYTHING, lambda: 0.0).scorer
        lists = Shortlists(scorer, 4)
        every, best = lists._rates(0, 4)
        assert not any(lists._score(0, choice, rate, best, 4, 4, False)[0] for rate, choice in every)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_blocks_are_cut_as_no_other_cut_is_better(data):
    each = data.draw(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.7]), min_size=1, max_size=4))
    num_blocks = data.draw(st.integers(1, 9))
    stages = []
    for seconds in each:
        base, kept, again = data.draw(st.tuples(st.sampled_from([0.0, 0.4]), st.integers(0, 5), st.integers(0, 9)))
        chunked = data.draw(st.tuples(st.sampled_from([1.1, 1.6]), st.sampled_from([1, 4]), st.integers(0, 9)))
        variants = [(1.0, 1, kept), (1.3, 1, max(kept, again)), chunked]
        stages.append(
            StageVariants(
                tuple(
                    StageVariant(
                        "",
                        1,
                        BlockLine(base * head, seconds * more),
                        BlockLine(0, 0),
                        most,
                    )
                    for more, head, most in variants
                )
            )
        )
    every = [blocks for blocks in itertools.product(range(1, 10), repeat=len(each)) if sum(blocks) == num_blocks]
    times = [max(stage.seconds(k) for stage, k in zip(stages, each, strict=True)) for each in every]
    result = cut_blocks(num_blocks, stages)
    if not times or min(times) == float("inf"):
        assert result is None
    else:
        assert max(stage.seconds(k) for stage, k in zip(stages, result, strict=True)) == min(times)
        assert sum(result) == num_blocks


@pytest.mark.parametrize("one_by_one", [GIVEN_ONE_BY_ONE, 0])
@settings(max_examples=200, deadline=None)
@given(
    pipelines=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1.0, 1.7, 3.0])), min_size=1, max_size=3),
    num_rows=st.integers(1, 12),
)
def test_rows_are_cut_as_no_other_cut_is_better(one_by_one, pipelines, num_rows):
    least = [first for first, _ in pipelines]
    times = [lambda n, least=least, speed=speed: -(-n // least) / speed for least, speed in pipelines]
    every = itertools.product(*(range(first, num_rows + 1) for first in least))
    every = [max(of(n) for of, n in zip(times, rows, strict=True)) for rows in every if sum(rows) == num_rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "GIVEN_ONE_BY_ONE", one_by_one)
        result = deal_out(num_rows, least, times)
    if not every:
        assert result is None
    else:
        assert sum(result) == num_rows and all(n >= first for n, first in zip(result, least, strict=True))
        assert max(of(n) for of, n in zip(times, result, strict=True)) == min(every)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 40.0)), min_size=2, max_size=5), st.integers(100, 3000))
def test_many_rows_are_cut_as_if_they_were_given_one_by_one(pipelines, num_rows):
    least = [first for first, _ in pipelines]
    times = [lambda n, least=least, speed=speed: (3 + -(-n // least)) / speed for least, speed in pipelines]
    result = deal_out(num_rows, least, times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "GIVEN_ONE_BY_ONE", num_rows)
        assert result == deal_out(num_rows, least, times)
    assert sum(result) == num_rows


@pytest.mark.parametrize(
    ("num_pools", "count"), [(1, 1), (2, 2 + 3), (3, 3 + 3 * 3 + 13), (4, 4 + 6 * 3 + 4 * 13 + 73)]
)
def test_every_arrangement_is_there_once(num_pools, count):
    result = list(arrangements(num_pools))
    assert len(result) == len(set(result)) == count, "Lah numbers of all subsets"
    assert set(result) == every_arrangement(list(range(num_pools)))
