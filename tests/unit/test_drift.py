"""What is measured of a run against its prediction: where ranks spent time, and which part is to blame."""

import json
from dataclasses import replace

import pytest

from hpctrain.comm.tracing import Tracer
from hpctrain.observe import drift
from hpctrain.plan.schedule import Instruction, Op
from hpctrain.planner.predictor import predict
from hpctrain.planner.simulate import EXPOSED
from tests.pretended import CLUSTER
from tests.unit.test_predict import LAYOUTS, SETUP, plan_of


@pytest.mark.parametrize("plan", LAYOUTS)
def test_what_ranks_spend_adds_up_to_the_step_as_predicted(plan):
    result = predict(SETUP, plan, CLUSTER)
    assert sum(result.exposed_seconds.values()) == pytest.approx(result.step_seconds)
    assert result.exposed_seconds["compute"] == pytest.approx(result.breakdown_seconds["compute"])
    assert all(seconds >= 0 for seconds in result.exposed_seconds.values())


class Heard(Tracer):
    def __init__(self):
        self.names = []

    def computed(self, name, since):
        self.names.append(str(name))


def test_a_meter_knows_where_time_goes_and_passes_on_what_it_hears():
    now, heard = [0.0], Heard()
    meter = drift.PartMeter(lambda: now[0], heard)

    def take(seconds):
        now[0] += seconds
        return now[0] - seconds

    def step():
        begin = now[0]
        meter.exposed("pipeline", "receive", 1, take(2.0))
        meter.computed(Instruction(Op.RECEIVE_ACTIVATION, 0), begin)
        begin = take(3.0)
        meter.exposed("y", "all_reduce", 1, take(0.5))
        meter.waited("x", "all_reduce", take(0.25))
        meter.computed("item 1 forward", begin)
        meter.computed(Instruction(Op.FORWARD, 0), begin)
        begin = take(0.125)
        meter.exposed("data", "reduce_scatter", 1, take(4.0))
        meter.computed(Instruction(Op.REDUCE_GRADIENTS, 0), begin)
        begin = take(1.0)
        meter.exposed("everyone", "all_reduce", 1, take(0.0625))
        meter.computed(Instruction(Op.UPDATE, 0), begin)

    step()
    meter.computed("step 0", 0.0)
    meter.computed(Instruction(Op.FORWARD, 0), take(100.0))  # a validation
    meter.begin_step()
    step()
    meter.computed("step 1", 0.0)
    expected = {"compute": 3.0, "tensor": 0.75, "pipeline": 2.0625, "data": 4.125, "optimizer": 1.0}
    assert meter.steps == [expected, expected]
    assert heard.names.count("step 1") == 1


PLAN = plan_of()
PREDICTED = predict(SETUP, PLAN, CLUSTER)


def measured(**times) -> list[drift.MeasuredStep]:
    parts = {part: seconds * times.get(part, 1.0) for part, seconds in PREDICTED.exposed_seconds.items()}
    return [drift.MeasuredStep(sum(parts.values()), parts, 30_000_000) for _ in PLAN.ranks]


def test_a_step_as_predicted_is_no_drift(tmp_path):
    summary = drift.Expected(PREDICTED, PLAN, "c.toml", True).compare(measured(), 4)
    assert summary["drift"] == pytest.approx(0.0) and not summary["is_large"]
    assert "warning" not in drift.text(summary)
    drift.write(tmp_path, summary)
    assert drift.read(tmp_path) == json.loads(json.dumps(summary))
    assert drift.read(tmp_path / "nowhere") is None


@pytest.mark.parametrize(("part", "times"), [(part, times) for part in ("compute", "data") for times in (0.3, 3.0)])
def test_a_part_that_drifts_is_named(part, times):
    share = PREDICTED.exposed_seconds[part] / PREDICTED.step_seconds
    expected = drift.Expected(replace(PREDICTED, interval_seconds=(0, PREDICTED.step_seconds)), PLAN, "c.toml", True)
    summary = expected.compare(measured(**{part: times}), 4)
    assert summary["drift"] == pytest.approx(share * (times - 1))
    assert summary["drifted"] == part
    assert summary["is_large"] == (abs(summary["drift"]) > 0.1)
    assert f"in '{part}'" in drift.blame(summary) and ("longer" if times > 1 else "shorter") in drift.blame(summary)
    assert ("warning: " in drift.text(summary)) == summary["is_large"]


def test_of_devices_that_compute_while_their_host_waits_the_step_alone_is_reported():
    summary = drift.Expected(PREDICTED, PLAN, "c.toml", False).compare(measured(compute=2.0), 4)
    assert "parts" not in summary and summary["is_large"]
    assert "steps took" in drift.text(summary)
    assert set(EXPOSED) == set(PREDICTED.exposed_seconds)
