"""Numbers that a device got wrong: what is not finite is not kept, and weights that ranks hold alike are compared."""

import math
import re
from collections.abc import Callable

import pytest
import torch

from hpctrain.checkpoint.copies import HostCopies
from hpctrain.checkpoint.folder import complete_checkpoints
from hpctrain.config.errors import CorruptionError
from hpctrain.data.order import open_datasets
from hpctrain.engine.copies import Copying
from hpctrain.engine.saves import CheckpointSchedule
from hpctrain.engine.step.optimizer import Optimizer
from hpctrain.engine.step.replicas import Replicas
from hpctrain.engine.trainer import Trainer
from tests.ranks.small_runs import make_job, make_trainer, whole
from tests.ranks.test_saving import NoRequests
from tests.ranks.test_tilings import job_of, plan_of, tile

pytestmark = pytest.mark.ranks(2, 4)
STEPS, FAULT_AFTER = 8, 5
MIXED = {  # of unlike families, whose holders gather what one owner has updated; heads that several y share
    2: [tile((0, 8), (0, 3), (0,), family="a"), tile((0, 8), (3, 5), (1,), family="b")],
    4: [
        tile((0, 8), (0, 2), (0, 1), (1, 2, 1), family="a"),
        tile((0, 4), (2, 5), (2,), family="b"),
        tile((4, 8), (2, 5), (3,), family="b"),
    ],
}
LAYOUTS = {
    2: [{"data": 2, "zero": zero} for zero in (0, 1, 2, 3)],
    4: [{"data": 4, "zero": 0}, {"tensor": {"y": 2}, "data": 2}, {"tensor": {"z": 2}, "data": 2, "zero": 2}],
}


def fit(world, job, folder, fault: Callable[[Trainer], object], until: int = STEPS, copies_every: int = 0) -> None:
    """Train with a fault after some steps, on the ranks on which it does something."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    with world.freeing():
        trainer = make_trainer(world, job)
        trainer.initialise()
        saves = CheckpointSchedule(trainer.saver(folder, {}), job.checkpoint, print, None)
        if copies_every:
            copies = HostCopies(world, folder / "copies" / world.hosts[world.rank], saves.saver.counts, 0)
            saves.copying = Copying(copies, copies_every, 0.0)

        def report(metrics: dict) -> None:
            if metrics["step"] == FAULT_AFTER:
                fault(trainer)

        trainer.fit(training, None, until, saves, report, NoRequests())


def small_job(tokens, layout: dict, every: int = 2, **watch):
    job = make_job(tokens, "llama", layout, {"num_layers": 2}, steps=STEPS)
    checkpoint = job.checkpoint.model_copy(update={"every": every, "keep": 9})
    return job.model_copy(update={"checkpoint": checkpoint, "watch": job.watch.model_copy(update=watch)})


def names_of(folder) -> list[str]:
    return [path.name for path in complete_checkpoints(folder)]


@pytest.mark.timeout(120)
def test_a_norm_that_is_not_finite_is_not_applied_and_the_state_before_it_is_saved(world, tokens, folder, monkeypatch):
    norm = Optimizer.squared_norm

    def break_one(trainer):
        if world.rank == world.size - 1:
            broken = trainer.optimizer
            infinite = lambda self: norm(self) * (math.inf if self is broken else 1)  # noqa: E731
            monkeypatch.setattr(Optimizer, "squared_norm", infinite)

    job = small_job(tokens, {"data": world.size})
    with pytest.raises(CorruptionError) as caught:
        fit(world, job, folder / "broken", break_one)
    monkeypatch.setattr(Optimizer, "squared_norm", norm)
    saved = folder / "broken" / "checkpoints" / "step-00000005"
    assert re.search(
        r"step 6: the loss is \d\S+ and the norm of the gradient inf; the weights were not upd", str(caught.value)
    )
    assert f"the state before it is saved as {saved}" in str(caught.value)
    assert "learning_rate" not in str(caught.value)
    fit(world, small_job(tokens, {"data": world.size}), folder / "sound", lambda trainer: None, until=FAULT_AFTER)
    one, other = whole(folder / "broken"), whole(folder / "sound")
    assert [name for name in one if one[name].tobytes() != other[name].tobytes()] == []


@pytest.mark.timeout(120)
def test_weights_that_are_not_finite_are_not_saved_and_their_rank_is_named(world, tokens, folder):
    def break_one(trainer):
        if world.rank == 1:
            shard = trainer.optimizer.shards[0]
            shard.master[shard.updated.place_of(shard.owned)][3] = math.nan

    with pytest.raises(CorruptionError) as caught:
        fit(world, small_job(tokens, {"data": world.size}, replicas_every=0), folder, break_one)
    text = str(caught.value)
    assert "is not finite on rank 1 (host " in text and "): model/" in text and "it is not saved" in text
    assert f"the newest, {folder / 'checkpoints' / 'step-00000004'}" in text and "learning_rate" not in text
    world.agree(None)
    assert names_of(folder)[-1] == "step-00000004" and not list(folder.glob("checkpoints/*.partial"))


@pytest.mark.timeout(120)
def test_a_moment_that_is_not_finite_is_seen_when_it_is_saved(world, tokens, folder):
    """Its element is updated no more, and no loss shows it."""

    def break_one(trainer):
        if world.rank == 1:
            shard = trainer.optimizer.shards[0]
            state = shard.states[0]
            state.moments["exp_avg_sq"][state.at.place_of(shard.owned)][3] = math.inf

    with pytest.raises(CorruptionError, match=r"state after step 6 is not finite on rank 1 \(.*optimizer/exp_avg_sq/"):
        fit(world, small_job(tokens, {"data": world.size}), folder, break_one)
    world.agree(None)
    assert names_of(folder)[-1] == "step-00000004"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bit", [0, 30])
def test_a_replica_that_differs_in_a_bit_stops_the_run_and_is_named(world, tokens, folder, bit):
    def flip(trainer):
        if world.rank == world.size - 1:
            trainer.optimizer.shards[0].group.weights.view(torch.int32)[3] ^= 1 << bit

    job = small_job(tokens, {"data": world.size, "zero": 0}, every=4, replicas_every=3)
    with pytest.raises(CorruptionError) as caught:
        fit(world, job, folder, flip)
    named = {int(rank) for rank in re.findall(r"rank (\d+) \(host ", str(caught.value))}
    assert named == ({0, 1} if world.size == 2 else {world.size - 1}), "of two both, of more the minority"
    assert "step 6: weights that ranks hold alike differ" in str(caught.value)
    assert f"continues from {folder / 'checkpoints' / 'step-00000004'}, which is from before" in str(caught.value)
    world.agree(None)
    assert names_of(folder) == ["step-00000004"]


@pytest.mark.timeout(120)
def test_replicas_are_compared_before_a_checkpoint_or_copy_and_not_where_that_is_off(world, tokens, folder):
    def flip(trainer):
        if world.rank == 1:
            trainer.optimizer.shards[0].group.weights.view(torch.int32)[3] ^= 1

    layout = {"data": world.size, "zero": 0}
    with pytest.raises(CorruptionError, match="step 8: weights that ranks hold alike differ"):
        fit(world, small_job(tokens, layout, every=0, replicas_every=100), folder, flip)
    world.agree(None)
    assert names_of(folder) == []
    with pytest.raises(CorruptionError, match="step 6: weights that ranks hold alike differ"):
        fit(world, small_job(tokens, layout, every=0, replicas_every=100), folder, flip, copies_every=6)
    fit(world, small_job(tokens, layout, every=0, replicas_every=0), folder, flip)
    assert names_of(folder) == ["step-00000008"]


def replicas_of(trainer: Trainer) -> Replicas:
    holders = [group.ranks for group in trainer.layout.holding.shard_groups]
    return Replicas(trainer.world, trainer.layout.store, trainer.optimizer.shards, holders)


@pytest.mark.timeout(180)
def test_replicas_have_the_same_bits_by_any_plan(world, tokens):
    jobs = [(small_job(tokens, layout), None) for layout in LAYOUTS[world.size]]
    for dtypes in ({}, {"b": "bf16"}):
        job = job_of(tokens, "gpt2 tied")
        job = job.model_copy(update={"precision": job.precision.model_copy(update={"by_family": dtypes})})
        jobs.append((job, plan_of(tuple(MIXED[world.size]), world.size)))
    for job, plan in jobs:
        _, training, _ = open_datasets(job.data, job.train.seed)
        with world.freeing():
            trainer = make_trainer(world, job, plan)
            trainer.initialise()
            replicas = replicas_of(trainer)
            assert replicas.exist == (plan is not None or job.plan.zero != 3)
            for _ in range(3):
                trainer.step(training)
                assert replicas.differing() is None, (job.plan, plan)
