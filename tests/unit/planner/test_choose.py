"""Neither the plan among equally fast ones nor the dtype depends on the noise of one measurement of a machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.job import load_job
from hpctrain.planner.choose import with_dtypes, with_fewest_microbatches
from hpctrain.planner.explain import EQUAL_SHARE, runner_up
from hpctrain.planner.search.search import SearchResult
from tests import clusters


@dataclass(frozen=True)
class Timed:
    """What is asked of a plan that was timed."""

    microbatches: int
    seconds: float

    @property
    def plan(self) -> "Timed":
        return self

    def describe(self, _names: Sequence[str]) -> str:
        return f"{self.microbatches} microbatches"


def result_of(*plans: tuple[int, float]) -> SearchResult:
    timed = tuple(Timed(*plan) for plan in sorted(plans, key=lambda plan: plan[1]))
    return SearchResult(timed, (), {}, True, math.nan, math.nan, {}, {})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("noise", [-0.4 * EQUAL_SHARE, 0.0, 0.4 * EQUAL_SHARE])
def test_of_equally_fast_plans_the_one_with_the_fewest_microbatches_is_taken_however_they_were_measured(noise):
    result = result_of((4, 2.0), (2, 2.0 * (1 + noise)), (8, 2.0 * (1 - noise)), (1, 2.0 * (1 + 3 * EQUAL_SHARE)))
    chosen = with_fewest_microbatches(result)
    assert chosen.best.plan.microbatches == 2
    assert sorted(chosen.plans, key=id) == sorted(result.plans, key=id)
    assert [each for each in chosen.plans if each is not chosen.best] == [
        each for each in result.plans if each is not chosen.best
    ]
    assert runner_up(chosen).endswith(": equally fast (within 0.1%)")


def test_one_that_is_faster_is_taken_whatever_its_microbatches():
    result = result_of((4, 2.0), (2, 2.01))
    assert with_fewest_microbatches(result).plans == result.plans
    assert runner_up(result) == "2 microbatches: 0.5% slower"


def chosen_dtype(kind: str, asked: str = "auto", **speeds: float) -> str | None:
    text = clusters.family("only", kind=kind, sustained_flops_per_second=speeds) + clusters.nodes({"only": 1}, None)
    job = load_job("tiny", [f"train.dtype={asked}"])
    return with_dtypes(job, parse_cluster(text, "a file"), ["only"], "a file")[0].train.dtype


def test_processors_take_fp32_however_fast_bf16_was_measured():
    for bf16 in (0.005e9, 1e9, 7e9, 20e9):
        assert chosen_dtype("cpu", fp32=1e9, bf16=bf16) == "fp32"
    assert chosen_dtype("cpu", asked="bf16", fp32=1e9, bf16=1e7) == "bf16", "asked for"
    assert chosen_dtype("cpu", bf16=1e9) == "bf16", "the only one that it has"


def test_accelerators_take_half_precision_where_it_is_clearly_faster():
    assert chosen_dtype("cuda", fp32=1e9, bf16=2e9) == "bf16"
    assert chosen_dtype("cuda", fp32=1e9, fp16=8e9) == "fp16"
    assert chosen_dtype("cuda", fp32=1e9, bf16=1.4e9, fp16=1.2e9) == "fp32"
