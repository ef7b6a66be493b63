"""What is measured of a run against its prediction: where ranks spent time, and which part is to blame."""

import json
from dataclasses import replace

import pytest

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.engine.start.facts import MachineDescription
from hpctrain.observe.folder.run_folder import RunFolder
from hpctrain.observe.folder.schema import DRIFT, read_saved
from hpctrain.observe.folder.spans import StepRecorder
from hpctrain.observe.prediction_check import MeasuredStep, compare, describe_drift, format_comparison
from hpctrain.plan.schedule import Action, Instruction
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prediction.simulate import EXPOSED
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from tests.pretended import CLUSTER
from tests.unit.planner.test_predict import LAYOUTS, NUM_ITEMS, SETUP, plan_of


@pytest.mark.parametrize("plan", LAYOUTS)
def test_what_ranks_spend_adds_up_to_the_step_as_predicted(plan):
    result = predict(SETUP, plan, CLUSTER)
    assert sum(result.exposed_seconds.values()) == pytest.approx(result.step_seconds)
    assert result.exposed_seconds["compute"] == pytest.approx(result.breakdown_seconds["compute"])
    assert all(seconds >= 0 for seconds in result.exposed_seconds.values())


def test_a_recorder_knows_where_time_goes():
    now, recorder = [0.0], StepRecorder(CpuAccelerator())
    recorder.now = lambda: now[0]

    def take(seconds):
        now[0] += seconds
        return now[0] - seconds

    def step():
        begin = now[0]
        recorder.exposed("pipeline", "pipeline 0-1", "receive", 1, take(2.0))
        recorder.computed(Instruction(Action.RECEIVE_ACTIVATION, 0), begin)
        begin = take(3.0)
        recorder.exposed("y", "y 0-1", "all_reduce", 1, take(0.5))
        recorder.waited("x", "all_reduce", take(0.25))
        recorder.computed("item 1 forward", begin)
        recorder.computed(Instruction(Action.FORWARD, 0), begin)
        begin = take(0.125)
        recorder.exposed("data", "data 0-1", "reduce_scatter", 1, take(4.0))
        recorder.computed(Instruction(Action.REDUCE_GRADIENTS, 0), begin)
        begin = take(1.0)
        recorder.exposed("everyone", "everyone 0-1", "all_reduce", 1, take(0.0625))
        recorder.computed(Instruction(Action.UPDATE, 0), begin)

    for number in range(2):
        recorder.begin_step()
        step()
        recorder.computed(f"step {number}", 0.0)
        recorder.computed(Instruction(Action.FORWARD, 0), take(100.0))  # a validation
        expected = {"compute": 3.0, "tensor": 0.75, "pipeline": 2.0625, "data": 4.125, "optimizer": 1.0}
        assert recorder.parts() == expected


PLAN = plan_of()
PREDICTED = predict(SETUP, PLAN, CLUSTER)


def measured(**times) -> list[MeasuredStep]:
    parts = {part: seconds * times.get(part, 1.0) for part, seconds in PREDICTED.exposed_seconds.items()}
    return [MeasuredStep(sum(parts.values()), parts, 30_000_000) for _ in PLAN.ranks]


def test_a_step_as_predicted_is_no_drift(tmp_path):
    summary = compare(PREDICTED, PLAN, "c.toml", measured(), 4, knows_parts=True)
    assert summary["drift"] == pytest.approx(0.0) and not summary["is_large"]
    assert "warning" not in format_comparison(summary)
    RunFolder(tmp_path).write(DRIFT, summary)
    assert read_saved(tmp_path, DRIFT) == json.loads(json.dumps(summary))
    assert read_saved(tmp_path / "nowhere", DRIFT) is None


@pytest.mark.parametrize(("part", "times"), [(part, times) for part in ("compute", "data") for times in (0.3, 3.0)])
def test_a_part_that_drifts_is_named(part, times):
    share = PREDICTED.exposed_seconds[part] / PREDICTED.step_seconds
    prediction = replace(PREDICTED, interval_seconds=(0, PREDICTED.step_seconds))
    summary = compare(prediction, PLAN, "c.toml", measured(**{part: times}), 4, knows_parts=True)
    assert summary["drift"] == pytest.approx(share * (times - 1))
    assert summary["drifted"] == part
    assert summary["is_large"] == (abs(summary["drift"]) > 0.1)
    assert f"in '{part}'" in describe_drift(summary) and ("longer" if times > 1 else "shorter") in describe_drift(
        summary
    )
    assert ("warning: " in format_comparison(summary)) == summary["is_large"]
    summary["parts"] = {}  # as in a damaged file
    assert "steps took" in describe_drift(summary) and f"in '{part}'" not in describe_drift(summary)


def test_of_devices_that_compute_while_their_host_waits_the_step_alone_is_reported():
    summary = compare(PREDICTED, PLAN, "c.toml", measured(compute=2.0), 4, knows_parts=False)
    assert "parts" not in summary and summary["is_large"]
    assert "steps took" in format_comparison(summary)
    assert set(EXPOSED) == set(PREDICTED.exposed_seconds)


def test_memory_is_compared_with_the_ranks_that_have_as_many_rows(tmp_path):
    """Replicas share items and family; one that has more rows needs more, and only its peak says whether it did."""
    whole = Interval(0, NUM_ITEMS)
    rows = {0: Interval(0, 1), 1: Interval(1, 8)}
    tiles = tuple(Tile(whole, of_rank, (rank,), TensorGrid(), family="fast") for rank, of_rank in rows.items())
    plan = Plan(tiles, 4, 8, unused=(2, 3))
    predicted = predict(SETUP, plan, CLUSTER)
    needed = {stage.ranks: stage.memory.total for stage in predicted.memory}
    assert needed[(1,)] > 1.5 * needed[(0,)]
    own = [MeasuredStep(1.0, dict.fromkeys(EXPOSED, 0.2), needed.get((rank,), 1)) for rank in range(4)]
    summary = compare(predicted, plan, "c.toml", own, 4, knows_parts=True)
    assert [(each["rows"], each["measured_bytes"] / each["predicted_bytes"]) for each in summary["memory"]] == [
        (1, 1.0),
        (7, 1.0),
    ]
    lines = [line for line in format_comparison(summary).splitlines() if "memory of items" in line]
    assert [line.split(":")[0].split(", ")[-1] for line in lines] == ["1 row", "7 rows"]
    assert all("(+0.0%)" in line for line in lines)
    RunFolder(tmp_path).write(DRIFT, summary)
    assert read_saved(tmp_path, DRIFT) == json.loads(json.dumps(summary))


def test_a_comparison_of_an_earlier_version_can_be_read(tmp_path):
    summary = compare(PREDICTED, PLAN, "c.toml", measured(), 4, knows_parts=True)
    for each in summary["memory"]:
        del each["rows"]
    RunFolder(tmp_path).write(DRIFT, summary)
    assert read_saved(tmp_path, DRIFT) == json.loads(json.dumps(summary))
    assert "memory of items [0, 5], fast: " in format_comparison(summary)


def test_where_the_cause_is_known_nobody_is_asked_to_measure_again(tmp_path):
    summary = compare(PREDICTED, PLAN, "c.toml", measured(compute=3.0), 4, knows_parts=True)
    assert "warning: steps took" in format_comparison(summary) and "measure the machine again" in format_comparison(
        summary
    )
    summary["cause"] = "other programs took 1.5 of the 2 processors of host a meanwhile"
    (tmp_path / DRIFT.name).write_text(json.dumps(summary))
    said = format_comparison(read_saved(tmp_path, DRIFT))
    assert "longer than predicted, most of it in 'compute'" in said and said.endswith(summary["cause"])
    assert "warning" not in said and "measure the machine again" not in said
    quiet = MachineDescription(CLUSTER, "a name")
    assert not quiet.doubt, "who can measure again is asked to"
    assert "the next start measures it again" in replace(quiet, disturbance="others").doubt
