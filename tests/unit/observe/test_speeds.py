"""A rank whose device computes longer or shorter than predicted is named; noise and single steps are not."""

import random

import pytest

from hpctrain.comm.topology import Place
from hpctrain.observe.speeds import SpeedWatch

PLACES = [Place(f"node{rank // 2}", "v100", "cuda") for rank in range(4)]
SECONDS = {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}
"""Predicted seconds: two stages."""


def watch_of(steps: list[dict[int, float]]) -> tuple[SpeedWatch, list[tuple[int, str]]]:
    """Return a watch that has seen some steps, by the factors of ranks, and what it said after which of them."""
    watch, said = SpeedWatch(SECONDS, PLACES), []
    for step, factors in enumerate(steps, 1):
        times = [SECONDS[rank] * factors.get(rank, 1.0) * 1.3 for rank in range(4)]  # all are off alike
        said += [(step, str(each)) for each in watch.look(times)]
    return watch, said


def test_a_slow_device_is_named_after_three_steps_with_its_host_and_its_factor():
    watch, said = watch_of([{}] * 5 + [{2: 1.4}] * 5)
    place = "predicted, on a device of v100 of host node1"
    assert said == [(8, f"rank 2 computes 1.40 times as long as {place}")]
    assert watch.has_news and watch.take_factors() == {2: pytest.approx(1.4)} and not watch.has_news


def test_one_that_is_well_again_is_named_too():
    _, said = watch_of([{}] * 5 + [{2: 1.4}] * 5 + [{}] * 5)
    assert [step for step, _ in said] == [8, 13]


def test_one_that_is_faster_than_predicted_has_another_speed():
    watch, _ = watch_of([{}] * 3 + [{1: 0.7}] * 4)
    assert watch.take_factors() == {1: pytest.approx(0.7)}


def test_only_a_device_that_takes_longer_than_predicted_is_slow():
    """After a rebalance, a device that is well again is faster than predicted."""
    for factor in (1.4, 0.7):
        watch, changes = SpeedWatch(SECONDS, PLACES), []
        for step in range(12):
            times = [SECONDS[rank] * (factor if rank == 1 and 3 <= step < 7 else 1.0) for rank in range(4)]
            changes += [(each.rank, each.is_slow) for each in watch.look(times)]
        assert changes == [(1, factor > 1), (1, False)]


@pytest.mark.parametrize("slow", [[1.5], [1.5, 1.5], [4.0, 1.0, 4.0]], ids=str)
def test_single_slow_steps_say_nothing(slow):
    watch, said = watch_of([{}] * 6 + [{3: factor} for factor in slow] + [{}] * 6)
    assert not said and not watch.has_news


def test_noise_says_nothing_in_two_hundred_steps():
    noise = random.Random(0)
    steps = [{rank: noise.gauss(1.0, 0.04) for rank in range(4)} for _ in range(200)]
    assert watch_of(steps)[1] == []


def test_the_first_step_and_steps_without_times_do_not_count():
    assert watch_of([{2: 9.0}, {2: float("nan")}, {2: 0.0}] + [{}] * 3)[1] == []
