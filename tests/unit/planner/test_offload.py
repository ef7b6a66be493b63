"""Offload as the planner sees it, and the buckets in which the optimizer's state goes through a device."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.offload import DEVICE, GLOBAL_BATCH, SETTINGS, SHORT_OF_MEMORY, SPACE, cluster_of, plan_of
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.groups.group import Group
from hpctrain.config.clusters.cluster import Cluster, Nodes
from hpctrain.config.errors import PlanError
from hpctrain.config.job import load_job
from hpctrain.config.training.optimizers import RULES
from hpctrain.engine.step.host_state import buckets_of
from hpctrain.model.storage.groups import HeldArray, PlacedUnits
from hpctrain.model.storage.shard import ShardState, make_shard
from hpctrain.plan.checks import check_tiling
from hpctrain.plan.file import dump_plan, parse_plan
from hpctrain.plan.holdings import ShardGroup
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.explain import reasons
from hpctrain.planner.prediction.offload import offloaded_update_seconds
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.cost import update_seconds
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.search import search
from hpctrain.sharding.grid import ONE_RANK, TensorGrid
from hpctrain.sharding.grid_parts import parts_of
from hpctrain.sharding.host_buckets import ALIGNED, BUCKETS, LARGEST_BUCKET, SLOTS, bucket_elements
from hpctrain.sharding.intervals import Interval

JOB = load_job("tiny", list(SETTINGS))
SETUP = Setup.of_job(JOB, "fp32")


def shard_of(*sizes_and_decays: tuple[int, bool]) -> Any:
    """Return what `buckets_of` asks of a shard, which begins at element 5 of its group."""
    regions, at = [], 5
    for size, decays in sizes_and_decays:
        parameter = SimpleNamespace(update="decayed" if decays else "plain")
        regions.append(SimpleNamespace(at=Interval(at, at + size), parameter=parameter))
        at += size
    updated = Interval(5, at)
    states = (ShardState(updated, {}),)
    return SimpleNamespace(updated=updated, states=states, group=SimpleNamespace(regions=lambda within: regions))


@given(st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=8), st.integers(1, 5))
def test_buckets_cover_a_shard_once_and_cut_tensors_at_aligned_places(sizes, times):
    shard, most = shard_of(*sizes), times * ALIGNED
    buckets = list(buckets_of(shard, most))
    assert all(bucket.at.size <= most for bucket in buckets)
    seen = [element for bucket in buckets for run in bucket.stretches for element in range(*run.at)]
    assert seen == list(range(*shard.updated))
    whole = {}
    for run in (run for bucket in buckets_of(shard, 10**6 * ALIGNED) for run in bucket.stretches):
        whole |= dict.fromkeys(range(*run.at), (run.at.start, run.update))
    for run in (run for bucket in buckets for run in bucket.stretches):
        start, update = whole[run.at.start]
        assert (run.at.start - start) % ALIGNED == 0 and run.update == update


def test_plan_files_keep_it_and_refuse_other_words():
    plan = plan_of(JOB, "optimizer")
    text = dump_plan(plan)
    assert parse_plan(text, "x") == plan and 'offload = "optimizer"' in text
    with pytest.raises(PlanError, match=r"offload"):
        parse_plan(text.replace('"optimizer"', '"disk"'), "x")
    interleaved = even_plan(JOB.model.num_items, TensorGrid(), 2, 1, 4, 16, virtual_stages=2)
    first, *others = interleaved.tiles
    with pytest.raises(PlanError, match="different offload: optimizer, none"):
        check_tiling(replace(interleaved, tiles=(replace(first, offload="optimizer"), *others)), JOB.model.num_items)


def test_an_update_through_the_device_takes_what_its_slowest_part_takes():
    device = predictor_device()
    one_way = 8 * 10**6 / device.host_copy_bytes_per_second
    seconds = offloaded_update_seconds(SETUP, device, 10**6)
    assert one_way < seconds < 2 * one_way * (1 + 4 / BUCKETS), "both ways overlap"
    fast = replace(device, family=device.family.model_copy(update={"host_copy_bytes_per_second": 1e15}))
    assert offloaded_update_seconds(SETUP, fast, 10**6) == pytest.approx(
        10**6 * (SETUP.engine.clipping_bytes + SETUP.update_bytes) / device.memory_bytes_per_second, rel=1e-3
    )


@pytest.mark.parametrize("updates_of_copy", [0.1, 0.5, 1.0, 2.0, 10.0])
def test_an_update_takes_what_its_buckets_take_one_by_one(updates_of_copy):
    device, num_elements = predictor_device(), 200 * LARGEST_BUCKET
    each = 32 / 48 * update_seconds(SETUP, device, LARGEST_BUCKET)
    copy = each / updates_of_copy
    speed = LARGEST_BUCKET * SETUP.state_bytes() / copy
    device = replace(device, family=device.family.model_copy(update={"host_copy_bytes_per_second": speed}))
    come = updated = 0.0
    gone = [0.0] * SLOTS
    for _ in range(200):
        come = max(come, gone[-SLOTS]) + copy
        updated = max(updated, come) + each
        gone.append(max(gone[-1], updated) + copy)
    rest = (1 - 32 / 48) * update_seconds(SETUP, device, num_elements)
    assert offloaded_update_seconds(SETUP, device, num_elements) == pytest.approx(gone[-1] + rest, rel=0.005)


def predictor_device():
    from hpctrain.planner.prices.devices import DeviceModel

    name, family = next(iter(cluster_of(DEVICE).families.items()))
    return DeviceModel(name, family)


def test_buckets_are_aligned_and_bounded():
    for count in (0, 1, 63, 10**4, 10**7, 10**10):
        assert bucket_elements(count) % ALIGNED == 0 and ALIGNED <= bucket_elements(count) <= 1 << 22


def with_host(cluster: Cluster, num_bytes: int | None) -> Cluster:
    nodes = tuple(each.model_copy(update={"host_memory_bytes": num_bytes}) for each in cluster.nodes)
    assert all(isinstance(each, Nodes) for each in nodes)
    return cluster.model_copy(update={"nodes": nodes})


def test_the_search_offloads_where_memory_is_short_and_says_why():
    limited = cluster_of(DEVICE.model_copy(update={"memory_bytes": SHORT_OF_MEMORY}))
    cluster = with_host(limited, 10**9)
    unknown = "no plan offloads to hosts of unknown memory: set nodes.0.host_memory_bytes in the cluster file"
    try:
        plain = search(SETUP, GLOBAL_BATCH, with_host(limited, None), space=SPACE)
        assert {tile.offload for tile in plain.best.plan.tiles} == {"none"}
        assert any(unknown in reason for reason in reasons(plain))
    except PlanError as error:
        assert unknown in str(error)
    result = search(SETUP, GLOBAL_BATCH, cluster, space=SPACE)
    assert {tile.offload for tile in result.best.plan.tiles} != {"none"}
    assert any("without host memory" in reason for reason in reasons(result))
    try:
        without = search(SETUP, GLOBAL_BATCH, cluster, space=replace(SPACE, offload=("none",))).best.seconds
    except PlanError:
        without = float("inf")
    assert result.best.seconds < without
    roomy = search(SETUP, GLOBAL_BATCH, cluster_of(DEVICE), space=SPACE).best.plan
    assert {tile.offload for tile in roomy.tiles} == {"none"}


def test_hosts_must_have_room_for_what_is_offloaded():
    cluster, plan = cluster_of(DEVICE), plan_of(JOB, "optimizer")

    needed = {rank: stage.memory.on_host for stage in predict(SETUP, plan, cluster).memory for rank in stage.tile.ranks}
    assert all(needed.values())
    unknown = predict(SETUP, plan, with_host(cluster, None))
    assert unknown.fits and any("host_memory_bytes: enough" in guess for guess in unknown.assumed_inputs)
    assert predict(SETUP, plan, with_host(cluster, 10**9)).fits
    small = predict(SETUP, plan, with_host(cluster, max(needed.values()) // 2))
    assert not small.fits and "ranks of node 0 offload" in small.host_shortage
    limited = cluster_of(DEVICE.model_copy(update={"memory_bytes": SHORT_OF_MEMORY}))
    try:
        best = search(SETUP, GLOBAL_BATCH, with_host(limited, 1000), space=SPACE).best
    except PlanError:
        return
    assert {tile.offload for tile in best.plan.tiles} == {"none"}


def test_the_host_does_not_wait_for_masters_that_go_to_holders_of_another_dtype():
    """Weights in use are half precision here, and fp32 is exchanged: masters come from pinned memory."""
    places = PlacedUnits([], *parts_of(ONE_RANK))
    places.size, waits = 8, []
    group = HeldArray(places, torch.ones(8, dtype=torch.bfloat16), torch.zeros(8), torch.float32)
    shard = make_shard(group, Group((0,)), ShardGroup((0,), (1,), 1), RULES["adamw"], CpuAccelerator().host_buffer)

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default and args[1].data_ptr() == shard.master.data_ptr():
                waits.append(not (args[2:] and args[2]))
            return func(*args, **(kwargs or {}))

    shard.master.fill_(3.0)
    with Copies():
        shard.start_gather().wait()
    assert waits == [False]
    assert (group.weights == 3).all()
