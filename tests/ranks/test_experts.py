"""A mixture of experts has the losses of one rank on every layout that may cut it, with the choices of one rank.

Rounding can flip the choice between two experts with nearly equal scores. So choices are replayed: each token takes
those of the token of one rank whose scores are nearest. How many would have been others is counted.
"""

import functools

import pytest
import torch

from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import DataError, PlanError
from hpctrain.config.job import load_job
from hpctrain.data.order import open_datasets
from hpctrain.engine.start import resolve
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.model import feed_forward
from hpctrain.model.operators.experts import choose
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.uniform import resolve_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.ranks.small_runs import (
    Alone,
    largest_relative_difference,
    make_job,
    make_trainer,
    whole_if_resumed_exactly,
    world_of,
)
from tests.ranks.test_legs import DEVICES

TOLERANCE, STEPS = 1e-5, 6
EXPERTS = {"num_experts": 8, "ffn_size": 24, "num_layers": 2}
SHAPES = {
    "mixtral": EXPERTS | {"experts_per_token": 1},
    "qwen3_moe": EXPERTS | {"experts_per_token": 8, "normalise_scores": False},
    "dots1": EXPERTS
    | {"experts_per_token": 2, "expert_groups": 4, "groups_per_token": 2, "shared_experts": 1, "dense_layers": 1}
    | {"expert_size": 16},
}
SHAPES["gpt_oss"] = SHAPES["mixtral"] | {"experts_per_token": 2, "window": 3, "global_every": 2}
SHAPES["evened"] = SHAPES["mixtral"] | {"experts_per_token": 2}
SHAPES["deep"] = SHAPES["dots1"] | {"architecture": "dots1", "num_layers": 4}
LAYOUTS = {
    2: [
        ("dots1", {"tensor": {"y": 2}}),
        ("mixtral", {"tensor": {"y": 2}, "sequence_parallel": True, "recompute": "selective"}),
        ("qwen3_moe", {"tensor": {"z": 2}, "recompute": "full"}),
        ("dots1", {"pipeline": 2, "schedule": "zb-h1"}),
        ("dots1", {"data": 2, "zero": 0}),
        ("qwen3_moe", {"tensor": {"c": 2}}),
        ("gpt_oss", {"tensor": {"y": 2}, "sequence_parallel": True, "recompute": "selective"}),
        ("gpt_oss", {"tensor": {"c": 2}}),
        ("evened", {"tensor": {"c": 2}, "recompute": "full"}),
        ("evened", {"tensor": {"y": 2}, "sequence_parallel": True, "recompute": "selective"}),
    ],
    4: [
        ("mixtral", {"tensor": {"y": 4}}),
        ("qwen3_moe", {"tensor": {"y": 2, "z": 2}}),
        ("dots1", {"tensor": {"y": 2}, "pipeline": 2, "sequence_parallel": True, "recompute": "full"}),
        ("dots1", {"data": 4, "zero": 1}),
        ("gpt_oss", {"tensor": {"y": 2}, "pipeline": 2, "schedule": "zb-h1"}),
        ("dots1", {"tensor": {"y": 2}, "data": 2, "zero": 3}),
        ("evened", {"tensor": {"y": 2, "c": 2}}),
        ("evened", {"tensor": {"z": 2}, "pipeline": 2, "schedule": "zb-h1"}),
    ],
    8: [("gpt_oss", {"tensor": {"y": 2, "c": 2}, "pipeline": 2, "sequence_parallel": True, "recompute": "selective"})],
}
DEEP = {
    "ZeRO 2": {"tensor": {"y": 2}, "data": 2, "zero": 2},
    "interleaved": {"tensor": {"y": 2}, "pipeline": 2, "virtual_stages": 2},
    "interleaved, ZeRO 1": {"pipeline": 2, "virtual_stages": 2, "data": 2, "zero": 1},
}
"""Layouts of a deeper model."""


def job_of(tokens, family: str, plan: dict | None = None):
    train = {"balance_loss": 0.5, "clip_norm": 0.0} if family == "evened" else {}
    shape = {"architecture": "mixtral" if train else family, **SHAPES[family]}
    return make_job(tokens, "llama", plan, shape, **train)


class Choices:
    """The choices of one rank, which other layouts take, too."""

    def __init__(self):
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.flipped = 0

    def record(self, scores, experts, balance=None):
        chosen = choose(scores, experts, balance)
        self._made.append((scores.detach().flatten(0, -2), chosen.flatten(0, -2)))
        return chosen

    def replay(self, scores, experts, balance=None):
        known, chosen = (torch.cat(each) for each in zip(*self._made, strict=True))
        given = scores.detach().flatten(0, -2)
        nearest = chosen[torch.cdist(given, known, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)]
        own = choose(scores, experts, balance).flatten(0, -2)
        self.flipped += int((nearest.sort(-1).values != own.sort(-1).values).any(-1).sum())
        return nearest.unflatten(0, scores.shape[:-1])


def run(world, job, plan=None, steps: int = STEPS):
    """Return losses, auxiliary ones behind them; loads of the busiest experts, and tokens of all in the last step; the
    biases that balance this rank's experts."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    trainer = make_trainer(world, job, plan)
    trainer.initialise()
    metrics = [trainer.step(training)[0] for _ in range(steps)]
    trainer.layout.store.await_weights()
    biases = {
        region.parameter.name: group.weights_at(region.at).clone()
        for group in trainer.layout.store.groups
        for region in group.regions(group.stored)
        if region.parameter.balances and region.elements.size == region.parameter.shape[0]
    }
    losses = [line[key] for key in ("loss", "balance_loss") for line in metrics if key in line]
    tokens = {layer: of.tolist() for layer, of in trainer.load.tokens.items()}
    return losses, ([line["expert_load"] for line in metrics], tokens), biases


@functools.cache
def reference(tokens, family: str, steps: int):
    """Return losses, loads, biases and choices of this rank alone."""
    choices = Choices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward, "choose", choices.record)
        return *run(Alone(), job_of(tokens, family), steps=steps), choices


def check(world, tokens, family: str, plan: dict | None = None, tiling: Plan | None = None, steps: int = STEPS):
    expected, loads, biases, choices = reference(tokens, family, steps)
    assert expected[steps - 1] < expected[0] and expected[-1] < expected[-steps], "the reference learns"
    assert len(expected) == (2 * steps if family == "evened" else steps)
    choices.flipped = 0
    with world.freeing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward, "choose", choices.replay)
        losses, own_loads, own = run(world, job_of(tokens, family, plan), tiling, steps)
    assert largest_relative_difference(losses, expected) < TOLERANCE, (plan, choices.flipped)
    assert own_loads == loads and (min(loads[0]) > 1 or family == "qwen3_moe"), (
        "qwen3_moe has all experts for each token"
    )
    for name, bias in own.items():
        assert torch.equal(bias, biases[name]), (name, bias, biases[name])
        assert bias.abs().max() > 0, "it moves"


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.timeout(240)
def test_each_layout_has_the_losses_and_biases_of_one_rank(world, tokens):
    for family, plan in LAYOUTS[world.size]:
        check(world, tokens, family, plan)


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", DEEP)
def test_a_deep_model_has_the_losses_and_biases_of_one_rank(world, tokens, steps, name):
    check(world, tokens, "deep", DEEP[name], steps=steps)


@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
def test_tiles_with_other_grids_share_whole_experts(world, tokens):
    whole = Interval(0, 6)
    tiles = Tile(whole, Interval(0, 3), (2, 0), TensorGrid(y=2)), Tile(whole, Interval(3, 4), (1,))
    check(world, tokens, "dots1", tiling=Plan(tiles, 4, 4, unused=(3,)))


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(world, tokens, folder):
    job = job_of(tokens, "dots1", {"tensor": {"y": 2}})
    whole_if_resumed_exactly(world, job, resolve_plan(job, world.size).plan, folder)


@pytest.mark.ranks(2)
@pytest.mark.timeout(60)
def test_a_model_that_no_plan_could_hold_is_refused_before_anything_is_measured(world, folder, monkeypatch):
    monkeypatch.chdir(folder)  # where no tokens are
    monkeypatch.setattr(resolve, "host_memory_bytes", lambda: 25_000_000_000)
    message = r"30.5 billion parameters need 489 GB.*2 ranks on 1 host is 25 GB.*--rehearse CLUSTER.*train tiny-moe"
    no_tokens = r"tokens/stdlib.h5: no such token file"
    for name, changes, error, said in (
        ("qwen3-30b-a3b", [], PlanError, message),
        ("qwen3-30b-a3b", ["search.must_fit=false"], DataError, no_tokens),
        ("tiny-moe", [], DataError, no_tokens),
    ):
        own = world_of(world)
        with pytest.raises(error, match=said):
            prepare_run(own, load_job(name, changes))
        own.close()


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["mixtral", "dots1", "llama"])
def test_a_start_says_that_nothing_balances_experts(world, tokens, family):
    job = job_of(tokens, family, {"data": 2}) if family in SHAPES else make_job(tokens, family, {"data": 2})
    described = MachineDescription(parse_cluster(DEVICES.format(count=world.size), "a test"), "a test")
    own = world_of(world)
    reasons = prepare_run(own, job, described=described).reasons
    own.close()
    assert ("experts" in reasons) == (family == "mixtral")
