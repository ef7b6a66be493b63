"""The report: every number in it is one of the run's files, whatever the run was like; and it stays small."""

import json
import re
import shutil
import subprocess
from html import unescape
from statistics import fmean

import pytest
from click.testing import CliRunner

from hpctrain.comm.watchdog.flight import record_path
from hpctrain.comm.watchdog.recorder import Recorder
from hpctrain.config.errors import HpctrainError, JobError
from hpctrain.config.job import load_job
from hpctrain.jobs.plan import command as plan_command
from hpctrain.observe.folder.run_folder import LOST, SAVE, STRAGGLER, RunFolder, note_event, note_failure, read_events
from hpctrain.observe.folder.schema import EXPERTS, OF_ONE_PLAN
from hpctrain.observe.report import summary
from hpctrain.observe.report.bars import StackedBar, step_stacks
from hpctrain.observe.report.differences import difference_rows
from hpctrain.observe.report.matrix import IN_NODE, bytes_between, fabric_totals
from hpctrain.observe.report.page import render_report
from hpctrain.observe.report.record import read_run, read_runs
from hpctrain.observe.report.step_curves import MAX_POINTS, thinned
from hpctrain.observe.report.svg import show_bytes, show_count, show_percent, show_seconds
from hpctrain.plan.file import dump_plan
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.simulate import EXPOSED
from hpctrain.sharding.grid import TensorGrid
from tests.pretended import CLUSTER
from tests.unit.folders import LARGE, make_run
from tests.unit.planner.test_predict import plan_of
from tests.unit.report_page import Page, check_numbers, in_files

JOB = load_job("tiny", ["model.vocab_size=1024", "train.dtype=fp32", "overlap.tensor=false", "overlap.data=false"])
JOB = JOB.model_copy(update={"overlap": JOB.overlap.model_copy(update={"z": False})})
PLAN = plan_of()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "a", JOB, PLAN, CLUSTER)


@pytest.fixture(scope="module")
def page(run):
    return Page(render_report(read_runs([run])))


def test_every_number_is_that_of_its_file(run, page):
    assert len(page.numbers) > 30
    check_numbers(run, page)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("metrics.jsonl", '"step": 6, "loss": 6.1', '"step": 6, "loss": 6.2'),
        ("drift.json", '"measured_seconds": ', '"measured_seconds": 1'),
        ("events.jsonl", '"overrun": 0.004', '"overrun": 0.04'),
        ("resolved.toml", "steps = 200", "steps = 201"),
        ("traffic.json", '"step": 3', '"step": 4'),
        ("timeline.json", '"step": 3', '"step": 4'),
    ],
)
def test_a_number_that_is_not_in_its_file_is_noticed(run, page, tmp_path, file, before, after):
    other = shutil.copytree(run, tmp_path / "a")
    check_numbers(other, page)
    text = (other / file).read_text()
    assert before in text
    (other / file).write_text(text.replace(before, after))
    with pytest.raises(AssertionError, match=re.escape(f"a/{file}")):
        check_numbers(other, page)


def value_at(svg, axis, pixel):
    """Return the value that a place of a picture represents."""
    low, high, start, stop = map(float, svg[f"data-{axis}"].split())
    return low + (pixel - start) / (stop - start) * (high - low)


def test_curves_go_through_the_metrics(run, page):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "tokens_per_second"):
        curve, svg = next((a, svg) for tag, a, svg in page.shapes if a["data-from"] == f"a/metrics.jsonl:{key}")
        points = [tuple(map(float, point.split(","))) for point in curve["points"].split()]
        drawn = [(value_at(svg, "x", x), value_at(svg, "y", y)) for x, y in points]
        expected = [(line["step"], line[key]) for line in lines]
        assert [x for x, _ in drawn] == pytest.approx([x for x, _ in expected], abs=0.01)
        assert [y for _, y in drawn] == pytest.approx([y for _, y in expected], rel=0.003)
    dots = [a for tag, a, _ in page.shapes if a["data-from"] == "a/metrics.jsonl:validation_loss"]
    assert len(dots) == 2 * 2, "two validations, in a wide and a narrow picture"


def test_bars_are_as_long_as_what_they_represent(run, page):
    record = read_run(run, "a")
    ranks = json.loads((run / "ranks.json").read_text())
    for group in record.groups:
        predicted, measured = step_stacks(record, group)
        for part in EXPOSED:
            assert measured.parts[part] == pytest.approx(fmean(ranks[f"{part}_seconds"][rank] for rank in group.ranks))
            assert record.forecast and predicted.parts[part] == record.forecast.exposed[group.tile][part]
        for stack in (predicted, measured):
            assert isinstance(stack, StackedBar)
            for part, seconds in stack.parts.items():
                bars = [
                    value_at(svg, "x", float(a["x"]) + float(a["width"])) - value_at(svg, "x", float(a["x"]))
                    for tag, a, svg in page.shapes
                    if a["data-from"] == f"{stack.source}:{part}" and "data-x" in svg
                ]
                near = 1e-4 * sum(stack.parts.values()) + 0.002 * seconds
                assert not seconds or any(abs(bar - seconds) <= near for bar in bars), f"{stack.source}:{part}"


def test_the_timeline_shows_each_span_at_its_time(run, page):
    grids = json.loads((run / "timeline.json").read_text())["grids"]
    for number, grid in enumerate(grids):
        shapes = [(a, svg) for _, a, svg in page.shapes if a["data-from"] == f"a/timeline.json:{number}"]
        wide = max(float(svg["width"]) for _, svg in shapes)
        drawn = []
        for a, svg in shapes:
            for x, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", a["d"]) if float(svg["width"]) == wide else ():
                drawn.append((value_at(svg, "x", float(x)), value_at(svg, "x", float(x) + float(width))))
        end = max(stop for *_, stop in grid["spans"])
        shown = [(begin, stop) for *_, begin, stop in grid["spans"] if stop - begin > 0.01 * end]
        for begin, stop in shown:
            assert any(abs(begin - a) + abs(stop - b) < 0.003 * end for a, b in drawn), (number, begin, stop)


def test_the_matrix_adds_up_to_what_was_moved(run, page):
    traffic = json.loads((run / "traffic.json").read_text())
    cells = {a["data-from"]: float(a["data-value"]) for _, a, _ in page.shapes if "traffic.json" in a["data-from"]}
    sends = sum(group["tensor_bytes"] for group in traffic["groups"] if "from" in group)
    assert sum(cells.values()) == pytest.approx(sends + 2 * 3 * 8000), "an all-reduce of n ranks sends 2 (n - 1) times"
    totals = fabric_totals(read_run(run, "a"))
    between_nodes = sends + 8 * 2 * 8000 / 4
    assert totals == pytest.approx({"ib": between_nodes, IN_NODE: 4 * 2 * 8000 / 4})
    assert "over ib" in render_report(read_runs([run]))


def test_bytes_between_groups_of_ranks_are_the_sum_of_those_between_ranks():
    groups = [
        {"operation": "all_gather", "ranks": "0-5", "tensor_bytes": 600},
        {"operation": "send", "from": 1, "to": 4, "tensor_bytes": 7},
        {"operation": "barrier", "ranks": "0-5", "tensor_bytes": 0},
    ]
    single, coarse = bytes_between(groups, lambda rank: rank), bytes_between(groups, lambda rank: rank // 2)
    assert single[0, 5] == 100 and single[1, 4] == 107 and (3, 3) not in single
    assert coarse[0, 2] == 4 * 100 + 7 and coarse[1, 1] == 2 * 100


def test_a_page_needs_nothing_else_and_runs_nothing(run, page):
    text = render_report(read_runs([run]))
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert "of a test &lt;&amp;&gt;" in text, "what files say is escaped"
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_the_first_lines_say_what_was_trained(run):
    text = render_report(read_runs([run])).split('<ul class="facts">')[0]
    model = "llama, 4 layers x 192 hidden, 2.0 M parameters, fp32"
    scale = "the devices that the ranks impersonate; FLOP/s 1/3,000"
    for part in (model, "tokens/stdlib.h5", ">32</data> sequences of", ">0.003</data>", PLAN.describe(), scale, " UTC"):
        assert part in text


def test_a_family_has_one_colour_in_all_runs_of_a_page(run, tmp_path):
    other = make_run(tmp_path / "b", JOB, plan_of(pipeline=1, data=4), CLUSTER, steps=4)
    fills = re.findall(r'class="tile (f\d)"[^>]*><title>(\w+)', render_report(read_runs([other, run])))
    assert set(fills) == {("f0", "fast"), ("f1", "slow")}


def test_several_runs_are_shown_next_to_each_other(run, tmp_path):
    other = make_run(tmp_path / "b", JOB, plan_of(pipeline=1, data=4), CLUSTER, steps=4)
    text = render_report(read_runs([run, other]))
    both = Page(text)
    curves = {a["data-from"] for tag, a, _ in both.shapes if tag == "polyline"}
    assert {"a/metrics.jsonl:loss", "b/metrics.jsonl:loss"} <= curves
    for source, value, _ in both.numbers:
        assert value in in_files(run if source.startswith("a/") else other, source), source
    assert read_runs([run, run])[0].name != "a", "equal names are distinguished by their paths"


def test_events_without_anything_new_are_not_repeated(tmp_path):
    path = make_run(tmp_path / "a", JOB, PLAN, CLUSTER, ends=False)
    for step in (10, 20, 30):
        note_event(path, SAVE, step, f"step-{step} written in 1 s")
    note_event(path, STRAGGLER, 31, "rank 1 computes long")
    text = render_report(read_runs([path]))
    assert "4 checkpoints; the last: step-30 written in 1 s" in text and "step-20" not in text
    assert '<tr class="bad"><td class="figure">' in text and "rank 1 computes long" in text
    assert "validation loss 6.5" not in text, "it is in the curve"


def test_a_start_with_another_plan_removes_what_was_measured_with_the_last(tmp_path):
    path = make_run(tmp_path / "a", JOB, PLAN, CLUSTER)
    RunFolder(path).describe(JOB, PLAN, {}, CLUSTER)
    assert all((path / file.name).is_file() for file in OF_ONE_PLAN)
    RunFolder(path).describe(JOB, plan_of(pipeline=1, data=4), {}, CLUSTER)
    assert not any((path / file.name).is_file() for file in OF_ONE_PLAN)
    assert "A step is predicted to take" in render_report(read_runs([path]))


def test_a_run_that_failed_says_why(tmp_path):
    path = make_run(tmp_path / "f", JOB, PLAN, CLUSTER, ends=False)
    (path / "flight").mkdir()
    for rank in range(4):
        recorder = Recorder(None, rank, 4, "host-a", "fast")
        recorder.move_to(path / "flight")
        recorder.close("TrainingError: the disk <is> full" if rank == 2 else "")
    assert record_path(path / "flight", 2).is_file()
    text = render_report(read_runs([path]))
    assert "The run failed: " in text and "Why it failed" in text
    assert "rank 2 (host host-a) reported: TrainingError: the disk &lt;is&gt; full" in text
    note_failure(path, path / "flight")
    assert read_events(path)[-1]["event"] == "failure" and "is> full" in read_events(path)[-1]["causes"][0]
    note_failure(path, path / "flight")
    assert len([event for event in read_events(path) if event["event"] == "failure"]) == 1, "once"


def test_what_a_run_did_not_write_is_left_out_with_a_reason(tmp_path):
    path = make_run(tmp_path / "g", JOB, PLAN, CLUSTER)
    for name in ("timeline.json", "traffic.json", "ranks.json", "drift.json", "events.jsonl", "metrics.jsonl"):
        (path / name).unlink()
    text = render_report(read_runs([path]))
    for part in ("No step was logged", "A step is predicted to take", "Nothing is known of what ranks sent"):
        assert part in text
    assert "The run has not begun: " in text
    with pytest.raises(JobError, match=r"has no resolved.toml, so it is no run folder, or one of an older version"):
        read_run(tmp_path, "x")


DAMAGED = [
    ("timeline.json", "{", "timeline.json: is damaged: "),
    ("timeline.json", '{"step": 3, "grids": [{"rank": 9, "spans": []}]}', "rank 9 is none of the plan&#39;s 4"),
    ("timeline.json", '{"step": 3, "grids": [{"rank": 0, "spans": [["forward", 0, 0, "x", 1]]}]}', "timeline.json"),
    ("traffic.json", '{"step": 3, "groups": [{"ranks": "0-99999"}]}', "traffic.json"),
    ("traffic.json", "[]", "traffic.json"),
    ("experts.json", '{"step": 3, "layers": [{"layer": 0, "tokens": []}]}', "experts.json"),
    ("events.jsonl", '{"event": "end", "step": 0, "time": 1.0, "text": "", "overrun": null}\n', "overrun: "),
    ("ranks.json", '{"step": 3, "memory_peak_bytes": [1]}', "has 1 ranks, and the plan 4"),
    ("drift.json", '{"cluster": 3}', "drift.json: is damaged"),
    ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n', "metrics.jsonl, line 1: is damaged, or of another version: "),
    ("metrics.jsonl", '{"step": 1\n', "metrics.jsonl, line 1: is damaged"),
    ("events.jsonl", '\x00\n[]\n3\n{"event": "start", "step": 0, "time": 1.0}\n', "events.jsonl, line 1: is damaged"),
]


@pytest.mark.parametrize(("file", "content", "said"), DAMAGED)
def test_what_is_damaged_is_left_out_and_named(run, tmp_path, file, content, said):
    path = shutil.copytree(run, tmp_path / "a")
    (path / file).write_text(content)
    text = render_report(read_runs([path]))
    assert said in text and "Left out: " in text
    note_failure(path, path / "flight")  # which reads the events too


@pytest.mark.parametrize("file", ["resolved.toml", "plan.toml", "cluster.toml"])
def test_without_what_it_was_to_do_there_is_one_error(run, tmp_path, file):
    path = shutil.copytree(run, tmp_path / "a")
    (path / file).write_text("nonsense = 3\n")
    with pytest.raises(HpctrainError, match=file):
        read_run(path, "a")


def test_a_loss_that_is_no_number_is_not_drawn(run, tmp_path):
    path = shutil.copytree(run, tmp_path / "a")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["loss"] = float("nan")
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = render_report(read_runs([path]))
    assert "did not fall: it went from " in text and "nan," not in text


def test_the_load_of_experts_is_drawn_where_a_model_has_them(run, tmp_path):
    path = shutil.copytree(run, tmp_path / "a")
    without = render_report(read_runs([path]))
    assert not [name for name in ("Load of experts", "idlest", "spread of experts") if name in without]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    more = {"expert_load": 1.5, "expert_load_layer": 3, "expert_spread": 0.625}
    loads = [{"layer": 1, "tokens": [5, 3, 4]}, {"layer": 3, "tokens": [1200, 0, 1200]}]
    RunFolder(path).write(EXPERTS, {"step": 6, "layers": loads})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line | more) + "\n" for line in lines))
    text = render_report(read_runs([path]))
    assert "Load of experts" in text and 'data-from="a/metrics.jsonl:expert_load"' in text
    page = Page(text)
    check_numbers(path, page)
    shown = {of: shown for of, _, shown in page.numbers if "expert" in of}
    assert shown == {
        "a/metrics.jsonl:expert_spread": "0.625",
        "a/resolved.toml:search.expert_spread": "0.2",
        "a/experts.json:layers.1.tokens.0": "1,200",
        "a/experts.json:step": "6",
    }
    drawn = [(int(a["data-value"]), float(a["cy"])) for _, a, _ in page.shapes if "experts.json" in a["data-from"]][:4]
    assert [count for count, _ in drawn] == [5, 3, 1200, 0]
    assert drawn[2][1] < drawn[0][1] < drawn[1][1] < drawn[3][1], "over the mean of each layer: 1.5, 1.25, 0.75, 0"


def test_a_long_curve_keeps_its_extremes():
    points = [(float(step), float(step % 97)) for step in range(20_000)]
    points[777] = (777.0, 1e6)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS and (777.0, 1e6) in kept and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]


def test_a_report_of_1024_ranks_is_small(tmp_path):
    job = load_job("tiny", ["model.vocab_size=32768", "model.num_layers=32", "model.num_heads=8", "train.dtype=bf16"])
    plan = even_plan(job.model.num_items, TensorGrid(1, 8, 1), 8, 16, 32, 16, family="gpu")
    path = make_run(tmp_path / "large", job, plan, LARGE, steps=3000)
    text = render_report(read_runs([path]))
    assert len(text) < 10e6
    drawn = Page(text)
    assert len(drawn.shapes) < 20_000
    for source, value, _ in drawn.numbers:
        assert value in in_files(path, source), source


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (show_seconds, 0.0, "0 s"),
        (show_seconds, 1234.5, "1,234 s"),
        (show_seconds, 0.0123, "12.3 ms"),
        (show_seconds, 4.2e-6, "4.2 µs"),
        (show_bytes, 1536 * 2**20, "1.5 GiB"),
        (show_bytes, 1023 * 2**20, "1,023 MiB"),
        (show_count, 12_345, "12.3 k"),
        (show_count, 1912.3, "1,912"),
        (show_percent, 0.996, "100%"),
        (show_percent, 0.0123, "1.2%"),
    ],
)
def test_figures_have_units_and_few_digits(show, value, text):
    assert show(value) == text


def test_a_plan_is_drawn_into_a_page(tmp_path):
    (tmp_path / "plan.toml").write_text(dump_plan(PLAN))
    done = CliRunner().invoke(
        plan_command, ["draw", str(tmp_path / "plan.toml"), "--html", str(tmp_path / "plan.html")]
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "plan.html").read_text()
    assert text.count('class="tile ') == 2 * len(PLAN.tiles) and PLAN.describe() in text


LOOK = """<script>
const seen = [...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width > 0);
const texts = seen.map(svg => [...svg.querySelectorAll("text")].map(text => [text, text.getBoundingClientRect()]));
const outside = seen.flatMap((svg, i) => {
  const box = svg.getBoundingClientRect();
  return texts[i].filter(([_, at]) => at.left < box.left - 1 || at.right > box.right + 1 || at.bottom > box.bottom + 1);
});
const overlapping = texts.flatMap(all => all.flatMap(([one, a], i) => all.slice(i + 1).filter(([other, b]) =>
  Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
  Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)));
const page = document.documentElement;
page.dataset.look = JSON.stringify({
  pictures: seen.length, outside: outside.map(([text]) => text.textContent),
  overlapping: overlapping.map(([text]) => text.textContent), tooWide: page.scrollWidth > page.clientWidth,
});
</script></body>"""
CHROMIUM = "chromium --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-component-update"
CHROMIUM += " --disable-background-networking --disable-sync --disable-dev-shm-usage --enable-logging=stderr --dump-dom"


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_shows_it_without_errors(run, tmp_path, width):
    """Without messages on its console, nothing cut off, no text on another one; 500 pixels have the phone's layout."""
    (tmp_path / "r.html").write_text(render_report(read_runs([run])).replace("</body>", LOOK))
    more = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", f"file://{tmp_path / 'r.html'}"]
    done = subprocess.run([*CHROMIUM.split(), *more], capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr
    look = re.search(r'data-look="([^"]*)"', done.stdout)
    assert look, done.stderr
    seen = json.loads(unescape(look[1]))
    assert seen == {"pictures": 8, "outside": [], "overlapping": [], "tooWide": False}


def test_runs_begin_with_what_differs(run, tmp_path):
    """Settings that are the same are left out; results come first."""
    faster = JOB.model_copy(update={"train": JOB.train.model_copy(update={"learning_rate": 0.25})})
    other = make_run(tmp_path / "b", faster, PLAN, CLUSTER)
    rows = difference_rows(read_runs([run, other]))
    assert [row[0] for row in rows[:2]] == ["tokens/s, median step", "loss, last step"]
    assert rows[0][2].endswith("(1.00 times)") and rows[1][1] == rows[1][2]
    assert ("train.learning_rate", str(JOB.train.learning_rate), "0.25") in rows
    assert not [row for row in rows[3:] if row[1] == row[2]] and not any("seed" in row[0] for row in rows)
    text = render_report(read_runs([run, other]))
    assert text.index("What differs") < text.index('id="loss"') < text.index('id="norm"') < text.index('id="rate"')
    assert "What differs" not in render_report(read_runs([run]))


def test_a_run_that_ended_before_its_output_was_lost_is_no_failure(tmp_path):
    path = make_run(tmp_path / "a", JOB, PLAN, CLUSTER)
    note_event(path, LOST, 6, "standard output cannot be written: Broken pipe")
    record = read_run(path, "a")
    assert record.end and record.diagnosis is None and "failed" not in summary.verdict(record)
