"""Calibration recovers the constants that made the measurements, and reports mistakes in files."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmarks.evidence.calibrate import SHIPPED, Measured, changes, dump_parameters, fit, load_parameters
from benchmarks.evidence.fit_runs import command
from hpctrain.config.errors import PlanError
from hpctrain.software.run import DescribedRun

NODES = {"devices_per_node": 1, "network": "OPA-100"}  # by hosts, of which a software gets its own share
RUNS = [
    DescribedRun(hidden, 12, 16, 1024, tensor, pipeline, 1, microbatch, 8, "H100", stack="megatron-core", **NODES)
    for hidden in (1024, 4096)
    for tensor, pipeline, microbatch in ((1, 1, 1), (1, 1, 8), (2, 1, 8), (8, 1, 1), (8, 1, 4), (2, 2, 2))
]
TRUE = SHIPPED.changed(
    {
        ("efficiencies", "hopper", "product_share"): 0.55,
        ("efficiencies", "hopper", "memory_share"): 0.7,
        ("stacks", "megatron-core", "dispatch_seconds"): 15e-6,
        ("stacks", "megatron-core", "link_share"): 0.6,
        ("stacks", "megatron-core", "reserved_bytes"): 3e9,
    }
)


def measured(parameters=TRUE) -> list[Measured]:
    result = []
    for number, run in enumerate(RUNS):
        prediction = parameters.predict(Measured("", run, 1.0))
        memory = max(stage.memory.total for stage in prediction.memory)
        result.append(Measured(str(number), run, prediction.step_seconds, memory))
    return result


def test_constants_that_made_the_measurements_are_recovered():
    result = fit(measured())
    for _, constant, true, fitted in changes(TRUE, result):
        assert fitted == pytest.approx(true, rel=0.1), constant
    for row in measured():
        assert result.predict(row).step_seconds == pytest.approx(row.seconds, rel=0.02)
    others = {"volta", "ampere"}, {"megatron-lm", "eager"}
    assert all(result.efficiencies[name] == SHIPPED.efficiencies[name] for name in others[0]), "nobody measured them"
    assert all(result.stacks[name] == SHIPPED.stacks[name] for name in others[1])


def test_one_bad_row_of_many_does_not_spoil_a_fit():
    rows = measured()
    rows[3] = replace(rows[3], seconds=3 * rows[3].seconds)
    result = fit(rows)
    good = [row for number, row in enumerate(rows) if number != 3]
    assert all(result.predict(row).step_seconds == pytest.approx(row.seconds, rel=0.05) for row in good)


def test_parameters_are_written_and_read_back(tmp_path):
    (tmp_path / "p.toml").write_text(dump_parameters(SHIPPED, TRUE, "A test."))
    assert not changes(TRUE, load_parameters(tmp_path / "p.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[efficiencies.hoper]\nproduct_share = 0.5", "no efficiencies.hoper; did you mean 'hopper'"),
        ("[stacks.megatron-lm]\nlink_shar = 0.5", "stacks.megatron-lm.link_shar: unknown; did you mean 'link_share'"),
        ("[efficiencies.volta]\nproduct_share = 7", "product_share = 7: set it to a number from 0.1 to 1"),
        ("[stack.hpctrain]", "no table 'stack'; did you mean 'stacks'"),
        ("stacks = ", "cannot be read"),
    ],
)
def test_mistakes_in_a_file_of_parameters_are_reported(tmp_path, text, message):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(PlanError, match=message):
        load_parameters(tmp_path / "p.toml")


HEAD = "name,hidden,layers,heads,positions,tensor,pipeline,data,microbatch,global_batch,accelerator,stack,step_seconds"


def test_the_command_fits_writes_and_tells(tmp_path):
    lines = [HEAD.replace("step_seconds", ",".join([*NODES, "step_seconds"]))]
    for row in measured():
        run = row.run
        values = (row.name, run.hidden, run.layers, run.heads, run.positions, run.tensor, run.pipeline, run.data)
        values = (*values, run.microbatch, run.global_batch, run.accelerator, run.stack, *NODES.values(), row.seconds)
        lines.append(",".join(map(str, values)))
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    out = tmp_path / "mine.toml"
    done = CliRunner().invoke(command, [str(tmp_path / "runs.csv"), "--out", str(out), "--rows"])
    assert done.exit_code == 0, done.output
    assert "efficiencies.hopper.product_share" in done.output
    assert load_parameters(out).efficiencies["hopper"].product_share == pytest.approx(0.55, rel=0.1)
    checked = CliRunner().invoke(command, [str(tmp_path / "runs.csv"), "--parameters", str(out), "--check"])
    assert float(checked.output.split("mean error of 12 steps")[1].split("%")[0]) < 2.0


def test_runs_that_ran_out_of_memory_are_counted_and_fit_nothing(tmp_path):
    large, small = "6144,44,64,2048,1,1,1,8,8", "1024,4,16,1024,1,1,1,1,1"
    runs = [f"{n},{shape},A100-40,megatron-lm,oom" for n, shape in enumerate((large, small))]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEAD, *runs, f"ran,{small},A100-40,megatron-lm,0.05"]))
    done = CliRunner().invoke(command, [str(path), "--check", "--rows"])
    assert "1 ran, of which predicted not to fit: 0" in done.output
    assert "2 ran out of memory, of which predicted to fit: 1" in done.output
    assert done.output.count(" oom  needs ") == 2
    path.write_text("\n".join([HEAD, *runs]))
    refused = CliRunner().invoke(command, [str(path)])
    assert "no row ran, so there is nothing to fit to; see --check" in str(refused.exception)
    assert CliRunner().invoke(command, [str(path), "--check"]).exit_code == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,64,2,2,64,1,1,1,1,1,A100-80,megatron-lm,x", r"runs.csv:2: step_seconds = 'x' is no float"),
        ("a,64,2,2,64,1,1,1,1,1,A100-8,megatron-lm,1", r"runs.csv:2: no accelerator 'A100-8'; did you mean"),
        ("a,64,2,2,64,1,4,1,1,4,A100-80,megatron-lm,1", r"runs.csv:2: pipeline = 4 stages need as many blocks"),
        ("a,64,2,,64,1,1,1,1,1,A100-80,megatron-lm,1", r"runs.csv:2: heads is empty"),
        ("a,64,2,2,64,0,1,1,1,1,A100-80,megatron-lm,1", r"runs.csv:2: tensor = 0 is no finite number above 0"),
        ("a,64,2,2,64,1,1,1,1,1,A100-80,megatron-lm,inf", r"runs.csv:2: step_seconds = inf is no finite number"),
    ],
)
def test_mistakes_in_measurements_are_reported(tmp_path, line, message):
    (tmp_path / "runs.csv").write_text(f"{HEAD}\n{line}\n")
    result = CliRunner().invoke(command, [str(tmp_path / "runs.csv")])
    assert isinstance(result.exception, PlanError)
    with pytest.raises(PlanError, match=message):
        raise result.exception


def test_a_column_that_nobody_knows_is_reported(tmp_path):
    (tmp_path / "runs.csv").write_text(f"{HEAD},micro_batch\n")
    result = CliRunner().invoke(command, [str(tmp_path / "runs.csv")])
    assert "has no rows" in str(result.exception)
    (tmp_path / "runs.csv").write_text(f"{HEAD},zeros\na,64,2,2,64,1,1,1,1,1,A100-80,megatron-lm,1,2\n")
    result = CliRunner().invoke(command, [str(tmp_path / "runs.csv")])
    assert "unknown column 'zeros'; did you mean 'zero'" in str(result.exception)
