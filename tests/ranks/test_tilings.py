"""Any tiling gives the numbers of one rank: different grids, rows, depths, ZeRO stages; unused ranks."""

import functools

import hypothesis.strategies as st
import numpy as np
import pytest

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.comm.transports.transport import HostTransport
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.plan.checks import check_plan
from hpctrain.plan.holdings import holding_of
from hpctrain.plan.schedule import forward_only, one_f_one_b
from hpctrain.plan.schedule_run import check_no_deadlock
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.examples import costly
from tests.ranks.given_on_ranks import given_on_ranks
from tests.ranks.small_runs import (
    Alone,
    by,
    bytes_of_a_step,
    largest_relative_difference,
    make_job,
    make_trainer,
    whole,
    whole_if_resumed_exactly,
)
from tests.tilings import share_items_by_different_grids, tilings

TOLERANCE = 1e-5
STEPS = 3
LAYERS, ROWS, MICROBATCHES = 3, 5, 3
SHAPE = {"num_layers": LAYERS, "hidden_size": 16, "num_heads": 4}
MODELS = {
    "gpt2 tied": ("gpt2", {}),
    "gpt2 untied, a key/value head for all": ("gpt2", {"tie_head": False, "num_kv_heads": 1}),
    "llama": ("llama", {"ffn_size": 24}),
    "llama tied": ("llama", {"ffn_size": 24, "tie_head": True}),
}


def tile(items, rows, ranks, grid=(1, 1, 1), **options) -> Tile:
    return Tile(Interval(*items), Interval(*rows), ranks, TensorGrid(*grid), **options)


LAST = 2 * LAYERS + 2
WHOLE = (tile((0, LAST), (0, ROWS), (0,)),)


def plan_of(tiles: tuple[Tile, ...], num_ranks: int) -> Plan:
    """Return the plan of these tiles; who is in none is unused."""
    unused = set(range(num_ranks)) - {rank for each in tiles for rank in each.ranks}
    return Plan(tiles, MICROBATCHES, ROWS, unused=tuple(sorted(unused)))


def job_of(tokens, name: str, steps: int = STEPS, global_batch: int = ROWS * MICROBATCHES, **more):
    model, shape = MODELS[name]
    return make_job(tokens, model, shape={**SHAPE, **shape}, global_batch=global_batch, steps=steps, **more)


def curve(world, job, plan: Plan) -> list[float]:
    """Losses, norms of gradients, and the validation loss."""
    _, training, validation = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.initialise()
        result = [trainer.step(training)[0] for _ in range(job.train.steps)]
        return [m[key] for m in result for key in ("loss", "grad_norm")] + [trainer.validate(validation)]


@functools.cache
def one_rank(world, tokens, name: str, steps: int) -> list[float]:
    alone = curve(Alone(), job_of(tokens, name, steps=steps), plan_of(WHOLE, 1)) if world.rank == 0 else None
    return world.broadcast_object(alone)


def check(world, tokens, name: str, plan: Plan, steps: int = STEPS, overlap: bool = False) -> None:
    job = job_of(tokens, name, steps=steps)
    job = job.model_copy(update={"overlap": Overlap(tensor=overlap, data=overlap, z=overlap)})
    check_plan(job, plan, "drawn")
    for schedule in (one_f_one_b, forward_only):
        check_no_deadlock(plan, {tile: schedule(plan, tile) for tile in plan.tiles})
    expected = one_rank(world, tokens, name, steps)
    difference = largest_relative_difference(curve(world, job, plan), expected)
    if world.rank == 0:
        print(f"{name}: {difference:.1e} {plan.describe()}")
    assert difference < TOLERANCE, plan


def different_tilings(tokens, name: str, size: int):
    drawn = tilings(job_of(tokens, name).model, size, ROWS, MICROBATCHES, exchanging=True)
    if size > 2:  # fewer ranks cannot be different
        drawn = drawn.filter(share_items_by_different_grids)
    return drawn.map(lambda plan: (name, plan))


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(300)
def test_random_tilings_give_the_losses_of_one_rank(world, tokens, monkeypatch):
    mixed = st.one_of(*(different_tilings(tokens, name, world.size) for name in MODELS))

    @given_on_ranks(st.tuples(mixed, st.sampled_from(["auto", "messages"])), max_examples=costly(24))
    def every(world, drawn):
        (name, plan), route = drawn
        one_rank(world, tokens, name, STEPS)
        monkeypatch.setattr(world, "settings", by(route, world.settings))
        monkeypatch.setattr(HostTransport, "polls_freely", True)
        check(world, tokens, name, plan)

    every(world)


FIXED = {
    "different grids, one cuts positions": (
        tile((0, LAST), (0, 3), (2, 0), (1, 2, 1, True)),
        tile((0, LAST), (3, 5), (1, 3), (2, 1, 1)),
    ),
    "different grids in one stage": (
        tile((0, LAST), (0, 2), (0, 1), (1, 2, 1), zero=0),
        tile((0, LAST), (2, 5), (3, 2), (1, 1, 2), state_share=3),
    ),
    "ends of different vocabularies, and a rank that is not used": (
        tile((0, 2), (0, 5), (3, 1), (1, 2, 1), recompute="full"),
        tile((2, LAST), (0, 5), (0,), row_chunks=2),
    ),
    "stages of different data degree": (
        tile((0, 2), (0, 5), (0,)),
        tile((2, 3), (0, 3), (3,), row_chunks=3),
        tile((2, 3), (3, 5), (1,), zero=0),
        tile((3, LAST), (0, 5), (2,)),
    ),
    "tiles that share rows with some of the next ones only": (
        tile((0, 2), (0, 2), (0,)),
        tile((0, 2), (2, 5), (2,), row_chunks=2),
        tile((2, LAST), (0, 1), (1,)),
        tile((2, LAST), (1, 5), (3,), recompute="full"),
    ),
    "rows that z cuts unevenly": (
        tile((0, 3), (0, 3), (3, 0), (1, 1, 2)),
        tile((0, 3), (3, 5), (2,)),
        tile((3, LAST), (0, 5), (1,), row_chunks=2),
    ),
}


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tiling", FIXED)
def test_tilings_of_four_ranks(world, tokens, steps, tiling):
    check(world, tokens, "llama tied", plan_of(FIXED[tiling], 4), steps=steps)


CHECKPOINTED = {
    2: [(tile((0, 3), (0, 5), (1,)), tile((3, LAST), (0, 5), (0,))), (tile((0, LAST), (0, 5), (0, 1), (1, 1, 2)),)],
    4: [
        FIXED["different grids in one stage"],
        (tile((0, LAST), (0, 4), (3, 2, 1), (1, 1, 3)), tile((0, LAST), (4, 5), (0,), zero=0)),
    ],
}


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gpt2 tied", "gpt2 untied, a key/value head for all"])
def test_a_checkpoint_of_one_tiling_is_that_of_any_other_bit_for_bit(world, tokens, folder, name):
    job = job_of(tokens, name)
    _, training, _ = open_datasets(job.data, job.train.seed)
    first, second = (plan_of(tiles, world.size) for tiles in CHECKPOINTED[world.size])
    with world.freeing():
        trainer = make_trainer(world, job, first)
        trainer.initialise()
        for _ in range(2):
            trainer.step(training)
        trainer.save(folder / "first", {})
        continued = trainer.step(training)[0]["loss"]
    with world.freeing():
        trainer = make_trainer(world, job, second)
        trainer.resume(latest_checkpoint(folder / "first"))
        trainer.save(folder / "second", {})
        again = trainer.step(training)[0]["loss"]
    assert abs(again / continued - 1) < TOLERANCE
    if world.rank == 0:
        trainer = make_trainer(Alone(), job, plan_of(WHOLE, 1))
        trainer.resume(latest_checkpoint(folder / "second"))
        trainer.save(folder / "alone", {})
        assert abs(trainer.step(training)[0]["loss"] / continued - 1) < TOLERANCE
        saved = [whole(folder / name) for name in ("first", "second", "alone")]
        for name in saved[0]:
            assert not np.isnan(saved[0][name]).any(), name
            assert saved[0][name].tobytes() == saved[1][name].tobytes() == saved[2][name].tobytes(), name
    world.agree(None)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["gpt2 untied, a key/value head for all", "llama tied"])
def test_different_grids_share_gradients_and_weights(world, tokens, name):
    """x, y and z against each other in one stage, the exchange after the passes, and overlapped with them."""
    x_y = {"recompute": "full"}
    check(world, tokens, name, plan_of(DIFFERENT_GRIDS, 4))
    for tiles in (
        DIFFERENT_GRIDS,
        (tile((0, LAST), (0, 3), (2, 0), (2, 1, 1), **x_y), tile((0, LAST), (3, 5), (1, 3), (1, 2, 1), **x_y)),
        (tile((0, LAST), (0, 4), (1, 3, 0), (1, 1, 3)), tile((0, LAST), (4, 5), (2,))),
    ):
        check(world, tokens, name, plan_of(tiles, 4), overlap=True)


@pytest.mark.ranks(4)
@pytest.mark.timeout(60)
def test_different_grids_move_each_region_by_formula(world, tokens, monkeypatch):
    """A step of one microbatch: n holders of a region send n - 1 times its gradients, and n - 1 times its weights."""
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    job = job_of(tokens, "llama", global_batch=ROWS)
    plan = Plan(DIFFERENT_GRIDS, 1, ROWS)
    sent = bytes_of_a_step(world, job, lambda layout: layout.groups, plan)
    expected = 0
    for shard_group in {h for rank in plan.ranks for h in holding_of(job.model, plan, rank).shard_groups}:
        size, others = sum(region.size for region in shard_group.regions), len(shard_group.ranks) - 1
        expected += others * size * 4 * 2
    assert sent == expected


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("name", ["gpt2 tied", "llama"])
def test_replicas_that_share_gradients_and_weights(world, tokens, folder, name, zero):
    """Uneven rows, uneven shares, and z or y inside; saved as shards, and read by one rank."""
    grid, row_chunks = ((1, 1, 2), 1) if name == "llama" else ((1, 2, 1), 2)
    options = {"grid": grid, "zero": zero, "row_chunks": row_chunks}
    less = tile((0, LAST), (0, 2), (0, 3), **options)
    plan = plan_of((less, tile((0, LAST), (2, 5), (2, 1), **options, state_share=3)), 4)
    check(world, tokens, name, plan)
    job = job_of(tokens, name)
    _, training, _ = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.initialise()
        trainer.step(training)
        trainer.save(folder / "a", {})
        trainer.resume(latest_checkpoint(folder / "a"))
        trainer.save(folder / "b", {})
    if world.rank == 0:
        trainer = make_trainer(Alone(), job, plan_of(WHOLE, 1))
        trainer.resume(latest_checkpoint(folder / "a"))
        trainer.save(folder / "c", {})
        a, b, c = (whole(folder / each) for each in "abc")
        assert [each for each in a if not a[each].tobytes() == b[each].tobytes() == c[each].tobytes()] == []
    world.agree(None)


DIFFERENT_GRIDS = (
    tile((0, LAST), (0, 2), (0, 1), (1, 2, 1), row_chunks=1),
    tile((0, LAST), (2, 5), (3, 2), (1, 1, 2), state_share=3),
)


EXACT = {
    "different grids": FIXED["different grids in one stage"],
    "replicas that share weights": (
        tile((0, LAST), (0, 3), (0, 1), (1, 2, 1), zero=3, state_share=2),
        tile((0, LAST), (3, 5), (2, 3), (1, 2, 1), zero=3),
    ),
    "uneven rows": FIXED["rows that z cuts unevenly"],
}


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("tiling", "dtype"), list(zip(EXACT, ("fp32", "bf16", "fp32"), strict=True)))
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(world, tokens, folder, tiling, dtype):
    job, plan = job_of(tokens, "gpt2 tied", dtype=dtype), plan_of(EXACT[tiling], 4)
    whole_if_resumed_exactly(world, job, plan, folder)
