"""The predictor against steps that were rehearsed: it is given the pretended devices' true figures, and no more.

Recorded by `mpirun -n 4 python -m benchmarks.training tiny --set train.dtype=fp32 --rehearse TEXT`. Its pretended
devices (`[truth]`) have the speeds and memory bandwidths below and need 20 us for an operation.
"""

import pytest

from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.job import load_job
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.efficiency import Efficiency
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.sharding.intervals import Interval
from tests import clusters


def two_devices(name: str, speed: float) -> str:
    figures = {"memory_bytes": 300e6, "memory_bytes_per_second": speed, "peak_flops_per_second": {"fp32": speed}}
    table = clusters.family(name, kind="cuda", origin="datasheet", **figures)
    return table + clusters.nodes({name: 2}, 2e8, "ib", origin="datasheet", link_latency_seconds=20e-6)


TEXT = two_devices("fast", 4e9) + two_devices("slow", 2e9) + clusters.fabric("ib", 50e-6, "datasheet")
FOUR_STAGES, ZB_H1, AGAIN = ("plan.pipeline=4", "plan.microbatch=4"), "plan.schedule=zb-h1", "plan.recompute=full"
TRUE = Efficiency(product_share=1.0, memory_share=1.0, launch_seconds=20e-6, processors=1)


def predictor(*layout: str) -> Predictor:
    cluster = parse_cluster(TEXT, "a test")
    job = load_job("tiny", [*layout, "train.dtype=fp32", "model.vocab_size=1024"])
    plan = resolve_plan(job, 4, families=[device.family for device in cluster.devices]).plan
    setup = Setup(job.model, job.data.sequence_length, "fp32", HPCTRAIN)
    return Predictor(setup, plan, cluster, {"fast": TRUE, "slow": TRUE})


@pytest.mark.parametrize(
    ("layout", "rehearsed_seconds"),
    [
        (["plan.pipeline=2", "plan.data=2"], 6.815),
        (["plan.pipeline=2", "plan.data=2", "plan.virtual_stages=2"], 6.776),
        (["plan.tensor.y=2", "plan.data=2"], 6.2285),
        (["plan.tensor.z=2", "plan.pipeline=2"], 7.064),
        (["plan.tensor.x=2", "plan.pipeline=2", "plan.recompute=full"], 10.2886),
    ],
)
def test_predictions_are_near_what_was_rehearsed(layout, rehearsed_seconds):
    result = predictor(*layout).predict()
    assert result.step_seconds == pytest.approx(rehearsed_seconds, rel=0.03)


def test_stages_that_share_a_port_with_others_are_near_what_was_rehearsed():
    """Four stages that alternate between two nodes, with a NIC of 1.5 MB/s each. As if each port carried a
    message of each stage for every microbatch, a step is predicted 11 % too short."""
    figures = {"memory_bytes": 300e6, "memory_bytes_per_second": 4e9, "peak_flops_per_second": {"fp32": 4e9}}
    nodes = clusters.nodes({"a": 2}, 1.5e6, "ib", origin="datasheet", link_latency_seconds=20e-6, count=2)
    text = clusters.family("a", kind="cuda", origin="datasheet", **figures) + clusters.fabric("ib", 50e-6) + nodes
    job = load_job("tiny", ["train.dtype=fp32", "model.vocab_size=1024"])
    cuts, ranks = ((0, 3), (3, 5), (5, 7), (7, 10)), (0, 2, 1, 3)
    tiles = (
        Tile(Interval(*cut), Interval(0, 2), (rank,), family="a", zero=1) for cut, rank in zip(cuts, ranks, strict=True)
    )
    setup = Setup(job.model, job.data.sequence_length, "fp32", HPCTRAIN)
    true = Efficiency(product_share=1.0, memory_share=1.0, launch_seconds=0.0, processors=1)
    result = Predictor(setup, Plan(tuple(tiles), 16, 2), parse_cluster(text, "a test"), {"a": true}).predict()
    assert result.step_seconds == pytest.approx(8.628, rel=0.03)
