"""What ranks need, as the planner says, against the storages that each rank holds at its peak when it trains alone.

What collectives and messages between ranks add is in tests/ranks/test_memory.py.
"""

import itertools

import pytest

from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.buffers import largest_message_bytes
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from tests.pretended import CLUSTER
from tests.ranks.small_runs import write_tokens
from tests.unit.planner.rank_alone import FAMILIES, job_of, train

PIPELINE, CUT = {"pipeline": 4, "microbatch": 2}, {"tensor": {"y": 2}, "pipeline": 2, "sequence_parallel": True}
HOST = {"offload": "optimizer"}
LAYOUTS: dict[str, tuple[dict, float]] = {
    "replicas": ({"data": 4}, 0.01),
    "replicas, ZeRO 0": ({"data": 4, "zero": 0}, 0.01),
    "replicas, ZeRO 2": ({"data": 4, "zero": 2, "microbatch": 2}, 0.02),
    "replicas, ZeRO 3": ({"data": 4, "zero": 3, "microbatch": 2}, 0.05),
    "z": ({"tensor": {"z": 4}}, 0.02),
    "z, pipeline": ({"tensor": {"z": 2}, "pipeline": 2, "microbatch": 4}, 0.04),
    "z, replicas, ZeRO 3": ({"tensor": {"z": 2}, "data": 2, "zero": 3}, 0.03),
    "y, recompute": ({"tensor": {"y": 2}, "data": 2, "recompute": "full"}, 0.07),
    "y": ({"tensor": {"y": 4}}, 0.01),
    "y, sequence parallel": ({"tensor": {"y": 4}, "sequence_parallel": True}, 0.05),
    "y, sequence parallel, selective": (CUT | {"microbatch": 4, "recompute": "selective"}, 0.02),
    "y, sequence parallel, recompute": (CUT | {"microbatch": 4, "recompute": "full"}, 0.06),
    "y, sequence parallel, a row at once": (CUT | {"microbatch": 1}, 0.02),
    "x, recompute": ({"tensor": {"x": 2}, "pipeline": 2, "recompute": "full", "microbatch": 4}, 0.07),
    "x, selective": ({"tensor": {"x": 2}, "data": 2, "recompute": "selective"}, 0.01),
    "pipeline": (PIPELINE, 0.05),
    "zero-bubble": (PIPELINE | {"schedule": "zb-h1"}, 0.02),
    "zero-bubble, selective": (PIPELINE | {"schedule": "zb-h1", "recompute": "selective"}, 0.03),
    "zero-bubble, z": ({"tensor": {"z": 2}, "pipeline": 2, "microbatch": 2, "schedule": "zb-h1"}, 0.04),
    "chunks": ({"pipeline": 2, "data": 2, "microbatch": 2, "virtual_stages": 2}, 0.02),
    "replicas, optimizer on the host": ({"data": 4} | HOST, 0.01),
    "replicas, ZeRO 2, optimizer on the host": ({"data": 4, "zero": 2, "microbatch": 2} | HOST, 0.02),
    "replicas, ZeRO 3, optimizer on the host": ({"data": 4, "zero": 3, "microbatch": 2} | HOST, 0.05),
    "pipeline, optimizer on the host": ({"pipeline": 2, "data": 2, "microbatch": 2} | HOST, 0.02),
}
"""Each axis, ZeRO stage, schedule, recompute and offload, and by which share a rank may need less than predicted."""
OVERLAPPED = ("replicas, ZeRO 2", "z, replicas, ZeRO 3", "zero-bubble, z")
CASES = [(name, False) for name in LAYOUTS] + [(name, True) for name in OVERLAPPED]
TURNS = [(*case, family) for case, family in zip(CASES, itertools.cycle(FAMILIES), strict=False)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "tokens.bin")


@pytest.mark.parametrize(("layout", "is_overlapped", "family"), TURNS, ids=str)
def test_no_rank_needs_more_than_predicted_nor_much_less(tokens, layout, is_overlapped, family):
    plan, least = LAYOUTS[layout]
    job = job_of(family, tokens, plan)
    overlap = job.overlap.model_copy(update={"z": is_overlapped, "data": is_overlapped})
    check_memory(job.model_copy(update={"overlap": overlap}), least)


@pytest.mark.parametrize("plan", [{"data": 4, "zero": 0}, {"data": 2, "pipeline": 2} | HOST], ids=str)
def test_an_optimizer_of_one_moment_takes_what_is_predicted(tokens, plan):
    check_memory(job_of("llama", tokens, plan | {"microbatch": 2}, optimizer="lion"), 0.01)


def test_nor_does_one_that_goes_through_its_rows_in_chunks(tokens):
    job = job_of("llama", tokens)
    check_memory(job, 0.01, even_plan(job.model.num_items, TensorGrid(y=2), 1, 2, 1, 16, row_chunks=4))


def test_nor_does_one_whose_masks_are_of_documents(tokens):
    """Of many positions, so that masks of all pairs are an eighth of what a rank needs."""
    plan = {"pipeline": 2, "data": 2, "microbatch": 1}
    check_memory(job_of("llama", tokens, plan, positions=256, documents=True, global_batch=4), 0.03)


def check_memory(job, least: float, plan: Plan | None = None) -> None:
    """Compare the peaks of a rank of each tile with the prediction, below which they are by no more than `least`."""
    plan = plan or resolve_plan(job, 4).plan
    setup = Setup.of_job(job)
    stages = Predictor(setup, plan, CLUSTER).memory
    peaks = train(job, plan, [stage.tile.ranks[0] for stage in stages])
    for stage, (peak, on_host) in zip(stages, peaks.values(), strict=True):
        memory = stage.memory
        # Of a stage in the middle a message more is counted, or one less, than there is at the peak.
        message = largest_message_bytes(setup, stage.tile) / memory.total if plan.path_length(stage.tile) > 1 else 0.0
        off = peak / memory.total - 1
        assert -least < off < 0.005 + message, f"{stage.tile.ranks}: {off:+.2%}, {peak:,} bytes of {memory}"
        assert abs(on_host - memory.on_host) <= 0.001 * memory.on_host, (stage.tile.ranks, on_host, memory)
