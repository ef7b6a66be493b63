"""Saving and resuming: exact on the same layout, and into any other; whole parameters in the index."""

import h5py
import numpy as np
import pytest

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.config.errors import CheckpointError
from hpctrain.data.order import open_datasets
from tests.ranks.small_runs import make_job, make_trainer, whole

STEPS = 4
SHAPE = {"num_layers": 2}
LAYOUTS: dict[int, list[dict]] = {
    2: [{"tensor": {"z": 2}}, {"pipeline": 2}],
    4: [{"tensor": {"y": 4}}, {"tensor": {"x": 2, "z": 2}}],
    8: [{"tensor": {"y": 4, "z": 2}}, {"tensor": {"x": 2}, "pipeline": 2, "data": 2}],
}
"""With everything that makes rectangles: z-shards, shared heads, pipeline, data."""


def run(world, job, folder, interrupt_after=None, resume=False):
    """Train to STEPS (or stop early), save, and return losses and gradient norms of the steps that ran."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    trainer = make_trainer(world, job)
    if resume:
        trainer.resume(latest_checkpoint(folder))
    else:
        trainer.initialise()
    result = []
    while trainer.steps_done < (interrupt_after or STEPS):
        metrics, _ = trainer.step(training)
        result.append((metrics["loss"], metrics["grad_norm"]))
    trainer.save(folder, {})
    return result


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("model", "number", "optimizer"), [("gpt2", 0, "adamw"), ("llama", 1, "lion")])
def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(world, tokens, folder, model, number, optimizer):
    job = make_job(tokens, model, LAYOUTS[world.size][number], SHAPE, steps=STEPS, optimizer=optimizer)
    uninterrupted = run(world, job, folder / "a")
    for step in (1, STEPS - 1) if world.size == 2 else (2,):
        first = run(world, job, folder / f"b{step}", interrupt_after=step)
        rest = run(world, job, folder / f"b{step}", resume=True)
        assert first + rest == uninterrupted
        if world.rank == 0:
            a, b = whole(folder / "a"), whole(folder / f"b{step}")
            assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []
        world.agree(None)


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
def test_another_layout_continues_where_the_first_stopped(world, tokens, folder):
    first, second = (make_job(tokens, "gpt2", layout, SHAPE, steps=STEPS) for layout in LAYOUTS[world.size])
    uninterrupted = run(world, second, folder / "a")
    run(world, first, folder / "b", interrupt_after=2)
    rest = run(world, second, folder / "b", resume=True)
    for (loss, _), (expected, _) in zip(rest, uninterrupted[2:], strict=True):
        assert abs(loss - expected) < 1e-5 * expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_the_index_shows_every_parameter_whole(world, tokens, folder, model):
    job = make_job(tokens, model, LAYOUTS[world.size][0], SHAPE, steps=STEPS)
    trainer = make_trainer(world, job)
    trainer.initialise()
    trainer.save(folder, {})
    if world.rank == 0:
        from hpctrain.model.initialise import initial_values
        from hpctrain.sharding.intervals import Interval
        from hpctrain.sharding.parameters import all_parameters

        with h5py.File(latest_checkpoint(folder) / "index.h5") as file:
            for name, parameter in all_parameters(job.model).items():
                elements = Interval(0, int(np.prod(parameter.shape)))
                expected = initial_values(parameter, elements, job.model, job.train.seed).numpy()
                result = file["model"][name][:]
                assert result.shape == parameter.shape
                assert np.array_equal(result.reshape(-1), expected), name
    world.agree(None)


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_damage_is_detected_before_anything_is_loaded(world, tokens, folder):
    job = make_job(tokens, "gpt2", {"data": 2}, SHAPE, steps=STEPS)
    run(world, job, folder, interrupt_after=1)
    part = latest_checkpoint(folder) / "part-00001.h5"
    if world.rank == 0:
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    world.agree(None)
    with pytest.raises(CheckpointError, match=r"part-00001.h5: is damaged: block \d+ of rank-00001 has another CRC-32"):
        run(world, job, folder, resume=True)


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_a_failed_write_keeps_what_was_there(world, tokens, folder, monkeypatch):
    import hpctrain.checkpoint.saving as saving

    job = make_job(tokens, "gpt2", {"data": 2}, SHAPE, steps=STEPS)
    run(world, job, folder, interrupt_after=1)
    before = latest_checkpoint(folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    if world.rank == 1:
        monkeypatch.setattr(saving, "write_stream", full)
    with pytest.raises(
        CheckpointError,
        match=r"No space left on device \(.* bytes are to be written, .* are free\); earlier checkpoints are untouched",
    ):
        run(world, job, folder, resume=True)
    world.agree(None)
    assert latest_checkpoint(folder) == before
    assert [p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith("step")] == [before.name]


def step_names(folder) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith("step"))


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_only_the_newest_are_kept_and_the_latest_is_among_them(world, tokens, folder):
    job = make_job(tokens, "gpt2", {"data": 2}, SHAPE, steps=STEPS)
    trainer = make_trainer(world, job)
    trainer.initialise()
    for step in (1, 2, 3):
        trainer.steps_done = step
        trainer.save(folder, {})
    assert step_names(folder) == ["step-00000002", "step-00000003"]
    world.agree(None)  # all have looked
    # continued from an older one: what came after it is of another past
    trainer.steps_done = 2
    trainer.save(folder, {})
    assert step_names(folder) == ["step-00000002"]
    assert latest_checkpoint(folder).name == "step-00000002"


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("zero", "dtype"), [(1, "bf16"), (0, "bf16"), (0, "fp32")])
def test_masters_resume_exactly(world, tokens, folder, zero, dtype):
    job = make_job(tokens, "llama", {"data": 2, "zero": zero}, SHAPE, steps=STEPS, dtype=dtype)
    uninterrupted = run(world, job, folder / "a")
    first = run(world, job, folder / "b", interrupt_after=2)
    assert first + run(world, job, folder / "b", resume=True) == uninterrupted
