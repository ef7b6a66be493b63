"""Tables of measured layers take the place of data sheets."""

import pytest

from benchmarks.evidence.layers import LayeredPredictor, load_layers
from hpctrain.config.errors import PlanError
from hpctrain.planner.prediction.predictor import Predictor
from tests.pretended import CLUSTER
from tests.unit.planner.test_predict import SETUP, plan_of

HEAD = "model,device,microbatch,tensor,layer,forward_seconds,backward_seconds,update_seconds"
LAST = SETUP.model.num_layers + 1


def table(times: dict[str, float], tensor: int = 1, rows=(2, 4, 8), model: str = "tiny") -> str:
    """A block takes `times` seconds a row forward and twice that back, the embedding a tenth, the head thrice."""
    lines = [HEAD]
    for device, seconds in times.items():
        for each in rows:
            for layer, share in ((0, 0.1), (1, 1.0), (LAST, 3.0)):
                forward = seconds * each * share
                lines.append(f"{model},{device},{each},{tensor},{layer},{forward},{2 * forward},0.001")
    return "\n".join(lines) + "\n"


def predicted(tmp_path, plan, times, **more):
    (tmp_path / "layers.csv").write_text(table(times, **more))
    return LayeredPredictor(load_layers(tmp_path / "layers.csv"), SETUP, plan, CLUSTER).predict()


def test_a_step_computes_what_its_layers_do(tmp_path):
    plan = plan_of((1, 1, 1), pipeline=1, data=4, microbatches=4)
    result = predicted(tmp_path, plan, {"fast": 0.5, "slow": 0.5})
    layers = 0.1 + SETUP.model.num_layers + 3.0
    assert result.breakdown_seconds["compute"] == pytest.approx(3 * 0.5 * 2 * 4 * layers)
    agreeing = result.breakdown_seconds["optimizer"] - (LAST + 1) * 0.001 / 4
    assert 0 < agreeing < 0.1, "each of four replicas updates a quarter"
    halved = predicted(tmp_path, plan, {"fast": 0.25, "slow": 0.25})
    assert halved.breakdown_seconds["compute"] == pytest.approx(result.breakdown_seconds["compute"] / 2)
    assert halved.memory == result.memory


def test_collectives_of_a_grid_are_part_of_the_layers_and_recomputing_is_a_forward_pass(tmp_path):
    plan = plan_of((1, 2, 1), pipeline=1, data=2)
    result = predicted(tmp_path, plan, {"fast": 0.5, "slow": 0.5}, tensor=2)
    assert result.breakdown_seconds["tensor"] == 0
    assert Predictor(SETUP, plan, CLUSTER).predict().breakdown_seconds["tensor"] > 0
    again = predicted(
        tmp_path, plan_of((1, 2, 1), pipeline=1, data=2, recompute="full"), {"fast": 0.5, "slow": 0.5}, tensor=2
    )
    assert again.breakdown_seconds["compute"] == pytest.approx(result.breakdown_seconds["compute"] * 4 / 3)


def test_what_a_table_does_not_have_is_reported(tmp_path):
    with pytest.raises(PlanError, match="layers.csv has no layers of slow by tensor 1; known are: fast"):
        predicted(tmp_path, plan_of(), {"fast": 0.5})
    (tmp_path / "two.csv").write_text(table({"fast": 0.5}) + table({"fast": 0.5}, model="b").split("\n", 1)[1])
    with pytest.raises(PlanError, match="two.csv has layers of b, tiny; name one of them as `model`"):
        load_layers(tmp_path / "two.csv")
    assert load_layers(tmp_path / "two.csv", "b")
    (tmp_path / "bad.csv").write_text(table({"fast": 0.5}).replace("0.001", "soon", 1))
    with pytest.raises(PlanError, match="bad.csv:2: update_seconds = 'soon' is no number"):
        load_layers(tmp_path / "bad.csv")
    (tmp_path / "bad.csv").write_text("model,devise\n1,2\n")
    with pytest.raises(PlanError, match="bad.csv: no column 'device'; did you mean 'devise'"):
        load_layers(tmp_path / "bad.csv")


def test_tables_in_sailors_words_are_read_too(tmp_path):
    names = "model,gpu,mbs,tp,layer,fwd_s,bwd_s,update_s"
    text = table({"fast": 0.5, "slow": 0.5})
    (tmp_path / "ours.csv").write_text(text)
    (tmp_path / "sailors.csv").write_text(text.replace(HEAD, names))
    ours, sailors = (load_layers(tmp_path / name) for name in ("ours.csv", "sailors.csv"))
    assert ours.of("fast", 1, 1, LAST).forward(2) == sailors.of("fast", 1, 1, LAST).forward(2) == 1.0
