"""Files and command lines that mean nothing, or too much: each is refused with a message, before anything is listed."""

import json
import struct
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from benchmarks.evidence.measured import load_measured
from benchmarks.mutations import CLUSTER, CSV, JOB, PLAN
from hpctrain.cli import root
from hpctrain.comm.watchdog import flight
from hpctrain.comm.watchdog.diagnosis import Diagnosis, Evidence, make_table
from hpctrain.config.bounds import MOST_PASSES, MOST_RANKS
from hpctrain.config.clusters.cluster import Cluster, Family
from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import CommError, HpctrainError, JobError, PlanError, TopologyError
from hpctrain.config.job import Job, load_job
from hpctrain.config.tables import MOST_BYTES, Table, parse_toml
from hpctrain.jobs.arguments import FiniteRange
from hpctrain.observe.folder.run_folder import RunFolder, read_metrics
from hpctrain.observe.folder.schema import DRIFT, METRICS, read_saved
from hpctrain.observe.prediction_check import format_comparison
from hpctrain.plan.checks import check_plan, check_tiling
from hpctrain.plan.file import load_plan, parse_plan
from hpctrain.plan.tiling import Plan, Tile, even_plan
from hpctrain.sharding.grid import ONE_RANK
from hpctrain.sharding.intervals import Interval, divisors

pytestmark = pytest.mark.timeout(20)
LONG = "n" * 300


@pytest.fixture
def job(tmp_path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def refused(*words: object) -> str:
    """Return what a command line says that refuses it."""
    result = CliRunner().invoke(root, list(map(str, words)))
    assert result.exit_code, result.output
    assert isinstance(result.exception, HpctrainError | SystemExit), result.exception
    return f"{result.output}{result.exception}"


def test_ranks_that_are_far_apart_are_not_listed():
    with pytest.raises(PlanError, match="ranks.1 = 1000000000: input should be less than 100000"):
        parse_plan(PLAN.replace("ranks = [0]", "ranks = [2, 1000000000]"), "plan.toml")
    far = Plan((Tile(Interval(0, 4), Interval(0, 2), (10**9,)),), 2, 2)
    with pytest.raises(PlanError, match=r"rank 0 is in no tile; list it under unused = \[0, 1, .*…\]"):
        check_tiling(far, 4)


def test_plans_for_a_billion_ranks_are_refused(job):
    assert "--ranks" in refused("plan", "uniform", job, "--ranks", 10**9)
    for key in ("plan.data", "plan.pipeline", "plan.tensor.y"):
        with pytest.raises(JobError, match=f"{key} = 1000000000: input should be less than or equal to 100000"):
            load_job(str(job), [f"{key}=1000000000"])
    with pytest.raises(JobError, match="tensor, pipeline and data ask for 1,000,000 ranks; lower them to 100,000"):
        load_job(str(job), ["plan.data=1000", "plan.tensor.y=1000"])


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.steps=true", "train.steps = True: must be a whole number"),
        ("train.steps=0", "train.steps = 0: input should be greater than or equal to 1"),
        ("train.learning_rate=inf", "train.learning_rate = inf: input should be a finite number"),
        ("model.preset=[1]", r"model.preset = \[1\]: no such preset"),
        ("model.num_heads=5", "hidden_size [0-9]+ is not divisible by num_heads 5"),
    ],
)
def test_a_setting_that_means_nothing_is_named(job, setting, says):
    with pytest.raises(JobError, match=says):
        load_job(str(job), [setting])


def test_a_batch_of_a_trillion_sequences_is_refused(job):
    with pytest.raises(JobError, match="train.global_batch = 1000000000000: input should be less than or equal to"):
        load_job(str(job), ["train.global_batch=1000000000000"])
    assert divisors(360) == [n for n in range(1, 361) if 360 % n == 0]
    assert divisors(9) == [1, 3, 9]
    assert len(divisors(10**12)) == 169


def test_a_billion_microbatches_are_refused(job):
    with pytest.raises(PlanError, match="microbatches = 1000000000: input should be less than or equal to"):
        parse_plan(PLAN.replace("microbatches = 2", "microbatches = 1000000000"), "plan.toml")
    with pytest.raises(PlanError, match="microbatches = 500,000 are more than 20,000; make them of more rows"):
        check_tiling(even_plan(4, ONE_RANK, 1, 1, 500_000, 2), 4)
    loaded = load_job(str(job), ["train.global_batch=40000", "model.num_layers=64"])
    with pytest.raises(PlanError, match=rf"the plan has 1,280,000 passes a step .* the most is {MOST_PASSES:,}"):
        check_plan(loaded, even_plan(130, ONE_RANK, 64, 1, 20_000, 2), "plan")
    check_tiling(even_plan(130, ONE_RANK, 4, 2000, 100, 2000), 130)  # replicas are equal, and count once


def test_clusters_of_a_billion_nodes_are_refused():
    for key in ("count = 1000000000\ndevices = {cpu = 1}", "devices = {cpu = 1000000000}"):
        with pytest.raises(TopologyError, match="= 1000000000: input should be less than or equal to 100000"):
            parse_cluster(CLUSTER.replace("devices = {cpu = 1}", key), "cluster.toml")
    with pytest.raises(TopologyError, match="nodes: have 10,000,000 devices; lower count or devices to 100,000 in all"):
        parse_cluster(CLUSTER.replace("devices = {cpu = 1}", "count = 1000\ndevices = {cpu = 10000}"), "cluster.toml")


def test_measured_runs_of_a_billion_degrees_are_refused(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(CSV)
    assert len(load_measured(path)) == 2
    path.write_text(CSV.replace("2048,4,2,1,1,64", "2048,1000000000,2,1,1,64"))
    with pytest.raises(
        PlanError, match="tensor x pipeline x data x context are 2,000,000,000 devices, and the most is 100,000"
    ):
        load_measured(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = " + "9" * 5000, "an integer of thousands of digits"),
        (f"x = {2**64}", "x: is an integer of more than 64 bits"),
        ('x = "a\\u0000b"', "has a zero byte"),
        ('"a\\u0000b" = 1', "has a zero byte"),
        ("x = " + "[" * 30_000 + "]" * 30_000, "within each other, more than 32 deep"),
        ("x = " + "[" * 40 + "]" * 40, "within each other, more than 32 deep"),
        (".".join(["a"] * 20_000) + " = 1", "a key has more than 32 parts"),
        ("[" + ".".join(['"a"'] * 20_000) + "]", "a key has more than 32 parts"),
        ("a = 1\n" * 100_000, "and maybe more"),
    ],
)
def test_toml_that_would_take_the_host_is_refused(text, says):
    with pytest.raises(JobError, match=says):
        parse_toml(text, "file.toml", JobError)


def test_long_texts_and_lists_are_read():
    text = f'path = "{"a.b/" * 20}"\nfloats = [{"1.5, " * 100}]\n# {"x." * 20}\n'
    assert len(parse_toml(text, "file.toml", JobError)["floats"]) == 100


def test_files_that_are_no_files_are_refused(tmp_path):
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop.name)
    endless = tmp_path / "endless.toml"
    endless.symlink_to("/dev/zero")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (MOST_BYTES + 1))
    for path, says in (
        (loop, "cannot be read: Too many levels of symbolic links"),
        (endless, "is no regular file"),
        (tmp_path, "is a folder"),
        (large, "has 4,000,001 bytes, and no file of this kind has more"),
        (tmp_path / LONG, "cannot be read: File name too long"),
    ):
        with pytest.raises(PlanError, match=says):
            load_plan(path)


def test_extends_that_leads_nowhere_is_refused(job):
    (job.parent / "loop.toml").symlink_to("loop.toml")
    for base, says in (
        ("loop.toml", "loop.toml: cannot be read: Too many levels of symbolic links"),
        ("job.toml", "job.toml: extends itself"),
        (LONG, "cannot be read: File name too long"),
        ("a\\u0000b", "has a zero byte"),
    ):
        job.write_text(f'extends = "{base}"\n{JOB}')
        with pytest.raises(JobError, match=says):
            load_job(str(job))
    for number in range(30):
        (job.parent / f"{number}.toml").write_text(f'extends = "{number + 1}.toml"\n')
    with pytest.raises(JobError, match="is the end of 20 files that extend each other"):
        load_job(str(job.parent / "0.toml"))


def test_a_job_extends_a_ready_made_one_by_its_name_and_a_file_of_that_name_first(tmp_path):
    job = tmp_path / "own.toml"
    job.write_text('extends = "tiny"\n[train]\nsteps = 7\n')
    assert load_job(str(job)).train.steps == 7
    assert load_job(str(job)).model == load_job("tiny").model
    (tmp_path / "tiny").write_text(JOB)
    assert load_job(str(job)).data == load_job(str(tmp_path / "tiny")).data


def test_a_preset_is_a_job_and_told_apart_from_a_typo():
    job = load_job("qwen3-30b-a3b", ["train.steps=7"])
    assert (job.name, job.model.num_experts, job.train.steps) == ("qwen3-30b-a3b", 128, 7)
    assert (job.data.tokens, job.data.sequence_length) == (load_job("tiny").data.tokens, 4096)
    assert load_job("gpt2-124m").data.sequence_length == 1024, "the most positions"
    with pytest.raises(JobError, match="qwen3-30b: no such job file.*did you mean 'qwen3-30b-a3b'"):
        load_job("qwen3-30b")
    with pytest.raises(JobError, match="tinny: no such job file.*did you mean 'tiny'"):
        load_job("tinny")


def test_names_of_300_letters_are_refused(job):
    with pytest.raises(JobError, match="no such job file"):
        load_job(LONG)
    with pytest.raises(JobError, match="name: is longer than 200 bytes"):
        load_job(str(job), [f"name={LONG}"])
    (job.parent / "plan.toml").write_text(PLAN)
    for words in (("inspect", LONG), ("predict", job, "--cluster", LONG, "--plan", job.parent / "plan.toml")):
        assert "no such" in refused(*words)
    for words in (("compare", LONG, LONG), ("generate", LONG), ("export", "run", "--hf", LONG)):
        assert "is a name of 300 bytes; the most is 255" in refused(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "run", "--temperature", "nan"),
        ("generate", "run", "--top-p", "nan"),
        ("compare", "run", "run", "--tolerance", "nan"),
        ("export", "run", "--hf", "out", "--shard-gb", "nan"),
        ("probe", "--out", "cluster.toml", "--seconds", "inf"),
        ("train", "tiny", "--time-scale", "nan"),
    ],
)
def test_numbers_on_the_command_line_are_finite(words):
    assert "is not a finite number" in refused(*words) or "is not in the range" in refused(*words)
    assert FiniteRange(0, 1).convert("0.5", None, None) == 0.5


@pytest.mark.parametrize("value", ["true", '"8"', '"1e-3"', "[8]", "nan", "inf"])
def test_what_is_no_number_is_refused_for_one(job, value):
    with pytest.raises(JobError, match="train.learning_rate = .*: (must be a number|input should be a finite)"):
        load_job(str(job), [f"train.learning_rate={value}"])


@pytest.mark.parametrize("key", ["microbatches", "rows", "zero"])
@pytest.mark.parametrize("value", ["8.0", "true", '"8"'])
def test_what_is_no_integer_is_refused_in_a_plan(key, value):
    lines = [f"{key} = {value}" if line.startswith(f"{key} = ") else line for line in PLAN.splitlines()]
    with pytest.raises(PlanError, match=f"{key} = .*: must be a whole number|{key}: input should"):
        parse_plan("\n".join(lines), "plan.toml")


def test_unused_ranks_are_ranks_and_listed_once():
    with pytest.raises(PlanError, match="unused.0 = -5: input should be greater than or equal to 0"):
        parse_plan("unused = [-5]\n" + PLAN, "plan.toml")
    twice = parse_plan("unused = [1, 1]\n" + PLAN, "plan.toml")
    with pytest.raises(PlanError, match=r"unused = \[1, 1\] has a rank twice"):
        check_tiling(twice, 4)
    with pytest.raises(PlanError, match=r"ranks \[0, 0\] has a rank twice"):
        check_tiling(parse_plan(PLAN.replace("ranks = [0]", "ranks = [0, 0]").replace("y = 1", "y = 2"), "plan"), 4)


def test_a_plan_for_an_unknown_family_is_not_predicted(job):
    (job.parent / "plan.toml").write_text(PLAN.replace('"cpu"', '"gpu"'))
    (job.parent / "cluster.toml").write_text(CLUSTER)
    words = ("predict", job, "--cluster", job.parent / "cluster.toml", "--plan", job.parent / "plan.toml")
    assert "tile 0 is for family 'gpu', but its ranks [0] are of 'cpu'" in refused(*words)


def test_set_takes_one_value(job):
    for override, says in (
        ("train.steps=1\nx = 2", "has more than one value"),
        ("train.steps=1\nrubbish", "has a second line"),
        ("train.steps=" + "9" * 5000, "an integer of thousands of digits"),
        (".".join(["a"] * 5000) + "=1", "write it as section.key=value"),
        ("train..steps=1", "write it as section.key=value"),
    ):
        with pytest.raises(JobError, match=says):
            load_job(str(job), [override])
    assert load_job(str(job), ["train.steps=4 # a comment"]).train.steps == 4


def test_initial_weights_that_overflow_are_refused(job):
    with pytest.raises(JobError, match="model.init_std = 1e.30: input should be less than or equal to 100"):
        load_job(str(job), ["model.init_std=1e30"])


def tables(base: type = Table) -> list[type[Table]]:
    import hpctrain.config.clusters.truth
    import hpctrain.plan.file  # noqa: F401

    return [each for table in base.__subclasses__() for each in (table, *tables(table))]


def kinds_of(annotation: Any) -> set[Any]:
    return {annotation} | {kind for argument in get_args(annotation) for kind in kinds_of(argument)}


def test_no_table_takes_text_or_booleans_for_numbers():
    """A field added later, or one that turns strictness off, is detected here."""
    seen = 0
    for table in tables():
        for name, field in table.model_fields.items():
            kinds = kinds_of(field.annotation)
            if (int not in kinds and float not in kinds) or bool in kinds:
                continue
            seen += 1
            text = [] if name in ("ranks", "unused") else ["1"]  # ranks may be ranges
            for wrong in (True, *text, [True], ["1"], {"cpu": True}, {"cpu": "1"}, {"fp32": True}):
                with pytest.raises(ValidationError):
                    table.__pydantic_validator__.validate_assignment(table.model_construct(), name, wrong)
    assert seen > 80


def test_ordinary_whole_numbers_are_taken_for_numbers(job):
    assert load_job(str(job), ["train.weight_decay=1", "train.seed=-3"]).train.weight_decay == 1.0
    assert issubclass(Cluster, Table) and issubclass(Family, Table) and issubclass(Job, Table)
    assert parse_cluster(CLUSTER.replace("5e10", "50_000_000_000"), "c.toml").num_devices <= MOST_RANKS


@pytest.mark.parametrize("value", ["{}", "[]", "5"])
def test_the_name_of_a_fabric_is_text(value):
    with pytest.raises(TopologyError, match=r"c.toml: line 14: nodes.0.nics.0.fabric = .*: must be text"):
        parse_cluster(CLUSTER.replace('fabric = "ib"', f"fabric = {value}"), "c.toml")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 1: is damaged"),
        (b"[1]", "another version: Input should be a valid dictionary"),
        (b"\xff\xfe", "line 1: is damaged"),
        (b"[" * 100_000, "line 1: is damaged"),
        (b'{"step": "3", "loss": 1.0}', "another version: step: Input should be a valid integer"),
        (b'{"loss": 3.0}', "another version: step: Field required"),
        (b'{"step": 3, "loss": 1.0, "grad_norm": null}', "another version: grad_norm: Input should be a valid number"),
    ],
)
def test_damaged_metrics_are_said(tmp_path, line, says):
    good = b'{"step": 1, "loss": 2.0}\n'
    (tmp_path / METRICS.name).write_bytes(line + b"\n" + good)
    with pytest.raises(JobError, match=says):
        read_metrics(tmp_path)
    note = RunFolder(tmp_path).rewind_metrics(5)
    assert note and "left out (1 in all), the file is kept as" in note
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == line + b"\n" + good
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    (tmp_path / METRICS.name).write_bytes(good + b'{"step": 2, "lo')  # cut short by a crash
    assert RunFolder(tmp_path).rewind_metrics(5) is None


@pytest.mark.parametrize("change", [{"drift": "x"}, {"predicted_seconds": 0}, {"parts": 3}, {"drifted": "none"}])
def test_a_damaged_comparison_is_said(tmp_path, change):
    parts = {"compute": {"predicted_seconds": 1.0, "measured_seconds": 2.0}}
    good = {"cluster": "a", "steps": 3, "predicted_seconds": 1.0, "interval_seconds": [0.5, 2.0], "drift": 1.0}
    good |= {"measured_seconds": 2.0, "is_large": True, "parts": parts, "drifted": "compute"}
    path = tmp_path / DRIFT.name
    path.write_text(json.dumps(good))
    summary = read_saved(tmp_path, DRIFT)
    assert summary and "most of it in 'compute'" in format_comparison(summary)
    path.write_text(json.dumps(good | change))
    with pytest.raises(JobError, match=r"drift.json: is damaged: .*; remove it"):
        read_saved(tmp_path, DRIFT)
    path.write_text("[" * 100_000)
    with pytest.raises(JobError, match="drift.json: is damaged"):
        read_saved(tmp_path, DRIFT)


def test_damaged_flight_records_are_left_out(tmp_path):
    header = flight.HEADER.pack(flight.MAGIC, flight.VERSION, 0, 2**31 - 1, 1, 1, 1, 1.0, 1.0, b"h", b"cpu", b"m")
    with pytest.raises(CommError, match="is damaged: rank 0 of 2147483647"):
        flight.parse_flight(header)
    good = flight.HEADER.pack(flight.MAGIC, flight.VERSION, 0, 2, 1, 1, 1, 1.0, 1.0, b"h", b"cpu", b"m")
    data = bytearray(good.ljust(flight.TOTAL_BYTES, b"\0"))
    slot = flight.SLOT.pack(1, 1, 0, 0, -5, 8, float("nan"), 0.0, 1)
    data[flight.RING_AT : flight.RING_AT + len(slot)] = slot
    line = b'["lane", 1e400, "a", "0-1", 2, 3]\n' + b"[" * 5000
    data[flight.TABLE_USED_AT : flight.TABLE_USED_AT + 8] = struct.pack("@Q", len(line))
    data[flight.TABLE_AT : flight.TABLE_AT + len(line)] = line
    read = flight.parse_flight(bytes(data))
    assert read.operations == () and read.lanes == ()
    (tmp_path / flight.LAST_WORD).write_text('{"rank": 1e400, "time": 0}')
    assert flight.read_first_death(tmp_path) is None


def test_the_table_of_many_ranks_is_short():
    lines = make_table(Evidence({}, 900_000, 0.0), [5])
    assert len(lines) == 33
    assert lines[-1] == "... and 899,968 more ranks"
    assert Diagnosis.__doc__
