"""Among plans that are equally fast the choice does not depend on the noise of one measurement of a machine."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from hpctrain.planner.choose import EQUAL_SHARE, with_fewest_microbatches
from hpctrain.planner.explain import runner_up
from hpctrain.planner.search import SearchResult


@dataclass(frozen=True)
class Timed:
    """What is asked of a plan that was timed."""

    microbatches: int
    seconds: float

    @property
    def plan(self) -> "Timed":
        return self

    @property
    def layout(self) -> SimpleNamespace:
        return SimpleNamespace(describe=lambda names: f"{self.microbatches} microbatches")


def result_of(*plans: tuple[int, float]) -> SearchResult:
    timed = tuple(Timed(*plan) for plan in sorted(plans, key=lambda plan: plan[1]))
    return SearchResult(timed, (), 0.5, {}, True, math.nan, math.nan, {}, {})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("noise", [-0.4 * EQUAL_SHARE, 0.0, 0.4 * EQUAL_SHARE])
def test_of_equally_fast_plans_the_one_with_the_fewest_microbatches_is_taken_however_they_were_measured(noise):
    result = result_of((4, 2.0), (2, 2.0 * (1 + noise)), (8, 2.0 * (1 - noise)), (1, 2.0 * (1 + 3 * EQUAL_SHARE)))
    chosen = with_fewest_microbatches(result)
    assert chosen.best.plan.microbatches == 2
    assert sorted(chosen.plans, key=id) == sorted(result.plans, key=id)
    assert [each for each in chosen.plans if each is not chosen.best] == [
        each for each in result.plans if each is not chosen.best
    ]
    assert runner_up(chosen).endswith(" 0.0% slower")


def test_one_that_is_faster_is_taken_whatever_its_microbatches():
    result = result_of((4, 2.0), (2, 2.01))
    assert with_fewest_microbatches(result).plans == result.plans
    assert runner_up(result) == "2 microbatches: 0.5% slower"
