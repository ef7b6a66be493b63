"""Rows whose positions c cuts: the losses of one rank, the same bits again, the bytes of the group of c."""

import functools
from itertools import chain, starmap
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.groups.group import Group
from hpctrain.comm.world import HOST_VARIABLE, World
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.job import Job
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import Batch, open_datasets
from hpctrain.data.tokens import TokenWriter
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.checks import check_plan
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.network import ClusterNetwork
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval, cut_zigzag
from tests.pretended import equal_nodes
from tests.ranks.punctual import Measurement, punctual_step
from tests.ranks.small_runs import (
    VOCAB,
    Alone,
    by,
    bytes_of_a_step,
    largest_relative_difference,
    losses,
    make_job,
    rehearsed_world,
    whole_if_resumed_exactly,
)

TOLERANCE = 1e-5
ROWS, MICROBATCHES, BLOCKS = 4, 2, 2
LAST = 2 * BLOCKS + 2
MODELS = {
    "gpt2": {"num_heads": 8},
    "llama": {"ffn_size": 24},
    "mistral": {"architecture": "mistral", "window": 5, "ffn_size": 24},
    "gemma3": {
        "architecture": "gemma3",
        "window": 5,
        "global_every": 2,
        "rope_local_base": 100.0,
        "score_divisor": 6.0,
        "head_size": 8,
        "ffn_size": 24,
        "tie_head": True,
    },
    "gemma2": {
        "architecture": "gemma2",
        "window": 5,
        "global_every": 2,
        "score_divisor": 6.0,
        "score_cap": 2.0,
        "logit_cap": 4.0,
        "head_size": 8,
        "ffn_size": 24,
        "tie_head": True,
    },
}


def tile(items, rows, ranks, **options) -> Tile:
    """A tile, whose grid has the options that are its own."""
    grid = {name: options.pop(name) for name in list(options) if name in TensorGrid._fields}
    return Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(**grid), **options)


def whole(ranks, **options) -> tuple[Tile, ...]:
    return (tile((0, LAST), (0, ROWS), ranks, **options),)


TILINGS = {
    2: {
        "c": whole((0, 1), c=2),
        "c of one row at a time, selectively recomputed": whole((1, 0), c=2, recompute="selective", row_chunks=4),
        "c and all recomputed": whole((0, 1), c=2, recompute="full"),
        "heads": whole((0, 1), c=2, exchanges_heads=True),
        "heads, selectively recomputed": whole((1, 0), c=2, exchanges_heads=True, recompute="selective", row_chunks=4),
        "heads, all recomputed": whole((0, 1), c=2, exchanges_heads=True, recompute="full"),
        "unequal": whole((0, 1), c=2, position_shares=(3, 1)),
        "unequal, selectively recomputed": whole(
            (1, 0), c=2, position_shares=(1, 3), recompute="selective", row_chunks=2
        ),
        "unequal, heads": whole((0, 1), c=2, position_shares=(1, 7), exchanges_heads=True),
    },
    4: {
        "c of four": whole((0, 1, 2, 3), c=4),
        "x and c": whole((0, 1, 2, 3), x=2, c=2, recompute="full"),
        "y and c": whole((3, 1, 2, 0), y=2, c=2, recompute="selective"),
        "y that cuts positions, and c": whole((0, 1, 2, 3), y=2, c=2, sequence_parallel=True),
        "z and c": whole((0, 1, 2, 3), z=2, c=2, zero=0),
        "from c to whole rows": (tile((0, 3), (0, 4), (0, 1), c=2), tile((3, LAST), (0, 4), (2, 3), y=2)),
        "from whole rows to c": (tile((0, 3), (0, 4), (0, 1), z=2), tile((3, LAST), (0, 4), (3, 2), c=2)),
        "from y's positions to c": (
            tile((0, 3), (0, 4), (0, 1), y=2, sequence_parallel=True),
            tile((3, LAST), (0, 4), (2, 3), c=2),
        ),
        "replicas of unlike grids": (
            tile((0, LAST), (0, 3), (0, 1), c=2),
            tile((0, LAST), (3, 4), (2, 3), y=2),
        ),
        "replicas that share weights": (
            tile((0, LAST), (0, 3), (0, 1), c=2, zero=3),
            tile((0, LAST), (3, 4), (2, 3), c=2, zero=3, state_share=2),
        ),
        "replicas that share gradients": (
            tile((0, LAST), (0, 2), (0, 1), c=2, zero=2),
            tile((0, LAST), (2, 4), (2, 3), c=2, zero=2),
        ),
        "virtual stages": tuple(
            tile(items, (0, 4), ranks, c=2)
            for items, ranks in (((0, 2), (0, 1)), ((2, 3), (2, 3)), ((3, 4), (0, 1)), ((4, LAST), (2, 3)))
        ),
        "zero-bubble": (tile((0, 3), (0, 4), (0, 1), c=2), tile((3, LAST), (0, 4), (2, 3), c=2)),
        "unequal, y that cuts positions": whole((0, 1, 2, 3), y=2, c=2, position_shares=(3, 1), sequence_parallel=True),
        "unequal z and c": whole((0, 1, 2, 3), z=2, c=2, position_shares=(1, 3), recompute="full"),
        "unequal, all of four": whole((0, 1, 2, 3), c=4, position_shares=(1, 3, 2, 2)),
        "unequal, from one cut to another": (
            tile((0, 3), (0, 4), (0, 1), c=2, position_shares=(3, 1)),
            tile((3, LAST), (0, 4), (3, 2), c=2, position_shares=(3, 5), exchanges_heads=True),
        ),
        "unequal replicas": (
            tile((0, LAST), (0, 3), (0, 1), c=2, position_shares=(3, 1), zero=0),
            tile((0, LAST), (3, 4), (2, 3), c=2, zero=0),
        ),
        "heads of four": whole((0, 1, 2, 3), c=4, exchanges_heads=True),
        "heads, y that cuts positions": whole((3, 1, 2, 0), y=2, c=2, sequence_parallel=True, exchanges_heads=True),
        "heads and z": whole((0, 1, 2, 3), z=2, c=2, zero=0, exchanges_heads=True, recompute="selective"),
        "heads, then c, zero-bubble": (
            tile((0, 3), (0, 4), (0, 1), c=2, exchanges_heads=True),
            tile((3, LAST), (0, 4), (2, 3), c=2),
        ),
    },
    8: {
        "heads of eight": whole(tuple(range(8)), c=8, exchanges_heads=True),
        "x, y and c": whole(tuple(range(8)), x=2, y=2, c=2),
        "y, z and c": whole(tuple(range(8)), y=2, z=2, c=2, sequence_parallel=True),
        "y and c of four": whole((6, 7, 4, 5, 2, 3, 0, 1), y=2, c=4, recompute="selective"),
        "c of four, then of two": (
            tile((0, 3), (0, 4), (0, 1, 2, 3), c=4),
            tile((3, LAST), (0, 2), (4, 5), c=2, zero=0),
            tile((3, LAST), (2, 4), (6, 7), x=2, zero=0),
        ),
        "y and heads of four": whole(tuple(range(8)), y=2, c=4, exchanges_heads=True, sequence_parallel=True),
        "c of eight": whole(tuple(range(8)), c=8),
        "heads of two by two": whole(tuple(range(8)), y=2, z=2, c=2, exchanges_heads=True),
    },
}


UNEQUAL = {2: (3, 1), 4: (1, 3, 2, 2)}
"""Shares of the positions of a row, by the number of ranks."""


def plan_of(name: str, size: int) -> Plan:
    schedule = "zb-h1" if "zero-bubble" in name else "1f1b"
    return Plan(TILINGS[size][name], MICROBATCHES, ROWS, schedule)


def pytest_generate_tests(metafunc):
    if "tiling" in metafunc.fixturenames:
        from mpi4py import MPI

        names = TILINGS.get(MPI.COMM_WORLD.size, {})
        models = list(MODELS)
        metafunc.parametrize(("model", "tiling"), [(models[i % len(models)], name) for i, name in enumerate(names)])


def job_of(tokens, model: str, **more):
    shape = {"num_layers": BLOCKS, "hidden_size": 16, "num_heads": 4, "vocab_size": VOCAB} | MODELS[model]
    kind = "gpt2" if model == "gpt2" else "llama"
    job = make_job(tokens, kind, shape=shape, global_batch=ROWS * MICROBATCHES, learning_rate=1e-2)
    return job.model_copy(update=more)


def packed(world, folder) -> Path:
    """Write documents of 2 to 39 tokens, of which the first half is a prompt."""
    if world.rank == 0:
        rng = np.random.default_rng(2)
        with TokenWriter(folder / "packed.h5", VOCAB) as writer:
            for size in rng.integers(2, 40, size=300):
                writer.begin_document()
                writer.append(rng.integers(VOCAB, size=size // 2), learnt=False)
                writer.append(rng.integers(VOCAB, size=size - size // 2))
    world.agree(None)
    return folder / "packed.h5"


def inside_documents(job: Job) -> Job:
    return job.model_copy(update={"data": job.data.model_copy(update={"mask_documents": True})})


@functools.cache
def one_rank(world, tokens, model: str, steps: int) -> list[float]:
    return world.on_first_rank(lambda: losses(Alone(), job_of(tokens, model), steps, plan=Plan(whole((0,)), 2, ROWS)))


def curve(world, job, plan: Plan, steps: int) -> list[float]:
    with world.freeing():
        return losses(world, job, steps, plan=plan)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
def test_losses_are_those_of_one_rank(world, tokens, steps, model, tiling):
    plan, expected = plan_of(tiling, world.size), one_rank(world, tokens, model, steps)
    check_plan(job_of(tokens, model), plan, "the plan")
    result = curve(world, job_of(tokens, model), plan, steps)
    difference = largest_relative_difference(result, expected)
    if world.rank == 0:
        print(f"{model}, {tiling}: {difference:.1e} {plan.describe()}")
    assert expected[steps - 1] < 0.98 * expected[0], "the reference learns"
    assert difference < TOLERANCE


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", MODELS)
def test_windows_and_caps_have_the_losses_of_one_rank(world, tokens, steps, model):
    for name in ("c", "heads", "unequal"):
        result = curve(world, job_of(tokens, model), plan_of(name, 2), steps)
        assert largest_relative_difference(result, one_rank(world, tokens, model, steps)) < TOLERANCE, name


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["gpt2", "mistral"])
def test_documents_and_prompts_have_the_losses_of_one_rank(world, folder, model):
    job = inside_documents(job_of(packed(world, folder), model))
    expected = world.on_first_rank(lambda: losses(Alone(), job, 4, plan=Plan(whole((0,)), 2, ROWS)))
    names = {
        2: ["c", "heads", "unequal"],
        4: ["c of four", "y that cuts positions, and c", "heads of four", "unequal, from one cut to another"],
    }
    for name in names[world.size]:
        assert largest_relative_difference(curve(world, job, plan_of(name, world.size), 4), expected) < TOLERANCE, name


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_c_over_two_hosts_has_the_losses_of_one_rank(world, tokens, monkeypatch):
    """Keys and values that are gathered, and sent, and heads that are exchanged, inside of hosts and between them."""
    monkeypatch.setenv(HOST_VARIABLE, ("one", "two")[world.rank // 2])
    own = World.start(60.0, watched=False)
    assert own.topology.ranks_on_host(0) == 2
    for name, model in (("c of four", "llama"), ("c of four", "mistral"), ("heads of four", "llama")):
        result = curve(own, job_of(tokens, model), plan_of(name, 4), 4)
        assert largest_relative_difference(result, one_rank(world, tokens, model, 4)) < TOLERANCE, (name, model)
    own.close()


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["y and c", "replicas that share weights"])
def test_what_is_overlapped_changes_no_bit(world, tokens, name):
    plan = plan_of(name, 4)
    off, on = (
        curve(world, job_of(tokens, "llama", overlap=Overlap(tensor=on, data=on, z=on)), plan, 4)
        for on in (False, True)
    )
    assert on == off


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_heads_that_are_gathered_in_parts_change_no_bit(world, tokens, recompute, monkeypatch):
    """Attention of some heads overlaps the gather of the next ones, and the scatter of gradients of those before."""
    started: list[str] = []
    plan = Plan(whole(tuple(range(world.size)), c=world.size, recompute=recompute), MICROBATCHES, ROWS)
    model = job_of(tokens, "llama").model
    keys_and_values = 2 * ROWS * 16 * model.num_kv_heads * model.hidden_size // model.num_heads
    moved = keys_and_values, keys_and_values // 2

    def noting(name: str, begin):
        def start(group, tensor, *of):
            started.extend([name] * (tensor.numel() in moved))
            return begin(group, tensor, *of)

        monkeypatch.setattr(Group, name, start)

    for name in ("start_all_gather", "start_reduce_scatter"):
        noting(name, getattr(Group, name))
    results, counts, passes = [], [], 3 * MICROBATCHES * BLOCKS
    for parts in (1, 2):
        started.clear()
        overlap = Overlap(tensor=parts > 1, data=False, z=False, tensor_parts=parts)
        results.append(curve(world, job_of(tokens, "llama", overlap=overlap), plan, 3))
        assert started.count("start_reduce_scatter") == parts * passes
        counts.append(started.count("start_all_gather"))
    assert counts[1] == 2 * counts[0] >= 2 * passes * (2 if recompute == "full" else 1)
    assert results[0] == results[1]


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(world, tokens, folder, dtype):
    of_four = "replicas that share weights" if dtype == "fp32" else "unequal, from one cut to another"
    name = {2: "heads" if dtype == "fp32" else "unequal", 4: of_four}[world.size]
    # In windows ranks of unequal positions send each other what they see.
    job, plan = job_of(tokens, "gpt2" if dtype == "fp32" else "mistral"), plan_of(name, world.size)
    job = job.model_copy(update={"train": job.train.model_copy(update={"dtype": dtype})})
    whole_if_resumed_exactly(world, job, plan, folder)


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shares", [{}, UNEQUAL], ids=["equal", "unequal"])
def test_c_moves_the_keys_and_values_of_each_block(world, tokens, shares, recompute, monkeypatch):
    """fp32; n ranks send together n - 1 times what they gather, and as much of what they scatter: keys and values of
    each block forward, once more where they are not kept, and their gradients. Whoever has which positions."""
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    n = world.size
    job = make_job(tokens, "llama", {"tensor": {"c": n}, "microbatch": 8, "recompute": recompute})
    numbers, key_size = 16 * 16, job.model.num_kv_heads * job.model.hidden_size // job.model.num_heads
    passes, options = 2 if recompute == "none" else 3, {"position_shares": shares.get(n, ()), "recompute": recompute}
    everything = tile((0, job.model.num_items), (0, 8), tuple(range(n)), c=n, **options)
    plan = Plan((everything,), job.train.global_batch // 8, 8)
    sent = bytes_of_a_step(world, job, lambda layout: [layout.axes.c], plan)
    assert sent == 4 * (n - 1) * passes * job.model.num_layers * numbers * 2 * key_size


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("window", "packs", "shares", "recompute"),
    [(5, False, {}, "none"), (3, False, {2: (1, 3), 4: (1, 3, 2, 2)}, "selective"), (None, True, {}, "none")],
    ids=["window", "unequal", "documents"],
)
def test_ranks_receive_what_they_see(world, tokens, folder, window, packs, shares, recompute, monkeypatch):
    """fp32; each rank receives the keys and values of positions of others that one of its own attends to, and sends
    their gradients back. Of a row in which one sees all, all receive all."""
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    n, shape = world.size, {"architecture": "mistral", "window": window} if window else {}
    job = make_job(packed(world, folder) if packs else tokens, "llama", shape={"num_layers": 2} | shape)
    job = inside_documents(job) if packs else job
    grid = {"c": n, "position_shares": shares.get(n, ())}
    plan = Plan((tile((0, 6), (0, 1), tuple(range(n)), recompute=recompute, **grid),), job.train.global_batch, 1)
    _, training, _ = open_datasets(job.data, job.train.seed)
    batch = Batch.of_step(training, 1, job.train.global_batch)
    starts = batch.document_starts(Interval(0, plan.microbatches)) if packs else np.zeros((plan.microbatches, 16), int)
    contexts = [{*chain(*starmap(range, own))} for own in cut_zigzag(16, plan.tiles[0].tensor.context_shares)]
    received = []
    for row in starts:
        seen = [{k for q in own for k in range(max(row[q], q + 1 - (window or 16)), q + 1)} for own in contexts]
        seen = [{*range(16)}] * n if 16 in map(len, seen) else seen
        received.append(sum(len(keys - own) for keys, own in zip(seen, contexts, strict=True)))
    assert 0 < sum(received) < 0.8 * 16 * (n - 1) * len(received), "few see all"
    key_size, passes = job.model.num_kv_heads * job.model.hidden_size // job.model.num_heads, 2 + (recompute != "none")
    sent = bytes_of_a_step(world, job, lambda layout: [layout.axes.c], plan)
    assert sent == 4 * passes * job.model.num_layers * sum(received) * 2 * key_size


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_an_exchange_moves_each_head_once(world, tokens, recompute, kv_heads, monkeypatch):
    """fp32; a rank keeps an n-th of what it has. Queries, keys, values and the result move forward, again where all is
    recomputed, and their gradients. Keys and values of fewer heads than ranks are sent to several of them."""
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    n = world.size
    job = make_job(
        tokens, "llama", {"tensor": {"c": n}, "exchange_heads": True, "microbatch": 8, "recompute": recompute}
    )
    job = job.model_copy(update={"model": job.model.model_copy(update={"num_kv_heads": kv_heads})})
    numbers, head_size = 16 * 16, job.model.hidden_size // job.model.num_heads
    passes = 3 if recompute == "full" else 2
    sent = bytes_of_a_step(world, job, lambda layout: [layout.axes.c])
    of_token = 2 * job.model.num_heads + 2 * max(kv_heads, n)
    assert sent == 4 * passes * job.model.num_layers * numbers * of_token * head_size * (n - 1) // n


DEVICE = PretendDevice(memory_bytes=400_000_000, memory_bytes_per_second=4e9, flops_per_second={"fp32": 1e9})
APART = equal_nodes(DEVICE, count=4, nic_bytes_per_second=2e7)


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("grid", "recompute", "parts"),
    [
        (TensorGrid(c=4), "none", 1),
        (TensorGrid(c=4), "none", 4),
        (TensorGrid(c=4), "selective", 1),
        (TensorGrid(y=2, c=2), "none", 1),
        (TensorGrid(c=4, exchanges_heads=True), "none", 1),
        (TensorGrid(y=2, c=2, exchanges_heads=True), "selective", 1),
    ],
    ids=str,
)
def test_a_rehearsed_step_takes_as_long_as_predicted(world, tokens, grid, recompute, parts):
    """One row of 32 times the positions of other tests, attention being most of its work."""
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "max_positions": 512}
    job = make_job(tokens, "llama", shape=shape, global_batch=1, validation_sequences=1)
    data = job.data.model_copy(update={"sequence_length": 512})
    overlap = Overlap(tensor=parts > 1, data=False, z=False, tensor_parts=parts)
    job = job.model_copy(update={"data": data, "overlap": overlap})
    plan = even_plan(job.model.num_items, grid, 1, 1, 1, 1, family="equal", recompute=recompute)
    _, training, _ = open_datasets(job.data, job.train.seed)
    predicted = predict(Setup.of_job(job), plan, APART)
    measurement = Measurement(world)
    with rehearsed_world(world, APART, Truth(time_scale=8.0, devices={"equal": DEVICE})) as own:
        own.configure(network=ClusterNetwork(APART))
        trainer = Trainer(own, own.accelerator, job, plan)
        trainer.initialise()
        seconds, overrun = punctual_step(own, trainer, training)
        del trainer
    if world.rank == 0:
        print(f"{grid}, {recompute}: {seconds:.4f} s, {predicted.step_seconds:.4f} predicted; overrun {overrun:.2%}")
    with measurement.checking(overrun):
        assert seconds == pytest.approx(predicted.step_seconds, rel=0.05)
