"""A plan as a launch line of Megatron-LM: what it says is read back, and what it cannot say is refused."""

from dataclasses import replace

import pytest

from hpctrain.config.errors import JobError, PlanError
from hpctrain.config.job import load_job
from hpctrain.plan.tiling import Plan, even_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.software.megatron_export import launch_line
from hpctrain.software.run import DescribedRun
from tests.unit.software.test_megatron_flags import ARGUMENTS

JOB = load_job("tiny", ["model.vocab_size=32000", "model.num_layers=8", "data.sequence_length=512"])
CLUSTER = DescribedRun(1024, 4, 16, 1024, 8, 1, 1, 1, 1, "H100").cluster


PAIR = TensorGrid(y=2)


def plan_of(tensor: TensorGrid = PAIR, pipeline: int = 2, data: int = 2, **more) -> Plan:
    more = {"family": "H100", "zero": 1} | more
    return even_plan(JOB.model.num_items, tensor, pipeline, data, 2, 8, **more)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_of(), "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        (plan_of(recompute="full"), "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (plan_of(TensorGrid(), 2, 4, virtual_stages=2), "--num-virtual-stages-per-pipeline-rank 2"),
        (plan_of(TensorGrid(), 1, 8, zero=0, family="H100"), "--tensor-model-parallel-size 1"),
    ],
)
def test_an_even_plan_is_a_line_whose_flags_megatron_has(plan, expected):
    line, own = launch_line(JOB, "bf16", plan, CLUSTER)
    assert f"{expected} " in f"{line} " and "--swiglu --normalization RMSNorm" in line
    assert own.run.num_devices == 8 and own.run.global_batch == 16 and own.run.kv_heads == JOB.model.num_kv_heads
    assert ("use-distributed-optimizer" in line) == (plan.tiles[0].zero == 1)
    assert "--rotary-base 10000 --swiglu" in line and "--hidden-dropout 0 --attention-dropout 0" in line
    assert f"--adam-beta2 {JOB.train.beta2} " in line, "Megatron-LM's default is another one"
    for words in line.removeprefix("--").split(" --"):
        name, _, value = words.partition(" ")
        kind, choices = ARGUMENTS[name]
        assert (kind == "-") == (not value) and (not choices or value in choices), words


def _uneven(plan: Plan) -> Plan:
    cut = {0: Interval(0, 7), 9: Interval(7, 18)}
    return replace(plan, tiles=tuple(replace(tile, items=cut[tile.items.start]) for tile in plan.tiles))


def _mixed(plan: Plan) -> Plan:
    first, *others = plan.tiles
    return replace(plan, tiles=(replace(first, zero=0), *others))


def _swapped(plan: Plan) -> Plan:
    ranks = [tile.ranks for tile in plan.tiles]
    return replace(plan, tiles=tuple(replace(tile, ranks=ranks[i - 1]) for i, tile in enumerate(plan.tiles)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(TensorGrid(x=2)), "Megatron-LM has no tensor grid of .* set tensor.x, tensor.z and tensor.c to 1"),
        (plan_of(zero=2), "Megatron-LM has no ZeRO 2 with such plans"),
        (_uneven(plan_of()), r"cuts 8 blocks evenly, and this plan's stages begin with items \[0, 7\]"),
        (_swapped(plan_of()), r"replicas of a stage on ranks \[0, 1, 2, 3\], and this plan on \[6, 7, 0, 1\]"),
        (_mixed(plan_of()), "tiles of this plan have ZeRO stages 0, 1"),
        (plan_of(data=1), "the plan is for 4 ranks, and a launch line for all 8 devices of the cluster"),
    ],
)
def test_what_a_line_cannot_say_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        launch_line(JOB, "bf16", plan, CLUSTER)


def test_a_model_that_megatron_does_not_have_is_refused():
    model = JOB.model.model_copy(update={"architecture": "gemma2"})
    with pytest.raises(JobError, match="'gemma2' has no flags of Megatron-LM; gpt2, llama, qwen2, qwen3 have"):
        launch_line(JOB.model_copy(update={"model": model}), "bf16", plan_of(), CLUSTER)
