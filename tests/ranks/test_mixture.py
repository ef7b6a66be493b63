"""Data of several sources, and of several documents in a sequence, is the same on every layout."""

import numpy as np
import pytest

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.config.job import Source
from hpctrain.data.order import open_datasets
from hpctrain.data.tokens import TokenWriter
from tests.ranks.small_runs import VOCAB, Alone, largest_relative_difference, losses, make_job, make_trainer

STEPS = 4
SHAPE = {"num_layers": 2}


def mixed(job, folder, world):
    """Return the job with a second source, of tokens that follow each other in another order."""
    other = folder / "other.bin"
    if world.rank == 0:
        np.random.default_rng(1).integers(VOCAB, size=5_000).astype("<u2").tofile(other)
    world.agree(None)
    data = job.data.model_copy(update={"more": (Source(tokens=other, weight=0.5),)})
    return job.model_copy(update={"data": data})


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
def test_the_mixture_is_that_of_one_rank_and_continues_elsewhere(world, tokens, folder):
    first, second = ({"data": world.size}, {"pipeline": 2, "tensor": {"y": world.size // 2}, "recompute": "selective"})
    alone = mixed(make_job(tokens, "llama", shape=SHAPE), folder, world)
    expected = world.broadcast_object(losses(Alone(), alone, STEPS) if world.rank == 0 else None)[:STEPS]
    plain = world.broadcast_object(
        losses(Alone(), make_job(tokens, "llama", shape=SHAPE), 2) if world.rank == 0 else None
    )
    assert largest_relative_difference(plain[:2], expected[:2]) > 1e-3, "the second source counts"
    result = []
    for layout in (first, second):
        job = mixed(make_job(tokens, "llama", layout, SHAPE), folder, world)
        _, training, _ = open_datasets(job.data, job.train.seed)
        with world.freeing():
            trainer = make_trainer(world, job)
            if result:
                trainer.resume(latest_checkpoint(folder / "run"))
            else:
                trainer.initialise()
            result += [trainer.step(training)[0]["loss"] for _ in range(STEPS // 2)]
            trainer.save(folder / "run", {})
    assert largest_relative_difference(result, expected) < 1e-5


MASKED = {
    2: [{"tensor": {"x": 2}}, {"tensor": {"y": 2}}, {"tensor": {"z": 2}}, {"pipeline": 2, "microbatch": 4}],
    4: [
        {"tensor": {"y": 2}, "pipeline": 2, "recompute": "full"},
        {"tensor": {"y": 2}, "pipeline": 2, "recompute": "selective", "sequence_parallel": True},
        {"data": 2, "pipeline": 2, "zero": 3},
    ],
}


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_packed_documents_give_the_losses_of_one_rank(world, folder, model):
    if world.rank == 0:
        rng = np.random.default_rng(2)
        with TokenWriter(folder / "packed.h5", VOCAB) as writer:
            for size in rng.integers(1, 40, size=300):
                writer.begin_document()
                writer.append(rng.integers(VOCAB, size=size))
    world.agree(None)

    def masked(plan: dict | None = None):
        job = make_job(folder / "packed.h5", model, plan, SHAPE)
        overlap = job.overlap.model_copy(update={"tensor": True, "tensor_parts": 2})
        data = job.data.model_copy(update={"mask_documents": True})
        return job.model_copy(update={"data": data, "overlap": overlap})

    expected = world.broadcast_object(losses(Alone(), masked(), STEPS) if world.rank == 0 else None)
    for layout in MASKED[world.size]:
        with world.freeing():
            assert largest_relative_difference(losses(world, masked(layout), STEPS), expected) < 1e-5, layout
