"""What people see while a run trains: lines of progress, metrics of all ranks, stragglers, other software."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.config.errors import JobError
from hpctrain.config.job import load_job
from hpctrain.observe.anomalies import CONSECUTIVE_STEPS, SLOW_FACTOR, StragglerWatch
from hpctrain.observe.console import Console, describe_slowest, format_duration, wrap
from hpctrain.observe.exports import PrometheusWriter, flat, make_writers
from hpctrain.observe.folder.run_folder import RunFolder, read_events, read_metrics
from hpctrain.observe.live import LiveMetrics
from hpctrain.observe.metrics import RunMetrics, summarise_ranks
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.simulate import EXPOSED
from hpctrain.sharding.grid import TensorGrid
from tests.unit.planner.test_predict import plan_of

METRICS = {"step": 11, "loss": 6.0491, "step_seconds": 0.5, "tokens_per_second": 8324.0, "mfu": 0.112}
RANKS = {
    "memory_share": {"min": 0.1, "min_rank": 1, "median": 0.1, "max": 0.64, "max_rank": 0},
    "slowest": {"rank": 3, "computing_seconds": 0.49, "waiting_seconds": 0.01, "waits_for": "data"},
}
PARTS = ("step 12/300", "loss 6.0491", "8,324 tokens/s", "left", "MFU 11.2%", "memory 64% (rank 0)")
PARTS += ("slowest rank 3: computing 98%",)
EQUAL = even_plan(10, TensorGrid(1, 1, 1), 1, 4, 4, 8)
"""Four ranks with equal work."""


def figures_of(*compute: float) -> np.ndarray:
    """Return figures [ranks, figures] of ranks that compute for so many seconds, and then wait for the slowest."""
    rows = []
    for seconds in compute:
        parts = {"compute": seconds, "data": max(compute) - seconds}
        rows.append([1e6, 0.5, *(parts.get(part, 0.0) for part in EXPOSED)])
    return np.array(rows)


def show_two_steps(monkeypatch, capsys, bar: bool | None) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(True, bar=bar)
    console.step(METRICS, {}, 300)
    console.step(METRICS | {"step": 12}, RANKS, 300)
    console.close_line()
    return capsys.readouterr().out


def test_the_time_that_is_left_does_not_count_a_change_of_plans(monkeypatch, capsys):
    now = iter([0.0, 1.0, 2.0, 1000.0, 1002.0])
    monkeypatch.setattr("hpctrain.observe.console.time.monotonic", lambda: next(now))
    console = Console(True)
    for step in range(11, 16):
        if step == 14:
            console.forget_speed()  # another plan
        console.step(METRICS | {"step": step}, {}, 25)
    lines = capsys.readouterr().out.splitlines()
    assert "12 s left" in lines[2] and "left" not in lines[3] and "20 s left" in lines[4]


def test_a_file_gets_one_line_a_step(monkeypatch, capsys):
    first, second = show_two_steps(monkeypatch, capsys, None).splitlines()
    assert first.startswith("step 11/300") and "\x1b" not in first + second
    assert [second.index(part) for part in PARTS] == sorted(second.index(part) for part in PARTS)


def test_progress_fits_a_terminal_of_80_columns(monkeypatch, capsys):
    out = show_two_steps(monkeypatch, capsys, True)
    assert "\x1b[1A" in out or "\x1b[2K" in out, "is kept up to date in its place"
    lines = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", out).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) < 80
    assert all(part in " ".join(lines[-2:]) for part in PARTS), "nothing is left out"


def test_lines_are_wrapped_between_parts():
    assert wrap(["step 1/2", "loss 6.0", "8 tokens/s"], 20) == ["step 1/2  loss 6.0", "8 tokens/s"]
    assert wrap(["step 1/2"], 3) == ["step 1/2"]


@pytest.mark.parametrize(("seconds", "text"), [(12.4, "12 s"), (180, "3 min"), (7500, "2:05 h")])
def test_durations_have_units(seconds, text):
    assert format_duration(seconds) == text


def test_the_slowest_rank_is_the_one_that_works_longest():
    summary = summarise_ranks(figures_of(2.0, 3.0, 1.0), [0, 1, 2])
    spread = {"min": 1.0, "min_rank": 2, "median": 2.0, "max": 3.0, "max_rank": 1}
    assert summary["compute_seconds"] == spread
    assert summary["slowest"] == {"rank": 1, "computing_seconds": 3.0, "waiting_seconds": 0.0, "waits_for": "tensor"}
    assert describe_slowest(summary["slowest"]) == "computing 100%"
    waiting = {"rank": 0, "computing_seconds": 1.0, "waiting_seconds": 3.0, "waits_for": "data"}
    assert describe_slowest(waiting) == "waiting 75% (data)"


def test_ranks_without_work_are_not_the_fastest():
    summary = summarise_ranks(figures_of(2.0, 0.0, 3.0), [0, 2])
    assert summary["compute_seconds"]["min_rank"] == 0 and summary["compute_seconds"]["min"] == 2.0


def test_where_devices_compute_by_themselves_only_memory_is_known():
    unknown = [np.nan] * len(EXPOSED)
    figures = np.array([[3e6, 0.25, *unknown], [5e6, 0.5, *unknown]])
    summary = summarise_ranks(figures, [0, 1])
    assert set(summary) == {"memory_peak_bytes", "memory_share"}
    assert summary["memory_peak_bytes"]["max"] == 5_000_000 and summary["memory_share"]["max_rank"] == 1


def test_a_straggler_among_equal_ranks_is_noticed_and_its_recovery():
    watch = StragglerWatch(EQUAL)
    slow, usual = [1.0, 1.0, 1.0, 1.1 * SLOW_FACTOR], [1.0] * 4
    assert [watch.look(slow) for _ in range(CONSECUTIVE_STEPS - 1)] == [[]] * (CONSECUTIVE_STEPS - 1)
    (noticed,) = watch.look(slow)
    assert noticed[:3] == (3, pytest.approx(1.1 * SLOW_FACTOR), True)
    assert noticed.reference == "the median of 4 ranks with equal work"
    watch.look(usual)
    watch.look(slow)  # slow again: the count of good steps begins anew
    changes = [watch.look(usual) for _ in range(CONSECUTIVE_STEPS)]
    assert not any(changes[:-1]) and changes[-1][0][:3] == (3, 1.0, False)


def test_a_rank_without_equals_is_compared_with_its_first_steps():
    watch = StragglerWatch(plan_of(pipeline=2, data=2))
    for _ in range(CONSECUTIVE_STEPS):
        assert not watch.look([1.0, 1.0, 4.0, 4.0])
    changes = [watch.look([1.0, 1.0, 4.0, 6.0]) for _ in range(CONSECUTIVE_STEPS)]
    assert changes[-1][0][:3] == (3, 1.5, True) and changes[-1][0].reference == "its first steps"
    assert not StragglerWatch(plan_of()).look([float("nan")] * 4), "unknown seconds say nothing"


def test_a_straggler_becomes_an_event(tmp_path):
    folder = tmp_path
    live = LiveMetrics(RunFolder(folder), EQUAL)
    for step in range(1, CONSECUTIVE_STEPS + 1):
        live.write_step({"step": step, "loss": 6.0}, figures_of(1.0, 2.0, 1.0, 1.0))
    (event,) = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    assert event["event"] == "straggler" and event["rank"] == 1 and event["step"] == CONSECUTIVE_STEPS
    assert event["text"] == "rank 1 computes 2.00 times as long as the median of 4 ranks with equal work"
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, CONSECUTIVE_STEPS + 1))
    assert json.loads((folder / "ranks.json").read_text())["compute_seconds"] == [1.0, 2.0, 1.0, 1.0]


def test_the_load_of_experts_is_of_the_step_whose_figures_have_come(tmp_path):
    class Late:
        has_come = False

        def done(self) -> bool:
            return self.has_come

        def wait(self) -> np.ndarray:
            return figures_of(1.0)

    coming: list[Late] = []
    world = SimpleNamespace(rank=0, gather_numbers=lambda figures: coming.append(Late()) or coming[-1])
    accelerator = SimpleNamespace(memory=lambda: SimpleNamespace(peak=1, total=2), shares_memory=False)
    recorder = SimpleNamespace(knows_times=False)
    plan = even_plan(10, TensorGrid(1, 1, 1), 1, 1, 1, 1)
    observed = SimpleNamespace(world=world, plan=plan, accelerator=accelerator, recorder=recorder)
    live = LiveMetrics(RunFolder(tmp_path), plan)
    metrics = RunMetrics(observed, live.write_step)

    def steps_of_files() -> list[int]:
        return [json.loads((tmp_path / name).read_text())["step"] for name in ("ranks.json", "experts.json")]

    for step in (1, 2, 3):
        if step == 3:
            coming[0].has_come = True
        metrics.record({"step": step, "loss": 6.0}, {"step": step, "layers": [{"layer": 0, "tokens": [step]}]})
    live.note_save(3, tmp_path / "step-00000003", 0.1)
    assert steps_of_files() == [1, 1]
    metrics.flush()
    live.close()
    assert steps_of_files() == [3, 3]


def test_files_that_cannot_be_written_are_said_once_and_do_not_end_a_run(tmp_path):
    """Folders stand where files would be; those of others are written."""
    said, folder = [], tmp_path
    for name in ("metrics.jsonl", "ranks.json", "run.prom"):
        (folder / name).mkdir()
    writer = PrometheusWriter(folder / "run.prom", "job")
    live = LiveMetrics(RunFolder(folder, said.append), EQUAL, [writer])
    for step in range(1, 5):
        live.write_step({"step": step, "loss": 6.0, "validation_loss": 5.0}, figures_of(1.0, 2.0, 1.0, 1.0))
    live.note_end(4, 4, {})
    refused = "training continues without it"
    files = [f"{folder}/{name}: cannot be written: " for name in ("metrics.jsonl", "run.prom", "ranks.json")]
    assert [line.startswith(file) and line.endswith(refused) for line, file in zip(said, files, strict=True)] == [
        True
    ] * 3
    events = [(event["event"], event["text"]) for event in read_events(folder)]
    assert [text for event, text in events if event == "output lost"] == said
    assert events[-1][0] == "end" and [event for event, _ in events].count("validation") == 4
    assert not list(folder.glob("*.partial"))


def test_prometheus_has_all_figures_of_the_latest_step(tmp_path):
    path = tmp_path / "node" / "hpctrain.prom"
    writer = PrometheusWriter(path, 'a "job"\\')
    writer.write(METRICS | RANKS)
    writer.write(METRICS | RANKS | {"step": 12})
    lines = path.read_text().splitlines()
    assert 'hpctrain_step{job="a \\"job\\"\\\\"} 12' in lines and "# TYPE hpctrain_memory_share_max gauge" in lines
    assert len(lines) == 2 * len(flat(METRICS | RANKS)), "the text of `waits_for` is no figure"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    path.parent.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        writer.write(METRICS)


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    (writer,) = make_writers(load_job("tiny", ["observe.tensorboard=true"]), tmp_path)
    writer.write(METRICS | RANKS)
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (loss,) = events.Scalars("loss")
    assert loss.step == 11 and loss.value == pytest.approx(6.0491)
    assert "slowest_computing_seconds" in events.Tags()["scalars"]


def test_weights_and_biases_gets_one_run_with_every_step(tmp_path, monkeypatch):
    """A replacement of its package, which needs an account: the calls are those of its documentation."""
    made, logged = [], []
    run = SimpleNamespace(log=lambda figures, step: logged.append((step, figures)), finish=lambda: logged.append("end"))
    wandb = SimpleNamespace(init=lambda **options: made.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (writer,) = make_writers(load_job("tiny", ["observe.wandb=mine"]), tmp_path / "run-a")
    writer.write(METRICS)
    writer.close()
    assert made[0]["project"] == "mine" and made[0]["id"] == "run-a" and made[0]["resume"] == "allow"
    assert logged == [(11, METRICS), "end"]


@pytest.mark.parametrize(
    ("setting", "module"), [("tensorboard=true", "torch.utils.tensorboard"), ("wandb=mine", "wandb")]
)
def test_software_that_is_not_installed_is_named(tmp_path, monkeypatch, setting, module):
    monkeypatch.setitem(sys.modules, module, None)
    package = setting.partition("=")[0]
    with pytest.raises(JobError, match=f"{package} is not installed; pip install {package}, or remove the key"):
        make_writers(load_job("tiny", [f"observe.{setting}"]), tmp_path)
