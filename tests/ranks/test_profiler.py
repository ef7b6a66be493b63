"""What the profiler measures on each rank alone, against what the ranks then do together."""

import gc

import pytest

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.errors import TrainingError
from hpctrain.engine.start.profiler import profile
from hpctrain.engine.start.resolve_overlap import resolve_overlap
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prices.curves import PROFILED_ZEROS, describe_work, is_profiled, model_seconds
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER
from tests.ranks.punctual import Measurement
from tests.ranks.small_runs import make_job, open_datasets, rehearsed_world

# In proportion to what a rank needs for an operation (some 40 us): else it is measured how late it is.
FAST = PretendDevice(memory_bytes=3_000_000, memory_bytes_per_second=1e9, flops_per_second={"fp32": 1e9})
SLOW = PretendDevice(memory_bytes=2_000_000, memory_bytes_per_second=5e8, flops_per_second={"fp32": 4e8})
TRUTH = Truth(devices={"fast": FAST, "slow": SLOW})
SHAPE = {"num_layers": 4}


def resolved(world, job):
    """What `hpctrain probe --job` makes of a job whose vocabulary size and dtype are given."""
    return job.model_copy(update={"overlap": resolve_overlap(job.overlap, world.topology)[0]})


def profiled(world, accelerator, job, seconds: float):
    """Return the profiles on all ranks, by family and stage."""
    result = profile(world, accelerator, job, seconds)
    assert (result is None) == (world.rank > 0)
    profiles = world.broadcast_object(result and result[0])
    return {(of.family, of.zero): of for of in profiles}


def replicas(world, job, zero: int, rows: dict[str, int]) -> Plan:
    """Each rank a replica of the whole model, with rows by family."""
    tiles, at = [], 0
    for rank, place in enumerate(world.topology.places):
        cut, at = Interval(at, at + rows[place.family]), at + rows[place.family]
        tiles.append(Tile(Interval(0, job.model.num_items), cut, (rank,), family=place.family, zero=zero))
    return Plan(tuple(tiles), 1, at)


def trained(world, device, job, training, plan: Plan):
    """Train two steps by a plan, whatever fits; return this device's peak of memory, and how long it computed."""
    batch = job.train.model_copy(update={"global_batch": plan.rows})
    with world.freeing():
        device.overcommits = True
        device.start_anew()
        trainer = Trainer(world, device, job.model_copy(update={"train": batch}), plan)
        trainer.initialise()
        trainer.step(training)
        peak = device.memory().peak
        device.start_anew()
        trainer.step(training)
        busy = device.busy_seconds
        del trainer
    gc.collect()
    device.overcommits = False
    return peak, busy


def check_limits(world, device, job, zero: int, rows: dict[str, int]) -> float:
    """As many rows fit when all ranks train together, and one more does not, on any of them.

    Returns how long the device computed for those that do.
    """
    _, training, _ = open_datasets(job.data, job.train.seed)
    total = device.memory().total
    peak, busy = trained(world, device, job, training, replicas(world, job, zero, rows))
    more = {family: size + 1 for family, size in rows.items()}
    beyond, _ = trained(world, device, job, training, replicas(world, job, zero, more))
    assert peak <= total < beyond, f"ZeRO {zero}: {rows[world.place.family]} rows on {world.place.family}"
    return busy


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
def test_limits_measured_alone_hold_together(world, tokens):
    measurement = Measurement(world)
    with rehearsed_world(world, CLUSTER, TRUTH) as own:
        job = resolved(own, make_job(tokens, "gpt2", shape=SHAPE, global_batch=400))
        result = profiled(own, own.accelerator, job, seconds=200.0)
        assert set(result) == {(family, zero) for family in ("fast", "slow") for zero in PROFILED_ZEROS}
        for zero in (1, 3):
            fast, slow = result["fast", zero], result["slow", zero]
            assert 8 < slow.largest_rows < fast.largest_rows < 390
            assert slow.limited_by == fast.limited_by == "memory"
            with measurement.checking():
                assert fast.times[-1].block_seconds[0] / fast.largest_rows < 0.6 * (
                    slow.times[-1].block_seconds[0] / slow.largest_rows
                )
            rows = {family: result[family, zero].largest_rows for family in ("fast", "slow")}
            busy = check_limits(own, own.accelerator, job, zero, rows)
            mine = result[own.place.family, zero]
            whole = model_seconds(mine, job.model.num_layers, mine.largest_rows)
            with measurement.checking(own.accelerator.overrun):
                assert busy == pytest.approx(whole + mine.update_seconds, rel=0.06)


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_ranks_on_cores_measure_what_the_job_has(world, tokens):
    """Memory of the host is not the limit of a small job."""
    accelerator = CpuAccelerator()
    job = resolved(world, make_job(tokens, "llama", shape=SHAPE, global_batch=world.size + 5))
    result = profiled(world, accelerator, job, seconds=60.0)
    assert set(result) == {("cpu", zero) for zero in PROFILED_ZEROS}
    for of in result.values():
        assert of.largest_rows == 6 and of.limited_by == "job" and of.replicas == world.size
        assert of.work == describe_work(job, "fp32")
        assert of.times[0].rows == 1 and of.times[-1].rows == 6
    places = [place.family for place in world.topology.places]
    described = CLUSTER.model_copy(update={"profiles": tuple(result.values())})
    assert not is_profiled(described, job, "fp32"), f"these are of {places}, not of its families"


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_a_family_without_memory_for_a_block_is_reported_by_all(world, tokens):
    small = Truth(devices={"fast": FAST, "slow": SLOW.model_copy(update={"memory_bytes": 30_000})})
    with rehearsed_world(world, CLUSTER, small) as own:
        job = resolved(own, make_job(tokens, "llama", shape=SHAPE, global_batch=40))
        with pytest.raises(
            TrainingError, match=r"rank 2 \(slow\) has no memory for the embedding, one block and the head"
        ):
            profile(own, own.accelerator, job, 2.0)
