"""Checkpoints of random tilings, loaded by others: every tensor and moment bit for bit, and the losses that follow."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.checkpoint.resume import verify_checkpoint
from hpctrain.data.order import open_datasets
from hpctrain.plan.checks import check_plan
from tests.examples import costly
from tests.ranks.given_on_ranks import given_on_ranks
from tests.ranks.small_runs import make_trainer, whole
from tests.ranks.test_tilings import MICROBATCHES, MODELS, ROWS, TOLERANCE, job_of
from tests.tilings import tilings

FIRST_STEPS, MORE_STEPS = 2, 2
KEYS = ({}, {"parts": "node"})


@st.composite
def pairs(draw, tokens, size: int):
    """A model, two tilings with any ZeRO stage, and how the first one's checkpoint is written."""
    name = draw(st.sampled_from(sorted(MODELS)))
    drawn = tilings(job_of(tokens, name).model, size, ROWS, MICROBATCHES, exchanging=True)
    return name, draw(drawn), draw(drawn), draw(st.sampled_from(KEYS))


@pytest.mark.ranks(2, 4)
@pytest.mark.timeout(240)
def test_any_tiling_continues_from_the_checkpoint_of_any_other(world, tokens):
    def body(world, example):
        name, first, second, keys = example
        job = job_of(tokens, name, steps=FIRST_STEPS + MORE_STEPS)
        job = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update=keys)})
        for plan in (first, second):
            check_plan(job, plan, "drawn")
        _, training, _ = open_datasets(job.data, job.train.seed)
        folder = Path(world.on_first_rank(lambda: tempfile.mkdtemp(prefix="any-layout-")))
        losses, resume = [], None
        for number, plan in enumerate((first, second)):
            with world.freeing():
                trainer = make_trainer(world, job, plan)
                if resume:
                    trainer.resume(resume)
                else:
                    trainer.initialise()
                    for _ in range(FIRST_STEPS):
                        trainer.step(training)
                resume = trainer.save(folder / str(number), {})
                losses.append([trainer.step(training)[0]["loss"] for _ in range(MORE_STEPS)])
        if world.rank == 0:
            one, other = (whole(folder / str(number)) for number in range(2))
            assert one.keys() == other.keys()
            assert [tensor for tensor in one if one[tensor].tobytes() != other[tensor].tobytes()] == []
            verify_checkpoint(latest_checkpoint(folder / "0"))
            shutil.rmtree(folder)
        for loss, expected in zip(losses[1], losses[0], strict=True):
            assert abs(loss / expected - 1) < TOLERANCE, (losses, first, second)

    given_on_ranks(pairs(tokens, world.size), max_examples=costly(24))(body)(world)
