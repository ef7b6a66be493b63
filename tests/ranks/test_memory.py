"""What ranks need, as the planner says, against the storages that rehearsed ranks really hold at their peak."""

import itertools
from dataclasses import fields

import pytest

from hpctrain.architectures.description import Attention, Description, Mlp, Norm
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.job import Model
from hpctrain.data.order import open_datasets
from hpctrain.observe.overrun import QUOTED_OVERRUN
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.buffers import largest_message_bytes
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER
from tests.ranks.small_runs import make_job, make_trainer, rehearsed_world

LARGE = {"memory_bytes": 10**12, "memory_bytes_per_second": 1e13, "flops_per_second": {"fp32": 1e13}}
TRUTH = Truth(devices={name: PretendDevice(**LARGE) for name in ("fast", "slow")}, time_scale=1.0)
SHAPE = {"num_layers": 6, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 176, "vocab_size": 509}
LAYOUTS = {
    "replicas": {"data": 4},
    "replicas, ZeRO 0": {"data": 4, "zero": 0},
    "replicas, ZeRO 2": {"data": 4, "zero": 2, "microbatch": 2},
    "replicas, ZeRO 3": {"data": 4, "zero": 3, "microbatch": 2},
    "z": {"tensor": {"z": 4}},
    "z, pipeline": {"tensor": {"z": 2}, "pipeline": 2, "microbatch": 4},
    "y, recompute": {"tensor": {"y": 2}, "data": 2, "recompute": "full"},
    "y": {"tensor": {"y": 4}},
    "y, sequence parallel": {"tensor": {"y": 4}, "sequence_parallel": True},
    "y, sequence parallel, selective": {
        "tensor": {"y": 2},
        "pipeline": 2,
        "microbatch": 4,
        "recompute": "selective",
        "sequence_parallel": True,
    },
    "y, sequence parallel, recompute": {"tensor": {"y": 2}, "data": 2, "recompute": "full", "sequence_parallel": True},
    "y, sequence parallel, a row at once": {
        "tensor": {"y": 2},
        "pipeline": 2,
        "microbatch": 1,
        "sequence_parallel": True,
    },
    "y, sequence parallel, pipeline": {"tensor": {"y": 2}, "pipeline": 2, "microbatch": 4, "sequence_parallel": True},
    "x": {"tensor": {"x": 2}, "data": 2},
    "x, recompute": {"tensor": {"x": 2}, "pipeline": 2, "recompute": "full", "microbatch": 4},
    "pipeline": {"pipeline": 4, "microbatch": 2},
    "pipeline, recompute": {"pipeline": 4, "microbatch": 2, "recompute": "full"},
    "pipeline, selective": {"pipeline": 4, "microbatch": 2, "recompute": "selective"},
    "zero-bubble, selective": {"pipeline": 4, "microbatch": 2, "schedule": "zb-h1", "recompute": "selective"},
    "x, selective": {"tensor": {"x": 2}, "data": 2, "recompute": "selective"},
    "zero-bubble": {"pipeline": 4, "microbatch": 2, "schedule": "zb-h1"},
    "chunks": {"pipeline": 2, "data": 2, "microbatch": 2, "virtual_stages": 2},
    "replicas, optimizer on the host": {"data": 4, "offload": "optimizer"},
    "replicas, ZeRO 2, optimizer on the host": {"data": 4, "zero": 2, "microbatch": 2, "offload": "optimizer"},
    "replicas, ZeRO 3, optimizer on the host": {"data": 4, "zero": 3, "microbatch": 2, "offload": "optimizer"},
    "pipeline, optimizer on the host": {"pipeline": 2, "data": 2, "microbatch": 2, "offload": "optimizer"},
}


FEW_ROWS = {
    "exchange by domains": ({"data": 4}, {}),
    "exchange by domains, ZeRO 0": ({"data": 4, "zero": 0}, {}),
    "exchange by domains, overlapped": ({"data": 4}, {"data": True}),
    "z, overlapped, optimizer on the host": (
        {"tensor": {"z": 2}, "data": 2, "offload": "optimizer", "recompute": "selective"},
        {"z": True},
    ),
}
"""Ranks with so few rows that their gradients are larger than their activations: sums decide what they need."""
OVERLAPPED = ("replicas, ZeRO 2", "replicas, ZeRO 3", "z", "z, pipeline")
SELECTED = (
    *("replicas", "replicas, ZeRO 0", "replicas, ZeRO 3", "z, pipeline", "y", "x, recompute", "x, selective"),
    *("y, sequence parallel, selective", "y, sequence parallel, recompute", "y, sequence parallel, a row at once"),
    *("pipeline", "zero-bubble, selective", "chunks", "replicas, ZeRO 2, optimizer on the host"),
    *("replicas, ZeRO 3, optimizer on the host", "pipeline, optimizer on the host"),
)
"""Each axis, ZeRO stage, schedule, recompute and offload, and what keeps the most of each; all with --thorough."""
SELECTED_OVERLAPPED = "replicas, ZeRO 2", "z"


FAMILIES = {
    "llama": {},
    "gpt2": {"num_kv_heads": None, "tie_head": True},
    "qwen3": {},
    "gemma2": {"window": 16, "global_every": 2, "score_cap": 50.0, "logit_cap": 30.0, "score_divisor": 8.0},
    "qwen2": {},
    "gemma3": {"window": 16, "global_every": 3, "score_divisor": 8.0, "tie_head": True},
}
"""With the keys that give them all their parts. Together they have each part of a `Description`."""
CAREFUL_FAMILIES = {"gpt2": -0.1, "gemma2": -0.15, "gemma3": -0.1}
"""More is predicted than these need, where blocks are computed again; of scores with a
cap, which go one by one, everywhere."""


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        is_all = metafunc.config.getoption("--thorough")
        plain, overlapped = (LAYOUTS, OVERLAPPED) if is_all else (SELECTED, SELECTED_OVERLAPPED)
        layouts = [(name, False) for name in plain] + [(name, True) for name in overlapped]
        families, cases = itertools.cycle(FAMILIES), []
        for name, is_overlapped in layouts:
            tried = FAMILIES if is_all else [next(each for each in families if is_counted(name, each))]
            cases += [(name, is_overlapped, family) for family in tried if is_counted(name, family)]
        metafunc.parametrize(("layout", "is_overlapped", "family"), cases)


def is_counted(layout: str, family: str) -> bool:
    """Say whether the planner counts what a family keeps by a layout: of capped scores it does not know what waits for
    a weight pass, nor which of them stay on the device."""
    return family != "gemma2" or ("host" not in layout and "zero-bubble" not in layout)


def test_all_parts_of_a_description_are_trained():
    """Each field of what a model is made of has two values at least among the families, but for sizes."""
    sizes = {"hidden", "heads", "kv_heads", "head_size", "inner", "epsilon", "blocks", "base", "scaling"}
    values: dict[tuple[type, str], set] = {}
    for family, keys in FAMILIES.items():
        architecture = {"architecture": family, "max_positions": 64, "num_layers": 6, "hidden_size": 64}
        whole = Model.model_validate(architecture | SHAPE | keys).description
        for part in (whole, whole.norm, *(part for each in whole.blocks for part in (each.attention, each.mlp))):
            for name in {field.name for field in fields(part)} - sizes:
                values.setdefault((type(part), name), set()).add(getattr(part, name))
    assert {kind for kind, _ in values} == {Description, Norm, Attention, Mlp}
    assert [key for key, seen in values.items() if len(seen) == 1] == []


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_no_rank_needs_more_than_predicted_nor_much_less(world, tokens, layout, is_overlapped, family):
    shape = SHAPE | FAMILIES[family] | {"architecture": family, "max_positions": 64}
    job = make_job(tokens, "llama", LAYOUTS[layout], shape=shape, steps=2, global_batch=16)
    overlap = job.overlap.model_copy(update={"z": is_overlapped})
    data = job.data.model_copy(update={"sequence_length": 64})
    job = job.model_copy(update={"data": data, "overlap": overlap})
    check_memory(world, job, least=min(-0.04, CAREFUL_FAMILIES.get(family, 0.0)))


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", [{"data": 4, "zero": 0}, {"data": 2, "pipeline": 2, "offload": "optimizer"}], ids=str)
def test_an_optimizer_of_one_moment_takes_what_is_predicted(world, tokens, plan):
    job = make_job(tokens, "llama", plan | {"microbatch": 2}, shape=SHAPE, steps=2, global_batch=16, optimizer="lion")
    check_memory(world, job)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", FEW_ROWS)
def test_sums_by_messages_take_no_more_than_predicted(world, tokens, case):
    """Without scratch of collectives in the memory model these needed up to 17 % more than predicted."""
    plan, overlap = FEW_ROWS[case]
    job = make_job(tokens, "llama", plan, shape=SHAPE | {"max_positions": 32}, steps=2, global_batch=4)
    overlaps = job.overlap.model_copy(update={"z": False, "data": False} | overlap)
    data = job.data.model_copy(update={"sequence_length": 32})
    job = job.model_copy(update={"overlap": overlaps, "data": data})
    # Where sums may be in flight at once, all count, and how many are depends on how busy the machine is.
    check_memory(world, job, least=-0.08 if overlap else -0.04)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_two_grids_exchange_packed_copies_within_what_is_predicted(world, tokens):
    job = make_job(tokens, "llama", {"data": 4}, shape=SHAPE | {"max_positions": 32}, steps=2, global_batch=4)
    data = job.data.model_copy(update={"sequence_length": 32})
    overlap = job.overlap.model_copy(update={"z": True, "data": True, "bucket_bytes": 200_000})
    whole = Interval(0, job.model.num_items)
    plan = Plan(
        (
            Tile(whole, Interval(0, 2), (0, 1), TensorGrid(z=2), family="fast"),
            Tile(whole, Interval(2, 3), (2,), family="slow"),
            Tile(whole, Interval(3, 4), (3,), family="slow"),
        ),
        1,
        4,
    )
    check_memory(world, job.model_copy(update={"data": data, "overlap": overlap}), plan, least=-0.1)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_nor_does_one_that_goes_through_its_rows_in_chunks(world, tokens):
    job = make_job(tokens, "llama", {"data": 4}, shape=SHAPE, steps=2, global_batch=16)
    check_memory(world, job, even_plan(job.model.num_items, TensorGrid(y=2), 1, 2, 1, 16, row_chunks=4))


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_nor_does_one_whose_masks_are_of_documents(world, tokens):
    """Of many positions, so that masks of all pairs are an eighth of what a rank needs."""
    shape = SHAPE | {"max_positions": 256}
    job = make_job(tokens, "llama", {"pipeline": 2, "data": 2, "microbatch": 1}, shape=shape, steps=2, global_batch=4)
    data = job.data.model_copy(update={"sequence_length": 256, "mask_documents": True})
    check_memory(world, job.model_copy(update={"data": data}))


def check_memory(world, job, plan=None, least=-0.04):
    """Rehearse two steps and compare the peaks with the prediction, below which they are by no more than `least`."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    with rehearsed_world(world, CLUSTER, TRUTH) as own:
        trainer = make_trainer(own, job, plan, own.accelerator)
        trainer.initialise()
        for _ in range(2):
            trainer.step(training)
        peaks = own.all_objects(own.accelerator.memory().peak)
        on_host = own.all_objects(own.accelerator.host_peak_bytes)
        is_late = own.largest(own.accelerator.overrun) > QUOTED_OVERRUN
    setup = Setup.of_job(job)
    for stage in Predictor(setup, trainer.plan, CLUSTER).memory:
        memory = stage.memory
        # Where a core is busy, a message more or one less is in flight at the peak than between the pretended devices.
        late = largest_message_bytes(setup, stage.tile) / memory.total if is_late else 0.0
        for rank in stage.tile.ranks:
            off = peaks[rank] / memory.total - 1
            assert least - late < off < 0.015 + late, f"rank {rank}: {off:+.2%}, {peaks[rank]:,} bytes of {memory}"
            assert abs(on_host[rank] - memory.on_host) <= 0.02 * memory.on_host, (rank, on_host[rank], memory)
