"""Run folders of older states live on: they are inspected, exported, evaluated and continued, by another layout too."""

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.config.errors import CheckpointError, DataError, JobError
from tests.checkpoints import forge_file
from tests.old_runs.make import HERE, SAVED_STEP

STATES = sorted(path.name for path in HERE.iterdir() if (path / "job.toml").is_file())
OLDEST = {path.parts[-2]: path.parts[-3] for path in sorted(HERE.glob("*/*/checkpoints"), reverse=True)}
EACH = [(state, layout) for layout, state in sorted(OLDEST.items())]
"""Each layout, as the first state wrote it that has it."""
GONE = {
    "fp8": 'precision.overrides.linear = "fp8" is gone and is left out',
    "offload-activations": 'plan.offload = "activations" is gone and is read as "none"',
    "offload-all": 'plan.offload = "all" is gone and is read as "optimizer"',
    **{
        f"unlike-zero{zero}": f"zero = {zero} of tiles [0, 6], whose tensor grids differ, is gone and is read as 1"
        for zero in (2, 3)
    },
}
"""What is said of a run with a value that is gone."""
TRAIN = ("train", "job.toml", "--set", "plan.data=1", "--sample", "0")


@pytest.fixture
def work(tmp_path, request) -> Path:
    """A copy of what a state wrote."""
    state = getattr(request, "param", STATES[-1])
    return Path(shutil.copytree(HERE / state, tmp_path / "work"))


def last_line(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(("work", "layout"), EACH, indirect=["work"])
def test_an_old_run_is_read_exported_and_continued(hpctrain, work, layout):
    losses = json.loads((work / ("losses-fp8.json" if layout == "fp8" else "losses.json")).read_text())
    inspected = hpctrain("inspect", layout, "--verify", "--json", cwd=work)
    assert json.loads(inspected.out)["step"] == SAVED_STEP, inspected.err
    exported = hpctrain("export", layout, "--hf", "exported", "--json", cwd=work)
    assert json.loads(exported.out)["tokenizer"] and (work / "exported/model.safetensors").is_file(), exported.err
    evaluated = hpctrain("evaluate", layout, "--data", "tokens.h5", "--sequences", "4", "--json", cwd=work)
    assert json.loads(evaluated.out)["loss"] < losses[0], evaluated.err
    reported = hpctrain("report", layout, "--out", "report.html", cwd=work)
    assert reported.code == 0, reported.err
    assert layout.startswith("unlike") or GONE.get(layout, "") in inspected.err, "it reads the job"
    if layout == "fp8":
        dtype = ("--set", "train.dtype=bf16")
        refused = hpctrain(*TRAIN, *dtype, "--run", layout, cwd=work)
        assert refused.code == CheckpointError.exit_code and 'linear = "fp8", which is gone' in refused.err
        begun = hpctrain(*TRAIN, *dtype, "--run", "new", "--set", "train.start_from='fp8'", cwd=work)
        assert begun.code == 0, begun.err
        return
    done = hpctrain(*TRAIN, "--run", layout, cwd=work)
    assert done.code == 0 and f"continuing after step {SAVED_STEP}" in done.out, done.err
    assert GONE.get(layout, "") in done.out
    assert last_line(work / layout)["step"] == len(losses)
    assert last_line(work / layout)["loss"] == pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.parametrize("work", STATES, indirect=True)
def test_an_old_run_is_continued_by_four_ranks(hpctrain, work):
    plan = ("--set", "plan.pipeline=2", "--set", "plan.tensor.y=2")
    done = hpctrain("train", "job.toml", "--run", "sharded", "--sample", "0", *plan, ranks=4, cwd=work)
    assert done.code == 0, done.err
    assert last_line(work / "sharded")["loss"] == pytest.approx(
        json.loads((work / "losses.json").read_text())[-1], 1e-5
    )


def test_a_key_that_is_gone_is_passed_over_where_it_was_written_and_refused_in_a_job(hpctrain, work):
    checkpoint = latest_checkpoint(work / "one")
    job = json.loads((checkpoint / "job.json").read_text())
    job["observe"]["timeout_seconds"] = 3.0
    forge_file(checkpoint, "job.json", json.dumps(job).encode())
    resolved = work / "one/resolved.toml"
    resolved.write_text(resolved.read_text().replace("[observe]\n", "[observe]\ntimeout_seconds = 3.0\n"))
    word = "is of an older version; keys that are gone are passed over: observe.timeout_seconds"
    for command, times in ((("inspect", "one"), 1), (("generate", "one", "--tokens", "1"), 0)):
        done = hpctrain(*command, cwd=work)
        assert done.code == 0 and done.err.count(word) == times, done.err
    done = hpctrain(*TRAIN, "--run", "one", cwd=work)
    assert done.code == 0 and word in done.out, done.err
    again = hpctrain("train", "one/resolved.toml", "--set", "train.steps=1", "--run", "two", "--sample", "0", cwd=work)
    assert again.code == 0, again.err
    (work / "job.toml").write_text((work / "job.toml").read_text() + "[observe]\ntimeout_seconds = 3.0\n")
    refused = hpctrain(*TRAIN, cwd=work)
    assert refused.code == JobError.exit_code
    assert "job.toml: observe.timeout_seconds: unknown key; did you mean 'step_timeout_seconds'" in refused.err


def test_changed_keys_of_a_run_that_continues_are_said_and_kept(hpctrain, work):
    changes = ("--set", "train.steps=4", "--set", "train.learning_rate=1e-3", "--set", "train.validate_every=9")
    done = hpctrain(*TRAIN, *changes, "--run", "one", cwd=work)
    text = (
        "train.steps = 4 (before: 3), train.learning_rate = 0.001 (before: 0.01); the run goes on with the new values"
    )
    assert f"changed: {text}\n" in done.out, done.err
    events = [json.loads(line) for line in (work / "one/events.jsonl").read_text().splitlines()]
    start = [event for event in events if event["event"] == "start"][-1]
    assert text in start["text"] and start["reasons"]["changed"] == text
    assert hpctrain("report", "one", "--out", "report.html", cwd=work).code == 0
    assert "train.learning_rate = 0.001 (before: 0.01)" in (work / "report.html").read_text()
    same = hpctrain(*TRAIN, *changes, "--set", "train.steps=5", "--run", "one", cwd=work)
    assert "changed: train.steps = 5 (before: 4); the run" in same.out, same.err


def test_tokens_of_another_tokenizer_are_refused(hpctrain, work):
    (work / "text.txt").write_text("Another text, of which every byte is a token.\n" * 100)
    assert hpctrain("prepare", "text.txt", "--out", "bytes.h5", cwd=work).code == 0
    start = ("--set", "train.start_from='one'", "--set", "model.vocab_size=300", "--run", "new")
    refused = [
        hpctrain("evaluate", "one", "--data", "bytes.h5", cwd=work),
        hpctrain(*TRAIN, *start, "--set", "data.tokens=bytes.h5", cwd=work),
    ]
    for done in refused:
        assert done.code == DataError.exit_code and "with another tokenizer (256 ids) than the model of" in done.err
        assert "--tokenizer one/checkpoints/step-00000002/tokenizer.json" in done.err, done.err
    remedy = ("--tokenizer", "one/checkpoints/step-00000002/tokenizer.json")
    assert hpctrain("prepare", "text.txt", *remedy, "--out", "right.h5", cwd=work).code == 0
    assert hpctrain("evaluate", "one", "--data", "right.h5", cwd=work).code == 0
    done = hpctrain(*TRAIN, *start, "--set", "data.tokens=right.h5", "--set", "train.steps=1", cwd=work)
    assert done.code == 0, done.err


def test_lost_checkpoints_are_not_begun_anew(hpctrain, work):
    before = (work / "one/metrics.jsonl").read_text()
    shutil.rmtree(work / "one/checkpoints")
    done = hpctrain(*TRAIN, "--run", "one", cwd=work)
    assert (
        done.code == JobError.exit_code and "says that one of step 2 was written; bring checkpoints/ back" in done.err
    )
    assert (work / "one/metrics.jsonl").read_text() == before


def test_steps_without_a_checkpoint_are_said_to_be_computed_again(hpctrain, work):
    line = (work / "one/metrics.jsonl").read_text().splitlines()[-1]
    with (work / "one/metrics.jsonl").open("a") as file:
        file.write(line.replace('"step": 2', '"step": 3') + "\n")
    done = hpctrain(*TRAIN, "--run", "one", cwd=work)
    assert "steps 3 to 3, of which there is no checkpoint, are computed again" in done.out, done.err


def test_ranks_of_torchrun_say_so_once(hpctrain, work):
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    done = [hpctrain(*TRAIN, cwd=work, cold=True, environment=environment) for environment in ranks]
    assert [each.code for each in done] == [82, 82] and not done[1].err
    assert "torchrun started 2 processes" in done[0].err and "mpirun -n 2" in done[0].err
    assert not (work / "runs").exists()


def test_a_job_without_its_tokens_gets_no_script(hpctrain, work):
    start = ("slurm", "job.toml", "--nodes", "1", "--ranks-per-node", "2", "--mpi", "pmi2", "--run", "run")
    for key in ("data.tokens", "data.validation"):
        done = hpctrain(*start, "--set", f"{key}=no.h5", cwd=work)
        assert done.code == DataError.exit_code and "no.h5: no such token file" in done.err
    done = hpctrain(*start, "--set", "train.start_from='nothing'", cwd=work)
    assert done.code == CheckpointError.exit_code and not (work / "run").exists()
    assert hpctrain(*start, cwd=work).code == 0
