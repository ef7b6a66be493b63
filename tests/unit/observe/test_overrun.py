"""What a rehearsal does whose ranks cannot keep up with their pretended devices."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from hpctrain.config.errors import TrainingError
from hpctrain.observe.console import progress_parts
from hpctrain.observe.folder.spans import Observed
from hpctrain.observe.overrun import OverrunWatch
from hpctrain.observe.prediction_check import PredictionTracker
from hpctrain.rehearsal.clock import Clock
from hpctrain.rehearsal.fabric import FlowNetwork


class Device:
    """Late by shares that are given, of steps at its first time scale."""

    def __init__(self, *overruns: float):
        late = iter(overruns)
        self.time_scale, self.clock = 2.0, SimpleNamespace(take_overrun=lambda: next(late))

    def raise_time_scale(self, times: float) -> None:
        self.time_scale *= times


WORLD = SimpleNamespace(largest=lambda value: value, all_or_none=nullcontext)


def watch_steps(*overruns: float) -> tuple[Device, list[float | None], list[str | None], list[str]]:
    device, raised = Device(*overruns), []
    watch = OverrunWatch(WORLD, device, raised.append)  # pyright: ignore[reportArgumentType] - stand-ins
    seen, said = [], []
    for _ in overruns:
        seen.append(watch.look())
        said.append(watch.step_is_done(1.0))
    return device, seen, said, raised


def test_the_first_step_does_not_count_and_one_late_step_changes_nothing():
    device, seen, said, raised = watch_steps(9.0, 0.3, 0.01, 0.3, 0.05)
    assert device.time_scale == 2.0 and not any(said) and not raised
    assert seen == [None, 0.3, 0.01, 0.3, 0.05]


@pytest.mark.parametrize(("overrun", "scale"), [(0.06, 3.0), (0.4, 3.5), (3.0, 8.0)])
def test_two_late_steps_running_raise_the_time_scale(overrun, scale):
    device, _, said, raised = watch_steps(0.0, 0.06, overrun, 0.0)
    assert device.time_scale == pytest.approx(scale)
    assert said[:2] == [None, None] and said[3] is None and [said[2]] == raised
    assert f"late by {overrun:.0%} in step 3" in raised[0] and f"raised from 2 to {scale:g} s" in raised[0]


def test_nothing_is_raised_after_the_last_step():
    device, raised = Device(0.0, 3.0, 3.0), []
    watch = OverrunWatch(WORLD, device, raised.append)  # pyright: ignore[reportArgumentType] - stand-ins
    for is_last in (False, False, True):
        assert watch.look(is_last) is None or watch.step_is_done(1.0) is None
    assert device.time_scale == 2.0 and not raised


def test_beyond_four_times_the_run_stops_and_names_the_option():
    with pytest.raises(TrainingError, match=r"60% in step 5, .* time scale of 8 s .* set --time-scale 16 or more"):
        watch_steps(0.0, 5.0, 5.0, 0.6, 0.6)


def test_progress_has_the_overrun_and_a_clock_that_of_each_step():
    metrics = {"step": 2, "loss": 1.0, "overrun": 0.034}
    assert "overrun 3.4%" in progress_parts(metrics, {}, 4, 100.0, 0.0)
    clock = Clock()
    clock.late_seconds, clock.measured_seconds = 1.0, 4.0
    assert clock.take_overrun() == 0.25 and clock.take_overrun() == 0.0
    clock.late_seconds, clock.measured_seconds = 1.5, 5.0
    assert clock.take_overrun() == 0.5 and clock.overrun == 0.3


def test_steps_before_the_time_scale_was_raised_are_left_out_of_the_comparison():
    parts = dict.fromkeys(("compute", "tensor", "pipeline", "data", "optimizer"), 1.0)
    gathered = []
    world = SimpleNamespace(rank=0, gather_objects=lambda own: gathered.append(own) or [own], all_or_none=nullcontext)
    device, recorder = (
        SimpleNamespace(shares_memory=True, overrun=0.0),
        SimpleNamespace(parts=lambda: parts, knows_times=True),
    )
    observed = Observed(world, device, recorder, None, None)  # pyright: ignore[reportArgumentType] - stand-ins
    tracker = PredictionTracker(observed, None, "c.toml")
    for seconds in (9.0, 5.0, 5.0):
        tracker.step_is_done(seconds)
    tracker.forget()
    tracker.step_is_done(2.0)
    assert tracker.finish() is None and gathered[0].step_seconds == 2.0


def test_a_network_that_is_slowed_down_takes_longer_for_what_is_in_flight_too():
    memory = memoryview(bytearray(8 * FlowNetwork.num_doubles(2))).cast("d")
    fluid = FlowNetwork((10.0, 10.0), [(0, 1)], memory)
    fluid.reset()
    fluid.start(0, 0, 100.0, 0.0)  # would take 10 s
    fluid.slow_down(4.0, 5.0)
    fluid.advance(24.0)
    assert fluid.left(0) == float("inf")
    fluid.advance(26.0)
    assert fluid.left(0) == pytest.approx(25.0)
    fluid.start(1, 0, 100.0, 30.0)
    assert fluid.earliest_end(1) == pytest.approx(70.0) and fluid.next_end == pytest.approx(70.0)
