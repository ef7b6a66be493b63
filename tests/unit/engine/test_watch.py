"""Jumps of losses and norms, and digests of weights that ranks hold alike."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.errors import JobError
from hpctrain.config.job import load_job
from hpctrain.engine.step.replicas import COLUMNS, digest, odd_ranks
from hpctrain.observe.anomalies import MIN_STEPS, WINDOW_STEPS, JumpWatch


def look(watch: JumpWatch, step: int, loss: float, norm: float) -> list[tuple]:
    return [jump[:3] for jump in watch.look({"step": step, "loss": loss, "grad_norm": norm})]


def test_a_jump_is_found_once_and_again_after_it_was_over():
    watch = JumpWatch(10.0)
    for step in range(1, WINDOW_STEPS):
        assert not look(watch, step, 7.0, 1.0)
    assert look(watch, 50, 594.0, 1.8e35) == [("loss", 50, 594.0), ("grad_norm", 50, 1.8e35)]
    assert not look(watch, 51, 594.0, 2.0)
    assert not look(watch, 52, 7.0, 2.0)
    (jump,) = watch.look({"step": 53, "loss": 71.0, "grad_norm": 2.0})
    assert str(jump).startswith("warning: step 53: the loss is 71, 10 times the median of the last steps (7); ")


def test_few_steps_skipped_ones_and_a_watch_that_is_off_find_nothing():
    watch = JumpWatch(10.0)
    for step in range(MIN_STEPS):
        assert not look(watch, step, 1.0, 100.0**step)
    watch = JumpWatch(10.0)
    for step in range(20):
        assert not look(watch, step, 5.0, 0.0 if step % 2 else 3.0), "fp16 skips every other step"
    assert look(watch, 20, 5.0, 31.0)
    assert not any(look(JumpWatch(0.0), step, 10.0**step, 10.0**step) for step in range(30))


@pytest.mark.parametrize("value", ["1", "0.5", "-1", "nan"])
def test_a_jump_is_more_than_one_times(value):
    with pytest.raises(JobError, match=r"watch\.jump"):
        load_job("tiny", [f"watch.jump={value}"])


@given(
    size=st.integers(1, 3 * COLUMNS), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 9999)
)
def test_any_bit_and_any_order_is_in_the_digest(size, dtype, seed):
    rng = np.random.default_rng(seed)
    weights = torch.from_numpy(rng.standard_normal(size).astype(np.float32)).to(dtype)
    before = int(digest(weights))
    assert int(digest(weights.clone())) == before
    assert int(digest(torch.cat([weights[:1], weights])[1:])) == before, "wherever it lies in memory"
    changed = weights.clone()
    as_ints = changed.view({4: torch.int32, 2: torch.int16}[dtype.itemsize])
    one, other = rng.integers(size, size=2)
    as_ints[one] ^= 1 << int(rng.integers(8 * dtype.itemsize - 1))
    assert int(digest(changed)) != before
    swapped = weights.clone()
    swapped[one], swapped[other] = weights[other], weights[one]
    assert (int(digest(swapped)) == before) == torch.equal(swapped, weights)


def test_signs_that_change_twice_are_seen():
    """Sums alone would lose them: the highest bit of two words."""
    weights = torch.ones(4 * COLUMNS)
    before = int(digest(weights))
    for one, other in ((1, 3), (1, 2 * COLUMNS + 1), (1, 2 * COLUMNS + 3)):
        changed = weights.clone()
        changed[one] = changed[other] = -1.0
        assert int(digest(changed)) != before


def test_of_two_both_are_odd_and_of_more_the_minority():
    keys = [np.array(each) for each in ([1, 2], [1, 2], [1], [], [7, 3], [3], [3], [3])]
    digests = [np.array(each) for each in ([5, 9], [5, 8], [6], [], [0, 4], [4], [3], [3])]
    assert odd_ranks(keys, digests) == {1: [2], 2: [0, 1], 3: [4, 5, 6, 7]}
    assert odd_ranks([np.array([1])] * 3, [np.array([2])] * 3) == {}
