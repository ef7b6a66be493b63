"""What an optimizer keeps may differ by the shape of a parameter: all who read its rule agree."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.state import check_same_run
from hpctrain.config.clusters.truth import PretendDevice
from hpctrain.config.errors import CheckpointError
from hpctrain.config.training.optimizers import RULES, OptimizerRule
from hpctrain.config.training.train import Train
from hpctrain.data.order import open_datasets
from hpctrain.engine.step.updates import UPDATES, Updated, UpdateStep, update_by_adamw
from hpctrain.planner.prices.cost import update_seconds
from hpctrain.planner.prices.curves import describe_work
from hpctrain.planner.prices.profiled import device_models
from hpctrain.planner.prices.setup import Setup
from hpctrain.rehearsal.accelerator import seconds_of
from hpctrain.sharding.parameters import count_parameters
from tests.pretended import CLUSTER
from tests.ranks.small_runs import Alone, make_job, make_trainer, whole, write_tokens

BY_SHAPE = OptimizerRule(
    moments=lambda shape: ("momentum",) if len(shape) > 1 else ("exp_avg", "exp_avg_sq"),
    update_bytes=lambda shape: 20 if len(shape) > 1 else 32,
    meaning="by shape.",
    keys=("beta1", "beta2", "epsilon"),
)


def update_by_shape(parts, step) -> None:
    if "momentum" not in parts.moments:
        update_by_adamw(parts, step)
        return
    for master, grad, momentum in zip(parts.masters, parts.grads, parts.moments["momentum"], strict=True):
        momentum.mul_(0.9).add_(grad)
        master.sub_(step.rate * momentum)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setitem(RULES, "by-shape", BY_SHAPE)
    monkeypatch.setitem(UPDATES, "by-shape", update_by_shape)
    return make_job(write_tokens(tmp_path / "tokens.bin"), "gpt2", None, {"num_layers": 2}, optimizer="by-shape")


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rule_by_shape_is_kept_saved_resumed_and_counted(job, tmp_path, offload, dtype):
    plan = {"data": 1, "offload": offload}
    tree = job.model_dump(mode="json") | {"plan": plan}
    tree["train"] |= {"dtype": dtype}
    job = type(job).model_validate(tree)
    _, training, _ = open_datasets(job.data, job.train.seed)

    def train(folder, until: int):
        trainer = make_trainer(Alone(), job)
        if checkpoint := latest_checkpoint(folder) if folder.exists() else None:
            trainer.resume(checkpoint)
        else:
            trainer.initialise()
        while trainer.steps_done < until:
            trainer.step(training)
        trainer.save(folder, {})
        return trainer

    trainer = train(tmp_path / "a", 4)
    train(tmp_path / "b", 2)
    train(tmp_path / "b", 4)
    a, b = whole(tmp_path / "a"), whole(tmp_path / "b")
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []
    assert all(np.abs(values).max() > 0 for name, values in a.items() if name.startswith("optimizer/")), (
        "all are updated"
    )
    for name in (name.removeprefix("model/") for name in a if name.startswith("model/")):
        kinds = {kind for kind in ("momentum", "exp_avg", "exp_avg_sq") if f"optimizer/{kind}/{name}" in a}
        assert kinds == ({"momentum"} if a[f"model/{name}"].ndim > 1 else {"exp_avg", "exp_avg_sq"}), name
    kept = [t for shard in trainer.optimizer.shards for state in shard.states for t in state.moments.values()]
    parts = [(values.shape, values.size) for name, values in a.items() if name.startswith("model/")]
    weights, setup = sum(size for _, size in parts), Setup.of_job(job)
    masters = 0 if dtype == "fp32" else 4 * weights
    assert sum(4 * tensor.numel() for tensor in kept) + masters == pytest.approx(
        weights * setup.state_bytes(), rel=1e-9
    )
    assert setup.state_bytes(parts) == pytest.approx(setup.state_bytes(), rel=1e-12)
    assert 20 < setup.update_bytes < 32


def test_offload_and_device_have_the_same_bits_by_a_rule_by_shape(job):
    results = []
    for offload in ("none", "optimizer"):
        plan = job.model_copy(update={"plan": type(make_job("x", "gpt2", {"data": 1}).plan)(offload=offload)})
        _, training, _ = open_datasets(job.data, job.train.seed)
        trainer = make_trainer(Alone(), plan)
        trainer.initialise()
        results.append([trainer.step(training)[0]["loss"] for _ in range(4)])
    assert results[0] == results[1]


def test_another_optimizer_does_not_go_on(tmp_path):
    job = make_job(write_tokens(tmp_path / "tokens.bin"), "llama", {"data": 1}, {"num_layers": 2})
    trainer = make_trainer(Alone(), job)
    trainer.initialise()
    trainer.save(tmp_path / "run", {"data": "same"})
    checkpoint = latest_checkpoint(tmp_path / "run")
    lion = job.model_copy(update={"train": job.train.model_copy(update={"optimizer": "lion"})})
    with pytest.raises(CheckpointError, match="train.optimizer is adamw there and lion in the job; set it to the same"):
        check_same_run(checkpoint, lion, "same")
    with Index(checkpoint) as index:
        assert not index.has("norm.weight", "optimizer/momentum")


def test_a_profile_of_one_optimizer_is_none_of_another(tmp_path):
    job = make_job(tmp_path, "llama", {"data": 1})
    lion = job.model_copy(update={"train": job.train.model_copy(update={"optimizer": "lion"})})
    setups = [Setup.of_job(each) for each in (job, lion)]
    assert describe_work(job, "fp32") in setups[0].works and describe_work(lion, "fp32") in setups[1].works
    assert not set(setups[0].works) & set(setups[1].works)
    assert [setup.update_bytes for setup in setups] == [32, 52]
    assert [setup.state_bytes() for setup in setups] == [8, 4]
    assert [replace(setup, dtype="bf16").state_bytes() for setup in setups] == [12, 8]


def test_lion_needs_no_memory_but_its_own():
    """Its direction takes the place of the gradient: else the memory model would lack as much as the weights take."""
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(t for t in (result if isinstance(result, (list, tuple)) else [result]) if t is not None)
            return result

    parts = Updated([torch.ones(8)], [torch.ones(8)], {"exp_avg": [torch.zeros(8)]})
    given = {t.data_ptr() for t in (*parts.masters, *parts.grads, *parts.moments["exp_avg"])}
    with Made():
        UPDATES["lion"](parts, UpdateStep(Train(optimizer="lion", learning_rate=0.5, weight_decay=0.5), 0, True))
    assert {t.data_ptr() for t in made} <= given
    assert parts.masters[0].tolist() == [0.25] * 8


@pytest.mark.parametrize("optimizer", RULES)
def test_an_update_moves_the_bytes_that_are_priced(tmp_path, optimizer):
    """By what a pretended device sees of its operations, the norm and the clipping with it."""
    model = device_models(CLUSTER)["fast"]
    speed = model.memory_bytes_per_second
    device = PretendDevice(memory_bytes=10**12, memory_bytes_per_second=speed, flops_per_second={"fp32": 1e13})
    job = make_job(write_tokens(tmp_path / "tokens.bin"), "llama", None, {"hidden_size": 128}, optimizer=optimizer)
    trainer = make_trainer(Alone(), job)
    trainer.initialise()
    seconds = []

    class Priced(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            listed = result if isinstance(result, (tuple, list)) else (result,)
            seconds.append(seconds_of(func, args, [t for t in listed if isinstance(t, torch.Tensor)], device))
            return result

    for shard in trainer.optimizer.shards:
        shard.grads.fill_(1.0)
    with Priced():
        trainer.optimizer.update(0, math.sqrt(trainer.optimizer.squared_norm()))
    expected = update_seconds(Setup.of_job(job), model, count_parameters(job.model))
    print(f"{optimizer}: {sum(seconds) / expected:.4f} of the predicted seconds")
    assert sum(seconds) == pytest.approx(expected, rel=0.01)
