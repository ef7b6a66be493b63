"""The profiler on one rank that acts as one of several: what fits, what is left behind, what it takes."""

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.accelerators.base import describe_overflow
from hpctrain.comm.groups.offline_world import OfflineWorld
from hpctrain.comm.topology import Topology, places_of
from hpctrain.config.clusters.cluster import RowTimes
from hpctrain.config.clusters.truth import PretendDevice
from hpctrain.config.errors import CommError, TrainingError
from hpctrain.config.job import Job
from hpctrain.engine.start.profiler import DeviceProfiler, Limit, largest_that_fits
from hpctrain.engine.start.profiler import _median_times as median_times
from hpctrain.engine.step.optimizer import Optimizer
from hpctrain.rehearsal.accelerator import RehearsedAccelerator
from hpctrain.rehearsal.clock import Clock
from hpctrain.rehearsal.shaped import RehearsedNetwork
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER
from tests.ranks.small_runs import make_job

DEVICE = PretendDevice(
    memory_bytes=530_000, memory_bytes_per_second=2e10, flops_per_second={"fp32": 1e11}, launch_seconds=1e-7
)


def small_job(folder, model: str) -> Job:
    return make_job(folder, model, shape={"num_layers": 1})


@settings(deadline=None)
@given(limit=st.integers(0, 300), most=st.integers(1, 200), estimate=st.integers(0, 400))
def test_the_largest_is_reached_from_any_estimate_in_few_trials(limit, most, estimate):
    tried = []

    def fits(rows: int) -> bool:
        assert 1 <= rows <= most
        tried.append(rows)
        return rows <= limit

    result = largest_that_fits(fits, most, estimate)
    assert result == min(limit, most)
    assert len(tried) == len(set(tried))
    distance = abs(result - min(max(estimate, 1), most))
    assert len(tried) <= 2 * (distance + 1).bit_length() + 2
    if distance == 0:
        assert len(tried) <= 2, "a good estimate is confirmed by two"


HANDLE = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
NCCL = "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"
NCCL_OF_TORCH = f"NCCL error in: x.cpp:1, {NCCL}\nLast error:\nCuda failure 2 'out of memory'"


def test_what_is_an_overflow_and_what_a_mistake():
    full, empty = (SimpleNamespace(free_bytes=lambda free=free: free) for free in (12 << 20, 9 << 30))
    unknown = SimpleNamespace(free_bytes=lambda: None)
    assert describe_overflow(torch.OutOfMemoryError("no"), unknown) == "no"
    assert describe_overflow(RuntimeError(HANDLE), unknown) == HANDLE
    assert describe_overflow(RuntimeError(NCCL_OF_TORCH), unknown) == "Cuda failure 2 'out of memory'"
    assert describe_overflow(RuntimeError(NCCL), full) == f"{NCCL}, out of memory: 12 MiB of the device are free"
    for device in (empty, unknown):
        assert not describe_overflow(RuntimeError(NCCL), device), "a network that is gone says the same"
    assert not describe_overflow(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), full)


def test_an_error_of_ours_is_an_overflow_of_the_rank_that_it_came_from():
    full = SimpleNamespace(free_bytes=lambda: 0)
    other = CommError("rank 3 reported: TrainingError: is out of memory")
    assert not describe_overflow(other, full)
    other.__cause__ = RuntimeError(HANDLE)
    assert describe_overflow(other, full) == HANDLE


def trials(job: Job, device: PretendDevice = DEVICE, rank: int = 2, seconds: float = 1000.0):
    """As rank 2 of the four of a cluster, alone."""
    clock = Clock()
    accelerator = RehearsedAccelerator("slow", device, clock, 1.0, seed=rank)
    world = SimpleNamespace(
        rank=rank,
        size=4,
        settings=SimpleNamespace(rehearsal=RehearsedNetwork(None, clock)),
        topology=Topology(places_of(CLUSTER), shares_memory=False),
    )
    return DeviceProfiler(world, accelerator, job, time.monotonic() + seconds), accelerator


def test_one_row_more_than_the_limit_overflows(tmp_path):
    job = small_job(tmp_path, "gpt2")
    alone, accelerator = trials(job)
    limits = {zero: alone.limit(zero, 200) for zero in (1, 2, 3)}
    for zero, limit in limits.items():
        assert limit.reason == "memory" and 2 < limit.rows < 200
        alone._train(zero, limit.rows)
        with pytest.raises(torch.OutOfMemoryError):
            alone._train(zero, limit.rows + 1)
        alone._clean()
        assert accelerator.memory().used == 0, "an overflow leaves nothing behind"
    assert limits[1].rows <= limits[2].rows <= limits[3].rows
    assert limits[1].update_seconds > 0
    states = [states_of(alone, accelerator, job, zero) for zero in (1, 2, 3)]
    assert states[0] > states[1] > states[2], "the higher stages keep less"


def states_of(alone: DeviceProfiler, accelerator, job: Job, zero: int) -> int:
    with accelerator.running():
        layout = alone._layout(job, zero, 1)
        optimizer = Optimizer(layout, job.train)
        used = accelerator.memory().used
    del layout, optimizer
    alone._clean()
    return used


def test_the_state_alone_may_be_too_large(tmp_path):
    alone, accelerator = trials(small_job(tmp_path, "llama"), DEVICE.model_copy(update={"memory_bytes": 150_000}))
    assert alone.limit(1, 50) == Limit(0, "memory", None)
    assert accelerator.memory().used == 0
    assert alone.times(1, 4, time.monotonic() + 30), "curves of single items are there all the same"
    alone, _ = trials(small_job(tmp_path, "llama"), DEVICE.model_copy(update={"memory_bytes": 50_000}))
    with pytest.raises(
        TrainingError,
        match=r"rank 2 \(slow\) has no memory for the embedding, one block and the head .* ZeRO stage 3 of 4",
    ):
        alone.times(3, 4, time.monotonic() + 30)


def test_no_more_rows_than_the_job_has_are_tried_nor_more_than_there_is_time_for(tmp_path):
    alone, _ = trials(small_job(tmp_path, "llama"))
    assert alone.limit(1, 3)[:2] == (3, "job")
    late, _ = trials(small_job(tmp_path, "llama"), seconds=0.0)
    assert late.limit(1, 200)[:2] == (1, "time")
    assert [times.rows for times in late.times(1, 8, time.monotonic())] == [1, 2]


@pytest.mark.parametrize(
    ("fitting", "tried", "rows"), [(99, [1, 7, 2, 4, 8, 12], [1, 2, 4, 7, 8, 12]), (6, [1, 7, 3, 2, 4], [1, 2, 3, 4])]
)
def test_rows_that_an_even_plan_has_come_first(tmp_path, fitting, tried, rows):
    """What few rows take says little of many, and there may be no time for all."""
    alone, _ = trials(small_job(tmp_path, "llama"))
    asked = []

    def item_times(zero: int, rows: int) -> SimpleNamespace:
        asked.append(rows)
        if rows > fitting:
            raise torch.OutOfMemoryError("no more")
        return SimpleNamespace(rows=rows)

    alone._item_times = item_times
    assert [times.rows for times in alone.times(1, 12, time.monotonic() + 1000, likely=7)] == rows
    assert asked == tried


def test_kernels_that_compile_for_longer_than_there_is_time_leave_few_and_many_rows(tmp_path, monkeypatch):
    """Two small sizes say nothing of 64 rows on a device that is not busy with them."""
    alone, _ = trials(small_job(tmp_path, "llama"))
    now, asked = [0.0], []
    monkeypatch.setattr("hpctrain.engine.start.profiler.time", SimpleNamespace(monotonic=lambda: now[0]))

    def item_times(zero: int, rows: int) -> SimpleNamespace:
        asked.append(rows)
        now[0] += 6.0
        alone._round_seconds = 0.002
        return SimpleNamespace(rows=rows)

    alone._item_times = item_times
    alone.times(1, 64, 1.5, likely=64)
    assert asked == [1, 64]


def test_a_host_s_memory_is_not_filled_to_the_brim(tmp_path):
    """Its ranks share it, and one that takes too much is killed: what should not fit, by two rows, is not tried."""
    alone, accelerator = trials(small_job(tmp_path, "llama"), DEVICE.model_copy(update={"memory_bytes": 10**8}))
    peaks = iter([100_000, 300_000])
    summary = accelerator.memory
    accelerator.memory = lambda: summary()._replace(peak=next(peaks, 10**6))
    accelerator.shares_memory, alone._share = True, 1_000_000
    tried = []
    fits = alone._fits
    alone._fits = lambda zero, rows, updates: tried.append(rows) or fits(zero, rows, updates)
    assert alone.limit(1, 50)[:2] == (5, "memory")
    assert alone.limit(2, 50, 5)[:2] == (5, "memory"), "nor in the next stages"
    assert max(tried) == 5


def test_times_are_those_of_the_device(tmp_path):
    """Of a product, what its truth says; more rows take in proportion where nothing else costs."""
    job = small_job(tmp_path, "llama")
    alone, _ = trials(
        job, PretendDevice(memory_bytes=10**9, memory_bytes_per_second=1e12, flops_per_second={"fp32": 1e8})
    )
    one, *_, eight = alone.times(1, 8, time.monotonic() + 60)
    model, tokens = job.model, job.data.sequence_length
    head = 2 * tokens * model.hidden_size * model.vocab_size / 1e8
    assert one.head_seconds == pytest.approx((head, 2 * head), rel=1e-2)
    for item in ("block_seconds", "head_seconds"):
        forward, backward = getattr(one, item)
        assert getattr(eight, item) == pytest.approx((8 * forward, 8 * backward), rel=2e-2)
        assert backward == pytest.approx(2 * forward, rel=0.1)


def test_a_silent_collective_leaves_numbers_that_can_be_computed_with():
    group = OfflineWorld(1, 4).group(range(4), "data")
    cuts = [Interval(0, 3), Interval(3, 6), Interval(6, 8), Interval(8, 10)]
    flat = torch.full((10,), torch.nan)
    flat[3:6] = torch.tensor([1.0, 2.0, 3.0])
    assert group.all_gather(flat, cuts).tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    out = torch.empty(3)
    group.reduce_scatter(torch.arange(10.0), out, cuts)
    assert out.tolist() == [3, 4, 5]
    group.start_all_reduce(flat).wait()
    concurrent = OfflineWorld(1, 4).group(range(4), "data", overlapped=True)
    assert concurrent.is_overlapped and not group.is_overlapped, "overlapped operations need buffers of their own"
    flat[3:6] = torch.tensor([4.0, 5.0, 6.0])
    concurrent.start_all_gather(flat, cuts).wait()
    assert flat.tolist() == [4, 5, 6, 4, 5, 6, 4, 5, 6, 4]
    assert OfflineWorld(1, 4).group([1]).size == 1


def test_of_ranks_of_a_family_the_median_counts_where_all_have_as_many_rows():
    def times(rows: int, scale: float) -> RowTimes:
        pair = (1.0 * scale, 2.0 * scale)
        return RowTimes(rows=rows, embedding_seconds=pair, block_seconds=pair, head_seconds=pair)

    slow = [times(1, 9.0), times(2, 9.0)]
    assert median_times([[times(1, 1.0)], slow, [times(1, 1.2), times(2, 1.0)]]) == (times(1, 1.2),)
