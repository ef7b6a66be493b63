"""The commands from end to end: prepare, train, resume, compare, inspect, generate, bench."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.checkpoint.folder import latest_checkpoint
from hpctrain.observe.folder.run_folder import read_events, read_metrics
from tests.started import BIN, ranks_of
from tests.unit.report_page import Page, check_numbers
from tests.warm_start import MODULE, SCRIPT


def last_line(done) -> dict:
    assert done.code == 0, done.out + done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.fixture(scope="module")
def whole_run(hpctrain, folder):
    """An uninterrupted run on 2 ranks."""
    args = ["train", "job.toml", "--run", "runs/whole", "--set", "plan.pipeline=2"]
    done = hpctrain(*args, "--sample", "30", ranks=2, cwd=folder)
    assert done.code == 0, done.err
    return done


@pytest.mark.timeout(120)
def test_train_says_what_it_did_and_where_things_are(whole_run, folder):
    for part in ("TP1 x PP2 x DP1, ZeRO 1", "tokens/s", "validation loss", "unigram entropy", "sample:"):
        assert part in whole_run.out
    assert "run folder runs/whole\ncheckpoint runs/whole/checkpoints/step-00000006" in whole_run.out
    metrics = read_metrics(folder / "runs/whole")
    assert [m["step"] for m in metrics] == list(range(1, 7))
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert ["validation_loss" in m for m in metrics] == [False, False, True] * 2


@pytest.mark.timeout(60)
def test_a_report_shows_the_numbers_of_a_real_run(hpctrain, whole_run, folder):
    done = hpctrain("report", "runs/whole", "--out", "whole.html", cwd=folder)
    assert done.code == 0 and "open it in a browser" in done.out, done.err
    page = Page((folder / "whole.html").read_text())
    check_numbers(folder / "runs/whole", page)
    sources = {source.partition(":")[0] for source, _, _ in page.numbers}
    files = "metrics.jsonl", "drift.json", "timeline.json", "traffic.json", "resolved.toml", "cluster.toml", "forecast"
    assert {f"whole/{file}" for file in files} <= sources
    timeline = json.loads((folder / "runs/whole/timeline.json").read_text())
    assert all(grid["spans"][-1][0] == "update" for grid in timeline["grids"]), "validation comes after the third step"
    assert "of 6 steps" in re.sub("<[^>]*>", "", (folder / "whole.html").read_text())
    missing = hpctrain("report", "runs/nowhere", cwd=folder)
    assert missing.code == 81 and missing.err.count("\n") == 1 and "there is no such folder" in missing.err


@pytest.mark.timeout(60)
def test_what_is_auto_becomes_a_value_with_a_reason(hpctrain, folder):
    """The defaults of a job: dtype, plan, vocabulary and algorithms are all left open."""
    arguments = ["--set", "train.dtype=auto", "--set", "train.steps=1", "--run", "auto"]
    done = hpctrain("train", "job.toml", *arguments, ranks=2, cwd=folder)
    assert done.code == 0, done.err
    resolved = tomllib.loads((folder / "auto" / "resolved.toml").read_text())
    assert resolved["train"]["dtype"] in ("fp32", "bf16")
    assert resolved["model"]["vocab_size"] == 256
    reasons = (folder / "auto" / "resolved.toml").read_text()
    for key in ("train.dtype", "plan", "algorithms"):
        assert f"# {key}: " in reasons
    assert "search: " in done.out and "every choice and its reason: auto/resolved.toml" in done.out
    arguments[3] = "train.steps=2"  # what can change a bit is that of the checkpoint, whatever the clock says now
    again = hpctrain("train", "job.toml", *arguments, ranks=2, cwd=folder)
    assert again.code == 0, again.err
    reasons = (folder / "auto" / "resolved.toml").read_text()
    assert "# algorithms: none: ranks share one host's memory, by the links of auto/checkpoints/" in reasons


@pytest.mark.timeout(120)
def test_other_ranks_and_plans_give_the_same_losses(hpctrain, folder, whole_run):
    args = ["train", "job.toml", "--run", "runs/one", "--sample", "0"]
    assert last_line(hpctrain(*args, "--json", cwd=folder))["step"] == 6
    summary = last_line(hpctrain("compare", "runs/whole", "runs/one", "--json", cwd=folder))
    assert summary["same"]
    assert 0 < summary["largest_difference"] < 1e-5
    done = hpctrain("compare", "runs/whole", "runs/one", "--exact", cwd=folder)
    assert done.code == 1
    assert "different: beyond 0" in done.out


@pytest.mark.timeout(120)
def test_a_resolved_job_runs_again_bit_for_bit(hpctrain, folder, whole_run):
    done = hpctrain("train", "runs/whole/resolved.toml", "--run", "runs/again", "--sample", "0", ranks=2, cwd=folder)
    assert done.code == 0, done.err
    summary = last_line(hpctrain("compare", "runs/whole", "runs/again", "--exact", "--json", cwd=folder))
    assert summary["same"]
    assert summary["largest_difference"] == 0
    assert summary["different_parameters"] == []


@pytest.mark.timeout(120)
def test_killed_and_started_again_is_bit_for_bit_the_same(hpctrain, warm_start, folder, whole_run):
    args = ["train", "job.toml", "--run", "runs/killed", "--set", "plan.pipeline=2"]
    args += ["--sample", "0", "--set", "checkpoint.every=1"]
    command = [BIN / "mpirun", "-n", "2", *warm_start, *args]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not (folder / "runs/killed/checkpoints/latest").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(2)  # until the ranks are gone with their launcher
    done = hpctrain(*args, ranks=2, cwd=folder)
    assert "continuing after step" in done.out, "it was killed before its end"
    assert last_line(hpctrain("compare", "runs/whole", "runs/killed", "--exact", "--json", cwd=folder))["same"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGXCPU])
def test_a_signal_ends_a_run_in_order(hpctrain, warm_start, folder, whole_run, number):
    run = f"runs/stopped-{number}"
    command = [*warm_start, "train", "job.toml", "--run", run, "--set", "train.steps=5000"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(read_metrics(folder / run)) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert f"stopped by {number.name}; start the same command with --run {run} to continue" in out
    summary = last_line(hpctrain("inspect", run, "--json", cwd=folder))
    assert summary["step"] == len(read_metrics(folder / run))


@pytest.mark.timeout(120)
def test_a_run_goes_on_without_its_output_and_the_files_of_reports(folder):
    """A full disk takes neither its output nor one of its files, where a folder stands."""
    run = folder / "runs/unheard"
    (run / "traffic.json").mkdir(parents=True)
    command = [BIN / "hpctrain", "train", "job.toml", "--run", run, "--sample", "5"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lost = (
        "standard output cannot be written: No space left on device; training continues, and writes to its run folder"
    )
    assert done.stderr.splitlines()[1:] == [f"hpctrain: {lost}"]
    refused = f"{run / 'traffic.json'}: cannot be written: Is a directory; training continues without it"
    assert {event["text"] for event in read_events(run) if event["event"] == "output lost"} == {lost, refused}
    assert (run / "timeline.json").is_file() and latest_checkpoint(run)


def catches(pid: int, number: int) -> bool:
    """Say whether a process handles a signal, by Linux's mask of those that it does."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_signal_before_the_first_step_ends_a_run_in_order(folder, seconds):
    """It comes as soon as ranks listen, while Python imports; or while MPI starts or the run is prepared."""
    early = str(folder / "runs/early")
    run = [early, "--set", "train.steps=5000", "--no-progress"]
    command = [BIN / "mpirun", "-n", "2", BIN / "hpctrain", "train", "job.toml", "--run", *run]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while [catches(pid, signal.SIGTERM) for pid in ranks_of(early)] != [True, True]:
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert "stopped by SIGTERM" in out


@pytest.mark.timeout(120)
def test_files_in_the_run_folder_ask_for_a_checkpoint_and_for_the_end(warm_start, folder):
    run = folder / "runs/asked"
    command = [*warm_start, "train", "job.toml", "--run", run, "--set", "train.steps=5000"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for name, steps in (("save", 2), ("stop", 4)):
        while len(read_metrics(run)) < steps:
            assert process.poll() is None
            time.sleep(0.01)
        (run / name).touch()
        while (run / name).exists():
            time.sleep(0.01)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "stopped by the file stop in the run folder" in out
    assert len(list((run / "checkpoints").glob("step-*"))) == 2


@pytest.mark.timeout(120)
def test_a_run_ends_before_its_batch_job_does(hpctrain, folder, whole_run):
    options = ["--run", "runs/late", "--set", "train.steps=5000"]
    end = {"HPCTRAIN_END_TIME": str(time.time() + 63)}
    result = hpctrain("train", "job.toml", *options, cwd=folder, environment=end)
    assert result.code == 75, result.err
    assert "stopped by the end of the batch job" in result.out


@pytest.mark.timeout(120)
def test_inspect_tells_what_things_are(hpctrain, folder, whole_run):
    run = last_line(hpctrain("inspect", "runs/whole", "--verify", "--parameters", "--json", cwd=folder))
    assert run["step"] == 6
    assert run["verified"]
    assert run["blocks.0.attention.q.weight"].startswith("[32, 32]  norm ")
    tokens = last_line(hpctrain("inspect", "tokens.h5", "--verify", "--json", cwd=folder))
    assert tokens["documents"] == 40
    assert tokens["vocab_size"] == 256
    assert "PP2" in hpctrain("inspect", "runs/whole/plan.toml", cwd=folder).out
    assert "steps" in hpctrain("inspect", "job.toml", cwd=folder).out
    assert "46,702,792,704" in hpctrain("inspect", "mixtral-8x7b", cwd=folder).out
    assert hpctrain("inspect", "nothing", cwd=folder).code == 81


@pytest.mark.timeout(60)
def test_a_plan_is_written_edited_drawn_and_run(hpctrain, folder):
    done = hpctrain("plan", "uniform", "job.toml", "--ranks", "3", "--set", "plan.data=2", cwd=folder)
    assert done.code == 82, "the job asks for 2 ranks"
    args = ["--set", "plan.data=2", "--set", "plan.microbatch=2"]
    written = hpctrain("plan", "uniform", "job.toml", "--ranks", "2", *args, "--out", "mine.toml", cwd=folder)
    assert written.out == "mine.toml: TP1 x PP1 x DP2, ZeRO 1, 2 microbatches of 4 rows\n"
    text = (folder / "mine.toml").read_text()
    (folder / "mine.toml").write_text(text.replace("rows = [0, 2]", "rows = [0, 3]"))
    refused = hpctrain("plan", "draw", "mine.toml", cwd=folder)
    assert refused.code == 85
    assert "item 0 is computed for rows [[0, 3], [2, 4]], which is not [0, 4) once each" in refused.err
    (folder / "mine.toml").write_text(text.replace("[0, 2]", "[0, 3]").replace("[2, 4]", "[3, 4]"))
    shown = hpctrain("plan", "check", "mine.toml", "job.toml", cwd=folder)
    assert shown.code == 0
    assert "3 ├──" in shown.out
    trained = hpctrain(
        "train", "job.toml", "--set", "plan.file=mine.toml", "--run", "runs/mine", "--sample", "0", ranks=2, cwd=folder
    )
    assert trained.code == 0, trained.err


MIXED = """
microbatches = 2
rows = 4
unused = [1]
[[tile]]
items = [0, 6]
rows = [0, 1]
ranks = [0]
[[tile]]
items = [0, 6]
rows = [1, 4]
ranks = [2]
row_chunks = 3
"""


@pytest.mark.timeout(120)
def test_a_mixed_plan_with_an_unused_rank_trains_stops_and_continues(hpctrain, folder, whole_run):
    (folder / "mixed.toml").write_text(MIXED)
    args = ["train", "job.toml", "--run", "runs/mixed", "--sample", "0"]
    first = hpctrain(*args, "--set", "plan.file=mixed.toml", "--stop-after", "3", ranks=3, cwd=folder)
    assert first.code == 0, first.err
    assert "TP1 x PP1 x DP2, ZeRO 1, 2 microbatches of 4 rows, 1 rank unused; 3 ranks" in first.out
    rest = hpctrain(*args, ranks=3, cwd=folder)
    assert "1 rank unused: that of runs/mixed/checkpoints/step-00000003" in rest.out, "an auto plan is the saved one"
    assert last_line(hpctrain("compare", "runs/whole", "runs/mixed", "--json", cwd=folder))["same"]


@pytest.mark.timeout(120)
def test_generate_is_a_function_of_the_seed(hpctrain, folder, whole_run):
    args = ["generate", "runs/whole", "--prompt", "def ", "--tokens", "20", "--json"]
    texts = [last_line(hpctrain(*args, "--seed", seed, cwd=folder))["text"] for seed in "112"]
    assert texts[0] == texts[1] != texts[2]
    assert all(texts)


@pytest.mark.timeout(240)
def test_checkpoints_are_compared_with_plain_files(hpctrain, folder):
    options = "--set", "plan.data=2", "--rounds", "1", "--steps", "2", "--json"
    result = last_line(hpctrain(MODULE, "benchmarks.checkpoint", "job.toml", *options, ranks=2, cwd=folder))
    assert result["ranks"] == 2 and result["state_bytes"] > 100_000 and result["state_bytes"] % 12 == 0
    for name in ("write", "read", "plain_write", "plain_read"):
        assert 1e5 < result[f"{name}_bytes_per_second"] < 1e12, name
    assert 1 < result["stored_of_state"] < 3, "with tables, without compression"
    assert 0 < result["stall_seconds"] == pytest.approx(result["stall_of_step"] * result["step_seconds"])
    assert not list(folder.glob("bench-checkpoint-*"))


def test_steps_that_are_timed_are_printed_as_one_line(hpctrain, folder):
    options = "--set", "plan.data=2", "--steps", "2", "--json"
    done = hpctrain(MODULE, "benchmarks.training", "job.toml", *options, ranks=2, cwd=folder)
    summary = last_line(done)
    assert len(done.out.splitlines()) == 1
    assert summary["ranks"] == 2
    assert len(summary["step_seconds"]) == 2


def test_help_is_there_for_every_command(hpctrain, folder):
    from hpctrain.cli import COMMANDS, root

    shown = hpctrain("--help", cwd=folder).out
    assert all(name in shown for name in COMMANDS)
    for name in COMMANDS:  # in this process: a start of each takes a second
        done = CliRunner().invoke(root, [name, "--help"])
        assert done.exit_code == 0
        assert done.output.startswith("Usage: ")
    gone = CliRunner().invoke(root, ["bench"])
    assert gone.exit_code == 2 and "use python -m benchmarks.training" in gone.output


SLOW_DISK = """
import sys, time
from hpctrain.checkpoint import saving
from hpctrain.cli import main
from hpctrain.comm.start.launcher import promised_rank

write = saving.write_stream
if promised_rank() == 1:
    saving.write_stream = lambda *args: time.sleep(6) or write(*args)
main()
"""


@pytest.mark.timeout(90)
def test_a_rank_that_writes_its_checkpoint_for_long_is_waited_for(warm_start, folder):
    """Longer than a step may take: saving has a timeout of its own."""
    arguments = ["train", "job.toml", "--run", "runs/slow", "--sample", "0", "--stop-after", "2"]
    arguments += ["--set", "observe.step_timeout_seconds=4"]
    (folder / "slow_disk.py").write_text(SLOW_DISK)
    command = [BIN / "mpirun", "-n", "2", *warm_start, SCRIPT, "slow_disk.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "checkpoint runs/slow/checkpoints/step-00000002" in done.stdout


@pytest.mark.timeout(120)
def test_a_trace_is_of_the_first_steps_and_changes_nothing(hpctrain, folder, whole_run):
    args = ["train", "job.toml", "--run", "runs/traced", "--set", "plan.pipeline=2"]
    done = hpctrain(*args, "--sample", "0", "--trace", "--set", "observe.trace_steps=2", ranks=2, cwd=folder)
    assert done.code == 0, done.err
    assert "ms of a rank in one step, mean of 2" in done.out
    assert "trace runs/traced/trace.json: open it at ui.perfetto.dev" in done.out
    events = json.loads((folder / "runs/traced/trace.json").read_text())["traceEvents"]
    steps = [(e["pid"], e["name"]) for e in events if e["name"].startswith("step ")]
    assert sorted(steps) == [(rank, f"step {step}") for rank in range(2) for step in (1, 2)]
    assert last_line(hpctrain("compare", "runs/whole", "runs/traced", "--exact", "--json", cwd=folder))["same"]


def test_a_client_that_is_killed_before_it_asks_leaves_the_server_of_warm_starts(hpctrain, warm_start, folder):
    for sent in (b"", b"\0" * 8, (100).to_bytes(8, "big") + b"{"):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(warm_start[-1])
            link.sendall(sent)
    assert hpctrain("--version", cwd=folder).code == 0
