"""Communication that overlaps computation: what `auto` becomes, buckets of gradients, what can be hidden."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.overlap_variants import Operation, exposed_seconds, seconds_alone
from benchmarks.pairs import ratio_of
from hpctrain.comm.topology import Place, Topology
from hpctrain.config.errors import PlanError
from hpctrain.config.job import Job, Model
from hpctrain.config.parallelism import Overlap
from hpctrain.engine.start.facts import Prepared
from hpctrain.engine.start.resolve import check_plan
from hpctrain.engine.start.resolve_overlap import (
    GroupPlacement,
    continued,
    hidden_groups,
    launch_refusal,
    placements,
    resolve_for,
    resolve_overlap,
    topology_of,
)
from hpctrain.plan.holdings import holding_of
from hpctrain.plan.schedule import Action, Instruction, one_f_one_b
from hpctrain.plan.schedule_run import check_no_deadlock
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.examples import costly
from tests.pretended import CLUSTER, cluster_with
from tests.tilings import tilings

MODEL = Model(architecture="llama", num_layers=6, hidden_size=16, num_heads=4, vocab_size=64)
TIED = Model(architecture="gpt2", num_layers=6, hidden_size=16, num_heads=4, vocab_size=64, tie_head=True)
HERE, THERE = Place("a", "cpu"), Place("b", "cpu")
LARGE = Model(architecture="llama", num_layers=6, hidden_size=512, num_heads=8, vocab_size=64)
ACROSS, FOUR = cluster_with(3e6), TensorGrid(y=4)


@pytest.mark.parametrize(
    "topology, expected, reason",
    [
        (Topology((HERE, HERE)), (False, False, False), "off: all ranks compute on the cores of one host"),
        (Topology((HERE, THERE)), (True, True, True), "on: there are groups of x or y or c on several of 2 hosts"),
        (Topology((HERE, HERE), shares_memory=False), (True, True, True), "on: a rehearsal's devices"),
        (Topology((Place("a", "h200", "cuda"),) * 2), (True, True, True), "on: devices compute while bytes move"),
        (Topology((HERE, Place("a", "h200", "cuda"))), (True, True, True), "on: devices compute while bytes move"),
    ],
)
def test_auto_becomes_a_value_with_a_reason(topology, expected, reason):
    result, reasons = resolve_overlap(Overlap(), topology)
    assert (result.tensor, result.data, result.z) == expected
    assert reasons["overlap.tensor"].startswith(reason)
    assert set(reasons) == {"overlap.tensor", "overlap.data", "overlap.z"}


def test_only_what_crosses_between_hosts_is_overlapped():
    topology = Topology((HERE, HERE, THERE, THERE))
    placement = {key: GroupPlacement(key == "data", False) for key in ("tensor", "data", "z")}
    result, reasons = resolve_overlap(Overlap(), topology, placement)
    assert (result.tensor, result.data, result.z) == (False, True, False)
    assert reasons["overlap.tensor"].startswith("off: no groups of x or y or c on several hosts")
    assert reasons["overlap.data"].startswith("on: there are holders of the same weights on")


@pytest.mark.parametrize(
    "hosts, grid, expected",
    [
        ("aaaa", TensorGrid(1, 2, 1), (False, False, False)),
        ("aabb", TensorGrid(1, 2, 1), (False, True, False)),  # y inside, replicas across
        ("abab", TensorGrid(1, 2, 1), (True, False, False)),
        ("aabb", TensorGrid(2, 2, 1), (True, False, False)),  # x across: norms, which no y cuts, too
        ("abab", TensorGrid(1, 1, 2), (False, False, True)),
        ("abcd", TensorGrid(1, 1, 2), (False, True, True)),
    ],
)
def test_what_crosses_between_hosts_follows_from_the_plan(hosts, grid, expected):
    plan = even_plan(MODEL.num_items, grid, 1, 4 // grid.size, 1, 4)
    topology = Topology(tuple(Place(host, "cpu") for host in hosts))
    job = SimpleNamespace(model=MODEL, overlap=Overlap())
    summary = placements(topology, job, plan)
    assert tuple(summary[key].crosses_hosts for key in ("tensor", "data", "z")) == expected


def test_one_rank_of_a_kind_is_asked_for_its_holders(monkeypatch):
    """A search asks this of each plan that it simulates, which may have thousands of ranks."""
    plan, asked = even_plan(MODEL.num_items, TensorGrid(1, 2, 1), 2, 64, 1, 64), []
    monkeypatch.setattr(f"{placements.__module__}.holding_of", lambda *of: asked.append(of) or holding_of(*of))
    topology = Topology(tuple(Place(f"host{rank // 2}", "cpu") for rank in range(256)))
    summary = placements(topology, SimpleNamespace(model=MODEL, overlap=Overlap()), plan)
    assert len(asked) == 4, "the first and the last rank of each stage"
    assert summary == {
        "tensor": GroupPlacement(False, False),
        "data": GroupPlacement(True, False),
        "z": GroupPlacement(False, False),
    }


@settings(max_examples=costly(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_holders_of_one_rank_of_a_kind_are_on_as_many_hosts_as_those_of_all(data):
    plan = data.draw(tilings(MODEL, data.draw(st.integers(2, 6)), 6, 2, exchanging=True))
    topology = Topology(tuple(data.draw(st.sampled_from([HERE, THERE])) for _ in range(max(plan.ranks) + 1)))
    job = SimpleNamespace(model=MODEL, overlap=Overlap())
    ends = [rank for tile in plan.tiles for rank in (tile.ranks[0], tile.ranks[-1])]
    for key, placement in placements(topology, job, plan).items():
        groups = [ranks for rank in ends for ranks in hidden_groups(job, plan, rank)[key]]
        assert placement.crosses_hosts == any(len(topology.domains(ranks, "host")) > 1 for ranks in groups)


H200, MI250 = Place("a", "h200", "cuda"), Place("a", "mi250x", "rocm")


@pytest.mark.parametrize(
    ("families", "grid", "data"),
    [
        ((H200,) * 4, TensorGrid(y=2), True),
        ((H200, H200, MI250, MI250), TensorGrid(y=2), True),  # each y has one holder in each family: messages alone
        ((H200, H200, MI250, MI250), TensorGrid(), False),
        ((H200, MI250, HERE, HERE), TensorGrid(), True),
        ((H200, H200, HERE, HERE), TensorGrid(), False),
    ],
)
def test_gradients_of_several_families_are_overlapped_where_no_library_does_parts_of_their_sums(families, grid, data):
    plan, topology = even_plan(MODEL.num_items, grid, 1, 4 // grid.size, 1, 4), Topology(families)
    job = SimpleNamespace(model=MODEL, overlap=Overlap())
    result, reasons = resolve_overlap(Overlap(), topology, placements(topology, job, plan), launch_refusal(plan))
    assert (result.tensor, result.data, result.z) == (True, data, True)
    if data:
        assert reasons["overlap.data"].endswith("all ranks launch collectives in one order")
    else:
        assert reasons["overlap.data"].startswith("off: there are holders of the same weights of several families")


def test_sums_start_at_the_end_where_launches_have_no_order():
    result, reasons = resolve_overlap(Overlap(), Topology((H200,) * 2), refusal="tile items [0, 3] waits")
    assert (result.data, result.z) == (False, True)
    reason = reasons["overlap.data"]
    assert reason.startswith("off: sums that start early") and "items [0, 3]" in reason


def test_what_was_asked_for_stays():
    result, reasons = resolve_overlap(Overlap(tensor=True, z=False, bucket_bytes=7), Topology((HERE, THERE)))
    assert (result.tensor, result.data, result.z, result.bucket_bytes) == (True, True, False, 7)
    assert set(reasons) == {"overlap.data"}


CUT, WHOLE = (even_plan(MODEL.num_items, grid, 1, 4 // grid.size, 1, 64) for grid in (FOUR, TensorGrid()))


def job_of(**overlap) -> Job:
    values = {
        "name": "test",
        "model": LARGE,
        "data": {"tokens": "none", "sequence_length": 64},
        "train": {"dtype": "fp32"},
    }
    return Job.model_validate(values | {"overlap": overlap})


HOST = Topology((HERE,) * 4)
GPUS = Topology((Place("a", "h200", "cuda"),) * 4)


def test_sums_that_would_wait_for_ever_are_refused_where_a_job_asks_for_them():
    def run(data: bool, topology) -> Prepared:
        world = SimpleNamespace(topology=topology, on_first_rank=lambda make: make())
        return Prepared(world, job_of(data=data), None, None, None, plan_or_none=WHOLE)

    with patch("hpctrain.engine.start.resolve.launch_refusal", lambda plan: "the schedule deadlocks"):
        with pytest.raises(PlanError, match=r"deadlocks, where devices .* set overlap.data = false"):
            check_plan(run(True, GPUS))
        check_plan(run(False, GPUS))
        check_plan(run(True, replace(GPUS, shares_memory=False)))


def test_a_run_that_is_continued_keeps_what_can_change_its_bits():
    before = Overlap(tensor=False, data=True, z=False)  # saved before there was a number of parts
    result, reasons = continued(Overlap(), before)
    assert result == Overlap(tensor=False, data=True, z=False, tensor_parts=1)
    values = {"tensor": "off", "data": "on", "z": "off", "tensor_parts": "1"}
    assert reasons == {f"overlap.{key}": value for key, value in values.items()}
    saved = Overlap(tensor=True, data=False, z=False, tensor_parts=2)
    assert continued(Overlap(tensor=False), saved)[0] == saved.model_copy(update={"tensor": False})


@pytest.mark.parametrize(
    ("plan", "pretended", "expected"),
    [
        (None, False, (True, True, True)),
        (CUT, False, (True, False, False)),  # y on both hosts, no replicas, no z
        (WHOLE, False, (False, True, False)),
        (WHOLE, True, (True, True, True)),
    ],
)
def test_a_prediction_resolves_what_is_auto_as_a_run_would(plan, pretended, expected):
    families = {name: family.model_copy(update={"kind": "cpu"}) for name, family in CLUSTER.families.items()}
    cpus = CLUSTER.model_copy(update={"families": families})

    def resolved(cluster, pretended):
        topology = topology_of(cluster, pretended)
        return resolve_for(job_of(), plan, topology, cluster) if plan else resolve_overlap(Overlap(), topology)

    result, _ = resolved(cpus, pretended)
    assert (result.tensor, result.data, result.z) == expected
    devices, reasons = resolved(CLUSTER, False)
    assert (devices.tensor, devices.data, devices.z) == (True, plan is CUT, True), reasons


def test_buckets_are_whole_blocks_of_enough_bytes_and_the_first_has_what_is_left_over():
    plan = even_plan(MODEL.num_items, TensorGrid(), 1, 2, 1, 2)
    whole = holding_of(MODEL, plan, 0).shard_groups
    assert len(whole) == 1 and whole[0].final_after == 0
    sizes = {layout.unit.items[0]: layout.size for layout in whole[0].layouts}
    least = sizes[1] + sizes[2] + 1
    cut = holding_of(MODEL, plan, 0, bucket_bytes=4 * least).shard_groups
    buckets = [[unit.unit.items[0] for unit in h.layouts] for h in cut]
    assert list(itertools.chain(*buckets)) == list(range(MODEL.num_items)) and len(buckets) > 2
    for bucket in buckets[1:]:
        assert (
            sum(sizes[item] for item in bucket) >= least > sum(sizes[item] for item in bucket if item > bucket[0] + 1)
        )
        assert bucket[0] % 2, "from the attention of a block on"
    assert [h.final_after for h in cut] == [items[0] for items in buckets]
    assert sum((h.layouts for h in cut), ()) == whole[0].layouts


def test_a_tied_embedding_is_final_after_the_first_of_its_items_that_a_tile_has():
    whole = even_plan(TIED.num_items, TensorGrid(), 1, 1, 1, 1)
    two = even_plan(TIED.num_items, TensorGrid(), 2, 1, 1, 1)

    def final(plan, rank):
        shards = holding_of(TIED, plan, rank, bucket_bytes=1).shard_groups
        return next(h.final_after for h in shards if len(h.layouts[0].unit.items) == 2)

    assert (final(whole, 0), final(two, 0), final(two, 1)) == (0, 0, TIED.num_items - 1)


def test_holders_of_regions_compute_the_same_buckets():
    tiles = (
        Tile(Interval(0, TIED.num_items), Interval(0, 2), (0, 1), TensorGrid(1, 2, 1)),
        Tile(Interval(0, TIED.num_items), Interval(2, 4), (2, 3), TensorGrid(1, 1, 2)),
    )
    summary: dict = {}
    for rank in range(4):
        for shard_group in holding_of(TIED, Plan(tiles, 1, 4), rank, bucket_bytes=2000).shard_groups:
            key = tuple((region.parameter.name, region.rows, region.columns) for region in shard_group.regions)
            summary.setdefault((shard_group.ranks, key), []).append(rank)
            items = {item_of(n) for n, *_ in key if n.startswith("blocks")}
            assert shard_group.final_after <= min(items, default=0)
    assert all(sorted(ranks) == sorted(result) for (ranks, _), result in summary.items())
    assert len(summary) > len({ranks for ranks, _ in summary})


def item_of(name: str) -> int:
    _, block, branch, *_ = name.split(".")
    return 2 * int(block) + (1 if branch.startswith("attention") else 2)


def schedules(plan: Plan) -> dict:
    return {tile: list(one_f_one_b(plan, tile, reduce_early=True)) for tile in plan.tiles}


def test_the_last_backward_pass_starts_to_reduce_and_nobody_waits_for_it():
    plan = even_plan(6, TensorGrid(), 2, 2, 3, 4, row_chunks=2)
    for steps in schedules(plan).values():
        assert [str(s) for s in steps if s.starts_reducing] == ["backward 2.1 and start to reduce"]
    check_no_deadlock(plan, schedules(plan))


def test_a_start_before_gradients_are_final_is_detected():
    plan = even_plan(6, TensorGrid(), 1, 1, 2, 1)
    made = schedules(plan)
    steps = made[plan.tiles[0]]
    early = Instruction(Action.BACKWARD, 0, starts_reducing=True)
    steps[steps.index(Instruction(Action.BACKWARD, 0))] = early
    with pytest.raises(PlanError, match="'backward 0 and start to reduce' comes before 'backward 1 and start"):
        check_no_deadlock(plan, made)


def test_a_start_that_nobody_waits_for_is_detected():
    plan = even_plan(6, TensorGrid(), 1, 1, 1, 1)
    made = schedules(plan)
    made[plan.tiles[0]].remove(Instruction(Action.REDUCE_GRADIENTS))
    with pytest.raises(PlanError, match="starts is never waited for"):
        check_no_deadlock(plan, made)


def operation(asked, met, seconds, stream=0, group="y"):
    return Operation(group, "all_reduce", 100, stream, asked, met, seconds)


def test_what_is_computed_between_start_and_end_hides_it():
    blocking = [operation((1, 1.0), (2, 1.0), 0.5)]
    alone = seconds_alone(blocking)
    assert exposed_seconds(blocking, alone) == 0.5
    assert exposed_seconds([operation((1, 1.0), (2, 1.3), 9.0)], alone) == pytest.approx(0.2)
    assert exposed_seconds([operation((1, 1.0), (2, 2.0), 9.0)], alone) == 0.0
    # one after the other on a stream, at the same time on two
    both = [operation((1, 0.0), (3, 0.6), 9.0), operation((2, 0.0), (4, 0.6), 9.0)]
    assert exposed_seconds(both, alone) == pytest.approx(0.4)
    assert exposed_seconds([both[0], both[1]._replace(stream=1)], alone) == 0.0


def test_the_interval_of_a_ratio_is_of_its_median_and_narrower_with_more_pairs():
    draw = random.Random(1)
    few, many = ([1.05 * draw.lognormvariate(0, 0.03) for _ in range(n)] for n in (20, 320))
    few[3] = 4.0  # a step in which somebody else had the core
    narrow, wide = ratio_of(many), ratio_of(few)
    assert narrow.low < 1.05 < narrow.high and wide.low < 1.05 < wide.high
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert wide.high < 1.1
    assert ratio_of([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    assert ratio_of(few) == wide


def test_intervals_hold_the_median_as_often_as_they_say():
    draw = random.Random(2)
    shards = 0
    for _ in range(100):
        result = ratio_of([draw.lognormvariate(0, 0.05) for _ in range(20)])
        shards += result.low <= 1.0 <= result.high
    assert shards >= 90
