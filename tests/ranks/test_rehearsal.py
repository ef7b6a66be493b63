"""Ranks that impersonate devices: the numbers of one rank, in the time and the memory of the cluster."""

import pytest
import torch

from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.errors import LaunchError, TopologyError, TrainingError
from hpctrain.data.order import open_datasets
from hpctrain.plan.schedule import Action
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.rehearsal.fabric import PretendedNetwork
from hpctrain.rehearsal.shaped import rehearse
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER, cluster_with
from tests.ranks.punctual import Measurement
from tests.ranks.small_runs import (
    largest_relative_difference,
    losses,
    losses_of_one_rank,
    make_job,
    make_trainer,
    rehearsed_world,
    world_of,
)
from tests.virtual_ranks import VirtualRanks, VirtualTransports

FAST = PretendDevice(memory_bytes=50_000_000, memory_bytes_per_second=2e9, flops_per_second={"fp32": 2e9})
SLOW = PretendDevice(memory_bytes=25_000_000, memory_bytes_per_second=1e9, flops_per_second={"fp32": 1e9})
TRUTH = Truth(devices={"fast": FAST, "slow": SLOW})
SLOW_BANDWIDTH = 1e6
ENDS, ROWS = (Interval(0, 3), Interval(3, 6)), Interval(0, 8)
pytestmark = pytest.mark.ranks(4)


def rehearsed(world, truth: Truth = TRUTH):
    return rehearsed_world(world, CLUSTER, truth)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", [{"tensor": {"y": 2}, "pipeline": 2}, {"tensor": {"x": 2}, "data": 2}])
def test_a_rehearsal_gives_the_losses_of_one_rank(world, tokens, plan):
    expected = losses_of_one_rank(world, tokens, "llama", 3)
    with rehearsed(world) as own:
        result = losses(own, make_job(tokens, "llama", plan), steps=3, accelerator=own.accelerator)
    assert largest_relative_difference(result, expected) < 1e-5


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_different_families_in_different_tiles_give_them_too(world, tokens, model):
    """Tensor parallelism on one family, uneven replicas on the other; a tied embedding is held by both."""
    job = make_job(tokens, model)
    expected = losses_of_one_rank(world, tokens, model, 3)
    tiles = (
        Tile(Interval(0, 6), Interval(0, 8), (0, 1), TensorGrid(y=2), family="fast"),
        Tile(Interval(6, 10), Interval(0, 5), (2,), family="slow"),
        Tile(Interval(6, 10), Interval(5, 8), (3,), family="slow"),
    )
    with rehearsed(world) as own:
        result = losses(own, job, steps=3, accelerator=own.accelerator, plan=Plan(tiles, microbatches=2, rows=8))
    assert largest_relative_difference(result, expected) < 1e-5


@pytest.mark.measured
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "tiles",
    [
        (Tile(ENDS[0], ROWS, (0, 1), TensorGrid(y=2), "fast"), Tile(ENDS[1], ROWS, (2, 3), TensorGrid(y=2), "slow")),
        (Tile(ENDS[0], ROWS, (1,), family="fast"), Tile(ENDS[1], ROWS, (2, 3), TensorGrid(y=2), "slow")),
    ],
)
def test_parts_that_are_gathered_are_the_same_bits_over_a_slow_link_once(world, tokens, tiles):
    """The two y of each tile share their node's NIC. Sent whole, messages are twice as large, or as many."""
    job = make_job(tokens, "llama", shape={"num_layers": 2, "hidden_size": 64}, dtype="fp32")
    unused = tuple(sorted(set(range(4)) - {rank for tile in tiles for rank in tile.ranks}))
    plan = Plan(tiles, 2, ROWS.size, unused=unused)
    _, training, _ = open_datasets(job.data, job.train.seed)
    result, seconds, sent, overruns = {}, {}, {}, []
    measurement = Measurement(world)
    truth = TRUTH.model_copy(update={"time_scale": 4.0})
    for variant in ("parts", "whole"):
        with rehearsed_world(world, cluster_with(SLOW_BANDWIDTH), truth) as own:
            if variant == "whole":
                own.is_near = lambda one, other: True
            trainer = make_trainer(own, job, plan, own.accelerator)
            trainer.initialise()
            metrics = [trainer.step(training)[0] for _ in range(3)]
            result[variant] = [each[key] for each in metrics for key in ("loss", "grad_norm")]
            overruns.append(own.accelerator.overrun)
            seconds[variant] = own.largest(min(each["step_seconds"] for each in metrics))
            messages = trainer.layout.transfers[0].messages
            own_parts = messages[Action.SEND_ACTIVATION] + messages[Action.SEND_GRADIENT]
            elements = sum(part.num_elements for part in own_parts)
            sent[variant] = sum(own.all_objects(elements))
    if world.rank == 0:
        print(f"sent {sent}, seconds of a step {seconds}")
    assert result["parts"] == result["whole"]
    num_ys = sum(tile.tensor.y for tile in tiles)
    assert sent["whole"] / sent["parts"] == num_ys / 2, "to each tile one copy in place of one for each y"
    # 2 microbatches x 8 rows x 16 positions x 64 features x 4 bytes at 1 MB/s: 65 ms for each copy.
    saved = (num_ys - 2) * 2 * ROWS.size * 16 * 64 * 4 / SLOW_BANDWIDTH
    with measurement.checking(max(overruns)):
        assert seconds["whole"] - seconds["parts"] > 0.4 * saved


@pytest.mark.measured
@pytest.mark.timeout(60)
def test_an_all_reduce_takes_what_the_network_says_whatever_was_computed_before(world):
    num_elements, scale = 250_000, 10.0  # slow enough for a busy machine
    measurement = Measurement(world)
    with rehearsed(world, TRUTH.model_copy(update={"time_scale": scale})) as own:
        comm, device = own.group(range(4)), own.accelerator
        virtual = VirtualRanks(PretendedNetwork(CLUSTER))
        domains = [VirtualTransports(virtual, (0, 1)), VirtualTransports(virtual, (2, 3))]
        across = VirtualTransports(virtual, range(4))
        predicted = virtual.run(
            [
                _hierarchical(domains[r // 2][r % 2], across[r]).all_reduce(torch.ones(num_elements), "sum")
                for r in range(4)
            ]
        )
        assert predicted > 2 * num_elements * 4 / 2 / 5e7
        a, result = torch.ones(128, 128), []
        for _ in range(5):
            tensor = torch.ones(num_elements)
            comm.barrier()
            taken = device.stopwatch()
            start = device.clock.now / scale
            with device.running():
                a @ a
                comm.all_reduce(tensor)
            every = world.all_objects((start, start + taken()))
            computed = [
                start + 2 * 128**3 / (FAST, SLOW)[rank // 2].flops_per_second["fp32"]
                for rank, (start, _) in enumerate(every)
            ]
            result.append(max(end for _, end in every) - max(computed))
            assert (tensor == 4).all()
        if world.rank == 0:
            print(f"predicted {predicted * 1e3:.2f} ms, pretended {[f'{1e3 * s:.2f}' for s in result]}")
        assert min(result) > 0.98 * predicted
        with measurement.checking(device.overrun):
            assert min(result) < 1.05 * predicted


def _hierarchical(inner, across):
    from hpctrain.comm.collectives.flat import FlatCollectives
    from hpctrain.comm.collectives.hierarchical import HierarchicalCollectives

    flat = [FlatCollectives(transport, lambda _: "domains") for transport in (inner, across)]
    return HierarchicalCollectives(*flat, [(0, 1), (2, 3)])


@pytest.mark.timeout(60)
def test_what_does_not_fit_says_which_rank_and_what_to_change(world, tokens):
    small = Truth(devices={"fast": FAST, "slow": SLOW.model_copy(update={"memory_bytes": 150_000})})
    with rehearsed(world, small) as own:
        job = make_job(tokens, "llama", {"data": 4})
        error = None
        try:
            make_trainer(own, job, accelerator=own.accelerator)
        except TrainingError as caught:
            error = caught
        for made in own._made:
            made.abandon()
    summary = world.gather_objects(str(error) if error else None)
    if world.rank == 0:
        assert summary[:2] == [None, None]
        assert "rank 2 (cpu, items [0, 10], rows [8, 12]) is out of memory in making weights" in summary[2]
        assert "of 0.1 MiB are in use" in summary[2] and "the pretended slow is out of memory" in summary[2]


@pytest.mark.timeout(30)
def test_other_numbers_of_ranks_and_unknown_families_are_refused(world):
    with pytest.raises(TopologyError, match=r"truth.devices.slow: missing; say how pretend devices of family 'slow'"):
        rehearse(world, CLUSTER, Truth(devices={"fast": FAST}))
    alone = world_of(world, timeout_seconds=10.0)
    alone.size = 3
    with pytest.raises(LaunchError, match=r"has 4 devices \(2 fast and 2 slow on .*\), but MPI started 3 ranks"):
        rehearse(alone, CLUSTER, TRUTH)
    alone.size = 4
    alone.close()
