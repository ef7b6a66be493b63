"""What ranks need, as the planner says, against the storages that each rank holds at its peak when it trains alone.

What collectives and messages between ranks add is in tests/ranks/test_memory.py.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from hpctrain.plan.holdings import holding_of
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.prediction.activations import row_bytes
from hpctrain.planner.prediction.memory import _activations, _alive_before, _most_alive, memory_of
from hpctrain.planner.prediction.predictor import Predictor
from hpctrain.planner.prices.buffers import (
    SUMMED_BYTES,
    exchanged_bytes,
    largest_message_bytes,
    largest_unit,
    scattered_scratch,
    waiting_share,
)
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.host_buckets import bucket_elements
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers
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


@pytest.mark.parametrize(
    ("family", "plan", "least"),
    [
        ("qwen3_moe", {"data": 4}, 0.01),
        ("qwen3_moe", {"data": 4, "recompute": "selective"}, 0.01),
        ("gpt_oss", {"data": 4}, 0.03),
        ("gpt_oss", {"data": 4, "recompute": "selective"}, 0.03),
        ("gpt_oss", PIPELINE | {"schedule": "zb-h1"}, 0.07),
        ("dots1", PIPELINE | {"schedule": "zb-h1"}, 0.04),
        ("dots1", {"tensor": {"y": 2}, "data": 2}, 0.06),
    ],
    ids=str,
)
def test_experts_take_what_is_predicted(tokens, family, plan, least):
    sizes = {"num_experts": 8, "experts_per_token": 2, "ffn_size" if family == "gpt_oss" else "expert_size": 48}
    own = {"shared_experts": 1, "dense_layers": 1} if family == "dots1" else {}
    check_memory(job_of("llama", tokens, plan, architecture=family, **sizes, **own), least)


def test_nor_do_clamped_experts_that_are_wider_than_hidden_states(tokens):
    sizes = {"num_experts": 8, "experts_per_token": 2, "ffn_size": 256}
    check_memory(job_of("llama", tokens, {"data": 4}, architecture="gpt_oss", **sizes), 0.02)


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


def test_nor_does_one_whose_weight_passes_wait_while_it_goes_through_chunks(tokens):
    job = job_of("llama", tokens)
    plan = even_plan(job.model.num_items, TensorGrid(), 2, 1, 4, 4, schedule="zb-h1", row_chunks=2)
    check_memory(job, 0.03, plan)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_nor_does_one_that_ends_in_attention_with_exchanged_heads(tokens, recompute):
    """No feed-forward part has released its activations when queries, keys and values are there three times."""
    job = job_of("llama", tokens, positions=512, global_batch=2)
    grid, cut = TensorGrid(c=2, exchanges_heads=True), (Interval(0, 2), Interval(2, job.model.num_items))
    tiles = (
        Tile(items, Interval(0, 1), ranks, grid, family=family, recompute=recompute)
        for items, ranks, family in zip(cut, ((0, 1), (2, 3)), ("fast", "slow"), strict=True)
    )
    check_memory(job, 0.08, Plan(tuple(tiles), 2, 1))


def test_buckets_of_an_optimizer_on_the_host_decide_where_there_are_few_activations(tokens):
    job = job_of("llama", tokens, positions=4, max_positions=16, global_batch=1)
    plan = even_plan(job.model.num_items, TensorGrid(), 1, 1, 1, 1, **HOST)
    (stage,) = Predictor(Setup.of_job(job), plan, CLUSTER).memory
    ((peak, _),) = train(job, plan, [0]).values()
    update = (
        2 * SUMMED_BYTES * bucket_elements(stage.memory.weights // SUMMED_BYTES)
    )  # what the optimizer computes with, which is not counted
    assert 0 <= peak - stage.memory.total <= update


def test_two_grids_have_packed_copies(tokens):
    job = job_of("llama", tokens, positions=32, global_batch=4)
    whole, rows = Interval(0, job.model.num_items), (Interval(0, 2), Interval(2, 4))
    tiles = Tile(whole, rows[0], (0, 1), TensorGrid(y=2), family="fast"), Tile(whole, rows[1], (2,), family="slow")
    check_memory(job, 0.02, Plan(tiles, 1, 4))


class Scratch(NamedTuple):
    """A network whose sums take a fourth of their bytes, or half of them where all ranks have the result."""

    times: int = 1

    def scratch_bytes(self, operation: str, num_bytes: int, ranks: tuple[int, ...], rank: int) -> int:
        return self.times * num_bytes // {"reduce_scatter": 4, "all_reduce": 2}[operation]


def held(*groups: tuple[int, tuple[int, ...], int, bool, int]) -> list:
    """Return shard groups: ZeRO stage, ranks, item after which gradients are final, whether in regions, and size."""
    keys = "zero", "ranks", "final_after", "regions", "is_tied"
    return [(SimpleNamespace(**dict(zip(keys, (*group[:4], False), strict=True))), group[4]) for group in groups]


@pytest.mark.parametrize(
    ("groups", "alive", "overlapped", "blocking"),
    [
        # Bytes of packed copies and of scratch: 0 + 400, of all sums; and of the larger one alone.
        ([(0, (0, 1), 3, False, 200), (1, (0, 1), 3, False, 100)], 0, 400, 400),
        # 200 + 100, and 0 + 200 on a lane of its own.
        ([(0, (0, 1), 3, True, 50), (1, (0, 2), 3, False, 200)], 0, 500, 300),
        # The first sum starts while activations are left, the second one when there are none.
        ([(1, (0, 1), 5, False, 100), (1, (0, 1), 3, False, 300)], 1000, 1100, 300),
        # Of one rank alone, and of sums after each item.
        ([(1, (0,), 3, False, 100), (2, (0, 1), 3, False, 100)], 1000, 0, 0),
    ],
)
def test_sums_at_the_end_of_a_step_take_scratch_and_packed_copies(groups, alive, overlapped, blocking):
    for bucket_bytes, expected in ((1, overlapped), (None, blocking)):
        setup = SimpleNamespace(bucket_bytes=bucket_bytes, by_family=())
        needed = exchanged_bytes(setup, Scratch(), None, None, held(*groups), 0, lambda item: alive * (item == 5))  # pyright: ignore[reportArgumentType]
        assert needed == expected


def test_sums_after_each_item_take_scratch_of_the_largest(tokens):
    job = job_of("llama", tokens, {"tensor": {"z": 2}, "data": 2})
    setup, plan = Setup.of_job(job), resolve_plan(job, 4).plan
    tile = plan.tiles[0]
    over_z = largest_unit(setup, tile.tensor, range(*tile.items))
    sums = [(SUMMED_BYTES * stored, (0, 2), 0) for stored in (10_000, 4_000)]
    for overlaps, bucket_bytes, expected in (
        ({"z"}, 1, (over_z + 10_000, 0)),
        (set(), 1, (10_000, over_z)),
        ({"z"}, None, (over_z, 10_000)),
        (set(), None, (0, max(over_z, 10_000))),
    ):
        own = replace(setup, overlaps=frozenset(overlaps), bucket_bytes=bucket_bytes)
        assert scattered_scratch(own, Scratch(), tile, range(*tile.items), sums) == expected  # pyright: ignore[reportArgumentType]


def test_messages_that_wait_and_sums_in_flight_are_added(tokens):
    job = job_of("llama", tokens, {"tensor": {"z": 2}, "pipeline": 2, "microbatch": 4})
    setup, plan = replace(Setup.of_job(job), overlaps=frozenset({"z"})), resolve_plan(job, 4).plan
    tile = plan.tiles[0]
    shards = holding_of(job.model, plan, 0)

    def needed(network, waiting: int):
        return memory_of(setup, network, plan, tile, shards, 0, waiting, 0)

    plain, sums = needed(Scratch(0), 0), needed(Scratch(1), 0)
    assert needed(Scratch(0), 3).buffers - plain.buffers == 3 * largest_message_bytes(setup, tile)
    over_z = largest_unit(setup, tile.tensor, range(*tile.items))
    assert sums.gathered - plain.gathered == over_z
    setup = replace(setup, overlaps=frozenset())
    assert needed(Scratch(2000), 0).buffers - needed(Scratch(1000), 0).buffers == 1000 * over_z


INTERLEAVED = {"pipeline": 2, "data": 2, "microbatch": 2, "virtual_stages": 2}


@pytest.mark.parametrize("plan", [{"data": 4}, {"pipeline": 2, "data": 2, "microbatch": 8}, INTERLEAVED], ids=str)
def test_before_the_last_item_there_is_all_that_is_kept_and_computed_with(tokens, plan):
    job = job_of("llama", tokens, plan)
    setup, whole = Setup.of_job(job), resolve_plan(job, 4).plan
    for tile in whole.tiles:
        alive = [_alive_before(setup, whole, tile, item) for item in range(tile.items.start, tile.items.stop + 1)]
        assert alive == sorted(alive) and alive[0] == 0
        assert alive[-1] == pytest.approx(sum(_activations(setup, whole, tile)), rel=1e-3)


def test_the_largest_of_several_virtual_stages_decides():
    """The first of a rank's two has more blocks here, and is alive the most often before its last pass."""
    job = job_of("llama")
    setup = Setup.of_job(job)
    plan = even_plan(job.model.num_items, TensorGrid(), 2, 1, 8, 8, virtual_stages=2)
    cuts = Interval(0, 9), Interval(9, 10), Interval(10, 11), Interval(11, job.model.num_items)
    plan = replace(plan, tiles=tuple(replace(tile, items=cut) for tile, cut in zip(plan.tiles, cuts, strict=True)))
    pair = plan.tiles[0], plan.tiles[2]
    bytes_of = [row_bytes(setup, each.tensor, layers(each.items), "none", splits=False, rows=8) for each in pair]
    _, computing = _activations(setup, plan, pair[0])
    assert computing == 8 * bytes_of[0].computing > 8 * bytes_of[1].computing
    assert _most_alive(setup, plan, pair, [100, 1], [0, 0]) == 4 * 100 + 1


def test_what_is_not_sent_while_the_next_activations_are_made_waits():
    assert [waiting_share(*seconds) for seconds in ((1, 4), (4, 1), (1, 0))] == [0.75, 0, 0]


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
