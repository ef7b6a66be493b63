"""The state of random tilings, loaded or moved by others: every tensor and moment bit for bit, and what follows."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.checkpoint.resume import verify_checkpoint
from hpctrain.checkpoint.state import tensors_of
from hpctrain.config.precision import Precision
from hpctrain.config.training.optimizers import RULES
from hpctrain.data.order import open_datasets
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.checks import check_plan
from hpctrain.plan.moves import PlanState
from hpctrain.plan.tiling import Plan
from hpctrain.sharding.parameters import all_parameters, whole_rows
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


FAMILIES = "ab"
DTYPES = (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"))
"""Families of tiles, and the dtypes in which they compute."""


@st.composite
def moves(draw, tokens, size: int):
    """A model, its job and two tilings: families, precisions, optimizers, offload and ZeRO stages of all kinds."""
    name, first, second, _ = draw(pairs(tokens, size))
    dtypes = draw(st.sampled_from(DTYPES))
    keys = {"optimizer": draw(st.sampled_from(("adamw", "lion")))}
    job = job_of(tokens, name, steps=FIRST_STEPS, **keys)
    job = job.model_copy(
        update={"precision": Precision(by_family=dict(zip(FAMILIES, dtypes, strict=True)), loss_scale=256.0)}
    )
    is_one = draw(st.booleans())

    def belonging(plan: Plan) -> Plan:
        families = [draw(st.sampled_from(FAMILIES)) if is_one else "a" for _ in plan.tiles]
        offload = draw(st.sampled_from(("none", "optimizer")))
        tiles = zip(plan.tiles, families, strict=True)
        return replace(plan, tiles=tuple(replace(tile, family=name, offload=offload) for tile, name in tiles))

    return job, belonging(first), belonging(second)


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Return weights in use, masters and moments, where the model computes with them."""
    trainer.layout.store.await_weights()
    shards = trainer.optimizer.shards
    groups = trainer.layout.store.groups
    in_use = [each for group in groups for each in (group.weights, group.in_use) if each is not None]
    return [each.clone() for each in (*in_use, *(tensor.values for shard in shards for tensor in tensors_of(shard)))]


def marked(job, trainer: Trainer, owned: bool) -> np.ndarray:
    """Return how often this rank owns, or updates, each element of each tensor of a checkpoint."""
    parameters, marks = all_parameters(job.model), {}
    for shard in trainer.optimizer.shards:
        for tensor in tensors_of(shard):
            for region in shard.group.regions(shard.owned.intersect(tensor.at) if owned else tensor.at):
                shape = (*parameters[region.parameter.name].shape, 1)[:2]
                mark = marks.setdefault((tensor.kind, region.parameter.name), np.zeros(shape, int))
                for rows, columns, _ in whole_rows(region.parameter, region.box, region.elements):
                    if not owned or region.counts:
                        mark[slice(*rows), columns] += 1
    return marks


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(300)
def test_moved_state_is_that_of_a_checkpoint_and_each_element_is_sent_once(world, tokens):
    def body(world, example):
        job, first, second = example
        _, training, _ = open_datasets(job.data, job.train.seed)
        folder = Path(world.on_first_rank(lambda: tempfile.mkdtemp(prefix="moved-")))
        with world.freeing():
            trainer = make_trainer(world, job, first)
            trainer.initialise()
            for _ in range(FIRST_STEPS):
                trainer.step(training)
            saver = trainer.saver(folder, {})
            saver.start(FIRST_STEPS)
            saved = saver.finish()
            live, had = saver.live_state(FIRST_STEPS), marked(job, trainer, owned=True)
        states = []
        for take in (lambda trainer: trainer.resume(saved), lambda trainer: trainer.take(live)):
            with world.freeing():
                trainer = make_trainer(world, job, second)
                take(trainer)
                needs = marked(job, trainer, owned=False)
                scale = trainer.optimizer.loss_scale
                states.append((trainer.steps_done, scale and scale.dump(), state_of(trainer)))
        live.close()
        (*loaded, tensors), (*moved, others) = states
        assert loaded == moved
        for one, other in zip(tensors, others, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (first, second)
        missing = sum(4 * int((need - had.get(key, 0) > 0).sum()) for key, need in needs.items())
        sent = sum(world.all_objects(live.bytes_sent))
        assert sent == sum(world.all_objects(missing)), "each element once"
        before, after = (PlanState(job.model, plan, job.overlap.bucket_bytes) for plan in (first, second))
        rule, everyone = RULES[job.train.optimizer], range(world.size)
        counted = before.moves_to(after, everyone, lambda shape: 4 + rule.moment_bytes(shape))
        assert sent == sum(counted.values()), "as it is counted without ranks"
        if world.rank == 0:
            shutil.rmtree(folder)

    given_on_ranks(moves(tokens, world.size), max_examples=costly(24))(body)(world)


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
