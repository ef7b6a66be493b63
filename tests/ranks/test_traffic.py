"""Weights gathered early and gradients scattered late, on ranks: the same bits, few alive, bytes by formula."""

import pytest

from hpctrain.architectures.description import inner_of
from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import block_of
from tests.ranks.small_runs import by, bytes_of_a_step, make_job, make_trainer, parametrize_by_turns, whole

STEPS, SAVED, ROWS = 3, 2, 8
SHAPE = {"num_layers": 4}
OFF = {"tensor": False, "data": False, "z": False}
LAYOUTS = {
    2: [
        {"tensor": {"z": 2}, "microbatch": 4},
        {"tensor": {"z": 2}, "recompute": "full"},
        {"data": 2, "zero": 3, "microbatch": 2},
        {"data": 2, "zero": 2},
    ],
    4: [
        {"tensor": {"z": 4}, "microbatch": 4},
        {"tensor": {"x": 2, "z": 2}, "recompute": "full"},
        {"tensor": {"y": 2, "z": 2}, "microbatch": 4},
        {"tensor": {"z": 2}, "pipeline": 2, "microbatch": 4},
        {"tensor": {"z": 2}, "data": 2, "zero": 3, "microbatch": 2},
    ],
    8: [
        {"tensor": {"y": 2, "z": 2}, "pipeline": 2, "microbatch": 4},
        {"tensor": {"z": 2}, "pipeline": 2, "data": 2, "zero": 3, "microbatch": 2, "recompute": "full"},
    ],
}


def pytest_generate_tests(metafunc):
    parametrize_by_turns(metafunc, "route", ("auto", "messages"), LAYOUTS)


def history(world, job, folder, plan: Plan | None = None) -> list[float]:
    """Train, validate and save, continue in a new trainer; return losses, norms, and losses of validation."""
    _, training, validation = open_datasets(job.data, job.train.seed)
    result = []
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.initialise()
        for _ in range(SAVED):
            metrics = trainer.step(training)[0]
            result += [metrics["loss"], metrics["grad_norm"]]
        result.append(trainer.validate(validation))
        trainer.save(folder, {})
    with world.freeing():
        trainer = make_trainer(world, job, plan)
        trainer.resume(latest_checkpoint(folder))
        while trainer.steps_done < STEPS:
            metrics = trainer.step(training)[0]
            result += [metrics["loss"], metrics["grad_norm"]]
        result.append(trainer.validate(validation))
        trainer.save(folder, {})
    return result


def with_overlap(job, **switches):
    return job.model_copy(update={"overlap": Overlap(bucket_bytes=3000, **switches)})


def assert_same_bits(world, job, folder, plan: Plan | None = None, by_messages: bool = True) -> None:
    exposed = history(world, with_overlap(job, **OFF), folder / "off", plan)
    variants = {"all": {"tensor": True, "data": True, "z": True, "keep_gathered": 2}}
    if world.size == 4 and by_messages:  # ranks that share memory gather nothing over z
        variants["z"] = {"tensor": False, "data": False, "z": True}
    for name, switches in variants.items():
        assert history(world, with_overlap(job, **switches), folder / name, plan) == exposed
        if world.rank == 0:
            a, b = whole(folder / "off"), whole(folder / name)
            assert [key for key in a if a[key].tobytes() != b[key].tobytes()] == []
        world.agree(None)


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(300)
def test_on_and_off_are_bit_equal_through_validation_and_resuming(world, tokens, folder, layout, route, monkeypatch):
    monkeypatch.setattr(world, "settings", by(route, world.settings))
    model = "llama" if route == "auto" else "gpt2"
    job = make_job(tokens, model, layout, shape=SHAPE, steps=STEPS, global_batch=ROWS)
    assert_same_bits(world, job, folder, by_messages=route == "messages")


@pytest.mark.ranks(4)
@pytest.mark.timeout(300)
def test_row_chunks_and_different_grids_are_bit_equal_too(world, tokens, folder, monkeypatch):
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    tiles = (
        Tile(Interval(0, 10), Interval(0, 5), (0, 1), TensorGrid(z=2), row_chunks=2, recompute="full"),
        Tile(Interval(0, 10), Interval(5, 8), (2, 3), TensorGrid(y=2)),
    )
    job = make_job(tokens, "gpt2", shape=SHAPE, steps=STEPS)
    assert_same_bits(world, job, folder, Plan(tiles, microbatches=2, rows=8))


def test_few_whole_weights_are_alive(world, tokens, monkeypatch):
    """The layer in use and, where that is overlapped, the next one; as many in their buffers for gradients."""
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    job = make_job(tokens, "llama", {"tensor": {"z": world.size}, "microbatch": 8}, shape=SHAPE)
    _, training, _ = open_datasets(job.data, job.train.seed)
    for switches, most in ((OFF, 1), ({**OFF, "z": True}, 2), ({**OFF, "z": True, "keep_gathered": 3}, 5)):
        with world.freeing():
            trainer = make_trainer(world, with_overlap(job, **switches))
            trainer.initialise()
            store, alive = trainer.layout.store, []
            traffic, release = store.traffic, store.traffic.release

            def counted(item, store=store, alive=alive, release=release):
                whole = [unit for unit in store.units if unit.is_gathered or unit.gathering]
                layers = {block_of(unit.layout.unit.items[0]) for unit in whole}
                alive.append((len(layers), len(store.traffic.scattering)))
                release(item)

            monkeypatch.setattr(traffic, "release", counted)
            for _ in range(2):
                trainer.step(training)
        assert max(gathered for gathered, _ in alive) == most
        assert max(scattering for _, scattering in alive) == (2 if switches["z"] else 0)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weights_move_as_often_as_the_formula_says(world, tokens, on, recompute, monkeypatch):
    """3 (n - 1) / n of each weight a rank and microbatch: gathered forward and backward, scattered once (fp32).

    The head goes back right after it went forward, and the embedding forward right after it went back: one gather.
    Where another item is gathered early anyway, the blocks next to these wait for their turn in its place.
    What is kept is gathered once a step. What is recomputed is with the weights that the backward pass has anyway.
    """
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    n, microbatches, kept = world.size, min(4, 16 // world.size), 3

    def job_of(**overlap):
        plan = {"tensor": {"z": n}, "microbatch": 16 // microbatches, "recompute": recompute}
        shape = {"num_kv_heads": 8, "vocab_size": 64}
        return with_overlap(make_job(tokens, "llama", plan, shape=shape), **{key: on for key in OFF}, **overlap)

    sizes = sizes_of_items(job_of().model)
    each = 4 * (n - 1)  # bytes that ranks send together for an element
    gathers = gathers_of_items(len(sizes), microbatches, on)
    for keep in (0, kept):
        times = [1] * keep + gathers[keep:]
        moved = sum((gathered + microbatches) * size for gathered, size in zip(times, sizes, strict=True))
        assert bytes_of_a_step(world, job_of(keep_gathered=keep), lambda layout: [layout.axes.z]) == each * moved


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("zero", [2, 3])
def test_shards_of_zero_move_as_often_as_the_formula_says(world, tokens, on, zero, monkeypatch):
    """ZeRO 3 over data is what z does; with ZeRO 2 weights are gathered once a step, after the update."""
    monkeypatch.setattr(world, "settings", by("messages", world.settings))
    n, microbatches = world.size, 2
    shape = {"num_kv_heads": 8, "vocab_size": 64}
    plan = {"data": n, "microbatch": 16 // n // microbatches, "zero": zero}
    job = with_overlap(make_job(tokens, "llama", plan, shape=shape), **{key: on for key in OFF})
    sizes = sizes_of_items(job.model)
    gathers = gathers_of_items(len(sizes), microbatches, on) if zero == 3 else [1] * len(sizes)
    moved = sum((gathered + microbatches) * size for gathered, size in zip(gathers, sizes, strict=True))
    assert bytes_of_a_step(world, job, lambda layout: layout.groups) == 4 * (n - 1) * moved


def gathers_of_items(num_items: int, microbatches: int, on: bool) -> list[int]:
    """Return how often each of three items or more is gathered in a step of one stage."""
    m = microbatches
    times = [m + 1, *[2 * m] * (num_items - 2), m]
    if on:
        times[1] -= m - 1
        times[-2] -= m
    return times


def sizes_of_items(model) -> list[int]:
    h, f, vocabulary = model.hidden_size, inner_of(model), model.vocab_size
    return [vocabulary * h, *[4 * h * h + 3 * h * f + 2 * h] * model.num_layers, vocabulary * h + h]
