"""Tiles with more microbatches in flight than by 1F1B: the same bits, and slow messages that delay nobody."""

from dataclasses import replace

import pytest

from hpctrain.comm.transports.transport import HostTransport
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.checks import check_plan
from hpctrain.plan.schedule_run import check_schedules
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.setup import Setup
from hpctrain.planner.search.extra_warmup import with_extra_warmup
from hpctrain.sharding.grid import TensorGrid
from tests import clusters
from tests.ranks.punctual import TOO_LATE, punctual_step
from tests.ranks.small_runs import by, curve_and_weights, make_job, rehearsed_world

FLOPS, MEMORY, MEMORY_SPEED = 5e8, 200_000_000, 2e9
DEVICE = PretendDevice(memory_bytes=MEMORY, memory_bytes_per_second=MEMORY_SPEED, flops_per_second={"fp32": FLOPS})
APART = parse_cluster(
    clusters.family(
        "equal",
        kind="cuda",
        origin="measured",
        memory_bytes=MEMORY,
        memory_bytes_per_second=MEMORY_SPEED,
        peak_flops_per_second={"fp32": FLOPS},
        products=[{"dtype": "fp32", "shape": [64, 128, 128], "flops_per_second": FLOPS}],
    )
    + clusters.fabric("slow", 1e-3, "measured")
    + clusters.nodes({"equal": 1}, 4e5, "slow", origin="measured", count=4),
    "a test",
)


def for_plan(plan: Plan, *extra_warmup: int) -> Plan:
    """Return a plan whose stages have so many more in flight."""
    by_items = dict(zip(sorted({tuple(tile.items) for tile in plan.tiles}), extra_warmup, strict=True))
    return replace(plan, tiles=tuple(replace(tile, extra_warmup=by_items[tuple(tile.items)]) for tile in plan.tiles))


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("route", ["auto", "messages"])
def test_more_in_flight_are_the_same_bits(world, tokens, route, monkeypatch):
    monkeypatch.setattr(world, "settings", by(route, world.settings))
    monkeypatch.setattr(HostTransport, "polls_freely", True)
    layouts = {2: [(2, 1, (1, 0)), (2, 1, (5, 0))], 4: [(4, 1, (3, 2, 1, 0)), (4, 1, (1, 1, 0, 0)), (2, 2, (2, 0))]}
    for stages, data, extra_warmup in layouts[world.size]:
        plan = even_plan(10, TensorGrid(), stages, data, 4, 4)
        job = make_job(tokens, "llama").model_copy(update={"overlap": Overlap(data=True, bucket_bytes=3000)})
        further = for_plan(plan, *extra_warmup)
        check_plan(job, further, "this one")
        check_schedules(further, reduce_early=True)
        assert curve_and_weights(world, job, further, 3) == curve_and_weights(world, job, plan, 3)


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_messages_hold_up_nobody_where_more_are_in_flight(world, tokens):
    """Between four nodes a message takes about two fifths of a microbatch's time."""
    job = make_job(tokens, "llama", shape={"num_layers": 4, "hidden_size": 128, "ffn_size": 512}, global_batch=32)
    job = job.model_copy(update={"overlap": Overlap(tensor=False, data=False, z=False)})
    plan = even_plan(10, TensorGrid(), 4, 1, 8, 4, family="equal")
    predictor = Predictor(Setup.of_job(job), plan, APART)
    further = with_extra_warmup(plan, predictor.costs)
    predicted = [predictor.predict(), Predictor(Setup.of_job(job), further, APART).predict()]
    _, training, _ = open_datasets(job.data, job.train.seed)

    def measured(world, plan: Plan) -> tuple[float, float]:
        trainer = Trainer(world, world.accelerator, job, plan)
        trainer.initialise()
        return punctual_step(world, trainer, training)

    with rehearsed_world(world, APART, Truth(time_scale=2.0, devices={"equal": DEVICE})) as own:
        (delay, late), (through, later) = measured(own, plan), measured(own, further)
    if world.rank == 0:
        summary = [
            f"{s:.4f} s ({p.step_seconds:.4f} predicted)" for s, p in zip((delay, through), predicted, strict=True)
        ]
        extra = [tile.extra_warmup for tile in further.tiles]
        print(f"1f1b {summary[0]}, extra warm-up {extra} {summary[1]}; overrun {max(late, later):.2%}")
    if max(late, later) > TOO_LATE:
        pytest.skip(f"the machine was late by {max(late, later):.1%}: no times to be compared with predictions")
    assert through < 0.9 * delay
    for seconds, prediction in zip((delay, through), predicted, strict=True):
        assert seconds == pytest.approx(prediction.step_seconds, rel=0.05)
