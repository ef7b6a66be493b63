"""The search for a plan: as good as looking at every plan of its space, and indifferent to names."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpctrain.planner.search.search as search_module
from hpctrain.config.clusters.cluster import Cluster
from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.errors import PlanError, TopologyError
from hpctrain.jobs.common import ready_miniature
from hpctrain.jobs.plan import command
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.file import load_plan
from hpctrain.planner.explain import reasons
from hpctrain.planner.prediction.forecast import BUSY, Forecast
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.pools import Pool, pools_of
from hpctrain.planner.search.search import Limits, Search, search
from hpctrain.planner.search.space import PoolUse, Shape, Space
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import is_attention
from tests.examples import costly
from tests.unit.small_searches import (
    EVERYTHING,
    FAST_NETWORK,
    KNOWN_ALONE,
    NETWORKS,
    SLOW,
    cases,
    cluster_of,
    every_plan,
    setup_of,
    step_seconds,
)


@pytest.mark.timeout(900)
@settings(max_examples=costly(160), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases((*NETWORKS, SLOW)))
def test_as_good_as_looking_at_every_plan(case):
    setup, batch, cluster, space = case
    KNOWN_ALONE.clear()
    seconds = [step_seconds(setup, plan, cluster) for plan in every_plan(setup, batch, cluster, space)]
    searching = Search(setup, batch, cluster, None, space, EVERYTHING, lambda: 0.0)
    result = searching.run()
    plans, best = result.plans, result.best
    assert best.seconds <= min(seconds) * (1 + 1e-9), "cuts inside of blocks make plans faster"
    if not any(tile.items.start and not is_attention(tile.items.start) for timed in plans for tile in timed.plan.tiles):
        assert best.seconds == pytest.approx(min(seconds), rel=1e-9)
    assert result.is_complete
    assert searching.num_simulated == len(searching.layouts) <= len(seconds)
    check_tiling(best.plan, setup.model.num_items)


@pytest.mark.parametrize("memory", [40_000_000, 1_600_000, 1_400_000, 1_300_000])
def test_memory_decides_how_many_are_in_flight_where_messages_are_slow(memory):
    cluster = cluster_of([("a", 1, 1), ("b", 1, 1), ("c", 1, 1)], memory=memory, nic=1e6)
    result = best(cluster, batch=16, setup=setup_of(12, vocabulary=512), largest_grid=1, microbatches=(16,))
    plan, delay = result.best.plan, result.best.plain_seconds
    assert delay > 1.2 * result.best.seconds and max(tile.extra_warmup for tile in plan.tiles) >= 2
    assert result.best.prediction.fits
    assert any(
        "in flight" in reason and f"{delay / result.best.seconds - 1:.1%}" in reason for reason in reasons(result)
    )


@pytest.mark.parametrize("bucket_bytes", [None, 200_000])
def test_a_search_counts_each_sum_of_gradients_that_a_prediction_has(monkeypatch, bucket_bytes):
    """A fixed cost of sums, far above all else, makes both longer by as much."""
    setup, cluster = replace(setup_of(12), bucket_bytes=bucket_bytes), cluster_of([("a", 4, 1)])
    shape = Shape(((0,),), ((PoolUse(TensorGrid(), 2, 2),),), 2, 1)

    def seconds() -> tuple[float, float]:
        scorer = Search(setup, 8, cluster, None, Space((2,), 1, (1,)), EVERYTHING, lambda: 0.0).scorer
        layout = scorer.score(shape)
        return layout.seconds, Predictor(setup, scorer.plan(layout), cluster).predict().step_seconds

    before, inner = seconds(), ClusterNetwork.holder_seconds
    monkeypatch.setattr(
        ClusterNetwork,
        "holder_seconds",
        lambda self, operation, *rest: inner(self, operation, *rest) + 100.0 * (operation == "reduce_scatter"),
    )
    score, step = (now - then for now, then in zip(seconds(), before, strict=True))
    num_sums = round(step / 100)
    assert num_sums > 1 if bucket_bytes else num_sums == 1
    assert score == pytest.approx(step, rel=1e-3)


# ---- what a search is indifferent to ---------------------------------------------------------------------------------


def best(cluster: Cluster, batch: int = 8, setup: Setup | None = None, **space):
    return search(setup or setup_of(6), batch, cluster, space=Space(**{"largest_grid": 2} | space), limits=EVERYTHING)


@lru_cache(None)
def best_with_few(tables: tuple[tuple[str, int, int], ...], network: tuple[tuple[str, float], ...]):
    return best(cluster_of(list(tables), **dict(network)), zero=(1,), microbatches=(4,))


TWO_FAMILIES = ("a", 1, 2), ("b", 1, 1), ("a", 1, 2)


@pytest.mark.parametrize("tables", sorted(set(itertools.permutations(TWO_FAMILIES))), ids=str)
def test_the_order_of_nodes_changes_nothing(tables):
    ordered = best_with_few((("a", 2, 2), ("b", 1, 1)), ())
    result = best_with_few(tables, ())
    assert result.best.seconds == pytest.approx(ordered.best.seconds, rel=1e-9)


@pytest.mark.parametrize("split", [[("a", 1, 2), ("b", 1, 2)], [("a", 2, 1), ("b", 2, 1)], [("b", 1, 3), ("a", 1, 1)]])
def test_a_family_by_two_names_is_one(split):
    """Where networks cost nothing: collectives of several families take other routes than those of one."""
    speeds = {"a": 2e9, "b": 2e9}
    whole = cluster_of([("a", count, devices) for _, count, devices in split], speeds=speeds, **FAST_NETWORK)
    one, two = best(whole), best(cluster_of(split, speeds=speeds, **FAST_NETWORK))
    assert len(one.pools) == len(two.pools) == 1
    assert two.best.seconds == pytest.approx(one.best.seconds, rel=1e-6)


@pytest.mark.parametrize("tables", [[("a", 2, 2)], [("a", 1, 2), ("b", 1, 1)]])
def test_a_cluster_that_is_slower_in_everything_takes_as_much_longer(tables):
    once, thrice = (best(cluster_of(tables, times=times), microbatches=(2, 4)) for times in (300.0, 900.0))
    assert thrice.best.seconds == pytest.approx(3 * once.best.seconds, rel=1e-3), "but for launches"


@settings(max_examples=costly(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([[("a", 1, 1)], [("a", 3, 1)], [("a", 1, 2), ("b", 1, 1)]]),
    st.sampled_from("abc"),
    st.sampled_from([{}, {"nic": 1e7}, {"latency": 1e-3}]),
)
def test_one_more_device_never_hurts(tables, more, network):
    """But for agreeing on the step, which all ranks do, those too that are unused."""
    known = tuple(network.items())
    before, after = (best_with_few(tuple(result), known) for result in (tables, [*tables, (more, 1, 1)]))
    agreeing = 6 * network.get("latency", 1e-5)
    assert after.best.seconds <= before.best.seconds + agreeing


@pytest.mark.parametrize(("nodes", "devices"), [(1, 4), (4, 1), (2, 2)])
def test_equal_devices_get_equal_parts(nodes, devices):
    result = best(cluster_of([("a", nodes, devices)]), batch=16, setup=setup_of(8, vocabulary=2))
    tiles = result.best.plan.tiles
    assert not result.best.plan.unused
    assert len({tile.rows.size for tile in tiles}) == 1
    assert len({tile.items.intersect(Interval(1, 9)).size for tile in tiles}) == 1
    assert len({tile.tensor for tile in tiles}) == 1
    assert Forecast.of(result.best.predictor).prediction.waterfall_seconds[BUSY] > 0.8 * result.best.seconds


def test_faster_devices_do_more():
    result = best(cluster_of([("a", 2, 1), ("c", 2, 1)], **FAST_NETWORK), batch=24)
    work: dict[str, int] = {}
    for tile in result.best.plan.tiles:
        work[tile.family] = work.get(tile.family, 0) + tile.rows.size * tile.items.intersect(Interval(1, 7)).size
    assert 2.9 < work["c"] / work["a"] <= 5, "3.7 times as fast, in whole blocks or rows"


# ---- memory, limits, errors ------------------------------------------------------------------------------------------


def test_a_device_short_of_memory_recomputes_or_keeps_less_of_the_state():
    setup, tables = setup_of(8), [("a", 4, 1)]
    roomy = best(cluster_of(tables), setup=setup)
    most = max(stage.memory.total for stage in roomy.best.prediction.memory)
    tight = best(cluster_of(tables, memory=int(most * 0.9)), setup=setup)
    tighter = best(cluster_of(tables, memory=int(most * 0.45)), setup=setup)
    assert roomy.best.seconds <= tight.best.seconds <= tighter.best.seconds
    assert tight.best.prediction.fits and tighter.best.prediction.fits
    tiles = tighter.best.plan.tiles
    changed = {tile.recompute for tile in tiles} == {"full"} or tiles[0].zero >= 2 or tiles[0].items.size < 10
    assert changed, "less is kept by somebody"


def test_at_the_loss_rows_go_in_chunks_where_memory_is_short():
    """One of which is kept at a time: that costs less than to compute blocks again."""
    setup = setup_of(4, vocabulary=512)
    tables, space = [("a", 2, 1)], {"microbatches": (1,), "largest_grid": 1}
    roomy = best(cluster_of(tables), batch=16, setup=setup, **space).best
    most = max(stage.memory.total for stage in roomy.prediction.memory)
    result = best(cluster_of(tables, memory=int(most * 0.6)), batch=16, setup=setup, **space)
    (row_chunks,) = {tile.row_chunks for tile in result.best.plan.tiles}
    assert row_chunks > 1 and {tile.recompute for tile in result.best.plan.tiles} == {"none"}
    assert result.best.prediction.fits and result.best.seconds < 1.1 * roomy.seconds
    assert any(f"rows go in {row_chunks} chunks" in reason for reason in reasons(result))


def test_what_fits_nowhere_is_reported_with_the_numbers():
    with pytest.raises(PlanError) as error:
        best(cluster_of([("a", 2, 1), ("b", 1, 1)], memory=120_000))
    summary = str(error.value)
    assert "no plan of 2 a and 1 b on 3 nodes, by ib fits in memory; the nearest (" in summary
    assert "a rank with items [" in summary and "MiB and has 0.1 MiB: " in summary
    assert "MiB too few; use more devices, or shorter sequences (data.sequence_length is 16)" in summary


def test_the_answer_depends_on_the_budget_alone():
    cluster, setup = cluster_of([("a", 2, 2), ("b", 2, 1), ("c", 1, 2)]), setup_of(8)
    limits = Limits(scored=200, simulated=4)
    result = [search(setup, 16, cluster, limits=limits) for _ in range(2)]
    assert result[0].best.plan == result[1].best.plan
    assert result[0].searched == result[1].searched
    assert 200 <= result[0].searched["scored"] < 220 and result[0].searched["timed"] <= 2 * 5
    assert not result[0].is_complete
    more = search(setup, 16, cluster)
    assert more.best.seconds <= result[0].best.seconds


def test_no_candidate_that_may_be_faster_is_left(monkeypatch):
    """Where the budget suffices, each layout is simulated whose estimate, less its error, is below the best plan."""
    monkeypatch.setattr(search_module, "MOST_EQUIVALENT", 1000)
    cluster, limits = cluster_of([("a", 2, 1), ("c", 2, 1)]), Limits(scored=300, simulated=1000)
    searching = Search(setup_of(6), 8, cluster, None, Space(), limits, lambda: 0.0)
    result = searching.run()
    simulated = {id(plan.layout) for plan in result.plans}
    promising = [
        layout
        for layout in searching.layouts
        if layout.seconds * (1 - search_module.ESTIMATE_ERROR) - layout.saved_seconds < result.best.seconds
    ]
    assert len(promising) > 3
    assert all(id(layout) in simulated for layout in promising)
    assert len(simulated) < len(searching.layouts), "others are not"


def test_a_limit_in_seconds_still_gives_a_plan():
    ticks = itertools.count()
    result = search(
        setup_of(8), 16, cluster_of([("a", 2, 2), ("c", 1, 2)]), limits=Limits(seconds=0.0), clock=lambda: next(ticks)
    )
    assert result.best.prediction.fits
    assert result.searched["timed"] == 1 and not result.is_complete


def test_a_family_behind_two_fabrics_is_two_pools():
    """What the replicas of a stage exchange stays inside a fabric."""
    cluster = ready_miniature("ib-roce").cluster
    same = cluster.model_copy(update={"families": cluster.families})
    assert len(pools_of(same, list(same.families))) == 2
    one = cluster_of([("a", 1, 4)])
    (nodes,) = one.nodes
    other = nodes.model_copy(update={"nics": (nodes.nics[0].model_copy(update={"send_bytes_per_second": 1e8}),)})
    two = one.model_copy(update={"nodes": (nodes, other)})
    pools = pools_of(two, ["a"])
    assert [pool.name for pool in pools] == ["a on ib", "a on ib"] and [pool.num_devices for pool in pools] == [4, 4]


def test_families_of_equal_figures_on_a_node_have_grids_together_as_one_family_has():
    """There is one block and one row, so only a tensor grid uses both devices."""
    cluster = cluster_of([("a", 1, 1), ("b", 1, 1)], speeds={"a": 1e9, "b": 1e9})
    nodes = cluster.nodes[0].model_copy(update={"devices": {"a": 1, "b": 1}})
    result = search(setup_of(1), 1, cluster.model_copy(update={"nodes": (nodes,)}))
    (tile,) = result.best.plan.tiles
    assert tile.family == "a+b" and tile.ranks == (0, 1) and tile.tensor.c == 1
    assert not result.best.is_mixed and result.best.describe(["a+b"]).startswith("a+b: TP2")
    assert "positions" not in "; ".join(reasons(result))


def pool_of(sizes: Sequence[int], made: type[tuple] = tuple) -> Pool:
    """Return a pool of nodes that have so many devices."""
    starts = itertools.accumulate(sizes, initial=0)
    nodes = made(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False))
    return Pool("a", ("a",), None, nodes)  # pyright: ignore[reportArgumentType] - no device is asked


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 2), st.integers(1, 7), st.sampled_from([1, 2])
)
def test_stages_that_lie_alike_have_as_many_slots_on_each_node(sizes, size, replicas, stages):
    pool = pool_of(sizes)
    slots = pool.slots(size)
    node_of = {rank: number for number, ranks in enumerate(pool.nodes) for rank in ranks}

    def counts(first: int) -> list[tuple[int, int]]:
        """Return how many of the slots each node has, and how many it could have."""
        nodes = [node_of[slot[0]] for slot in slots[first : first + stages * replicas]]
        return [(nodes.count(node), len(pool.nodes[node]) // size) for node in dict.fromkeys(nodes)]

    for first in range(0, len(slots) - stages * replicas + 1, replicas):
        alike = pool.first_equivalent(first, size, replicas, stages)
        assert alike <= first and alike % replicas == 0 and counts(alike) == counts(first)


def test_one_short_node_does_not_make_all_stages_unlike():
    pool = pool_of([8] * 1024 + [7])
    for replicas, number in ((1, 2), (4, 2), (12, 3), (64, 1)):
        firsts = range(0, len(pool.slots(1)) - replicas + 1, replicas)
        assert len({pool.first_equivalent(first, 1, replicas) for first in firsts}) == number


def test_nodes_are_gone_through_once_for_all_stages():
    class Nodes(tuple):
        times = 0

        def __iter__(self):
            Nodes.times += 1
            return super().__iter__()

    pool = pool_of([8] * 4, Nodes)
    pool.first_equivalent(0, 1, 4)
    before = Nodes.times
    assert [pool.first_equivalent(4 * number, 1, 4) for number in range(8)] == [0] * 8 and Nodes.times == before


# ---- the command -----------------------------------------------------------------------------------------------------


def run(tmp_path, *arguments: str, cluster: Cluster | None = None):
    (tmp_path / "c.toml").write_text(dump_cluster(cluster or cluster_of([("a", 1, 2), ("c", 1, 2)])))
    job = ["tiny", "--set", "model.vocab_size=512", "--set", "data.sequence_length=16", "--set", "train.global_batch=8"]
    return CliRunner().invoke(command, ["search", *job, "--cluster", str(tmp_path / "c.toml"), *arguments])


def test_the_command_tells_all_that_is_asked_of_it(tmp_path):
    done = run(tmp_path, "--json", "--top", "3", "--out", str(tmp_path / "p.toml"), "--set", "train.dtype=fp32")
    summary = json.loads(done.stdout.splitlines()[-1])
    asked = {"plan", "waterfall_seconds", "searched", "wall_seconds", "reasons", "runner_up", "top"}
    predicted = {"step_seconds", "interval_seconds", "breakdown_seconds", "memory_bytes", "tokens_per_second", "mfu"}
    assert asked | predicted | {"assumed_inputs", "fits", "layout", "is_complete"} <= set(summary)
    assert sum(summary["waterfall_seconds"].values()) == pytest.approx(summary["step_seconds"])
    assert [each["step_seconds"] for each in summary["top"]] == sorted(each["step_seconds"] for each in summary["top"])
    assert len(summary["top"]) == 3 and summary["top"][0]["layout"] == summary["layout"]
    assert any("microbatch" in reason for reason in summary["reasons"])
    assert re.search("slower|equally fast", summary["runner_up"])
    plan = load_plan(tmp_path / "p.toml")
    assert {tile.family for tile in plan.tiles} <= {"a", "c"} and len(plan.ranks) == 4


def test_the_command_prints_a_plan_file_or_a_summary(tmp_path):
    printed = run(tmp_path).stdout
    (tmp_path / "printed.toml").write_text(printed)
    assert load_plan(tmp_path / "printed.toml").ranks == (0, 1, 2, 3)
    assert "# searched  " in printed
    summary = run(tmp_path, "--out", str(tmp_path / "p.toml"), "--top", "2", "--budget", "50", "--verbose").stdout
    assert "the best plans" in summary and "runner-up" in summary and "where the time goes" in summary


def test_the_command_refuses_what_makes_no_sense(tmp_path):
    assert run(tmp_path, "--space", "odd").exit_code == 2
    assert "Missing option '--cluster'" in CliRunner().invoke(command, ["search", "tiny"]).output
    assert "give --ranks N or --cluster CLUSTER" in CliRunner().invoke(command, ["uniform", "tiny"]).output
    result = run(tmp_path, "--set", "train.dtype=bf16")
    assert isinstance(result.exception, TopologyError)
    assert "none of the families a, c has a speed in bf16; set train.dtype, or families.*.peak" in str(result.exception)


def test_a_family_without_the_dtype_is_left_unused(tmp_path):
    cluster = cluster_of([("a", 1, 2), ("c", 1, 2)])
    slow = cluster.families["a"].model_copy(update={"sustained_flops_per_second": {"fp16": 1e9}})
    cluster = cluster.model_copy(update={"families": cluster.families | {"a": slow}})
    summary = json.loads(run(tmp_path, "--json", "--set", "train.dtype=fp32", cluster=cluster).stdout)
    assert "a is unused: it has no speed in fp32" in summary["reasons"]
    assert 'unused = "0-1"' in summary["plan"]
